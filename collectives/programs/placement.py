"""A schedule made concrete for one rank: which elements of which buffer each message carries.

`compile_lane` follows every block through the schedule and decides where it lies: in the input
until something else arrives under its name, then at its place in the output if it ends there, else
in scratch.  From this follow the savings that are otherwise written by hand: the first combination
reads the input and writes the result, nothing is copied or rotated that can be sent as it lies, and
scratch is reused as soon as a block has been seen for the last time.

The result is pure data.  `lanes.py` joins one or several of these; `program.py` makes them a table.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple, TypeVar

from collectives.algorithms import Algorithm
from collectives.schedule import (
    SPECS,
    Block,
    Operation,
    Piece,
    Region,
    Schedule,
    after,
    before,
    by_pair,
    by_rank,
    consecutive,
    even,
    incoming,
    local,
    original,
    outgoing,
)

Aliasing = int | Literal["none", "odd"]
Counts = int | tuple[int, ...] | tuple[tuple[int, ...], ...]


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
class Lane:
    """What one rank does: the rounds, then moves; and the scratch it needs, in elements.

    `staying`: moves from input to output, which may be made while the first messages travel.
    `copies_input`: it must run on a copy of the input, because the output would destroy it.
    """

    steps: tuple[Step, ...]
    staying: tuple[Move, ...] = ()
    closing: tuple[Move, ...] = ()
    num_scratch: int = 0
    copies_input: bool = False


class Outline(NamedTuple):
    """What a rank's schedule says whatever the counts are.

    `rounds`: of each round what sends, what receives, and what follows.  `uses`: when each block is
    needed, at 2k if it is sent in round k, at 2k + 1 if it is used after its messages.  `ends`: the
    last moments, counted likewise, of what each block holds before it is replaced.
    """

    rounds: list[tuple[list[Operation], list[Operation], list[Operation]]]
    uses: Mapping[Block, list[int]]
    ends: Mapping[Block, list[int]]


def outline(schedule: Schedule) -> Outline:
    """The outline of one rank's schedule."""
    uses: dict[Block, list[int]] = {}
    ends: dict[Block, list[int]] = {}
    for number, operations in enumerate(schedule):
        for op in operations:
            replaced = op.targets if op.kind in ("recv", "copy") else ()
            needed = () if op.kind.startswith("recv") else op.blocks
            for block in replaced:
                ends.setdefault(block, []).append(2 * number + (op.kind == "copy"))
            for block in (*needed, *(op.targets if op.side is not None else ())):
                uses.setdefault(block, []).append(2 * number + (op.kind != "send"))
    return Outline([(outgoing(r), incoming(r), local(r)) for r in schedule], uses, ends)


@lru_cache(maxsize=256)
def _outlined(
    algorithm: Algorithm, rank: int, size: int, root: int, options: tuple[tuple[str, int], ...]
) -> tuple[int, Sequence[Block], Sequence[Block], Outline]:
    """The number of pieces, the blocks of `rank` before and after, and its schedule's outline."""
    collective, given = algorithm.collective, dict(options)
    case = algorithm.case(size, root, **given)
    rooted_at = root if SPECS[collective].is_rooted else None
    made = outline(algorithm.schedule(rank, size, rooted_at, **given))
    return case.num_pieces, before(collective, rank, case), after(collective, rank, case), made


def compile_lane(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, int], ...] = (),
    aliasing: Aliasing = "none",
    parts: tuple[int, ...] | None = None,
) -> Lane:
    """The steps of one rank.

    `counts`: elements of the vector (broadcast, reduce, all-reduce), elements of each rank's block,
    or for all-to-all the p x p table of elements from source to destination.  `aliasing`: by how
    many elements the output begins behind the input in memory, "none" if they share none, "odd" if
    they do so in a way that only a copy of the input can serve.  `parts`: of each rank's block only
    so many elements, from its beginning.
    """
    num_pieces, held, wanted, made = _outlined(algorithm, rank, size, root, options)
    sizes = block_sizes(algorithm.collective, counts, num_pieces)
    initial, final = consecutive("input", held, sizes), consecutive("output", wanted, sizes)
    if parts is not None:
        sizes = by_rank(parts)
        initial, final = _beginnings(initial, sizes), _beginnings(final, sizes)
    return _Compiler(sizes, initial, final, aliasing).lane(made)


def _beginnings(regions: Mapping[Block, Region], sizes: Mapping[Block, int]) -> dict[Block, Region]:
    """The first elements of each block, as many as `sizes` says, where they lie."""
    return {
        block: region._replace(stop=region.start + sizes[block])
        for block, region in regions.items()
    }


def block_sizes(collective: str, counts: Counts, num_pieces: int) -> dict[Block, int]:
    """The number of elements of every block."""
    if isinstance(counts, int):
        return by_rank(even(counts, num_pieces))
    sizes = by_pair(counts) if collective == "all_to_all" else by_rank(counts)  # type: ignore[arg-type]
    if num_pieces == 1:
        return sizes
    return {
        Piece(block, number): part
        for block, size in sizes.items()
        for number, part in enumerate(even(size, num_pieces))
    }


