"""One rank's end of a communicator: its calls in order, its ledgers, and its time limits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np

from collectives.arrays import Arrays, Operator, validation
from collectives.diagnostics import Ancestry, Ledger
from collectives.engines import ProgressThread, Transport
from collectives.errors import CollectiveError, CollectiveTimeout, PeerFailed
from collectives.programs import CallSpec, Counts
from collectives.runtime.call_cache import NO_CALLS, CallCache
from collectives.runtime.checked import Checker, Mode
from collectives.runtime.description import Compared
from collectives.runtime.run import Run
from collectives.runtime.run_pool import RunPool
from collectives.runtime.turns import NotYourTurn, Numbering, Turn
from collectives.runtime.work import Steps, Work
from collectives.selection import Decisions, select

FREED = "this communicator was freed"

Result = TypeVar("Result")


class Session:
    """What a communicator and its planner share."""

    def __init__(
        self,
        transport: Transport,
        timeout: float | None = None,
        name: str = "",
        parent: Session | None = None,
        ancestry: Ancestry | None = None,
        thread: ProgressThread | None = None,
        check: Mode | None = None,
    ) -> None:
        self.transport, self.timeout, self.name = transport, timeout, name
        self.thread, self.thread_delay = thread, 0.0
        self.numbering = Numbering(transport.num_tags)
        self.checker = None if check is None else Checker(self, check)
        self.decisions: Decisions | None = None
        self.ledgers: list[Ledger] = []
        self.ancestry: Ancestry = [(self.ledgers, None), *(ancestry or [])]
        self._family: WeakSet[Session] = WeakSet() if parent is None else parent._family
        self._family.add(self)
        # One call at a time is made; whoever makes it has the only token, taken in one step.
        self.turn = [None]
        self._late: Work[Any] | None = None  # a blocking call that timed out; the next waits for it
        self._damage: CollectiveError | None = None  # why nothing can be called any more
        self.num_children: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.runs = RunPool(transport, name, self.ancestry)
        self.call_cache, self.plan_cache = CallCache(), CallCache()
        self.fast_calls = self.fast_plans = NO_CALLS
        self.refresh()

    def child(self, transport: Transport, members: Sequence[int]) -> Session:
        """The session of a communicator of some of our ranks, recorded by whoever records us."""
        self.num_children[tuple(members)] += 1
        times = self.num_children[tuple(members)]
        name = f"{self.name}[{','.join(map(str, members))}{f' #{times}' if times > 1 else ''}]"
        ancestry: Ancestry = [
            (ledgers, members if ranks is None else [ranks[member] for member in members])
            for ledgers, ranks in self.ancestry
        ]
        check = None if self.checker is None else self.checker.mode
        child = Session(transport, self.timeout, name, self, ancestry, self.thread, check)
        child.decisions = self.decisions
        return child

    # Calls in order

    def call(self, steps: Callable[[Turn], Steps], timeout: float | None) -> Any:
        """Make a blocking call."""
        with self.my_turn():
            limit = self.limit(timeout)
            self._wait_for_the_late(limit)
            return Work.blocking(self, steps(Turn(self.numbering, is_blocking=True))).run(limit)

    def started(self, steps: Callable[[Turn], Steps], timeout: float | None) -> Work[Any]:
        """Start a call that does not block."""
        with self.my_turn():
            self.check()
            work: Work[Any] = Work(
                self, steps(Turn(self.numbering, is_blocking=False)), timeout=self.limit(timeout)
            )
            return work.start(self.thread, self.thread_delay)

    def message(self, steps: Steps, timeout: float | None, is_async: bool) -> Any:
        """Send or receive; that needs no turn, since its tag is the user's."""
        self.check()
        work: Work[Any] = Work(self, steps, timeout=self.limit(timeout))
        return work.start(self.thread) if is_async else work.run(self.limit(timeout))

    @contextmanager
    def my_turn(self) -> Iterator[None]:
        """While this thread makes a call, no other thread can."""
        try:
            token = self.turn.pop()
        except IndexError:
            raise NotYourTurn from None
        try:
            yield
        finally:
            self.turn.append(token)

    def _wait_for_the_late(self, limit: float | None) -> None:
        """A call that timed out comes first: all have the same tag."""
        self.check()
        if self._late is not None:
            if not self._late.is_over:
                self._late.wait(limit)
            self._late.test()  # what it failed with is what the next call has to say
            self._late = None
            self.refresh()

    def limit(self, timeout: object) -> float | None:
        """The time limit of a call in seconds: its own, or that of all."""
        limit = validation.seconds(timeout)
        return self.timeout if limit is None else limit

    def is_late(self, work: Work[Any]) -> None:
        """A call has outlasted its time limit and goes on when somebody waits."""
        if work.is_blocking:
            self._late = work
            self.refresh()
        work.list()

    def gave_up(self, work: Work[Any], error: BaseException) -> None:
        """What failed half-way may leave messages that the next call would take for its own.

        So a blocking call, and one of which the others are in the midst, is the last thing that
        this communicator does; but what all ranks stopped together has left nothing.
        """
        self.forget_calls()
        is_stopped = self.checker is not None and self.checker.objection is error
        if (work.is_blocking or work.was_ahead) and not is_stopped:
            self._break(work.title, error)

    def _break(self, what: str, error: BaseException) -> None:
        """Nothing can be called any more, since this did not end as the other ranks expect."""
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        what = f"{what} failed half-way on rank {self.transport.rank}: {reason}"
        self._damage = CollectiveError(f"this communicator is of no more use: {what}")
        if isinstance(error, PeerFailed):
            self._damage = error
        self.refresh()

    def check(self) -> None:
        """Raise CollectiveError if a failure has left this communicator unusable."""
        if self._damage is not None:
            raise self._damage.with_traceback(None)

    def _under_way(self) -> list[Work[Any]]:
        """The calls of this communicator that are under way."""
        calls = [*self.transport.in_flight, *([] if self.thread is None else self.thread.calls)]
        if self._late is not None:
            calls.append(self._late)
        ours = [call for call in calls if isinstance(call, Work) and call.owner is self]
        return [work for work in ours if not work.is_over]

    @property
    def is_freed(self) -> bool:
        """Whether the communicator was given back."""
        return self._damage is not None and str(self._damage) == FREED

    def free(self) -> None:
        """Give the communicator below back, if nothing is under way on it."""
        for work in self._under_way():
            if not work.test():
                raise RuntimeError(f"{work.title} is already running; wait for it first")
        self.forget_calls()
        self.runs.free()
        self.transport.flight.close(self.transport.log)
        # MPI gives the next communicator the number of one that was freed: after a failure it might
        # get the messages that this one has left as well.
        if self._damage is None or isinstance(self._damage, PeerFailed):
            self.transport.free()
            self._damage = CollectiveError(FREED)
        self.refresh()

    # The fast path: calls that came before go straight to their executions

    def refresh(self) -> None:
        """Open the fast path or close it: it needs that nothing comes first.

        Those that are recorded begin in Python.
        """
        is_clear = self._damage is None and self._late is None
        self.is_recorded = any(ledgers for ledgers, _ in self.ancestry)
        self.has_fast_path = is_clear and not self.is_recorded and self.checker is None
        can_check = self.checker is None or (self.checker.mode == "calls" and not self.is_recorded)
        self.fast_calls = self.call_cache if is_clear and can_check else NO_CALLS
        self.fast_plans = self.plan_cache if is_clear and self.checker is None else NO_CALLS

    def forget_calls(self) -> None:
        """Forget what is ready to run again; plans that were made stay as they are."""
        self.call_cache.forget()
        self.plan_cache.forget()

    @contextmanager
    def recording(self, ledger: Ledger) -> Iterator[None]:
        """Record what is called here, and on all communicators made from this one."""
        self.ledgers.append(ledger)
        self._refresh_family()
        try:
            yield
        finally:
            self.ledgers.remove(ledger)
            self._refresh_family()

    def _refresh_family(self) -> None:
        for session in list(self._family):
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
        """The call in a form in which it can be compiled, kept and compared.

        `label`: what the ledger calls it if not by its name.
        """
        dtype, size = arrays.dtype, self.transport.size
        num_bytes = _num_bytes(counts, dtype)
        like = arrays.target if arrays.source is None else arrays.source
        choice = select.choose(collective, algorithm, size, num_bytes, op, self.decisions)
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
            None if like is None else tuple(like.shape),
            label,
            {None: "", True: "yes", False: "no"}[is_blocking],
            out,
        )

    def perform(
        self,
        spec: CallSpec,
        arrays: Arrays,
        turn: Turn,
        *,
        is_ahead: bool = False,
        says: Mapping[str, str] | None = None,
    ) -> Steps:
        """The runs of a collective: the call itself, and what ranks tell each other around it.

        `is_ahead`: whether it is sent ahead of the call of this turn.  `says`: what the ranks tell
        each other of it in checked mode, where that does not follow from the rest.
        """
        self.check()
        tag = turn.header_tag if is_ahead else turn.tag
        run = self.runs.call(spec, arrays, tag, turn.number, is_ahead=is_ahead)
        yield from self.guarded(run, spec, arrays, lambda: turn.check_tag, says)

    def guarded(
        self,
        run: Run,
        spec: CallSpec,
        arrays: Arrays,
        tag: Callable[[], int],
        says: Mapping[str, str] | None = None,
    ) -> Steps:
        """A run, and what the ranks tell each other before and after it in checked mode."""
        if self.checker is None:
            yield run
            return
        call = Compared(spec, arrays, run, tag(), says or {})
        yield from self.checker.before(call)
        yield run
        yield from self.checker.after(call)

    # Calls that are parts of something larger

    def part(self, steps: Callable[[Turn], Steps], timeout: float | None = None) -> Any:
        """A part of what only makes sense as a whole, on all ranks: one that timed out ends it."""
        late = self._late
        try:
            return self.call(steps, timeout)
        except CollectiveTimeout as error:
            if error.work is not late:
                error.work.give_up(error)
                error.work = None
            raise

    def made(
        self, what: str, make: Callable[[float | None], Result], deadline: float | None
    ) -> Result:
        """What only MPI can make, when all ranks concerned are there."""
        try:
            return make(deadline)
        except BaseException as error:
            self._break(what, error)
            raise


def _num_bytes(counts: Counts, dtype: np.dtype[Any]) -> int:
    """The n of the formulas: of the vector, of all blocks, or of an average rank's all-to-all."""
    if isinstance(counts, int):
        return counts * dtype.itemsize
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    num_parts = 1 if isinstance(counts[0], int) else len(counts)
    return sum(numbers) // num_parts * dtype.itemsize
