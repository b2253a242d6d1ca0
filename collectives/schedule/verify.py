"""Prove an algorithm for given p and root, by a run of all ranks on symbols.

The value of a block is the sequence of contributions (rank, block) it was combined from, and the
way in which they were put together.  What is demanded is the specification's: every contribution
exactly once, in rank order if the algorithm promises order, put together alike on all ranks if it
promises the same bits, and along the fixed tree if it promises that.  Messages must match one to
one.  Anything else raises `ScheduleError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple, NoReturn

from collectives.schedule import fixed_tree
from collectives.schedule.contracts import Case, after, brought, contributions, holders
from collectives.schedule.rounds import (
    Block,
    Operation,
    Schedule,
    ScheduleError,
    Side,
    grid,
    incoming,
    local,
    original,
    outgoing,
)


class Value(NamedTuple):
    """The value of a block.  Equal `form`s: combined in the same way, up to swapped operands."""

    parts: tuple[tuple[int, Block], ...]
    form: int


_NUM_SHOWN = 16  # rounds of the grid before the one that is wrong, and behind it
SIDES: dict[str, tuple[Side | None, ...]] = {
    "send": (None,),
    "recv": (None,),
    "recv_reduce": ("left", "right"),
    "copy": (None,),
    "copy_reduce": ("left", "right"),
}
KINDS, COPIES = tuple(SIDES), ("copy", "copy_reduce")
# By source and destination, in the order of the sends.
Messages = dict[tuple[int, int], list[tuple[tuple[Block, ...], list[Value]]]]


def verify_schedules(
    collective: str,
    case: Case,
    schedules: Sequence[Schedule],
    *,
    is_ordered: bool = True,
    is_bitwise: bool = True,
    is_invariant: bool = False,
) -> None:
    """Prove the schedules of all ranks of one collective.

    Raises `ScheduleError` if they are wrong.
    """
    run = SymbolicRun(collective, case, schedules)
    for number in range(run.num_rounds()):
        run.round(number)
    run.demand_promise(is_ordered)
    if is_bitwise:
        run.demand_same_bits()
    if is_invariant:
        run.demand_fixed_tree()


def invalid_operation(op: Operation) -> str | None:
    """Return why an operation is invalid in any schedule, as text, or None."""
    if op.kind not in KINDS:
        return f"there is no operation {op.kind!r}"
    if op.side not in SIDES[op.kind]:
        return f"{op.kind} cannot have the side {op.side!r}"
    if not _are_names(op.blocks, op.into):
        return f"{op.kind} names {op.blocks!r} and {op.into!r}, which are not tuples of names"
    if op.kind in COPIES:
        return _invalid_copy(op)
    if type(op.peer) is not int:
        return f"{op.kind} names {op.peer!r} as its peer"
    return None


def _invalid_copy(op: Operation) -> str | None:
    if op.peer is not None:
        return f"{op.kind} has no peer"
    if len(set(op.into)) < len(op.into):
        return f"{op.kind} writes a block of {op.into} twice"
    if op.kind == "copy_reduce" and set(op.blocks) & set(op.into):
        return "copy_reduce changes what it reads"
    return None


def _are_names(blocks: object, into: object) -> bool:
    """Return whether both can be names of blocks, which are keys of dictionaries."""
    try:
        hash((blocks, into))
    except TypeError:
        return False
    return isinstance(blocks, tuple) and isinstance(into, tuple)


class SymbolicRun:
    """All ranks, executed on symbols in lockstep."""

    def __init__(self, collective: str, case: Case, schedules: Sequence[Schedule]) -> None:
        self.collective, self.case, self.schedules = collective, case, schedules
        self.holders = holders(collective, case)
        self.forms: dict[object, int] = {}  # every way of combining, by number
        self.check_operations()
        self.state: list[dict[Block, Value]] = [
            {
                name: Value((contribution,), self.form(contribution))
                for name, contribution in brought(collective, rank, case).items()
            }
            for rank in range(case.size)
        ]

    def form(self, what: object) -> int:
        return self.forms.setdefault(what, len(self.forms))

    def fail(self, rank: int, number: int, what: str) -> NoReturn:
        shown = range(max(0, number - _NUM_SHOWN), number + _NUM_SHOWN)
        table = grid(self.schedules, mark=(rank, number), rounds=shown)
        raise ScheduleError(f"rank {rank}, round {number}: {what}\n{table}")

    def check_operations(self) -> None:
        """Check that every round is a tuple of valid operations."""
        for rank, schedule in enumerate(self.schedules):
            for number, operations in enumerate(schedule):
                if type(operations) is not tuple or not all(
                    isinstance(op, Operation) for op in operations
                ):
                    raise ScheduleError(
                        f"rank {rank}, round {number}: yields {operations!r}, which is not a tuple "
                        "of operations; a single operation needs a comma behind it"
                    )
                for op in operations:
                    if (what := invalid_operation(op)) is not None:
                        self.fail(rank, number, what)

    def num_rounds(self) -> int:
        lengths = [len(schedule) for schedule in self.schedules]
        for rank, length in enumerate(lengths):
            if length != lengths[0]:
                self.fail(
                    rank, min(length, lengths[0]), f"has {length} rounds, rank 0 has {lengths[0]}"
                )
        return lengths[0]

    def round(self, number: int) -> None:
        """Send from the state before the round, then deliver, then do what is local."""
        messages = self.posted(number)
        for rank, op in self.operations(number):
            if op.kind in ("recv", "recv_reduce"):
                self.deliver(rank, number, op, messages)
        for (src, dst), left in messages.items():
            if left:
                self.fail(src, number, f"blocks {left[0][0]} are not received at rank {dst}")
        for rank, schedule in enumerate(self.schedules):
            for op in local(schedule[number]):
                self.move(rank, number, op)

    def operations(self, number: int) -> Iterator[tuple[int, Operation]]:
        for rank, schedule in enumerate(self.schedules):
            for op in schedule[number]:
                yield rank, op

    def posted(self, number: int) -> Messages:
        messages: Messages = {}
        for rank, schedule in enumerate(self.schedules):
            for op in outgoing(schedule[number]):
                values = self.held(rank, number, op.blocks)
                ends = rank, self.peer(rank, number, op)
                messages.setdefault(ends, []).append((op.blocks, values))
            self.refuse_races(rank, number)
        return messages

    def refuse_races(self, rank: int, number: int) -> None:
        """Fail if a block is received twice in a round.

        Reductions into it may be several: they are applied in order.
        """
        receives = incoming(self.schedules[rank][number])
        targets = [target for op in receives for target in op.targets]
        if len(set(targets)) == len(targets):
            return
        plain: set[Block] = set()
        reduced: set[Block] = set()
        for op in receives:
            blocks = set(op.targets)
            if len(blocks) < len(op.targets) or blocks & (
                plain if op.kind == "recv_reduce" else plain | reduced
            ):
                self.fail(rank, number, f"receives a block of {op.targets} twice in one round")
            (reduced if op.kind == "recv_reduce" else plain).update(blocks)

    def peer(self, rank: int, number: int, op: Operation) -> int:
        if op.peer is None or not 0 <= op.peer < self.case.size or op.peer == rank:
            self.fail(rank, number, f"{op.kind} names {op.peer} as its peer")
        return op.peer

    def held(self, rank: int, number: int, blocks: Sequence[Block]) -> list[Value]:
        state = self.state[rank]
        for block in blocks:
            if block not in state:
                self.fail(rank, number, f"does not hold block {block}")
        return [state[block] for block in blocks]

    def deliver(self, rank: int, number: int, op: Operation, messages: Messages) -> None:
        peer = self.peer(rank, number, op)
        waiting = messages.get((peer, rank))
        if not waiting:
            self.fail(rank, number, f"waits for a message that rank {peer} does not send")
        blocks, values = waiting.pop(0)
        if blocks != op.blocks:
            self.fail(rank, number, f"expects blocks {op.blocks}, rank {peer} sends {blocks}")
        self.put(rank, number, op, values)

    def move(self, rank: int, number: int, op: Operation) -> None:
        """Copy, and perhaps combine; all blocks are read before any is written."""
        self.put(rank, number, op, self.held(rank, number, op.blocks))

    def put(self, rank: int, number: int, op: Operation, values: Sequence[Value]) -> None:
        """Let `values` replace what the operation names as its targets, or combine with it."""
        if op.into:
            self.check_names(rank, number, op)
        if op.side is not None:
            own = self.held(rank, number, op.targets)
            values = [self.combine(*pair, op.side) for pair in zip(values, own, strict=True)]
        self.state[rank].update(zip(op.targets, values, strict=True))

    def check_names(self, rank: int, number: int, op: Operation) -> None:
        """Check that every block gets one name, of a block of its size."""
        if len(op.blocks) != len(op.into):
            self.fail(rank, number, f"gives {len(op.blocks)} blocks {len(op.into)} names")
        for block, name in zip(op.blocks, op.into, strict=True):
            if self.original(rank, number, block) != self.original(rank, number, name):
                self.fail(rank, number, f"gives block {block} the name {name}, of another size")

    def combine(self, coming: Value, own: Value, side: Side) -> Value:
        parts = coming.parts + own.parts if side == "left" else own.parts + coming.parts
        return Value(parts, self.form_of_both(coming.form, own.form))

    def form_of_both(self, one: int, other: int) -> int:
        return self.form((min(one, other), max(one, other)))

    def original(self, rank: int, number: int, block: Block) -> Block:
        try:
            return original(block, self.holders)
        except KeyError:
            self.fail(rank, number, f"uses the name {block}, which is not the name of a block")

    def fail_at_end(self, rank: int, block: Block, what: str) -> NoReturn:
        """Fail where this rank last wrote the block; at the end if it never did."""
        written = [
            number
            for number, operations in enumerate(self.schedules[rank])
            if any(op.kind != "send" and block in op.targets for op in operations)
        ]
        self.fail(rank, max(written, default=max(self.num_rounds() - 1, 0)), what)

    def demand_promise(self, is_ordered: bool) -> None:
        """Check that every block due holds every contribution to it once.

        The contributions are in rank order if that is promised.
        """
        right: dict[Block, tuple[object, object]] = {}  # what was found right on another rank
        for rank, state in enumerate(self.state):
            for block in after(self.collective, rank, self.case):
                sources = contributions(self.collective, rank, self.holders[block])
                got = state[block].parts if block in state else ()
                seen, their_sources = right.get(block, (None, None))
                if got is seen and sources is their_sources:
                    continue
                due = tuple((source, block) for source in sources)
                in_order = got if is_ordered else tuple(sorted(got, key=itemgetter(0)))
                if in_order != due:
                    self.fail_at_end(rank, block, f"block {block} ends as {got}, not {due}")
                right[block] = got, sources

    def demand_same_bits(self) -> None:
        """Check that ranks combine in the same way.

        Ranks due the same contributions to a block have combined them alike.
        """
        first: dict[object, int] = {}
        for rank, state in enumerate(self.state):
            for block in after(self.collective, rank, self.case):
                due = block, len(contributions(self.collective, rank, self.holders[block]))
                other = first.setdefault(due, rank)
                if state[block].form != self.state[other][block].form:
                    what = f"combines block {block} in another way than rank {other}"
                    self.fail_at_end(rank, block, f"{what}: their last bits may differ")

    def demand_fixed_tree(self) -> None:
        """Check that every block due was combined along the fixed tree over its contributions."""
        forms: dict[object, int] = {}
        for rank, state in enumerate(self.state):
            for block in after(self.collective, rank, self.case):
                sources = contributions(self.collective, rank, self.holders[block])
                due = block, len(sources)
                if due not in forms:
                    forms[due] = self.fixed_form(sources, block)
                if state[block].form != forms[due]:
                    what = f"combines block {block} in another way than along the fixed tree"
                    self.fail_at_end(rank, block, what)

    def fixed_form(self, sources: Sequence[int], block: Block) -> int:
        if len(sources) == 1:
            return self.form((sources[0], block))
        middle = fixed_tree.middle(0, len(sources))
        halves = sources[:middle], sources[middle:]
        return self.form_of_both(*(self.fixed_form(half, block) for half in halves))
