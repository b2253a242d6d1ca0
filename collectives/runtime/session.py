"""One rank's end of a communicator: its numbers and tags, its ledgers, and its calls in order.

Tags keep messages apart.  A quarter of them is the user's (point to point), a quarter numbers the
collective calls, so that the messages of two calls never meet, and a quarter is for what the
library sends ahead of a call of that number.  Blocking calls all have one tag, of the last quarter,
so that their executions can be kept: they run one after the other on every rank, and between two
ranks messages of one tag arrive in the order in which they were sent.  The others of that quarter
are for what the ranks tell each other in checked mode, in the order in which calls start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.arrays import HOST, Array, Arrays, Backend, Bytes, Operator, kernels, validation
from collectives.diagnostics import Ancestry, Ledger
from collectives.engines import ProgressThread, Reusable, Transport
from collectives.errors import CollectiveError, CollectiveTimeout, PeerFailed
from collectives.programs import CallSpec, Counts, Message, Step
from collectives.runtime import checked, header
from collectives.runtime.call_cache import (
    NO_CALLS,
    CachedCall,
    CachedPlan,
    CachedStart,
    CallCache,
    CheckedCall,
    Likeness,
    NotYourTurn,
)
from collectives.runtime.checked import Checker, Mode
from collectives.runtime.header import Header
from collectives.runtime.plan import Plan
from collectives.runtime.run_pool import RunPool, ends_of
from collectives.runtime.runs import Run
from collectives.runtime.work import Steps, Work
from collectives.schedule import Region, Round, incoming, outgoing
from collectives.selection import Decisions, select

_MOST_DIMENSIONS = 8  # of arrays that compiled code looks at
FREED = "this communicator was freed"
_NOTHING = Region("input", 0, 0)

Result = TypeVar("Result")


class Turn:
    """The number of a call and its tags.

    The number is taken when it is first asked for: a call that is refused takes none, so that it
    can be made again.
    """

    def __init__(self, session: Session, is_blocking: bool) -> None:
        self._session, self.is_blocking = session, is_blocking
        self._number: int | None = None
        self._check_tag: int | None = None

    @property
    def number(self) -> int:
        """The number of the call."""
        if self._number is None:
            self._number = self._session.next_number()
        return self._number

    @property
    def check_tag(self) -> int:
        """That of what ranks tell each other of the call, and of what goes ahead of it."""
        if self._check_tag is None:
            self._check_tag = self._session.checks_tag()
        return self._check_tag

    @property
    def tag(self) -> int:
        """That of the call's own messages."""
        return self._session.tag(3, 0) if self.is_blocking else self._session.tag(1, self.number)

    @property
    def ahead_tag(self) -> int:
        """That of what goes ahead of them."""
        return self._session.tag(2, self.number)


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
        self.checker = None if check is None else Checker(self, check)
        self.decisions: Decisions | None = None
        self.ledgers: list[Ledger] = []
        self.ancestry: Ancestry = [(self.ledgers, None), *(ancestry or [])]
        self._family: WeakSet[Session] = WeakSet() if parent is None else parent._family
        self._family.add(self)
        self.numbers: NDArray[np.int64] = np.zeros(1, np.int64)  # calls made; read by compiled code
        self.checks: NDArray[np.int64] = np.zeros(1, np.int64)  # comparisons; likewise
        # One call at a time is made; whoever makes it has the only token, taken in one step.
        self.turn = [None]
        self._late: Work | None = None  # a blocking call that timed out; the next waits for it
        self._damage: CollectiveError | None = None  # why nothing can be called any more
        self._num_children: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self.runs = RunPool(transport, name, self.ancestry)
        self.cache, self.plans = CallCache(), CallCache()
        self.quick_calls = self.quick_plans = NO_CALLS
        self.refresh()

    def child(self, transport: Transport, members: Sequence[int]) -> Session:
        """The session of a communicator of some of our ranks, recorded by whoever records us."""
        self._num_children[tuple(members)] += 1
        times = self._num_children[tuple(members)]
        name = f"{self.name}[{','.join(map(str, members))}{f' #{times}' if times > 1 else ''}]"
        ancestry: Ancestry = [
            (ledgers, members if ranks is None else [ranks[member] for member in members])
            for ledgers, ranks in self.ancestry
        ]
        check = None if self.checker is None else self.checker.mode
        child = Session(transport, self.timeout, name, self, ancestry, self.thread, check)
        child.decisions = self.decisions
        return child

    # Numbers and tags

    def tag(self, quarter: int, number: int) -> int:
        """A tag of one of the four quarters."""
        num_each = self.transport.num_tags // 4
        return quarter * num_each + number % num_each

    def next_number(self) -> int:
        """The number of a new call."""
        self.numbers[0] += 1
        return int(self.numbers[0])

    @property
    def num_calls(self) -> int:
        """How many calls there have been."""
        return int(self.numbers[0])

    def catch_up(self, num_calls: int) -> None:
        """After ranks have called different things: there have been so many on another one."""
        self.numbers[0] = max(self.num_calls, num_calls)

    def checks_tag(self) -> int:
        """The tag of the next exchange of fingerprints: no blocking call's, nor that of `meet`."""
        self.checks[0] += 1
        tags = self.checks_tags
        return tags[int(self.checks[0]) % len(tags)]

    @property
    def checks_tags(self) -> range:
        """The tags that exchanges of fingerprints have in turns."""
        num_each = self.transport.num_tags // 4
        return range(3 * num_each + 2, 4 * num_each)

    def users_tag(self, tag: object) -> int:
        """A tag that the user names."""
        number, largest = validation.integer(tag, "tag"), self.transport.num_tags // 4 - 1
        if not 0 <= number <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {number}")
        return number

    # Calls in order

    def call(self, steps: Callable[[Turn], Steps], timeout: float | None) -> Any:
        """Make a blocking call."""
        with self.my_turn():
            limit = self.limit(timeout)
            self._wait_for_the_late(limit)
            return Work.blocking(self, steps(Turn(self, is_blocking=True))).run(limit)

    def started(self, steps: Callable[[Turn], Steps], timeout: float | None) -> Work:
        """Start a call that does not block."""
        with self.my_turn():
            self.check()
            work = Work(self, steps(Turn(self, is_blocking=False)), timeout=self.limit(timeout))
            return work.start(self.thread, self.thread_delay)

    def message(self, steps: Steps, timeout: float | None, is_async: bool) -> Any:
        """Send or receive; that needs no turn, since its tag is the user's."""
        self.check()
        work = Work(self, steps, timeout=self.limit(timeout))
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

    def is_late(self, work: Work) -> None:
        """A call has outlasted its time limit and goes on when somebody waits."""
        if work.is_blocking:
            self._late = work
            self.refresh()
        work.list()

    def gave_up(self, work: Work, error: BaseException) -> None:
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

    def _under_way(self) -> list[Work]:
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

    # Quick calls: those that came before go straight to their executions

    def refresh(self) -> None:
        """Allow quick calls or not: nothing comes first, and compiled code can compare them.

        Those that are recorded begin in Python.
        """
        is_clear = self._damage is None and self._late is None
        self.is_recorded = any(ledgers for ledgers, _ in self.ancestry)
        self.is_quick = is_clear and not self.is_recorded and self.checker is None
        can_check = self.checker is None or (self.checker.mode == "calls" and not self.is_recorded)
        self.quick_calls = self.cache if is_clear and can_check else NO_CALLS
        self.quick_plans = self.plans if is_clear and self.checker is None else NO_CALLS

    def forget_calls(self) -> None:
        """Forget what is ready to run again; plans that were made stay as they are."""
        self.cache.forget()
        self.plans.forget()

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
        tag = turn.ahead_tag if is_ahead else turn.tag
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
        call = checked.Compared(spec, arrays, run, tag(), says or {})
        yield from self.checker.before(call)
        yield run
        yield from self.checker.after(call)

    # What is kept to be run again

    def can_cache(self, look: tuple[Any, ...], spec: CallSpec, arrays: Arrays) -> bool:
        """Whether calls that look like this one may go straight to an execution.

        Not where one like it was remembered and could not serve this one, as it cannot serve an `x`
        that has to be copied first.
        """
        return (
            self.quick_calls is self.cache
            and (self.checker is None or spec.blocking == "yes")
            and self._is_all_compiled(spec, arrays)
            and spec.aliasing != "odd"
            and self.cache.find(look) is None
        )

    def cached(
        self,
        look: tuple[Any, ...],
        spec: CallSpec,
        arrays: Arrays,
        turn: Turn,
        left: Array | None = None,
    ) -> Steps:
        """The run of a call, whose execution serves all that look like it from now on.

        `left`: an array for the result that is checked and left as it is.
        """
        self.check()
        target, make = arrays.target, partial(self.runs.cached_call, spec)
        run = make(arrays, turn.tag, turn.number)
        execution, tags = run.reusable, range(0) if turn.is_blocking else self._tags_of_calls
        form_of = target if left is None else left
        execution.accept(run.log, run.key, self.numbers, arrays.source, form_of, tags)
        likeness = _likeness(target)
        if not turn.is_blocking:
            another = partial(_another, execution, make, spec.dtype)
            start = CachedStart(self, run, likeness, another)
            self.cache.add(look, start)
            run.release = start.idle.append
            yield run
        elif self.checker is None:
            self.cache.add(look, CachedCall(self, run, likeness))
            yield run
        else:
            call = checked.Compared(spec, arrays, run, turn.check_tag, {})
            steps = self.checker.steps(call)
            self.cache.add(look, CheckedCall(self, run, likeness, steps))
            yield from self.guarded(run, spec, arrays, lambda: turn.check_tag)
        execution.let_go()

    @property
    def _tags_of_calls(self) -> range:
        """Those that calls have that do not block, by their numbers."""
        num_each = self.transport.num_tags // 4
        return range(num_each, 2 * num_each)

    def plan(
        self,
        spec: CallSpec,
        arrays: Arrays,
        result: Array | None,
        turn: Turn,
        look: tuple[Any, ...] | None = None,
    ) -> Plan:
        """A plan, which takes the number of a call when it is made.

        `look`: how the call looks, if others that look so may be made from what is known of it.
        """
        self.check()
        make = partial(self.runs.plan, spec)
        run = make(arrays, self.plans_tag(turn.number), turn.number)
        is_quick = self._is_all_compiled(spec, arrays)
        plan = self._planned(
            run, partial(self.guarded, run, spec, arrays, self.checks_tag), arrays, result, is_quick
        )
        can_cache = self.quick_plans is self.plans and is_quick and spec.aliasing != "odd"
        if look is not None and can_cache and self.plans.find(look) is None:
            another = partial(_another, run.reusable, make, spec.dtype)
            self.plans.add(look, CachedPlan(self, run, _likeness(arrays.target), another))
        return plan

    def plans_tag(self, number: int) -> int:
        """The tag of all runs of a plan that has this number."""
        return self.tag(1, number)

    def message_plan(
        self, name: str, arrays: Arrays, tag: int, dest: int | None, source: int | None
    ) -> Plan:
        """The plan of a send, a receive, or both at once."""
        self.check()
        run = self.runs.message_plan(ends_of(name, arrays, dest, source), arrays, tag)
        is_quick = self._is_compiled(arrays)
        return self._planned(run, partial(_alone, run), arrays, arrays.target, is_quick)

    def _planned(
        self,
        run: Run,
        steps: Callable[[], Steps],
        arrays: Arrays,
        result: Array | None,
        is_quick: bool,
    ) -> Plan:
        """`is_quick`: whether compiled code can do all of it."""
        plan, (_, source, target) = Plan(self, run, steps, result), arrays
        if is_quick:
            run.reusable.accept(run.log, run.key, plan.num_runs, source, target)
            plan.begin_by_code(source, target)
            run.reusable.let_go()  # of the arrays, which the plan keeps
        return plan

    def run_by(self, backend: Backend, op: Operator | None, dtype: np.dtype[Any]) -> str:
        """What runs programs on arrays of this kind, in words."""
        if backend is not HOST:
            return f"the interpreter: the arrays are on {backend.name}"
        if self.transport.why_interpreted is not None:
            return f"the interpreter: {self.transport.why_interpreted}"
        if op is not None and not _has_kernels(op, dtype):
            return f"compiled code, and Python where it combines {dtype} by {op.name}"
        return "compiled code"

    def _is_all_compiled(self, spec: CallSpec, arrays: Arrays) -> bool:
        """Whether compiled code can begin such a call, and do all of it."""
        return self._is_compiled(arrays) and _has_kernels(spec.op, spec.dtype)

    def _is_compiled(self, arrays: Arrays) -> bool:
        """Whether compiled code can begin runs on these arrays."""
        is_seen = all(x is None or x.ndim <= _MOST_DIMENSIONS for x in arrays[1:])
        return arrays.backend is HOST and is_seen and self.transport.why_interpreted is None

    # What the library sends for itself, under labels of its own

    def announce(
        self, head: Header | None, root: int, num_counts: int, turn: Turn, says: Mapping[str, str]
    ) -> Steps:
        """The root's header, on every rank, ahead of a call."""
        message: Bytes = np.empty(header.num_bytes(num_counts), np.uint8)
        if head is not None:
            message = header.encode(head)
        arrays = Arrays(HOST, None if head is None else message, message)
        named: dict[str, Any] = {"root": root, "algorithm": "binomial", "label": "header"}
        spec = self.spec("broadcast", arrays, message.size, **named, is_blocking=turn.is_blocking)
        yield from self.perform(spec, arrays, turn, is_ahead=True, says=says)
        return header.decode(message)

    def table(
        self,
        numbers: Sequence[int],
        label: str,
        turn: Turn,
        *,
        is_ahead: bool = True,
        says: Mapping[str, str] | None = None,
    ) -> Steps:
        """A few integers of every rank on every rank, one row each; ahead of a call."""
        mine, size = np.array(numbers, np.int64), self.transport.size
        table = np.empty((size, mine.size), np.int64)
        arrays = Arrays(HOST, mine, table)
        spec = self.spec("all_gather", arrays, (mine.size,) * size, label=label)
        yield from self.perform(spec, arrays, turn, is_ahead=is_ahead, says=says)
        return table

    def all_integers(
        self, numbers: Sequence[int], label: str, timeout: float | None = None
    ) -> NDArray[np.int64]:
        """A few integers of every rank on every rank: a call of its own."""
        steps = partial(self.table, numbers, label, is_ahead=False)
        table: NDArray[np.int64] = self.part(steps, timeout)
        return table

    def roots_integers(
        self, numbers: Sequence[int] | None, length: int, root: int, label: str
    ) -> list[int]:
        """A few integers of the root's on every rank: a call of its own."""
        shared = np.empty(length, np.int64)
        if numbers is not None:
            shared[:] = numbers
        arrays = Arrays(HOST, None if numbers is None else shared, shared)
        spec = self.spec("broadcast", arrays, length, root=root, label=label)
        self.part(partial(self.perform, spec, arrays))
        return [int(number) for number in shared]

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

    def meet(self, members: Sequence[int], timeout: float | None) -> None:
        """Wait until these of our ranks are here, which make a communicator: MPI's own call to do
        so knows no time limit."""
        index, size = list(members).index(self.transport.rank), len(members)
        rounds = algorithms.schedule("barrier", "dissemination", rank=index, size=size)
        steps = [_meeting(each, members) for each in rounds]
        number = f"{self.name}s{self._num_children[tuple(members)] + 1}"

        def meeting(turn: Turn) -> Steps:
            yield self.runs.meeting(steps, self.tag(3, 1), number)

        self.part(meeting, timeout)

    def collect(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, on rank 0; None on the others."""
        lengths = self.all_integers([len(data)], "ledger")[:, 0]
        is_root = self.transport.rank == 0
        whole = np.empty(int(lengths.sum()), np.uint8) if is_root else None
        arrays = Arrays(HOST, np.frombuffer(data, np.uint8), whole)
        spec = self.spec("gather", arrays, tuple(lengths.tolist()), label="ledger")
        self.part(partial(self.perform, spec, arrays))
        if whole is None:
            return None
        return [part.tobytes() for part in np.split(whole, np.cumsum(lengths)[:-1])]


def _meeting(operations: Round, members: Sequence[int]) -> Step:
    """A round of messages without contents, among these ranks."""
    ends = [
        tuple(Message(members[op.peer], _NOTHING) for op in half(operations) if op.peer is not None)
        for half in (outgoing, incoming)
    ]
    return Step(sends=ends[0], receives=ends[1])


def _num_bytes(counts: Counts, dtype: np.dtype[Any]) -> int:
    """The n of the formulas: of the vector, of all blocks, or of an average rank's all-to-all."""
    if isinstance(counts, int):
        return counts * dtype.itemsize
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    num_parts = 1 if isinstance(counts[0], int) else len(counts)
    return sum(numbers) // num_parts * dtype.itemsize


def _likeness(target: Array | None) -> Likeness | None:
    """What a result looks like."""
    return None if target is None else (tuple(target.shape), target.dtype)


def _another(
    execution: Reusable, make: Callable[[Arrays, int, int], Run], dtype: np.dtype[Any]
) -> Run:
    """A run with an execution like this one; it gets its arrays and tag later."""
    other = make(Arrays(HOST, np.empty(0, dtype), None), 0, 0)
    other.reusable.accept_like(execution, other.key)
    return other


def _has_kernels(op: Operator | None, dtype: np.dtype[Any]) -> bool:
    """Whether compiled code can combine, and divide, what a call combines."""
    if op is None:
        return True
    if not isinstance(op.function, str) or kernels.combine(op.function, dtype) is None:
        return False
    return not op.is_average or kernels.divide(dtype) is not None


def _alone(run: Run) -> Steps:
    """A run that nothing goes around."""
    yield run
