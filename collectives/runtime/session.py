"""One rank's end of a communicator: its calls in order, its ledgers, and its time limits."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet
from zlib import crc32

from collectives.arrays import Arrays, Operator, validation
from collectives.devices import DeviceMode, Devices
from collectives.diagnostics import Ancestry, Recording, current_phase
from collectives.engines import Enqueued, ProgressThread, Transport, deadline_in
from collectives.errors import CollectiveError, CollectiveTimeout, PeerFailed
from collectives.programs import CallSpec, Counts
from collectives.runtime.checked import Checker, Mode
from collectives.runtime.messages import Messages
from collectives.runtime.numbering import ConcurrentCall, Numbering
from collectives.runtime.pool import Pool
from collectives.runtime.work import MakeSteps, Work
from collectives.schedule import Topology
from collectives.selection import Decisions, select

FREED = "this communicator was freed"
_FAMILIES = threading.Lock()  # threads may make communicators and open ledgers at the same time

Result = TypeVar("Result")


class Session:
    """What the calls of one rank on one communicator share, and what keeps them in order."""

    def __init__(
        self,
        transport: Transport,
        timeout: float | None = None,
        name: str = "",
        parent: Session | None = None,
        ancestry: Ancestry | None = None,
        thread: ProgressThread | None = None,
        check: Mode | None = None,
        axis: str = "",
        topology: Topology | None = None,
        device: DeviceMode = "auto",
    ) -> None:
        self.topology = topology or Topology.consecutive(transport.size, transport.size)
        self.transport, self.timeout, self.name, self.axis = transport, timeout, name, axis
        self.thread, self.thread_delay = thread, 0.0
        self.numbering = Numbering(transport.num_tags)
        self.checker = None if check is None else Checker(self, check)
        self.decisions: Decisions | None = None
        self.ledgers: list[Recording] = []
        self.phase_of_call: Callable[[], str] = current_phase
        self.site_of_call: Callable[[], str] = str  # "": not recorded
        self.ancestry: Ancestry = [(self.ledgers, None), *(ancestry or [])]
        self._family: WeakSet[Session] = WeakSet() if parent is None else parent._family
        with _FAMILIES:
            self._family.add(self)
        # A thread takes this token to make a call, and puts it back; both are atomic.
        self.call_token = [None]
        self._timed_out: Work[Any] | None = None  # a blocking call that the next one waits for
        self._broken_by: CollectiveError | None = None  # why nothing can be called any more
        self._has_left_messages = False  # of a call that was ended at its time limit
        self.num_children: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.devices = Devices(transport, device, self._when_device_failed, lambda: self.timeout)
        self.pool, self.messages = Pool(), Messages(self)
        self.refresh()

    def child(self, transport: Transport, members: Sequence[int], axis: str = "") -> Session:
        """Return the session of a communicator of some of these ranks.

        It is recorded wherever this one is.
        """
        self.num_children[tuple(members)] += 1
        times = self.num_children[tuple(members)]
        name = f"{self.name}[{','.join(map(str, members))}{f' #{times}' if times > 1 else ''}]"
        ancestry: Ancestry = [
            (ledgers, members if ranks is None else [ranks[member] for member in members])
            for ledgers, ranks in self.ancestry
        ]
        check = None if self.checker is None else self.checker.mode
        child = Session(
            transport,
            self.timeout,
            name,
            self,
            ancestry,
            self.thread,
            check,
            axis,
            self.topology.among(members),
            self.devices.mode,
        )
        child.devices.inherit(self.devices, members)
        child.phase_of_call, child.site_of_call = self.phase_of_call, self.site_of_call
        child.decisions = self.decisions
        child.thread_delay = self.thread_delay
        if self.numbering.can_mix:
            child.numbering.mix(crc32(f"{self.numbering.async_tag(0)} {name}".encode()))
        return child

    # Calls in order

    def call(self, make_steps: MakeSteps, timeout: float | None) -> Any:
        """Make a blocking call."""
        with self.exclusive_call():
            limit = self.limit(timeout)
            self._wait_for_timed_out(limit)
            return Work(self, make_steps, is_blocking=True).run(limit)

    def started(self, make_steps: MakeSteps, timeout: float | None) -> Work[Any]:
        """Start a call that does not block."""
        with self.exclusive_call():
            self.check()
            work: Work[Any] = Work(self, make_steps, self.limit(timeout))
            return work.start(self.thread, self.thread_delay)

    def message(self, make_steps: MakeSteps, timeout: float | None, is_async: bool) -> Any:
        """Send or receive.  Threads may do so at the same time, because the tags are the user's."""
        self.check()
        work: Work[Any] = Work(self, make_steps, self.limit(timeout))
        return work.start(self.thread) if is_async else work.run(self.limit(timeout))

    @contextmanager
    def exclusive_call(self) -> Iterator[None]:
        """Return a context manager that prevents calls by other threads.

        Raises ConcurrentCall if a call is being made.
        """
        try:
            token = self.call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            yield
        finally:
            self.call_token.append(token)

    @contextmanager
    def turn_of(self, work: Work[Any]) -> Iterator[None]:
        """Return a context manager in which later calls on devices wait for `work`.

        `work` begins with a header or counts.
        """
        turns, number = self.devices.turns, work.number
        turns.begin(number)
        work.has_turn = True
        try:
            yield
        finally:
            turns.end(number)

    def _wait_for_timed_out(self, limit: float | None) -> None:
        """Wait for a blocking call that timed out, because all blocking calls have one tag."""
        self.check()
        if self._timed_out is not None:
            if not self._timed_out.is_done:
                self._timed_out.wait(limit)
            self._timed_out.test()  # raises what it failed with
            self._timed_out = None
            self.refresh()

    def limit(self, timeout: object) -> float | None:
        """Return the time limit of a call in seconds: its own, or the default of all calls."""
        limit = validation.seconds(timeout)
        return self.timeout if limit is None else limit

    def when_timed_out(self, work: Work[Any]) -> None:
        """Note a call that timed out; it continues in later waits."""
        if work.is_blocking:
            self._timed_out = work
            self.refresh()
        work.list()

    def when_failed(self, work: Work[Any], error: BaseException) -> None:
        """Make the communicator unusable if a failed call may have left messages behind.

        The next call would take them for its own.  That holds for blocking calls, and for calls
        that failed before the call itself, which other ranks may have begun.  An error that all
        ranks raise leaves nothing behind.
        """
        self.forget_calls()
        if work.has_turn:  # its steps may be suspended for good
            self.devices.turns.end(work.number)
        self._has_left_messages |= isinstance(error, CollectiveTimeout)
        is_common = isinstance(error, CollectiveError) and error.is_on_all_ranks
        if (work.is_blocking or work.was_ahead) and not is_common:
            self._break(work.title, error)

    def _when_device_failed(self, error: CollectiveError) -> None:
        """Make the communicator unusable: what its device has done is void."""
        self.forget_calls()
        self._break("a call on devices", error)

    def _break(self, what: str, error: BaseException) -> None:
        """Refuse all later calls: `what` did not end as the other ranks expect."""
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        what = f"{what} failed half-way on rank {self.transport.rank}: {reason}"
        self._broken_by = CollectiveError(f"this communicator is unusable: {what}")
        if isinstance(error, PeerFailed):
            self._broken_by = error
        self.refresh()

    def check(self) -> None:
        """Raise CollectiveError if a failure has left this communicator unusable."""
        if self._broken_by is not None:
            raise self._broken_by.with_traceback(None)

    def pending_calls(self) -> list[Work[Any]]:
        """Return the calls of this communicator that are not done."""
        calls = [*self.transport.in_flight, *([] if self.thread is None else self.thread.calls)]
        if self._timed_out is not None:
            calls.append(self._timed_out)
        ours = [call for call in calls if isinstance(call, Work) and call.owner is self]
        return [work for work in ours if not work.is_done]

    @property
    def has_timed_out(self) -> bool:
        """Whether a blocking call has reached its time limit and is not done."""
        return self._timed_out is not None and not self._timed_out.is_done

    @property
    def is_freed(self) -> bool:
        """Whether the communicator was freed."""
        return self._broken_by is not None and str(self._broken_by) == FREED

    def free(self) -> None:
        """Free the communicator of the engine.  Raises RuntimeError during a call."""
        for work in self.pending_calls():
            work.test()
            if not work.is_done:
                raise RuntimeError(f"{work.title} is already running; wait for it first")
        is_idle = True
        if self._broken_by is None:
            self.devices.synchronize(None)
        else:
            is_idle = self.devices.give_up()
        self.forget_calls()
        self.messages.free()
        if is_idle:  # else the memory of the devices is kept
            self.devices.free()
        self.transport.flight.close(self.transport.log)
        # MPI reuses the number of a freed communicator: after a failure the next communicator could
        # receive messages that this one has left.
        has_not_failed = self._broken_by is None or isinstance(self._broken_by, PeerFailed)
        if is_idle:
            self.transport.board.free()
        if has_not_failed and not self._has_left_messages:
            self.transport.free()
        if has_not_failed:
            self._broken_by = CollectiveError(FREED)
        self.refresh()

    # What is left to devices

    def synchronize(self, timeout: object) -> None:
        """Wait until all calls are complete, those on devices too, and raise what went wrong."""
        limit = self.limit(timeout)
        deadline = deadline_in(limit)
        for work in self.pending_calls():
            work.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        self.devices.synchronize(validation.seconds(timeout))
        self.check()

    def is_done_by_device(self, enqueued: Enqueued) -> bool:
        """Return whether the device has done what a call has put on a stream."""
        return self.devices.has_done(enqueued)

    def wait_for_device(self, enqueued: Enqueued, title: str, seconds: float | None) -> None:
        """Wait on the host for what a call has put on a stream.

        Raises CollectiveTimeout, with the title of the call, after so many seconds.
        """
        deadline = None if seconds is None else deadline_in(seconds)
        if not self.devices.wait_for(enqueued, deadline):
            rank = self.transport.rank
            raise CollectiveTimeout(f"{title}: rank {rank} waited {seconds} s for its device")

    def refresh(self) -> None:
        """Let compiled code make calls at once, or not.

        It does not after a failure, and while a call that timed out is not done.
        """
        self.pool.set_open(self._broken_by is None and self._timed_out is None)
        self.is_recorded = any(ledgers for ledgers, _ in self.ancestry)
        self.is_watched = self.is_recorded or self.checker is not None
        self.has_fast_path = self.pool.is_open and not self.is_watched

    def rename(self, axis: str) -> None:
        """Change the name that ledgers show."""
        if axis != self.axis:
            self.axis = axis
            self.forget_calls()
            self.messages.forget()

    def forget_calls(self) -> None:
        """Forget what is prepared and does not run; existing plans do not change."""
        self.pool.forget()

    @contextmanager
    def recording(self, ledger: Recording) -> Iterator[None]:
        """Return a context manager that records the calls of this communicator.

        It also records the calls of all communicators made from this one.
        """
        self.add_ledger(ledger)
        try:
            yield
        finally:
            self.ledgers.remove(ledger)
            self._refresh_family()

    def add_ledger(self, ledger: Recording) -> None:
        """Record the same calls, from now to the end."""
        self.ledgers.append(ledger)
        self._refresh_family()

    def _refresh_family(self) -> None:
        with _FAMILIES:
            family = list(self._family)
        for session in family:
            session.refresh()

    # From a call to its run

    def spec(
        self,
        collective: str,
        arrays: Arrays,
        counts: Counts,
        *,
        root: int = 0,
        op: Operator | None = None,
        algorithm: str | None = None,
        label: str = "",
        is_blocking: bool | None = None,
        out: str = "",
    ) -> CallSpec:
        """Return the description of the call, from which it is compiled, cached and compared.

        `label` is its name in the ledger, if that is not the collective's.
        """
        dtype, size = arrays.dtype, self.transport.size
        num_bytes = select.num_bytes_of(counts, dtype.itemsize)
        like = arrays.target if arrays.source is None else arrays.source
        call = collective, algorithm, size, num_bytes, op, self.decisions, self.topology
        choice, direct = select.choose(*call, dtype.itemsize), None
        if not arrays.backend.is_host:
            on_device = select.choose(*call, dtype.itemsize, on_device=True)
            direct = on_device.direct_beside(choice)
        shape = None if like is None else tuple(like.shape)
        if shape is not None and choice.options.get("shards"):
            shape = shape[1:]  # ranks may have different numbers of shards
        return CallSpec(
            collective,
            choice.algorithm,
            tuple(choice.options.items()),
            choice.segments,
            choice.label,
            dtype,
            counts,
            root,
            op,
            validation.aliasing(*arrays),
            shape,
            label,
            "" if self.numbering.can_mix else {None: "", True: "yes", False: "no"}[is_blocking],
            out,
            direct,
        )

    # Parts of larger operations

    def call_part(self, make_steps: MakeSteps, timeout: float | None = None) -> Any:
        """Make a call that is a part of a larger operation; the operation ends if it times out."""
        before = self._timed_out
        try:
            return self.call(make_steps, timeout)
        except CollectiveTimeout as error:
            if error.work is not None and error.work is not before:
                error.work.give_up(error)
                error.work = None
            raise

    def made_by_engine(
        self, what: str, make: Callable[[float | None], Result], deadline: float | None
    ) -> Result:
        """Make a communicator by a call of MPI; a failure makes this communicator unusable."""
        try:
            return make(deadline)
        except BaseException as error:
            failure = self.transport.translate_error(error)
            self._break(what, failure)
            if failure is error:
                raise
            raise failure from error
