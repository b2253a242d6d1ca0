"""Proof of an algorithm for given p and root: all ranks are run on symbols, and nothing is assumed.

The value of a block is the sequence of contributions (rank, block) it was combined from.  What is
demanded is the specification's: every contribution exactly once, in rank order if the algorithm
promises order.  Messages must match one to one.  Anything else raises `ScheduleError`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from collectives import algorithms
from collectives.schedule import (
    Block,
    Operation,
    Schedule,
    ScheduleError,
    Side,
    grid,
    incoming,
    original,
    outgoing,
)
from collectives.spec import SPECS, Case, holders

Value = tuple[tuple[int, Block], ...]
Messages = dict[tuple[int, int], "deque[tuple[tuple[Block, ...], list[Value]]]"]


def verify(collective: str, name: str, size: int, root: int | None = None, **options: int) -> None:
    """Prove a registered algorithm for `size` ranks and `root`, or raise `ScheduleError`."""
    algorithm = algorithms.info(collective, name)
    schedules = [algorithm.schedule(rank, size, root, **options) for rank in range(size)]
    case = Case(size, root or 0, algorithm.num_pieces(size, {**algorithm.options, **options}))
    verify_schedules(collective, case, schedules, is_ordered=algorithm.is_ordered)


def verify_schedules(
    collective: str, case: Case, schedules: Sequence[Schedule], *, is_ordered: bool = True
) -> None:
    """Prove the schedules of all ranks of one collective, or raise `ScheduleError`."""
    run = _Run(collective, case, schedules)
    for number in range(run.num_rounds()):
        run.round(number)
    run.demand_promise(is_ordered)


class _Run:
    """All ranks, executed on symbols in lockstep."""

    def __init__(self, collective: str, case: Case, schedules: Sequence[Schedule]) -> None:
        self.collective, self.case, self.schedules = collective, case, schedules
        before = SPECS[collective].before
        self.contributors = holders(collective, case)
        self.state: list[dict[Block, Value]] = [
            {block: ((rank, block),) for block in before(rank, case)} for rank in range(case.size)
        ]

    def fail(self, rank: int, number: int, what: str) -> NoReturn:
        table = grid(self.schedules, mark=(rank, number))
        raise ScheduleError(f"rank {rank}, round {number}: {what}\n{table}")

    def num_rounds(self) -> int:
        lengths = [len(schedule) for schedule in self.schedules]
        for rank, length in enumerate(lengths):
            if length != lengths[0]:
                self.fail(
                    rank, min(length, lengths[0]), f"has {length} rounds, rank 0 has {lengths[0]}"
                )
        return lengths[0]

    def round(self, number: int) -> None:
        """Send from the state before the round, then deliver, then copy."""
        messages = self.posted(number)
        for rank, op in self.operations(number):
            if op.kind in ("recv", "recv_reduce"):
                self.deliver(rank, number, op, messages)
        for (src, dst), queue in messages.items():
            if queue:
                self.fail(src, number, f"nobody receives blocks {queue[0][0]} at rank {dst}")
        for rank, op in self.operations(number):
            if op.kind == "copy":
                self.copy(rank, number, op)

    def operations(self, number: int) -> Iterator[tuple[int, Operation]]:
        for rank, schedule in enumerate(self.schedules):
            for op in schedule[number]:
                yield rank, op

    def posted(self, number: int) -> Messages:
        messages: Messages = defaultdict(deque)
        for rank, schedule in enumerate(self.schedules):
            for op in outgoing(schedule[number]):
                values = [self.held(rank, number, block) for block in op.blocks]
                messages[rank, self.peer(rank, number, op)].append((op.blocks, values))
            self.refuse_races(rank, number)
        return messages

    def refuse_races(self, rank: int, number: int) -> None:
        """A block may be received once a round; reductions into it are applied in order."""
        plain: set[Block] = set()
        reduced: set[Block] = set()
        for op in incoming(self.schedules[rank][number]):
            blocks = set(op.blocks)
            if len(blocks) < len(op.blocks) or blocks & (
                plain if op.kind == "recv_reduce" else plain | reduced
            ):
                self.fail(rank, number, f"receives a block of {op.blocks} twice in one round")
            (reduced if op.kind == "recv_reduce" else plain).update(blocks)

    def peer(self, rank: int, number: int, op: Operation) -> int:
        if op.peer is None or not 0 <= op.peer < self.case.size or op.peer == rank:
            self.fail(rank, number, f"{op.kind} names {op.peer} as its peer")
        return op.peer

    def held(self, rank: int, number: int, block: Block) -> Value:
        if block not in self.state[rank]:
            self.fail(rank, number, f"does not hold block {block}")
        return self.state[rank][block]

    def deliver(self, rank: int, number: int, op: Operation, messages: Messages) -> None:
        peer = self.peer(rank, number, op)
        queue = messages.get((peer, rank))
        if not queue:
            self.fail(rank, number, f"waits for a message that rank {peer} does not send")
        blocks, values = queue.popleft()
        if blocks != op.blocks:
            self.fail(rank, number, f"expects blocks {op.blocks}, rank {peer} sends {blocks}")
        for block, value in zip(blocks, values, strict=True):
            if op.kind == "recv_reduce":
                value = _combine(value, self.held(rank, number, block), op.side)
            self.state[rank][block] = value

    def copy(self, rank: int, number: int, op: Operation) -> None:
        if len(op.blocks) != len(op.into):
            self.fail(rank, number, f"copies {len(op.blocks)} blocks to {len(op.into)} names")
        values = [self.held(rank, number, block) for block in op.blocks]
        for src, dst in zip(op.blocks, op.into, strict=True):
            if self.original(rank, number, src) != self.original(rank, number, dst):
                self.fail(rank, number, f"copies block {src} to {dst}, a name of another size")
        self.state[rank].update(zip(op.into, values, strict=True))

    def original(self, rank: int, number: int, block: Block) -> Block:
        try:
            return original(block, self.contributors)
        except KeyError:
            self.fail(rank, number, f"uses the name {block}, which stands for no block")

    def demand_promise(self, is_ordered: bool) -> None:
        """Every block due holds every contribution to it once, in rank order if promised."""
        last = len(self.schedules[0]) - 1
        for rank, state in enumerate(self.state):
            for block in SPECS[self.collective].after(rank, self.case):
                due = tuple((source, block) for source in self.contributors[block])
                got = state.get(block, ())
                if got != due and (is_ordered or sorted(got, key=repr) != sorted(due, key=repr)):
                    self.fail(rank, max(last, 0), f"block {block} ends as {got}, not {due}")


def _combine(incoming_value: Value, own: Value, side: Side | None) -> Value:
    return incoming_value + own if side == "left" else own + incoming_value