class _Arena:
    """Scratch elements, handed out first-fit and taken back when their round has passed."""

    def __init__(self) -> None:
        self._live: list[tuple[int, int, int]] = []  # start, stop, last round; in order
        self.num_elements = 0

    def forget(self, before_round: int) -> None:
        """Take back what was last needed before `before_round`."""
        self._live = [extent for extent in self._live if extent[2] >= before_round]

    def take(self, num_elements: int, last_round: int) -> int:
        """Where the lowest free gap of `num_elements` begins, kept until the round has passed."""
        start = 0
        for other, stop, _ in self._live:
            if other - start >= num_elements:
                break
            start = stop
        if num_elements:
            insort(self._live, (start, start + num_elements, last_round))
            self.num_elements = max(self.num_elements, start + num_elements)
        return start


class _Compiler:
    """Follows the blocks of one rank through its schedule."""

    def __init__(
        self,
        sizes: Mapping[Block, int],
        initial: Mapping[Block, Region],
        final: Mapping[Block, Region],
        aliasing: Aliasing,
    ) -> None:
        self.sizes, self.place, self.home = sizes, dict(initial), final
        # Each buffer's memory, and where it begins there: input and output may share theirs.
        self.memory = {name: (name, 0) for name in ("input", "output", "scratch")}
        if isinstance(aliasing, int):
            self.memory["output"] = "input", aliasing
        self.copies_input = aliasing == "odd" or self._input_is_in_the_way()
        if self.copies_input:
            self.memory["output"] = "output", 0
        self.arena = _Arena()
        self.number = 0

    def lane(self, outline: Outline) -> Lane:
        self.outline, steps = outline, []
        for self.number, operations in enumerate(outline.rounds):
            self.arena.forget(before_round=self.number)
            steps.append(self.step(*operations))
        moves = [
            Move(place, home)
            for block, home in self.home.items()
            if (place := self.place[block]) is not home and not self.is_same(place, home)
        ]
        # Nobody writes to the input, and to a block's home nobody but the block itself.
        staying = _merged([move for move in moves if move.src.buffer == "input"])
        closing = _merged([move for move in moves if move.src.buffer != "input"])
        num_scratch = self.arena.num_elements
        return Lane(tuple(steps), staying, closing, num_scratch, self.copies_input)

    # Places in memory

    def address(self, region: Region) -> tuple[str, int, int]:
        """Its memory, and its first and last address there."""
        memory, offset = self.memory[region.buffer]
        return memory, region.start + offset, region.stop + offset

    def is_same(self, a: Region, b: Region) -> bool:
        """Whether two regions for one block are the same memory, or none at all."""
        return a.start == a.stop or self.address(a) == self.address(b)

    def in_outputs_memory(self, regions: Iterable[Region]) -> list[tuple[int, int]]:
        """The first and last addresses of those regions that lie in the memory of the output."""
        here = self.memory["output"][0]
        places = map(self.address, regions)
        return [(start, stop) for memory, start, stop in places if memory == here]

    def is_free(self, region: Region, busy: Iterable[tuple[int, int]]) -> bool:
        """Whether a region of the output overlaps with none of these addresses."""
        _, start, stop = self.address(region)
        return all(start >= busy_stop or busy_start >= stop for busy_start, busy_stop in busy)

    def _input_is_in_the_way(self) -> bool:
        """Whether writing a block of the output would destroy another block of the input."""
        if self.memory["output"][0] == "output":
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

    def joined_home(
        self, blocks: Sequence[Block], busy: Sequence[tuple[int, int]]
    ) -> Region | None:
        """The blocks' places in the output as one region, unless it is busy or there is none."""
        homes = [self.home[block] for block in blocks if block in self.home]
        region = _joined(homes) if len(homes) == len(blocks) else None
        if region is None or region.start == region.stop or self.is_free(region, busy):
            return region
        return None

    def take(self, blocks: Sequence[Block], last_round: int) -> list[Region]:
        """New scratch for the blocks, one behind the other."""
        sizes = [self.sizes[original(block, self.sizes)] for block in blocks]
        stops = accumulate(sizes, initial=self.arena.take(sum(sizes), last_round))
        return [Region("scratch", *extent) for extent in pairwise(stops)]

    def last_round(self, blocks: Iterable[Block]) -> int:
        """The last round that needs what these blocks hold from now on."""
        return max(map(self.last_use, blocks), default=self.number)

    def last_use(self, block: Block) -> int:
        """The last round in which what the block now holds is needed."""
        now, uses, ends = 2 * self.number + 1, self.outline.uses, self.outline.ends
        end = next((time for time in ends.get(block, ()) if time > now), math.inf)
        return max((time for time in uses.get(block, ()) if time <= end), default=now) // 2

    # One round

    def step(self, goes: list[Operation], comes: list[Operation], stays: list[Operation]) -> Step:
        packing: list[Move] = []
        finishing: list[Move | Combine] = []
        sends = [self.send(op, packing) for op in goes]
        sent = self.in_outputs_memory(message.region for message in sends)
        receives = [self.receive(op, sent, finishing) for op in comes]
        for op in stays:
            move = self.copy if op.kind == "copy" else self.copy_and_combine
            move(op, finishing)
        return Step(_merged(packing), tuple(sends), tuple(receives), tuple(finishing))

    def send(self, op: Operation, packing: list[Move]) -> Message:
        """Send the blocks in one piece as they lie, or moved home, or packed in scratch."""
        places = [self.place[block] for block in op.blocks]
        region = _joined(places)
        if region is None:
            region = self.joined_home(op.blocks, busy=())
            if region is None:
                packed = self.take(op.blocks, last_round=self.number)
                region = _joined(packed)
            else:
                packed = [self.home[block] for block in op.blocks]
                self.place.update(zip(op.blocks, packed, strict=True))
            pairs = zip(places, packed, strict=True)
            packing += [Move(*pair) for pair in pairs if not self.is_same(*pair)]
        return _message(op, region)

    def receive(
        self, op: Operation, sent: list[tuple[int, int]], finishing: list[Move | Combine]
    ) -> Message:
        """Receive at home if all blocks lie there in one piece that is free, else in scratch.

        What is to be combined must not arrive where this rank's values are.
        """
        blocks, is_combined = op.targets, op.side is not None
        own = [self.place[block] for block in blocks] if is_combined else []
        target = self.joined_home(blocks, sent + self.in_outputs_memory(own))
        if target is not None:
            arrived = [self.home[block] for block in blocks]
        else:
            arrived = self.take(blocks, self.last_round(self.away(blocks, is_combined)))
            target = _joined(arrived)
        if is_combined:
            self.combine(op, arrived, own, arrived, finishing)
        else:
            self.settle(blocks, arrived, finishing)
        return _message(op, target)

    def away(self, blocks: Sequence[Block], is_combined: bool) -> list[Block]:
        """The blocks without a home; of results only those that cannot stay in scratch."""
        stay = [block for block in blocks if block not in self.home]
        return [b for b in stay if not (is_combined and self.place[b].buffer == "scratch")]

    def settle(
        self, blocks: Sequence[Block], arrived: Sequence[Region], finishing: list[Move | Combine]
    ) -> None:
        """Move home what arrived elsewhere."""
        homes = [self.home.get(*each) for each in zip(blocks, arrived, strict=True)]
        self.place.update(zip(blocks, homes, strict=True))
        pairs = zip(arrived, homes, strict=True)
        finishing += _merged([Move(*pair) for pair in pairs if pair[0] is not pair[1]])

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
            into = self.home.get(block, mine if mine.buffer == "scratch" else free)
            pair = (other, mine) if op.side == "left" else (mine, other)
            self.place[block] = into
            combines.append(Combine(*pair, into))
        finishing += _merged(combines)

    def copy(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Copy home if all have one that no source lies in, else into fresh scratch."""
        places = [self.place[block] for block in op.blocks]
        targets = [self.home[block] for block in op.into if block in self.home]
        busy = self.in_outputs_memory(places)
        if len(targets) < len(op.into) or not all(self.is_free(each, busy) for each in targets):
            # What ends at home moves there last.
            last = len(self.outline.rounds) if targets else self.last_round(op.into)
            targets = self.take(op.into, last)
        finishing += _merged(map(Move, places, targets))
        self.place.update(zip(op.into, targets, strict=True))

    def copy_and_combine(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Combine blocks that this rank holds."""
        coming, own = ([self.place[b] for b in blocks] for blocks in (op.blocks, op.into))
        away = self.away(op.into, is_combined=True)
        fresh = dict(zip(away, self.take(away, self.last_round(away)), strict=True))
        spare = [fresh.get(block, place) for block, place in zip(op.into, own, strict=True)]
        self.combine(op, coming, own, spare, finishing)


def _message(op: Operation, region: Region | None) -> Message:
    assert op.peer is not None and region is not None
    return Message(op.peer, region)


def _joined(regions: Iterable[Region]) -> Region | None:
    """The regions as one, if they lie one behind the other; empty ones do not matter."""
    joined: Region | None = None
    for region in regions:
        buffer, start, stop = region
        if joined is None:
            joined = region if start < stop else None
        elif (buffer, start) == (joined.buffer, joined.stop):
            joined = Region(buffer, joined.start, stop)
        elif start < stop:
            return None
    return Region("scratch", 0, 0) if joined is None else joined


Action = TypeVar("Action", Move, Combine)


def _merged(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Neighbouring actions on neighbouring regions made into one; empty ones dropped."""
    merged: list[Action] = []
    for action in actions:
        if action[0].start == action[0].stop:
            continue
        both = list(zip(merged[-1], action, strict=True)) if merged else []
        if both and all(a.buffer == b.buffer and a.stop == b.start for a, b in both):
            merged[-1] = type(action)(*(a._replace(stop=b.stop) for a, b in both))
        else:
            merged.append(action)
    return tuple(merged)
