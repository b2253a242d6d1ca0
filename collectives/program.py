"""A schedule made concrete for one rank: which elements of which buffer each message carries.

`compile_program` follows every block through the schedule and decides where it lies: in the input
until something else arrives under its name, then at its place in the output if it ends there, else
in scratch.  From this follow the savings that are otherwise written by hand: the first combination
reads the input and writes the result, nothing is copied or rotated that can be sent as it lies, and
scratch is reused as soon as a block has been seen for the last time.

A program is pure data.  It holds no arrays, so it can be kept, compared and executed by anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeVar

from collectives import algorithms
from collectives.layout import Extent, by_pair, by_rank, consecutive, even
from collectives.schedule import (
    Block,
    Operation,
    Round,
    Schedule,
    incoming,
    original,
    outgoing,
)
from collectives.spec import SPECS, Case

Buffer = Literal["input", "output", "scratch"]
Counts = int | tuple[int, ...] | tuple[tuple[int, ...], ...]


class Region(NamedTuple):
    """The elements `start` up to, not including, `stop` of one of the three buffers."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


class Message(NamedTuple):
    """One message: the rank at the other end, and the elements that it reads or fills."""

    peer: int
    region: Region


class Move(NamedTuple):
    """A copy within this rank."""

    src: Region
    dst: Region


class Combine(NamedTuple):
    """into = left (+) right, within this rank."""

    left: Region
    right: Region
    into: Region


class Step(NamedTuple):
    """One round: pack, exchange the messages, then finish in the order given."""

    packing: tuple[Move, ...] = ()
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    finishing: tuple[Move | Combine, ...] = ()


@dataclass(frozen=True)
class Program:
    """What one rank does: moves, the rounds, moves; and the scratch it needs, in elements."""

    steps: tuple[Step, ...]
    opening: tuple[Move, ...] = ()
    closing: tuple[Move, ...] = ()
    num_scratch: int = 0

    def sent(self) -> list[tuple[int, int, int]]:
        """(round, destination, number of elements) of every message that this rank sends."""
        return [
            (number, message.peer, message.region.num_elements)
            for number, step in enumerate(self.steps)
            for message in step.sends
        ]


@lru_cache(maxsize=1024)
def compile_program(
    collective: str,
    name: str,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, int], ...] = (),
    aliasing: int | Literal["none", "odd"] = "none",
) -> Program:
    """The program of one rank for a registered algorithm.

    `counts`: elements of the vector (broadcast, reduce, all-reduce), elements of each rank's block,
    or for all-to-all the p x p table of elements from source to destination.  `aliasing`: by how
    many elements the output begins behind the input in memory, "none" if they share none, "odd" if
    they do so in a way that only a copy of the input can serve.
    """
    algorithm = algorithms.info(collective, name)
    is_rooted = SPECS[collective].is_rooted
    schedule = algorithm.schedule(rank, size, root if is_rooted else None, **dict(options))
    case = Case(size, root, algorithm.num_pieces(size, {**algorithm.options, **dict(options)}))
    sizes = block_sizes(collective, counts, case)
    initial = consecutive(SPECS[collective].before(rank, case), sizes)
    final = consecutive(SPECS[collective].after(rank, case), sizes)
    return _Compiler(sizes, initial, final, aliasing).program(schedule)


def block_sizes(collective: str, counts: Counts, case: Case) -> dict[Block, int]:
    """The number of elements of every block."""
    if SPECS[collective].has_pieces:
        assert isinstance(counts, int)
        return by_rank(even(counts, case.num_pieces))
    if collective == "all_to_all":
        return by_pair(counts)  # type: ignore[arg-type]
    return by_rank(counts)  # type: ignore[arg-type]


class _Arena:
    """Scratch elements, handed out first-fit and taken back when their round has passed."""

    def __init__(self) -> None:
        self._live: list[tuple[Extent, int]] = []
        self.num_elements = 0

    def forget(self, before_round: int) -> None:
        """Take back what was last needed before `before_round`."""
        self._live = [(extent, last) for extent, last in self._live if last >= before_round]

    def take(self, num_elements: int, last_round: int) -> Region:
        """The lowest free gap of `num_elements`, kept until `last_round` has passed."""
        start = 0
        for extent, _ in sorted(self._live):
            if extent.start - start >= num_elements:
                break
            start = max(start, extent.stop)
        extent = Extent(start, start + num_elements)
        if num_elements:
            self._live.append((extent, last_round))
        self.num_elements = max(self.num_elements, extent.stop)
        return Region("scratch", *extent)


