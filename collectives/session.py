"""One rank's end of a communicator: its tags, its ledgers, and how its plans are made.

Tags keep messages apart.  A quarter of them is the user's (point to point), a quarter numbers the
collective calls, so that the messages of two calls never meet, and a quarter is for what the
library sends ahead of a call of that number.  Blocking calls all have one tag, of the last quarter,
so that their plans can be kept: they run one after the other on every rank, and between two ranks
messages of one tag arrive in the order in which they were sent.  The others of that quarter are for
what the ranks tell each other in checked mode, in the order in which calls start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms, arguments, checked, header, select
from collectives.arrays import HOST, Array, Backend
from collectives.checked import Checker, Guard, Mode
from collectives.decisions import Decisions
from collectives.errors import CollectiveError, CollectiveTimeout, PeerFailed
from collectives.fingerprint import Fingerprint
from collectives.flight_recorder import Position
from collectives.header import Header
from collectives.lanes import Woven, compile_lanes
from collectives.ledger import Ancestry, Ledger, Recorder, Sent
from collectives.plan import Buffers, Plan
from collectives.program import Counts, Message, Program, Region, Step
from collectives.progress import ProgressThread
from collectives.reduction import Operator
from collectives.remembered import KeptCall, Remembered
from collectives.schedule import Round, grid, incoming, outgoing
from collectives.select import Choice
from collectives.spec import SPECS
from collectives.transport import Transport
from collectives.work import Rest, Work

_MOST_ROWS = 16  # that a time-out shows
_MOST_ROUNDS = 4  # that it shows before, and after
FREED = "this communicator was freed"
_NOTHING = Region("input", 0, 0)

Result = TypeVar("Result")


class Arrays(NamedTuple):
    """The checked arrays of a call: where it reads and where it writes, if this rank does."""

    backend: Backend
    source: Array | None
    target: Array | None


class Session:
    """What a communicator and its planner share."""

    def __init__(
        self,
        transport: Transport,
        timeout: float | None = None,
        name: str = "",
        ancestry: Ancestry | None = None,
        thread: ProgressThread | None = None,
        check: Mode | None = None,
    ) -> None:
        self.transport, self.timeout, self.name = transport, timeout, name
        self.thread = thread
        self.checker = None if check is None else Checker(transport, check, self)
        self.decisions: Decisions | None = None
        self.ledgers: list[Ledger] = []
        self.ancestry: Ancestry = [(self.ledgers, None), *(ancestry or [])]
        self.remembered = Remembered()
        self._num_calls = [0]  # counted by the plans of blocking calls, when they run
        self._num_messages = 0
        self._num_checks = 0
        # A blocking call that timed out, with its arrays; the next waits for it.
        self._overdue: Work | Rest | None = None
        # What has gone ahead of a call whose own messages have not yet been prepared.
        self._ahead: Plan | None = None
        self._damage: CollectiveError | None = None  # why nothing can be called any more
        self._num_children: defaultdict[tuple[int, ...], int] = defaultdict(int)

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
        child = Session(transport, self.timeout, name, ancestry, self.thread, check)
        child.decisions = self.decisions
        return child

    # Tags.  A call that is refused takes none, so that it can be made again.

    def _tag(self, quarter: int, number: int) -> int:
        num_each = self.transport.num_tags // 4
        return quarter * num_each + number % num_each

    def next_tag(self) -> int:
        """The tag of a new call."""
        self.make_way()
        self._num_calls[0] += 1
        return self._tag(1, self._num_calls[0])

    def ahead_tag(self) -> int:
        """The tag for what is sent ahead of the next call, whose turn it now is."""
        self._take_turn(None)
        return self._next_ahead()

    def _next_ahead(self) -> int:
        return self._tag(2, self._num_calls[0] + 1)

    @property
    def num_calls(self) -> int:
        """How many calls there have been."""
        return self._num_calls[0]

    def catch_up(self, num_calls: int) -> None:
        """After ranks have called different things: there have been so many on another one."""
        self._num_calls[0] = max(self._num_calls[0], num_calls)

    def checks_tag(self) -> int:
        """The tag of the next exchange of fingerprints: no blocking call's, nor that of `meet`."""
        self._num_checks += 1
        return self._tag(3, 2 + self._num_checks % (self.transport.num_tags // 4 - 2))

    def users_tag(self, tag: object) -> int:
        """A tag that the user names."""
        number, largest = arguments.integer(tag, "tag"), self.transport.num_tags // 4 - 1
        if not 0 <= number <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {number}")
        return number

    # Blocking calls

    def again(
        self, call: KeptCall, x: Array | None, out: Array | None, timeout: float | None
    ) -> Array | None:
        """Run a call that is remembered, on these arrays."""
        if self._damage is not None or self._overdue is not None:
            self._take_turn(timeout)
        try:
            return call(x, out, self.timeout if timeout is None else timeout)
        except BaseException as error:
            self._has_failed(call.plan, error)
            raise

    def once(self, plan: Plan, timeout: float | None) -> Array | None:
        """Run the plan of a blocking call that is not remembered."""
        self._take_turn(timeout)
        try:
            return plan.run(self.limit(timeout))
        except BaseException as error:
            self._has_failed(plan, error)
            raise

    def _take_turn(self, timeout: float | None) -> None:
        """A call that timed out comes first: all have the same tag."""
        self.check()
        late, self._overdue = self._overdue, None
        limit = self.limit(timeout)
        if isinstance(late, Rest):
            late.go_on(limit)
        elif late is not None:
            self._complete(late, limit)

    def make_way(self, timeout: float | None = None) -> None:
        """For a call that timed out before it was numbered, as other ranks have numbered it."""
        if isinstance(self._overdue, Rest):
            self._take_turn(timeout)

    def _complete(self, work: Work, limit: float | None) -> None:
        try:
            work.plan.wait(limit)
        except BaseException as error:
            if isinstance(error, CollectiveTimeout):
                error.work = work  # which keeps the arrays
            self._has_failed(work.plan, error)
            raise
        work.plan.free()

    def _has_failed(self, plan: Plan, error: BaseException) -> None:
        """What failed half-way may leave messages that the next call would take for its own.

        So it is the last thing that this communicator does.  A call that timed out goes on; and
        what all ranks stopped together has left nothing.
        """
        self.remembered.drop(plan)
        if plan.was_stopped:
            return
        if isinstance(error, CollectiveTimeout):
            self._overdue = error.work
            return
        self._break(plan.title, error)

    def _break(self, what: str, error: BaseException) -> None:
        """Nothing can be called any more, since this did not end as the other ranks expect."""
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        what = f"{what} failed half-way on rank {self.transport.rank}: {reason}"
        self._damage = CollectiveError(f"this communicator is of no more use: {what}")
        if isinstance(error, PeerFailed):
            self._damage = error
        self.remembered.forget()

    def check(self) -> None:
        """Raise CollectiveError if a failure has left this communicator unusable."""
        if self._damage is not None:
            raise self._damage.with_traceback(None)

    def free(self) -> None:
        """Give back the plans of blocking calls, and the communicator below."""
        plan = self._overdue.plan if isinstance(self._overdue, Work) else self._ahead
        if plan is not None:
            if self.thread is None:
                plan.progress()  # it fails if the ranks have shrunk without it
            plan.free()
        self._overdue = self._ahead = None
        self.remembered.forget()
        # MPI gives the next communicator the number of one that was freed: after a failure it might
        # get the messages that this one has left as well.
        if self._damage is None or isinstance(self._damage, PeerFailed):
            self.transport.free()
            self._damage = CollectiveError(FREED)

    # Plans

    def collective(
        self,
        collective: str,
        arrays: Arrays,
        counts: Counts,
        *,
        root: int = 0,
        op: Operator | None = None,
        algorithm: str | None = None,
        is_kept: bool = False,
        is_blocking: bool = False,
        label: str | None = None,
        tag: int | None = None,
        says: Mapping[str, str] | None = None,
    ) -> Plan:
        """The plan of a collective.  `label`: what the ledger calls it if not by its name.

        That of a blocking call is to be run by `again` or `once`.  `says`: what the ranks tell each
        other of it in checked mode, where that does not follow from the rest.
        """
        dtype, size = _dtype(arrays), self.transport.size
        num_bytes = _num_bytes(counts, dtype)
        chosen = select.choose(collective, algorithm, size, num_bytes, op, self.decisions)
        buffers, aliasing = _flat(arrays, dtype), arguments.aliasing(*arrays)
        program = compile_lanes(
            chosen.algorithm,
            self.transport.rank,
            size,
            root,
            counts,
            tuple(chosen.options.items()),
            aliasing,
            chosen.segments,
        )
        names, what = (label or collective, chosen.label), None
        if self.checker is not None:
            what = checked.describe(collective, *arrays[1:], counts, root, op, chosen, aliasing)
            what = what._replace(**{"collective": names[0], **(says or {})})
            if tag is None:
                what = what._replace(blocking="yes" if is_blocking else "no")
            if not self.checker.compares_place:
                what = what._replace(in_place="")
        picture = partial(_picture, chosen, self.transport.rank, size, root)
        bind = partial(self._plan, names, program, buffers, arrays, op, is_kept)
        bind = partial(bind, what=what, picture=picture)
        if tag is not None:
            is_ahead, count = tag == self._next_ahead(), self.num_calls
            return bind(f"{self.name}{count + 1}a" if is_ahead else f"{self.name}{count}", tag)
        if is_blocking:
            plan = bind(None, self._tag(3, 0))
        else:
            tag = self.next_tag()
            plan = bind(f"{self.name}{self.num_calls}", tag)
        self._ahead = None  # it is followed by what it was ahead of
        return plan

    def point_to_point(
        self,
        name: str,
        arrays: Arrays,
        tag: int,
        dest: int | None,
        source: int | None,
        is_kept: bool,
    ) -> Plan:
        """The plan of a send, a receive, or both at once."""
        step, like = Step(), arrays.source
        if arrays.source is not None and dest is not None:
            whole = Region("input", 0, int(arrays.source.size))
            step = step._replace(sends=(Message(dest, whole),))
        if arrays.target is not None and source is not None:
            whole = Region("output", 0, int(arrays.target.size))
            step, like = step._replace(receives=(Message(source, whole),)), arrays.target
        assert like is not None
        self._num_messages += 1
        number = f"{self.name}p{self._num_messages}"
        buffers, program = _flat(arrays, like.dtype), Woven((Program((step,)),))
        names = name, "point_to_point"
        return self._plan(names, program, buffers, arrays, None, is_kept, number, tag)

    def _plan(
        self,
        names: tuple[str, str],
        program: Woven,
        buffers: Buffers,
        arrays: Arrays,
        op: Operator | None,
        is_kept: bool,
        number: str | None,
        tag: int,
        what: Fingerprint | None = None,
        picture: Callable[[Position], str] | None = None,
    ) -> Plan:
        """`number`: the call's, in the ledger; None if every run is a call of its own.

        `what`: what the ranks tell each other before they run it, if they do.
        """
        self.check()
        dtype = buffers.input.dtype
        if program.num_scratch:
            shape = (program.num_scratch * program.num_slots,)
            scratch = buffers.backend.empty(shape, dtype)
            buffers = buffers._replace(scratch=scratch)
        return Plan(
            (*names, number or ""),
            program,
            buffers,
            self.transport,
            tag=tag,
            result=arrays.target,
            timeout=self.timeout if number else None,
            operator=op,
            is_kept=is_kept,
            recorder=self._recorder(names, number, partial(_sent, program, dtype.itemsize)),
            counter=self._num_calls if number is None else None,
            picture=picture,
            thread=self.thread,
            guard=None if what is None else self._guard(what, arrays, number),
        )

    def _recorder(
        self, names: tuple[str, str], number: str | None, sent: Callable[[], Sent]
    ) -> Recorder:
        """Enters runs under the number of their plan, or each under one of its own."""
        numbered = self._number if number is None else partial(_run_number, number)
        transport = self.transport
        return Recorder(*names, numbered, sent, self.ancestry, transport.rank, transport.identity)

    def _guard(self, what: Fingerprint, arrays: Arrays, number: str | None) -> Guard:
        """What goes around the messages of a plan in checked mode."""
        assert self.checker is not None
        names = checked.LABEL, checked.ALGORITHM
        recorder = self._recorder(names, number, self.checker.sent)
        counter = self._num_calls if number is None else None
        return Guard(self.checker, what, *arrays, recorder, counter)

    def _number(self, count: int) -> str:
        """The number of a blocking call in the ledger; every run of its plan is one of its own."""
        return f"{self.name}{count}"

    # What the library sends for itself, under labels of its own

    def announce(
        self,
        head: Header | None,
        root: int,
        num_counts: int,
        timeout: float | None,
        says: Mapping[str, str] | None = None,
    ) -> Header:
        """The root's header, on every rank, ahead of the next call."""
        message: NDArray[np.uint8] = np.empty(header.num_bytes(num_counts), np.uint8)
        if head is not None:
            message = header.encode(head)
        plan = partial(
            self.collective,
            "broadcast",
            Arrays(HOST, None if head is None else message, message),
            message.size,
            root=root,
            algorithm="binomial",
            label="header",
            says=says,
        )
        return header.decode(self._sent_ahead(plan, timeout))

    def announce_counts(
        self, numbers: Sequence[int], timeout: float | None, says: Mapping[str, str] | None = None
    ) -> NDArray[np.int64]:
        """Every rank's numbers, one row each, ahead of the next call."""
        plan = partial(self._integers, numbers, "counts", says=says)
        table: NDArray[np.int64] = self._sent_ahead(plan, timeout)
        return table

    def _sent_ahead(self, plan: Callable[..., Plan], timeout: float | None) -> Any:
        """What goes ahead of a call.  One that timed out in it goes on where it was."""
        if self._ahead is not None:
            return self._ahead.wait(timeout)
        self._take_turn(timeout)
        self._ahead = plan(tag=self._next_ahead())
        return self._ahead.run(timeout)

    def broke_off(self, error: BaseException, again: Callable[[float | None], Any]) -> None:
        """A call has raised this: if something went ahead of it, the others are in the midst of it.

        `again`: makes the call again, with this time limit.
        """
        plan = self._ahead
        if plan is None:
            return
        if isinstance(error, CollectiveTimeout):
            self._overdue = error.work = Rest(plan, partial(self._resume, again))
            return
        self._ahead = None
        if not plan.was_stopped:
            self._break(plan.title, error)

    def _resume(self, again: Callable[[float | None], Any], timeout: float | None) -> Any:
        """Wait for what goes ahead, and make the call that is then to follow."""
        self._overdue = None  # it is its own turn
        assert self._ahead is not None
        try:
            self._ahead.wait(timeout)
        except BaseException as error:
            self.broke_off(error, again)
            raise
        return again(timeout)

    def part(self, plan: Plan, timeout: float | None = None) -> Any:
        """Run a part of what only makes sense as a whole, on all ranks."""
        try:
            return plan.run(timeout)
        except BaseException as error:
            if not plan.was_stopped:
                self._break(plan.title, error)
            raise

    def limit(self, timeout: object) -> float | None:
        """The time limit of a call in seconds: its own, or that of all."""
        limit = arguments.seconds(timeout)
        return self.timeout if limit is None else limit

    def made(
        self, what: str, make: Callable[[float | None], Result], deadline: float | None
    ) -> Result:
        """What only MPI can make, when all ranks concerned are there."""
        try:
            return make(deadline)
        except BaseException as error:
            self._break(what, error)
            raise

    def all_integers(
        self, numbers: Sequence[int], label: str, tag: int, timeout: float | None = None
    ) -> NDArray[np.int64]:
        """A few integers of every rank on every rank, one row each; a part of something."""
        table: NDArray[np.int64] = self.part(self._integers(numbers, label, tag=tag), timeout)
        return table

    def _integers(self, numbers: Sequence[int], label: str, **named: Any) -> Plan:
        """The plan that brings a few integers of every rank to every rank."""
        mine, size = np.array(numbers, np.int64), self.transport.size
        arrays = Arrays(HOST, mine, np.empty((size, mine.size), np.int64))
        return self.collective("all_gather", arrays, (mine.size,) * size, label=label, **named)

    def meet(self, members: Sequence[int], timeout: float | None) -> None:
        """Wait until these of our ranks are here, which make a communicator: MPI's own call to do
        so knows no time limit."""
        index, size = list(members).index(self.transport.rank), len(members)
        rounds = algorithms.schedule("barrier", "dissemination", rank=index, size=size)
        program = Woven((Program(tuple(_meeting(each, members) for each in rounds)),))
        arrays, names = Arrays(HOST, None, None), ("subgroup", "dissemination")
        number = f"{self.name}s{self._num_children[tuple(members)] + 1}"
        buffers, tag = _flat(arrays, np.dtype(np.uint8)), self._tag(3, 1)
        plan = self._plan(names, program, buffers, arrays, None, False, number, tag)
        self.part(plan, timeout)

    def collect(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, on rank 0; None on the others."""
        lengths = self.all_integers([len(data)], "ledger", self.next_tag())[:, 0]
        is_root = self.transport.rank == 0
        whole = np.empty(int(lengths.sum()), np.uint8) if is_root else None
        arrays = Arrays(HOST, np.frombuffer(data, np.uint8), whole)
        self.part(self.collective("gather", arrays, tuple(lengths.tolist()), label="ledger"))
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


def _flat(arrays: Arrays, dtype: np.dtype[Any]) -> Buffers:
    """One-dimensional views of in- and output; empty ones where there is none."""
    nothing = arrays.backend.empty((0,), dtype)
    source, target = (nothing if x is None else x.reshape(-1) for x in arrays[1:])
    return Buffers(arrays.backend, source, target, nothing)


def _dtype(arrays: Arrays) -> np.dtype[Any]:
    like = arrays.target if arrays.source is None else arrays.source
    return np.dtype(np.uint8) if like is None else like.dtype


def _num_bytes(counts: Counts, dtype: np.dtype[Any]) -> int:
    """The n of the formulas: of the vector, of all blocks, or of an average rank's all-to-all."""
    if isinstance(counts, int):
        return counts * dtype.itemsize
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    num_parts = 1 if isinstance(counts[0], int) else len(counts)
    return sum(numbers) // num_parts * dtype.itemsize


def _picture(choice: Choice, rank: int, size: int, root: int, position: Position) -> str:
    """The schedules of the ranks concerned, with the cell where this one waits."""
    algorithm, here = choice.algorithm, position.round
    concerned = {rank, *(waiting.peer for waiting in position.waiting_for)}
    ranks = range(size) if size <= _MOST_ROWS else sorted(concerned)
    schedules = {
        each: algorithm.schedule(
            each, size, root if SPECS[algorithm.collective].is_rooted else None, **choice.options
        )
        for each in ranks
    }
    return grid(schedules, (rank, here), range(max(0, here - _MOST_ROUNDS), here + _MOST_ROUNDS))


def _run_number(number: str, run: int) -> str:
    """The numbers of the runs of one plan: "7", "7.2", "7.3"."""
    return number if run == 1 else f"{number}.{run}"


def _sent(program: Woven, itemsize: int) -> Sent:
    """What a rank sends, in bytes."""
    return tuple((k, peer, n * itemsize, segments) for k, peer, n, segments in program.sent())
