"""Runs programs on devices: data goes from the memory of one device to that of another.

Before a call, the ranks of a host meet: each publishes where its arrays are, opens the memory of
its peers, and says so.  Then each enqueues its device program, on the caller's stream or, if the
caller goes on meanwhile, on a stream that begins after what is on the caller's.  The host does not
wait for the device.  If some rank cannot do that, all ranks stage their messages in host memory.

When all ranks make a call of the same kind again, they do not meet again: each says that it has
come, and whether its arrays are others than before, and enqueues the same program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Arrays
from collectives.devices.agreement import Agreement
from collectives.devices.call import DeviceCall
from collectives.devices.check import Check, until
from collectives.devices.clock import timed_end
from collectives.devices.driver import DriverError
from collectives.devices.exposed import Exposed
from collectives.devices.kept import Kept
from collectives.devices.last_arrays import LastArrays
from collectives.devices.links import LACKING, UNTRIED, YES, Links
from collectives.devices.loop import Loop
from collectives.devices.meeting import Wait, Waits
from collectives.devices.order import Enqueued, Order, Turns
from collectives.devices.placed import Placed
from collectives.devices.standstill import Standstill
from collectives.devices.streams import STREAMS
from collectives.devices.watch import Watch
from collectives.diagnostics import COMPLETE, ENQUEUED, CallLog, Waiting
from collectives.engines import FAILS, RUN_FAILED, WORKS, CallKey, Operands, Staged, Transport
from collectives.errors import CollectiveError, CollectiveMismatch

_ANSWER_BITS = 2  # of a verdict, for the answer of `Links.answer_on_kernels`


class OnDevice:
    """An execution of a call on devices.

    It is complete when all is enqueued.

    Attributes
    ----------
    kept : Kept
        The executions of this communicator that can run again without a meeting.
    is_strict : bool
        Whether a call that would be staged is refused.
    why_staged : str
        Why this rank's array cannot be used by its peers; "" if it can.
    check : Check or None
        The comparison of the next run, in checked mode.
    waits_for_device : bool
        Whether a run ends when the device has done it.
    when_staged : function or None
        Called before a run that is staged sends anything.
    """

    check: Check | None = None
    waits_for_device = _is_blocking = False
    _may_others_run: Callable[[], bool] | None = None  # after this rank has said that it does
    _last_arrays: LastArrays | None = None  # of the last run, if the next one may be on them
    when_staged: Callable[[], object] | None = None
    state_address = 0  # the state is its own
    reads_input = False  # `run` itself looks at the arrays

    def __init__(
        self,
        transport: Transport,
        links: Links,
        kept: Kept,
        call: DeviceCall,
        operands: Operands,
        tag: int,
        order: Order,
        turns: Turns,
        watch: Watch,
        why_staged: str = "",
        *,
        is_strict: bool = False,
    ) -> None:
        self._order, self._turns, self._watch = order, turns, watch
        self._transport, self._links, self._call = transport, links, call
        self.program = call.direct_program(transport.rank, transport.size)
        self._kept, self._backend, self._is_strict = kept, links.backend, is_strict
        self._exposed = Exposed(links, call, why_staged)
        self._scratch: Array | None = None  # kept for calls that follow without a meeting
        self.attach(operands, tag)
        self._loop = Loop(
            *(links.driver, order, turns, operands, self.program.itemsize),
            may_be_kernel=links.can_try_kernels and not links.why_no_kernels,
        )
        self._placed = Placed(transport, links, call, self._loop, self._backend, watch)
        self._others = [rank for rank in links.board.local_ranks if rank != transport.rank]
        self._staged: Staged | None = None
        self._is_staged, self.row = False, 0
        self._wait: Wait | None = None
        self._steps: Waits = _no_steps()
        self._lock = threading.Lock()  # held by the thread that advances it, or looks at it
        self._agreement: Agreement | None = None  # the last one
        self._standstill = Standstill(transport.board, transport.in_flight)

    @property
    def is_plan(self) -> bool:
        """Whether its runs are those of a plan, which have no number of a call."""
        return bool(self._call.plan)

    # The interface of executions

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        self.program.check_arrays(operands.input, operands.output, None)
        if self._scratch is not None:  # its peers know it
            operands = operands._replace(scratch=self._scratch)
        else:
            operands = _with_scratch(operands, self._num_scratch)
        self._operands, self._tag, self._last_arrays = operands, tag, None
        self._combining = operands.function, operands.divisor
        self._exposed.attach(operands)

    @property
    def _num_scratch(self) -> int:
        """The bytes of scratch that it needs, as far as it is known which ranks are staged."""
        rank, size = self._transport.rank, self._transport.size
        is_one_host = len(self._links.board.local_ranks) == size
        staged = self._links.staged if is_one_host else None
        return self._call.num_scratch(rank, size, staged)

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        del self._operands
        self._exposed.detach(self._order.after_all)
        self._placed.detach()
        self._staged = None

    def interrupt(self, is_wanted: bool) -> None:
        """See `Execution.interrupt`."""
        self._loop.interrupt(is_wanted)

    @property
    def limit(self) -> float | None:
        """The seconds that the run may take on the device; None: those of the communicator."""
        return self._loop.limit

    @limit.setter
    def limit(self, seconds: float | None) -> None:
        self._loop.limit = seconds

    @property
    def final_state(self) -> int:
        """See `Execution.final_state`."""
        return COMPLETE if self._is_staged else ENQUEUED

    @property
    def enqueued(self) -> Enqueued | None:
        """See `Execution.enqueued`."""
        return None if self._is_staged else self._loop.enqueued

    def restart(self, number: int, *, is_async: bool = False) -> None:
        """Go to the first row, and show the other ranks of the host that this one has come."""
        self._begin(number)
        self._is_blocking = not is_async
        with self._backend.on_stream(self._stream):
            self._loop.use_callers_stream()
            try:
                if is_async:
                    self.leave_callers_stream()
                self._note_start()
            except DriverError:
                self._loop.note_no_start()
            if self._can_run_again():
                self._steps = self._run_again(must_meet=not self._come())
            else:
                self._steps = self._run_anew()

    def _begin(self, number: int) -> None:
        """Note the number and the stream of a run that begins."""
        plan = self._call.plan
        self._key = CallKey(plan, number) if plan else CallKey(number)
        if self.check is not None:
            self.check.begin(self._key)
        if not plan:
            self._turns.begin(number)
        self._watch.release()
        self.row, self._is_staged, self._may_others_run = 0, False, None
        self._wait = Wait(lambda: True, self._missing)
        self._stream = self._backend.current_stream()
        self._standstill.begin()
        self._transport.watch(self)

    def leave_callers_stream(self) -> None:
        """See `Execution.leave_callers_stream`."""
        if self._loop.enqueued is None:
            with self._backend.on_stream(self._stream):
                self._loop.use_own_stream(self._order.new_mark())

    def _note_start(self) -> None:
        """Let the run begin after what is on the caller's stream now."""
        self._loop.note_start(self._links.pointer(self._stream))

    def advance(self, seconds: float) -> bool:
        """See `Execution.advance`; it waits only for ranks and devices, in compiled code."""
        with self._lock:
            return self._advance(seconds)

    def _advance(self, seconds: float) -> bool:
        if self._placed.progress():  # messages move only in calls of MPI
            seconds = 0.0
        self._loop.seconds = seconds
        self._watch.release()
        if self._watch.failure is not None:
            raise self._watch.failure.with_traceback(None)
        may_wait = seconds > 0.0 and self._wait is not None and self._wait.is_in_code
        with self._backend.on_stream(self._stream):
            while may_wait or self._wait is None or self._wait.is_over():
                may_wait, before = False, self._place()
                try:
                    self._wait = next(self._steps)
                except StopIteration:
                    self._end()
                    return True
                self.row += self._place() != before
                if self._wait is None:
                    break
        if self.check is not None and self._is_blocking and self._standstill.is_due:
            self._refuse_standstill()
        return False

    def _refuse_standstill(self) -> None:
        """Raise CollectiveMismatch if the ranks that it waits for wait for this one."""
        wait, me, (members, ordinal) = self._wait, self._transport.rank, self._transport.identity
        missing = [] if wait is None or wait.is_at_work else wait.missing()
        missing = [rank for rank in missing if rank != me]
        if self.limit != self._watch.limit:  # it ends by itself, as its caller may expect
            missing = []
        others = ", ".join(str(members[rank]) for rank in missing)
        which = f"{_shown(members)}{f' #{ordinal}' if ordinal > 1 else ''}"
        call = f"call {self._key.call} of ranks {which}: {self._call.text}"
        what = f"rank {members[me]} waits for rank {others} in {call}"
        if why := self._standstill.look(wait, missing, what):
            self._watch.note(RUN_FAILED, why)
            raise CollectiveMismatch(why)

    def _place(self) -> tuple[object, ...]:
        """Return where it stands, to notice progress."""
        check, staged = self.check, self._staged
        return self._wait, self._loop.row, check and check.row, staged and staged.row

    def _end(self) -> None:
        """End a run of which all is enqueued."""
        self._transport.unwatch(self)
        self._standstill.end()
        self._turns.end(self._key.call)
        if self.enqueued is not None:
            self._order.keep_until(self.enqueued, self._operands)
        self._may_others_run = None
        self._loop.log_end(self.final_state)
        self._last_agreement.end_check()
        self._wait = self.check = None  # which refer to this object, or to arrays

    @property
    def can_move(self) -> bool:
        """See `Waiter.can_move`; if it waits for a message, its transport knows that."""
        with self._looking() as wait:
            return wait is not None and wait.has_ended

    @property
    def is_stuck(self) -> bool:
        """See `Waiter.is_stuck`."""
        with self._looking() as wait:
            return wait is None or not (wait.is_at_work or wait.has_ended)

    @contextmanager
    def _looking(self) -> Iterator[Wait | None]:
        """Return a context manager in which what it waits for does not change.

        Yields what it waits for; `_MOVING` if another thread advances it.
        """
        if not self._lock.acquire(blocking=False):
            yield _MOVING
            return
        try:
            yield self._wait
        finally:
            self._lock.release()

    @property
    def missing(self) -> list[int]:
        """The ranks that it waits for."""
        wait = self._wait
        return [] if wait is None else wait.missing()

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        if self._is_staged and self._staged is not None:
            self._staged.note_completed()
        elif self.check is not None:
            self.check.note_completed()

    def position(self) -> tuple[int, list[Waiting]]:
        """See `Execution.position`."""
        if self._is_staged and self._staged is not None:
            return self._staged.position()
        check = self.check
        if check is not None and (messages := check.waiting_for()):
            return 0, messages
        missing = self._placed.late() if self._wait is None else self.missing
        waiting = [Waiting(rank, is_receive=True) for rank in missing]
        waiting += self._placed.waiting_for()
        return self._placed.round_of(self.program.num_rounds), waiting

    def when_complete(self, then: Callable[[float], object]) -> None:
        """See `Execution.when_complete`."""
        if self._is_staged:
            then(time.perf_counter())
            return
        # If the device fails or does not answer, no time is known, but the call is complete.
        with suppress(RuntimeError, TimeoutError), self._backend.on_stream(self._stream):
            end = timed_end(self._links.driver, self._backend, self._loop.stream, then)
            self._watch.held.add(*end)

    def link(self, rank: int) -> str:
        """See `Execution.link`."""
        return self._links.by_mpi if self._is_staged else self._links.link(rank)

    @property
    def device_row(self) -> str:
        """See `Execution.device_row`."""
        return "" if self._is_staged else self._placed.device_row

    def abandon(self) -> bool:
        """See `Execution.abandon`; what is enqueued goes on.

        The memory of the meeting is kept as long as the device uses its counters.
        """
        with self._lock:
            return self._abandon()

    def _abandon(self) -> bool:
        self._transport.unwatch(self)
        self._standstill.end()
        self._turns.end(self._key.call)
        is_certain, may_others_run = self._loop.is_certain, self._may_others_run
        if self._loop.is_coming:  # compiled code may have started it
            may_others_run = self._have_all_come
        with self._backend.on_stream(self._backend.current_stream()):
            self._steps.close()
            has_refused = self.check is not None and self.check.has_refused
            if self.check is not None:
                self.check.abandon()
            is_done = self._placed.abandon()
            if is_certain or (may_others_run is not None and not has_refused and may_others_run()):
                self._watch.note(RUN_FAILED, f"{self._call.text} has failed half-way")
            if self._is_staged and self._staged is not None:
                is_done &= self._staged.abandon()
            if self._agreement is not None:
                self._agreement.leave(self._order.after_all)
                self._exposed.keep(None)
        self._wait = self.check = None  # which refer to this object, or to arrays
        return is_done

    def _missing(self) -> list[int]:
        """Return the ranks that this rank or its device waits for in compiled code."""
        return self._not_come() if self._loop.is_coming else self._placed.late()

    # Runs that compiled code starts

    @property
    def loop(self) -> OnDevice:
        """What starts it; see `Reusable`."""
        return self

    def make_reusable(
        self,
        log: CallLog,
        key: int,
        counter: NDArray[np.int64],
        source: Array | None,
        target: Array | None,
        tags: range = range(0),
    ) -> None:
        """See `Reusable.make_reusable`; the arrays of a plan are those that are attached."""
        self._loop.log_runs(log, key, counter)

    def make_reusable_like(self, other: OnDevice, key: int) -> None:
        """See `Reusable.make_reusable_like`."""
        self._loop.log_runs_like(other._loop, key)

    def set_arrays(self, source: Array | None, target: Array | None) -> None:
        """Let `run` start the next run of a call if it is on these arrays."""
        self._last_arrays = LastArrays(source, target)

    def fits(self, state: int, source: int, target: int) -> bool:
        """Return False: Python starts no run that compiled code might start, but a new one."""
        return False

    def update_dtypes(self, source: Array | None, target: Array | None) -> bool:
        """See `Reusable.update_dtypes`; `run` compares no dtypes."""
        return False

    def run(self, state: int, source: int, target: int, nanoseconds: int) -> int:
        """See `Loop.run` of `Reusable`; a call is on the arrays of its last run, or is a misfit."""
        misfit = int(self._loop.names.MISFIT)
        if self.is_plan:
            self._loop.use_callers_stream()
            return self._run_in_code(nanoseconds)
        if self._last_arrays is None or not self._last_arrays.are(source, target):
            return misfit
        if not self._turns.is_free or not self.take():
            return misfit
        try:
            self._loop.use_callers_stream()
            answer = self._run_in_code(nanoseconds)
        except BaseException:
            if not self.is_running:  # it was complete, or has not begun
                self.forget()
            raise
        if answer == self._loop.names.DONE:
            self.note_kept()
        return answer

    def start(self, state: int, source: int, target: int, nanoseconds: int) -> int:
        """See `Loop.start` of `Reusable`; the arrays are those that are attached."""
        self._stream = self._backend.current_stream()
        self._loop.use_callers_stream()
        try:
            self.leave_callers_stream()
        except DriverError:
            return int(self._loop.names.MISFIT)
        answer = self._run_in_code(nanoseconds)
        if answer == self._loop.names.DONE and self.enqueued is not None:
            self._order.keep_until(self.enqueued, self._operands)
        return answer

    def _run_in_code(self, nanoseconds: int) -> int:
        self.limit = None
        stream = self._backend.current_stream()
        if self._backend.is_current:
            return self._loop.run(self._links.pointer(stream), nanoseconds)
        with self._backend.on_stream(stream):
            return self._loop.run(self._links.pointer(stream), nanoseconds)

    def started(self, answer: int, source: Array | None, target: Array | None) -> bool:
        """See `Reusable.started`."""
        names = self._loop.names
        if answer == names.MISFIT:
            return False
        if not self.is_plan:  # its arrays were released after its last run
            arrays, (function, divisor) = Arrays(self._backend, source, target), self._combining
            operands = Operands.of(arrays)._replace(function=function, divisor=divisor)
            self.attach(operands, self._tag)
            self.set_arrays(source, target)
        self._begin(self._loop.run_number)
        if not self._loop.is_start_noted:  # because no context was current
            with self._backend.on_stream(self._stream):
                self._note_start()
        self._may_others_run = None if answer == names.MEET else self._have_all_come
        self._steps = self._run_again(must_meet=answer == names.MEET)
        return True

    @property
    def is_running(self) -> bool:
        """Whether a run that compiled code has started is not complete."""
        return self.run_number != 0

    @property
    def run_number(self) -> int:
        """The number of the run that compiled code has started."""
        return self._loop.run_number

    @property
    def log_entry(self) -> int:
        """The index of that run's entry in the log."""
        return self._loop.log_entry

    # Runs without a meeting

    def _can_run_again(self) -> bool:
        """Return whether the last run can be repeated; then nothing but this run can end that."""
        if self._call.plan:
            return self._loop.can_run_again
        return self.take() and self._loop.can_run_again

    def take(self) -> bool:
        """Return whether it is kept for calls; then it no longer is, since a call begins."""
        return self._kept.take_call(self)

    def _come(self) -> bool:
        """Let the peers see that this rank has come; return False if the ranks must meet."""
        if not self._loop.is_start_noted:
            return False
        others = None
        if not self._call.plan:
            try:
                others = self._exposed.other_buffers()
            except DriverError:
                return False
            if not self._exposed.can_keep:
                return False
        if others is not None:
            self._last_agreement.meeting.change(others)
            self._exposed.keep(others)
        self._may_others_run = self._have_all_come
        self._loop.come(self._key.run or self._key.call, has_changed=others is not None)
        return True

    def _run_again(self, *, must_meet: bool) -> Waits:
        """Yield the steps of a run without a meeting, unless a rank makes it in another way."""
        loop = self._loop
        while loop.is_coming and not must_meet:
            answer = loop.advance()
            must_meet = answer == loop.names.MEET
            if answer == loop.names.CHANGED:
                must_meet = not (yield from self._change())
            elif loop.is_coming and not must_meet:
                yield from until(Wait(self._is_decided, self._not_come), self.check)
                must_meet = bool(self._elsewhere())
        if must_meet:
            yield from self._run_anew()
        else:
            yield from self._finish()
            self.note_kept()

    def _is_decided(self) -> bool:
        """Return whether it is known how the ranks make this run."""
        return self._loop.can_advance() or bool(self._elsewhere())

    def _not_come(self) -> list[int]:
        """Return the ranks that have not come."""
        return [self._others[at] for at in self._loop.late()]

    def _have_all_come(self) -> bool:
        """Return whether all ranks have come.

        If not, ranks that come see that this one has left.
        """
        return not self._not_come()

    def _elsewhere(self) -> list[int]:
        """Return the ranks that make this run in another way.

        A rank that comes while it is looked at is not one of them.
        """
        elsewhere = [rank for rank in self._not_come() if self._is_elsewhere(rank)]
        late = self._not_come() if elsewhere else []
        return [rank for rank in elsewhere if rank in late]

    def _is_elsewhere(self, rank: int) -> bool:
        """Return whether a rank meets others, has a host array, or has come with another execution.

        The last may be so if several calls of a kind are under way.
        """
        board, key = self._links.board, self._key
        if board.find(rank, key) is not None or board.is_on_host(rank, key):
            return True
        numbers = board.arrivals_at_calls(rank) >> self._loop.names.NUMBER_AT
        return not key.run and bool((numbers == key.call).any())

    def _change(self) -> Waits:
        """Take over the other buffers of some ranks; return whether all ranks can."""
        meeting, records = self._last_agreement.meeting, self._last_agreement.records
        for rank, record in records.items():
            record["buffers"] = meeting.record(rank)["buffers"]
        if not all(map(self._links.is_open, records.values())):
            yield self._until_it_may_block()
        verdict, turn = WORKS, self._loop.turn
        try:
            starts = self._placed.find(records)
        except DriverError:
            verdict = FAILS
        except BaseException:
            meeting.answer_change(turn, FAILS)  # or the others would wait for the answer
            raise
        yield meeting.answer_change(turn, verdict)
        if not meeting.all_can_change():
            return False
        yield self._until_it_is_its_turn()
        self._placed.move(starts)
        return True

    def note_kept(self) -> None:
        """Note that a run is over, and that the next one may do without a meeting."""
        if plan := self._call.plan:
            self._kept.add_plan(plan, self)
        else:
            self._kept.add_call(self)

    def forget(self) -> None:
        """Let the ranks meet before the next run."""
        self._placed.end()
        self._exposed.keep(None)
        if self._scratch is not None:
            self._order.keep(self._scratch)
            self._scratch = None

    # Runs that begin with a meeting

    def _run_anew(self) -> Waits:
        """Yield the steps of a run that begins with a meeting, to which this rank comes at once."""
        self.forget()
        self._may_others_run = None
        agreement = self._agreement = Agreement(
            *(self._links, self._call, self._key, self._exposed, self.check),
            is_strict=self._is_strict,
        )
        agreement.come(self._loop, self._kept.forget_calls)
        return self._run(agreement)

    @property
    def _last_agreement(self) -> Agreement:
        """The agreement of this run, or of that which it repeats."""
        assert self._agreement is not None
        return self._agreement

    def _run(self, agreement: Agreement) -> Waits:
        """Yield the steps of such a run."""
        why_staged = yield from agreement.meet()
        if not why_staged and self._is_strict:
            why_staged = self._links.why_any_staged
        if not why_staged:
            why_staged = yield from self._run_on_devices(agreement)
        if why_staged and self._is_strict:
            agreement.meeting.leave()
            error = not_staged(why_staged)
            if agreement.is_complete:
                raise self._links.board.on_this_host(error)
            raise error  # which a rank with a host array does not raise
        if why_staged:
            self._links.why_last_staged = why_staged
            agreement.meeting.leave()
            yield from self._run_staged()

    def _run_on_devices(self, agreement: Agreement) -> Waits:
        """Open the memory of the others, and enqueue; return "".

        If a rank cannot open the memory of another one, or knows of other links, return that.
        """
        meeting, records = agreement.meeting, agreement.records
        links, me = self._links, self._transport.rank
        are_open = all(map(links.is_open, records.values()))
        if not are_open or any(record["closing"].any() for record in records.values()):
            yield self._until_it_may_block()
        works = 1 + crc32(repr(sorted(links.staged or ())).encode()) << _ANSWER_BITS
        try:
            for record in records.values():
                links.close(record)
            starts = self._placed.find(records)
            how = links.answer_on_kernels
            if how == YES and not self._loop.can_be_kernel:
                how = LACKING
            verdict = FAILS if links.staged is None else works + how
        except DriverError:
            verdict = FAILS
        except BaseException:
            meeting.answer(FAILS)  # or the others would wait for the answer
            raise
        self._may_others_run = None if verdict == FAILS else meeting.is_too_late_to_fail
        meeting.answer(verdict)
        yield meeting.for_answers()
        links.exports.closed(records[me]["closing"].tolist())
        verdicts = meeting.verdicts().values()
        if {answer >> _ANSWER_BITS for answer in verdicts} != {works >> _ANSWER_BITS}:
            self._may_others_run = None
            return "a rank cannot open the memory of another one"
        yield self._until_it_is_its_turn()
        how = links.agree_on_kernels({answer - works for answer in verdicts})
        self._placed.begin(records, starts, meeting, self._exposed, may_be_kernels=how == YES)
        yield from self._finish()
        if all(record["lasts"] for record in records.values()) and how != UNTRIED:
            self._keep(agreement)
        else:
            self.forget()
        return ""

    def _finish(self) -> Waits:
        """Enqueue the rows, and wait for the device if that is wanted."""
        yield from self._placed.finish(self._tag)
        if self.waits_for_device:
            yield Wait(lambda: self._order.has_ended, self._placed.late, is_at_work=True)
            self._watch.check()

    def _until_it_may_block(self) -> Wait:
        """Wait until this rank may make calls that wait for all streams of its process."""
        return Wait(partial(STREAMS.may_block, self._links.driver), list, is_at_work=True)

    def _until_it_is_its_turn(self) -> Wait:
        """Wait until all earlier calls of the communicator are enqueued."""
        return Wait(partial(self._turns.has_come_to, self._key.call), list)

    def _keep(self, agreement: Agreement) -> None:
        """Let the next run do without a meeting."""
        meeting, me = agreement.meeting, self._transport.rank
        self._scratch = self._operands.scratch
        self._exposed.keep(agreement.records[me]["buffers"])
        arrivals = [meeting.arrival(rank) for rank in self._others]
        self._loop.keep(meeting.arrival(me), arrivals, self._placed.table.most_runs - 1)
        self.note_kept()

    def _run_staged(self) -> Waits:
        """Let all messages go through host memory."""
        self._turns.end(self._key.call)
        if self.when_staged is not None:
            self.when_staged()
        if self._staged is None:
            program = self._call.staged_program(self._transport.rank, self._transport.size)
            operands = _with_scratch(self._operands, program.num_scratch)
            self._staged = Staged(program, operands, self._transport, self._tag)
        else:
            operands = _with_scratch(self._operands, self._staged.program.num_scratch)
            self._staged.attach(operands, self._tag)
        self._staged.restart(self._key.call)
        self._is_staged = True
        is_complete = self._staged.advance(0.0)  # from now on, its transport looks at that
        self._transport.unwatch(self)
        while not is_complete:
            yield None
            is_complete = self._staged.advance(0.0)


def _with_scratch(operands: Operands, num_bytes: int) -> Operands:
    """Return the operands of a call that needs so many bytes of scratch."""
    dtype = operands.scratch.dtype
    if operands.scratch.nbytes >= num_bytes:
        return operands
    scratch = operands.backend.empty((num_bytes // dtype.itemsize,), dtype)
    return operands._replace(scratch=scratch)


_MOVING = Wait(lambda: False, list, is_at_work=True)


def _no_steps() -> Waits:
    """Yield the steps before the first run: none."""
    yield from ()


def _shown(ranks: Sequence[int]) -> str:
    """Return ranks in few words."""
    first, last = ranks[0], ranks[-1]
    is_range = list(ranks) == [*range(first, last + 1)]
    return f"{first} to {last}" if is_range else ", ".join(map(str, ranks))


def not_staged(why: str) -> CollectiveError:
    """Return the error of a call that would be staged for some reason, and must not be."""
    return CollectiveError(f"device='peer' was asked for, but the call would be staged: {why}")
