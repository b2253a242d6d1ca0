"""Places the blocks of a schedule in memory: which elements of which buffer each message has.

`compile_lane` follows every block through the schedule and decides where it lies: in the input
until its value is replaced, then at its place in the output if it belongs there, else in scratch.
Savings follow that are otherwise written by hand: the first combination reads the input and writes
the result, blocks are sent from where they lie without a copy, and scratch is reused as soon as a
block is no longer needed.

The result is pure data.  `lanes.py` joins one or several lanes; `program.py` makes them a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeVar

from collectives.algorithms import Algorithm, Option
from collectives.programs.lifetimes import Arena, Outline, outline
from collectives.programs.steps import (
    Aliasing,
    Combine,
    CountOfEachBlock,
    Counts,
    Lane,
    Message,
    Move,
    OwnCounts,
    Step,
)
from collectives.schedule import (
    SPECS,
    Block,
    Operation,
    Piece,
    Region,
    after,
    before,
    by_pair,
    by_rank,
    consecutive,
    even_counts,
    incoming,
    original,
)


@lru_cache(maxsize=64)
def _outlined(
    algorithm: Algorithm, rank: int, size: int, root: int, options: tuple[tuple[str, Option], ...]
) -> tuple[int, Sequence[Block], Sequence[Block], Outline]:
    """Return the number of pieces, the blocks of `rank` before and after, and the outline."""
    collective, given = algorithm.collective, dict(options)
    case = algorithm.case(size, root, **given)
    rooted_at = root if SPECS[collective].is_rooted else None
    made = outline(algorithm.schedule(rank, size, rooted_at, **given))
    return case.num_pieces, before(collective, rank, case), after(collective, rank, case), made


@lru_cache(maxsize=256)
def passing_blocks(
    algorithm: Algorithm, rank: int, size: int, options: tuple[tuple[str, Option], ...] = ()
) -> tuple[Block, ...]:
    """Return the blocks of an all-to-all that come to `rank` only to be sent on, in this order."""
    schedule = algorithm.schedule(rank, size, None, **dict(options))
    arriving = (block for ops in schedule for op in incoming(ops) for block in op.targets)
    home = frozenset(after(algorithm.collective, rank, algorithm.case(size, None, **dict(options))))
    return tuple(block for block in dict.fromkeys(arriving) if block not in home)


def compile_lane(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, Option], ...] = (),
    aliasing: Aliasing = "none",
    parts: tuple[int, ...] | None = None,
) -> Lane:
    """Return the steps of one rank.

    Parameters
    ----------
    counts : int, tuple, OwnCounts or CountOfEachBlock
        The elements of the vector (broadcast, reduce, all-reduce), or of each rank's block.  For
        all-to-all `OwnCounts`, `CountOfEachBlock`, or the p x p table of elements from source to
        destination.
    aliasing : int, "none" or "odd"
        The offset in elements of the output from the input in memory; "none" if they do not
        overlap; "odd" if they overlap in a way that needs a copy of the input.
    parts : tuple of int, optional
        The number of elements of the vector, or of each rank's block, from its beginning, that this
        lane works on; None for all.
    """
    num_pieces, held, wanted, made = _outlined(algorithm, rank, size, root, options)
    if isinstance(counts, int):
        sizes = block_sizes(algorithm.collective, parts[0] if parts else counts, num_pieces)
        initial, final = _vectors(held, sizes, counts), consecutive("output", wanted, sizes)
        return _Compiler(sizes, initial, final, aliasing).lane(made)
    if isinstance(counts, CountOfEachBlock):
        wanted = [*wanted, *passing_blocks(algorithm, rank, size, options)]
        sizes = dict.fromkeys([*held, *wanted], counts.num_elements)
    else:
        sizes = block_sizes(algorithm.collective, counts, num_pieces)
    initial, final = consecutive("input", held, sizes), consecutive("output", wanted, sizes)
    if parts is not None:
        sizes = by_rank(parts)
        initial, final = _beginnings(initial, sizes), _beginnings(final, sizes)
    return _Compiler(sizes, initial, final, aliasing).lane(made)


def _vectors(held: Sequence[Block], sizes: Mapping[Block, int], stride: int) -> dict[Block, Region]:
    """Return the pieces of the vectors of this rank.

    Each vector begins `stride` after the previous one.
    """
    regions: dict[Block, Region] = {}
    for number, first in enumerate(range(0, len(held), len(sizes))):
        pieces = held[first : first + len(sizes)]
        regions |= consecutive("input", pieces, sizes, start=number * stride)
    return regions


def _beginnings(regions: Mapping[Block, Region], sizes: Mapping[Block, int]) -> dict[Block, Region]:
    """Return the regions of the first elements of each block, as many as `sizes` says."""
    return {
        block: region._replace(stop=region.start + sizes[original(block, sizes)])
        for block, region in regions.items()
    }


def block_sizes(collective: str, counts: Counts, num_pieces: int) -> dict[Block, int]:
    """Return the number of elements of every block."""
    if isinstance(counts, int):
        return by_rank(even_counts(counts, num_pieces))
    sizes = _sizes(collective, counts)
    if num_pieces == 1:
        return sizes
    return {
        Piece(block, number): part
        for block, size in sizes.items()
        for number, part in enumerate(even_counts(size, num_pieces))
    }


def _sizes(collective: str, counts: tuple[Any, ...]) -> dict[Block, int]:
    """Return the number of elements of every block, or of those that one rank knows."""
    if isinstance(counts, OwnCounts):
        me, sent, received, passing = counts
        sizes: dict[Block, int] = {(me, rank): size for rank, size in enumerate(sent)}
        sizes.update({(rank, me): size for rank, size in enumerate(received)})
        return {**sizes, **dict(passing)}
    return by_pair(counts) if collective == "all_to_all" else by_rank(counts)


class _Compiler:
    """Follows the blocks of one rank through its schedule.

    Attributes
    ----------
    place : dict
        The current region of each block.
    home : dict
        The region in the output of each block that belongs there.
    """

    def __init__(
        self,
        sizes: Mapping[Block, int],
        initial: Mapping[Block, Region],
        final: Mapping[Block, Region],
        aliasing: Aliasing,
    ) -> None:
        self.sizes, self.place, self.home = sizes, dict(initial), final
        # The buffers in the memory of the output, and their offsets there; the input may overlap.
        alone = {"output": 0}
        self.offsets = {"input": 0, "output": aliasing} if isinstance(aliasing, int) else alone
        self.copies_input = aliasing == "odd" or self._output_overwrites_input()
        if self.copies_input:
            self.offsets = alone
        self.arena = Arena()
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
        # Nothing writes to the input, and only the block itself writes to its home.
        staying = _merged([move for move in moves if move.src.buffer == "input"])
        closing = _merged([move for move in moves if move.src.buffer != "input"])
        num_scratch = self.arena.num_elements
        return Lane(tuple(steps), staying, closing, num_scratch, self.copies_input)

    # Places in memory

    def is_same(self, a: Region, b: Region) -> bool:
        """Return whether two regions for one block are the same memory, or are empty."""
        if a.start == a.stop or a == b:
            return True
        addresses = self.in_outputs_memory((a, b))
        return len(addresses) == 2 and addresses[0] == addresses[1]

    def in_outputs_memory(self, regions: Iterable[Region]) -> list[tuple[int, int]]:
        """Return the first and last addresses of the regions in the memory of the output."""
        offsets = self.offsets
        return [
            (start + offsets[buffer], stop + offsets[buffer])
            for buffer, start, stop in regions
            if buffer in offsets
        ]

    def is_free(self, region: Region, busy: Iterable[tuple[int, int]]) -> bool:
        """Return whether a region of the output overlaps with none of the busy addresses."""
        offset = self.offsets["output"]
        start, stop = region.start + offset, region.stop + offset
        for busy_start, busy_stop in busy:  # noqa: SIM110 - all() takes twice as long
            if start < busy_stop and busy_start < stop:
                return False
        return True

    def _output_overwrites_input(self) -> bool:
        """Return whether writing a block of the output would overwrite another one of the input."""
        if "input" not in self.offsets:
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
        """Return the first and last address and the name of each block with elements, in order."""
        addresses = self.in_outputs_memory(regions.values())
        placed = (
            (start, stop, block)
            for (start, stop), block in zip(addresses, regions, strict=True)
            if start < stop
        )
        return sorted(placed, key=itemgetter(0))

    def joined_home(
        self, blocks: Sequence[Block], busy: Sequence[tuple[int, int]]
    ) -> Region | None:
        """Return the homes of the blocks as one region; None if they are not adjacent, or busy."""
        home = self.home
        for block in blocks:
            if block not in home:
                return None
        region = _joined([home[block] for block in blocks])
        if region is None or region.start == region.stop or self.is_free(region, busy):
            return region
        return None

    def take(self, blocks: Sequence[Block], last_round: int) -> list[Region]:
        """Allocate adjacent scratch regions for the blocks."""
        sizes = [self.sizes[original(block, self.sizes)] for block in blocks]
        start, regions = self.arena.take(sum(sizes), last_round), []
        for size in sizes:
            regions.append(Region("scratch", start, start + size))
            start += size
        return regions

    def last_round(self, blocks: Iterable[Block]) -> int:
        """Return the last round that needs the values that these blocks get now."""
        return max(map(self.last_use, blocks), default=self.number)

    def last_use(self, block: Block) -> int:
        """Return the last round that needs the value that the block gets now."""
        now, uses, ends = 2 * self.number + 1, self.outline.uses, self.outline.ends
        end = next((time for time in ends.get(block, ()) if time > now), math.inf)
        return max((time for time in uses.get(block, ()) if time <= end), default=now) // 2

    # One round

    def step(
        self, sending: list[Operation], receiving: list[Operation], staying: list[Operation]
    ) -> Step:
        packing: list[Move] = []
        finishing: list[Move | Combine] = []
        sends = [self.send(op, packing) for op in sending]
        sent = self.in_outputs_memory({message.region for message in sends})
        receives = [self.receive(op, sent, finishing) for op in receiving]
        for op in staying:
            move = self.copy if op.kind == "copy" else self.copy_and_combine
            move(op, finishing)
        return Step(_merged(packing), tuple(sends), tuple(receives), tuple(finishing))

    def send(self, op: Operation, packing: list[Move]) -> Message:
        """Send the blocks as one region: where they lie, moved home, or packed in scratch."""
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
        """Receive at home if the homes of all blocks are one free region, else in scratch.

        Data that is to be combined must not overwrite this rank's values.
        """
        blocks, is_combined = op.targets, op.side is not None
        own = [self.place[block] for block in blocks] if is_combined else []
        target = self.joined_home(blocks, sent + self.in_outputs_memory(own))
        if target is not None:
            arrived = [self.home[block] for block in blocks]
        else:
            arrived = self.take(blocks, self.last_round(self.without_home(blocks, is_combined)))
            target = _joined(arrived)
        if is_combined:
            self.combine(op, arrived, own, arrived, finishing)
        else:
            self.move_home(blocks, arrived, finishing)
        return _message(op, target)

    def without_home(self, blocks: Sequence[Block], is_combined: bool) -> list[Block]:
        """Return the blocks without a home.

        If they are results, blocks that are in scratch already are left out.
        """
        stay = [block for block in blocks if block not in self.home]
        return [b for b in stay if not (is_combined and self.place[b].buffer == "scratch")]

    def move_home(
        self, blocks: Sequence[Block], arrived: Sequence[Region], finishing: list[Move | Combine]
    ) -> None:
        """Move home the blocks that arrived elsewhere."""
        moves = []
        for block, region in zip(blocks, arrived, strict=True):
            self.place[block] = home = self.home.get(block, region)
            if home is not region:
                moves.append(Move(region, home))
        finishing += _merged(moves)

    def combine(
        self,
        op: Operation,
        coming: Sequence[Region],
        own: Sequence[Region],
        spare: Sequence[Region],
        finishing: list[Move | Combine],
    ) -> None:
        """Combine at home, else in place if this rank's value is in scratch, else in `spare`."""
        combines = []
        for block, other, mine, free in zip(op.targets, coming, own, spare, strict=True):
            into = self.home.get(block, mine if mine.buffer == "scratch" else free)
            left, right = (other, mine) if op.side == "left" else (mine, other)
            self.place[block] = into
            combines.append(Combine(left, right, into))
        finishing += _merged(combines)

    def copy(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Copy home if all blocks have a home that no source overlaps, else into new scratch."""
        places = [self.place[block] for block in op.blocks]
        targets = [self.home[block] for block in op.into if block in self.home]
        busy = self.in_outputs_memory(places)
        if len(targets) < len(op.into) or not all(self.is_free(target, busy) for target in targets):
            # Blocks with a home move there after the last round.
            last = len(self.outline.rounds) if targets else self.last_round(op.into)
            targets = self.take(op.into, last)
        finishing += _merged(map(Move, places, targets))
        self.place.update(zip(op.into, targets, strict=True))

    def copy_and_combine(self, op: Operation, finishing: list[Move | Combine]) -> None:
        """Combine two sets of blocks of this rank."""
        coming, own = ([self.place[b] for b in blocks] for blocks in (op.blocks, op.into))
        homeless = self.without_home(op.into, is_combined=True)
        fresh = dict(zip(homeless, self.take(homeless, self.last_round(homeless)), strict=True))
        spare = [fresh.get(block, place) for block, place in zip(op.into, own, strict=True)]
        self.combine(op, coming, own, spare, finishing)


def _message(op: Operation, region: Region | None) -> Message:
    assert op.peer is not None and region is not None
    return Message(op.peer, region)


def _joined(regions: Iterable[Region]) -> Region | None:
    """Return the regions as one, without empty ones; None if they are not adjacent and in order."""
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
    """Return the actions with consecutive ones on adjacent regions merged, without empty ones."""
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
