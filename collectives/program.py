"""A schedule made concrete for one rank: which elements of which buffer each message carries.

`compile_program` follows every block through the schedule and decides where it lies: in the input
until something else arrives under its name, then at its place in the output if it ends there, else
in scratch.  From this follow the savings that are otherwise written by hand: the first combination
reads the input and writes the result, nothing is copied or rotated that can be sent as it lies, and
scratch is reused as soon as a block has been seen for the last time.

A program is pure data.  It holds no arrays, so it can be kept, compared and executed by anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

from collectives import algorithms
from collectives.algorithms import Algorithm
from collectives.layout import Extent, by_pair, by_rank, consecutive, even
from collectives.schedule import (
    Block,
    Operation,
    Round,
    Schedule,
    incoming,
    local,
    original,
    outgoing,
)
from collectives.spec import SPECS, Case, Piece, after, before

Buffer = Literal["input", "output", "scratch"]
Aliasing = int | Literal["none", "odd"]
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
    """What one rank does: the rounds, then moves; and the scratch it needs, in elements.

    `staying`: moves from input to output, which may be made while the first messages travel.
    `copies_input`: it must run on a copy of the input, because the output would destroy it.
    """

    steps: tuple[Step, ...]
    staying: tuple[Move, ...] = ()
    closing: tuple[Move, ...] = ()
    num_scratch: int = 0
    copies_input: bool = False

    def sent(self) -> list[tuple[int, int, int]]:
        """(round, destination, number of elements) of every message that this rank sends."""
        return [
            (number, message.peer, message.region.num_elements)
            for number, step in enumerate(self.steps)
            for message in step.sends
        ]


def compile_program(
    collective: str,
    name: str,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, int], ...] = (),
    aliasing: Aliasing = "none",
    parts: tuple[int, ...] | None = None,
) -> Program:
    """The program of one rank for a registered algorithm.

    `counts`: elements of the vector (broadcast, reduce, all-reduce), elements of each rank's block,
    or for all-to-all the p x p table of elements from source to destination.  `aliasing`: by how
    many elements the output begins behind the input in memory, "none" if they share none, "odd" if
    they do so in a way that only a copy of the input can serve.  `parts`: of each rank's block only
    so many elements, from its beginning.
    """
    algorithm = algorithms.info(collective, name)
    return compiled(algorithm, rank, size, root, counts, options, aliasing, parts)


@lru_cache(maxsize=1024)
def compiled(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, int], ...] = (),
    aliasing: Aliasing = "none",
    parts: tuple[int, ...] | None = None,
) -> Program:
    """The same for an algorithm that has been looked up; every program is made only once."""
    collective = algorithm.collective
    is_rooted = SPECS[collective].is_rooted
    schedule = algorithm.schedule(rank, size, root if is_rooted else None, **dict(options))
    case = algorithm.case(size, root, **dict(options))
    sizes = block_sizes(collective, counts, case)
    initial = consecutive(before(collective, rank, case), sizes)
    final = consecutive(after(collective, rank, case), sizes)
    if parts is not None:
        sizes = by_rank(parts)
        initial, final = _beginnings(initial, sizes), _beginnings(final, sizes)
    return _Compiler(sizes, initial, final, aliasing).program(schedule)


def _beginnings(extents: Mapping[Block, Extent], sizes: Mapping[Block, int]) -> dict[Block, Extent]:
    """The first elements of each block, as many as `sizes` says, where they lie."""
    return {
        block: Extent(extent.start, extent.start + sizes[original(block, sizes)])
        for block, extent in extents.items()
    }


def block_sizes(collective: str, counts: Counts, case: Case) -> dict[Block, int]:
    """The number of elements of every block."""
    if SPECS[collective].has_pieces:
        assert isinstance(counts, int)
        return by_rank(even(counts, case.num_pieces))
    sizes = by_pair(counts) if collective == "all_to_all" else by_rank(counts)  # type: ignore[arg-type]
    if case.num_pieces == 1:
        return sizes
    return {
        Piece(block, number): part
        for block, size in sizes.items()
        for number, part in enumerate(even(size, case.num_pieces))
    }


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
        aliasing: Aliasing,
    ) -> None:
        self.sizes = sizes
        self.home = {block: Region("output", *extent) for block, extent in final.items()}
        self.place = {block: Region("input", *extent) for block, extent in initial.items()}
        self.offset = aliasing if isinstance(aliasing, int) else None
        self.copies_input = aliasing == "odd" or self._input_is_in_the_way()
        if self.copies_input:
            self.offset = None
        self.arena = _Arena()
        self.number = 0
        self.num_rounds = 0
        self.uses: dict[Block, list[int]] = {}
        self.ends: dict[Block, list[int]] = {}

    def program(self, schedule: Schedule) -> Program:
        self.num_rounds = len(schedule)
        self.uses, self.ends = _uses(schedule), _ends(schedule)
        steps = []
        for self.number, operations in enumerate(schedule):
            self.arena.forget(before_round=self.number)
            steps.append(self.step(operations))
        moves = [
            Move(self.place[block], home)
            for block, home in self.home.items()
            if not self.is_same(self.place[block], home)
        ]
        # Nobody writes to the input, and to a block's home nobody but the block itself.
        staying = _merged(move for move in moves if move.src.buffer == "input")
        closing = _merged(move for move in moves if move.src.buffer != "input")
        num_scratch = self.arena.num_elements
        return Program(tuple(steps), staying, closing, num_scratch, self.copies_input)

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
        places, homes = self.in_memory(self.place), self.in_memory(self.home)
        i = j = 0
        while i < len(places) and j < len(homes):
            (start, stop, _), (other_start, other_stop, _) = places[i], homes[j]
            if start < other_stop and other_start < stop and places[i] != homes[j]:
                return True
            i, j = i + (stop <= other_stop), j + (other_stop <= stop)
        return False

    def in_memory(self, regions: Mapping[Block, Region]) -> list[tuple[int, int, Block]]:
        """First and last address and name of all blocks that are not empty, by address."""
        placed = ((*self.address(region)[1:], block) for block, region in regions.items())
        return sorted((each for each in placed if each[0] < each[1]), key=itemgetter(0))

    def take(self, blocks: Sequence[Block], last_round: int) -> list[Region]:
        """New scratch for the blocks, one behind the other."""
        sizes = [self.sizes[original(block, self.sizes)] for block in blocks]
        start = self.arena.take(sum(sizes), last_round).start
        extents = consecutive(range(len(blocks)), by_rank(sizes)).values()
        return [Region("scratch", start + extent.start, start + extent.stop) for extent in extents]

    def last_round(self, blocks: Iterable[Block]) -> int:
        """The last round that needs what these blocks hold from now on."""
        return max(map(self.last_use, blocks), default=self.number)

    def last_use(self, block: Block) -> int:
        """The last round in which what the block now holds is needed."""
        now = 2 * self.number + 1
        end = next((time for time in self.ends.get(block, ()) if time > now), math.inf)
        return max((time for time in self.uses.get(block, ()) if time <= end), default=now) // 2

    # One round.

    def step(self, operations: Round) -> Step:
        packing: list[Move] = []
        sends = [self.send(op, packing) for op in outgoing(operations)]
        finishing: list[Move | Combine] = []
        receives = []
        for op in incoming(operations):
            receive = self.receive if op.kind == "recv" else self.receive_and_combine
            receives.append(receive(op, [message.region for message in sends], finishing))
        for op in local(operations):
            move = self.copy if op.kind == "copy" else self.copy_and_combine
            move(op, finishing)
        return Step(_merged(packing), tuple(sends), tuple(receives), tuple(finishing))

    def send(self, op: Operation, packing: list[Move]) -> Message:
        """Send the blocks in one piece as they lie, or moved home, or packed in scratch."""
        places = [self.place[block] for block in op.blocks]
        region = _joined(places)
        if region is None:
            packed = self.homes(op.blocks) or self.take(op.blocks, last_round=self.number)
            packing += (
                Move(place, target)
                for place, target in zip(places, packed, strict=True)
                if not self.is_same(place, target)
            )
            region = _joined(packed)
            if packed[0].buffer == "output":
                self.place.update(zip(op.blocks, packed, strict=True))
        return _message(op, region)

    def receive(
        self, op: Operation, sent: Sequence[Region], finishing: list[Move | Combine]
    ) -> Message:
        """Receive at home if all blocks lie there in one piece that is free, else in scratch."""
        target = self.joined_home(op.targets, busy=sent)
        if target is not None:
            self.place.update((block, self.home[block]) for block in op.targets)
            return _message(op, target)
        staying = [block for block in op.targets if block not in self.home]
        arrived = self.take(op.targets, self.last_round(staying))
        moves = []
        for block, region in zip(op.targets, arrived, strict=True):
            self.place[block] = self.home.get(block, region)
            if block in self.home:
                moves.append(Move(region, self.home[block]))
        finishing += _merged(moves)
        return _message(op, _joined(arrived))

    def receive_and_combine(
        self, op: Operation, sent: Sequence[Region], finishing: list[Move | Combine]
    ) -> Message:
        """Receive where the result shall stand if that is free, else in scratch; then combine."""
        own = [self.place[block] for block in op.targets]
        target = self.joined_home(op.targets, busy=[*sent, *own])
        if target is not None:
            arrived = [self.home[block] for block in op.targets]
        else:
            # A result without a home stays where this rank's value was if that is scratch, and else
            # where the incoming one arrived.
            staying = [
                block
                for block, mine in zip(op.targets, own, strict=True)
                if block not in self.home and mine.buffer != "scratch"
            ]
            arrived = self.take(op.targets, self.last_round(staying))
            target = _joined(arrived)
        self.combine(op, arrived, own, arrived, finishing)
        return _message(op, target)

    def combine(
        self,
        op: Operation,
        coming: Sequence[Region],
        own: Sequence[Region],
        spare: Sequence[Region],
        finishing: list[Move | Combine],
    ) -> None:
        """Combine at home, else where this rank's value is if that is scratch, else in spare."""
        combines = []
        for block, other, mine, free in zip(op.targets, coming, own, spare, strict=True):
            self.place[block] = self.home.get(block, mine if mine.buffer == "scratch" else free)
            pair = (other, mine) if op.side == "left" else (mine, other)
            combines.append(Combine(*pair, self.place[block]))
        finishing += _merged(combines)

    def homes(self, blocks: Sequence[Block]) -> list[Region] | None:
        """The blocks' places in the output, if all have one and they lie one behind the other."""
        if not all(block in self.home for block in blocks):
            return None
        regions = [self.home[block] for block in blocks]
        return None if _joined(regions) is None else regions

    def joined_home(self, blocks: Sequence[Block], busy: Sequence[Region]) -> Region | None:
        """The blocks' places in the output as one region, unless it is busy or there is none."""
        homes = self.homes(blocks)
        region = _joined(homes) if homes else None
        if region is None or any(self.overlap(region, other) for other in busy):
            return None
        return region

    def copy(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Copy home if all have one that no source lies in, else into fresh scratch."""
        places = [self.place[block] for block in op.blocks]
        targets = [self.home[block] for block in op.into if block in self.home]
        if len(targets) < len(op.into) or any(
            self.overlap(place, target) for place in places for target in targets
        ):
            last = self.num_rounds if targets else self.last_round(op.into)
            targets = self.take(op.into, last)  # what ends at home moves there last
        finishing += _merged(map(Move, places, targets))
        self.place.update(zip(op.into, targets, strict=True))

    def copy_and_combine(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Combine blocks that this rank holds."""
        coming, own = ([self.place[b] for b in blocks] for blocks in (op.blocks, op.into))
        away = [b for b in op.into if b not in self.home and self.place[b].buffer != "scratch"]
        fresh = dict(zip(away, self.take(away, self.last_round(away)), strict=True))
        spare = [fresh.get(block, place) for block, place in zip(op.into, own, strict=True)]
        self.combine(op, coming, own, spare, finishing)


def _uses(schedule: Schedule) -> dict[Block, list[int]]:
    """When each block is needed: at 2k if sent in round k, at 2k + 1 if used after its messages."""
    uses: dict[Block, list[int]] = {}
    for number, operations in enumerate(schedule):
        for op in operations:
            needed = () if op.kind.startswith("recv") else op.blocks
            for block in (*needed, *(op.targets if op.side is not None else ())):
                uses.setdefault(block, []).append(2 * number + (op.kind != "send"))
    return uses


def _ends(schedule: Schedule) -> dict[Block, list[int]]:
    """The last moments, counted likewise, of what each block holds before it is replaced."""
    ends: dict[Block, list[int]] = {}
    for number, operations in enumerate(schedule):
        for op in operations:
            for block in op.targets if op.kind in ("recv", "copy") else ():
                ends.setdefault(block, []).append(2 * number + (op.kind == "copy"))
    return ends


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