class _Compiler:
    """Follows the blocks of one rank through its schedule."""

    def __init__(
        self,
        sizes: Mapping[Block, int],
        initial: Mapping[Block, Extent],
        final: Mapping[Block, Extent],
        aliasing: int | Literal["none", "odd"],
    ) -> None:
        self.sizes = sizes
        self.home = {block: Region("output", *extent) for block, extent in final.items()}
        self.place = {block: Region("input", *extent) for block, extent in initial.items()}
        self.offset = aliasing if isinstance(aliasing, int) else None
        self.must_copy_input = aliasing == "odd" or self._input_is_in_the_way()
        self.arena = _Arena()
        self.number = 0
        self.num_rounds = 0
        self.last_use: dict[Block, int] = {}

    def program(self, schedule: Schedule) -> Program:
        self.num_rounds, self.last_use = len(schedule), _last_uses(schedule)
        opening = self.copy_input() if self.must_copy_input else ()
        steps = []
        for self.number, operations in enumerate(schedule):
            self.arena.forget(before_round=self.number)
            steps.append(self.step(operations))
        closing = [
            Move(self.place[block], home)
            for block, home in self.home.items()
            if not self.is_same(self.place[block], home)
        ]
        return Program(tuple(steps), opening, _merged(closing), self.arena.num_elements)

    # Places in memory.  Input and output may be the same memory, shifted by `offset`.

    def address(self, region: Region) -> tuple[str, int, int]:
        if region.buffer == "output" and self.offset is not None:
            return "input", region.start + self.offset, region.stop + self.offset
        return region

    def is_same(self, a: Region, b: Region) -> bool:
        return self.address(a) == self.address(b) or a.num_elements == b.num_elements == 0

    def overlap(self, a: Region, b: Region) -> bool:
        (space, start, stop), (other, other_start, other_stop) = self.address(a), self.address(b)
        return space == other and start < other_stop and other_start < stop

    def _input_is_in_the_way(self) -> bool:
        """Whether writing a block of the output would destroy another block of the input."""
        if self.offset is None:
            return False
        return any(
            self.overlap(place, home) and not (block == other and self.is_same(place, home))
            for block, place in self.place.items()
            for other, home in self.home.items()
        )

    def copy_input(self) -> tuple[Move, ...]:
        total = sum(place.num_elements for place in self.place.values())
        copy = self.arena.take(total, last_round=self.num_rounds)
        moves = []
        for block, place in self.place.items():
            self.place[block] = Region("scratch", copy.start + place.start, copy.start + place.stop)
            moves.append(Move(place, self.place[block]))
        return _merged(moves)

    def take(self, blocks: Sequence[Block], last_round: int) -> list[Region]:
        """New scratch for the blocks, one behind the other."""
        sizes = [self.sizes[original(block, self.sizes)] for block in blocks]
        start = self.arena.take(sum(sizes), last_round).start
        extents = consecutive(range(len(blocks)), by_rank(sizes)).values()
        return [Region("scratch", start + extent.start, start + extent.stop) for extent in extents]

    def last_round(self, blocks: Iterable[Block]) -> int:
        return max((self.last_use[block] for block in blocks), default=self.number)

    # One round.

    def step(self, operations: Round) -> Step:
        packing: list[Move] = []
        sends = [self.send(op, packing) for op in outgoing(operations)]
        finishing: list[Move | Combine] = []
        receives = []
        for op in incoming(operations):
            receive = self.receive if op.kind == "recv" else self.receive_and_combine
            receives.append(receive(op, [message.region for message in sends], finishing))
        for op in operations:
            if op.kind == "copy":
                self.copy(op, finishing)
        return Step(_merged(packing), tuple(sends), tuple(receives), tuple(finishing))

    def send(self, op: Operation, packing: list[Move]) -> Message:
        """Send the blocks as they lie if they lie in one piece, else from packed scratch."""
        places = [self.place[block] for block in op.blocks]
        region = _joined(places)
        if region is None:
            packed = self.take(op.blocks, last_round=self.number)
            packing += map(Move, places, packed)
            region = _joined(packed)
            assert region is not None
        return _message(op, region)

    def receive(
        self, op: Operation, sent: Sequence[Region], finishing: list[Move | Combine]
    ) -> Message:
        """Receive at home if all blocks lie there in one piece that is free, else in scratch."""
        target = self.joined_home(op.blocks, busy=sent)
        if target is not None:
            self.place.update((block, self.home[block]) for block in op.blocks)
            return _message(op, target)
        staying = [block for block in op.blocks if block not in self.home]
        arrived = self.take(op.blocks, self.last_round(staying))
        moves = []
        for block, region in zip(op.blocks, arrived, strict=True):
            self.place[block] = self.home.get(block, region)
            if block in self.home:
                moves.append(Move(region, self.home[block]))
        finishing += _merged(moves)
        return _message(op, _joined(arrived))

    def receive_and_combine(
        self, op: Operation, sent: Sequence[Region], finishing: list[Move | Combine]
    ) -> Message:
        """Receive where the result shall stand if that is free, else in scratch; then combine."""
        own = [self.place[block] for block in op.blocks]
        target = self.joined_home(op.blocks, busy=[*sent, *own])
        if target is not None:
            arrived = [self.home[block] for block in op.blocks]
        else:
            # A result without a home stays where this rank's value was if that is scratch, and else
            # where the incoming one arrived.
            staying = [
                block
                for block, mine in zip(op.blocks, own, strict=True)
                if block not in self.home and mine.buffer != "scratch"
            ]
            arrived = self.take(op.blocks, self.last_round(staying))
            target = _joined(arrived)
        combines = []
        for block, mine, incoming_region in zip(op.blocks, own, arrived, strict=True):
            fallback = mine if mine.buffer == "scratch" else incoming_region
            self.place[block] = self.home.get(block, fallback)
            pair = (incoming_region, mine) if op.side == "left" else (mine, incoming_region)
            combines.append(Combine(*pair, self.place[block]))
        finishing += _merged(combines)
        return _message(op, target)

    def joined_home(self, blocks: Sequence[Block], busy: Sequence[Region]) -> Region | None:
        """The blocks' places in the output as one region, unless it is busy or there is none."""
        if not all(block in self.home for block in blocks):
            return None
        region = _joined([self.home[block] for block in blocks])
        if region is None or any(self.overlap(region, other) for other in busy):
            return None
        return region

    def copy(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Copy into fresh scratch, which no source can overlap; what ends at home moves last."""
        places = [self.place[block] for block in op.blocks]
        is_final = any(block in self.home for block in op.into)
        fresh = self.take(op.into, self.num_rounds if is_final else self.last_round(op.into))
        finishing += _merged(map(Move, places, fresh))
        self.place.update(zip(op.into, fresh, strict=True))


def _last_uses(schedule: Schedule) -> dict[Block, int]:
    """The last round in which each block is named."""
    return {
        block: number
        for number, operations in enumerate(schedule)
        for op in operations
        for block in (*op.blocks, *op.into)
    }


def _message(op: Operation, region: Region | None) -> Message:
    assert op.peer is not None and region is not None
    return Message(op.peer, region)


def _follows(a: Region, b: Region) -> bool:
    return a.buffer == b.buffer and a.stop == b.start


def _joined(regions: Iterable[Region]) -> Region | None:
    """The regions as one, if they lie one behind the other; empty ones do not matter."""
    joined: Region | None = None
    for region in regions:
        if region.num_elements == 0:
            continue
        if joined is not None and not _follows(joined, region):
            return None
        joined = region if joined is None else joined._replace(stop=region.stop)
    return Region("scratch", 0, 0) if joined is None else joined


Action = TypeVar("Action", Move, Combine)


def _merged(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Neighbouring actions on neighbouring regions made into one; empty ones dropped."""
    merged: list[Action] = []
    for action in actions:
        if action[0].num_elements == 0:
            continue
        if merged and all(map(_follows, merged[-1], action)):
            ends = zip(merged[-1], action, strict=True)
            merged[-1] = type(action)(*(a._replace(stop=b.stop) for a, b in ends))
        else:
            merged.append(action)
    return tuple(merged)
