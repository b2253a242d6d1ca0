"""Cuts a large reduction into lanes, which run the same rounds one after the other.

Received data should be combined while it is still in the cache.  Therefore a large vector is cut
into pieces whose messages have half a MiB.  A lane is the whole algorithm on one piece.  Lanes are
independent: while one combines, the messages of the next are in flight, and a round of one lane may
overlap with any round of another.  So every algorithm is pipelined across its rounds.

`order` gives the order of the rounds of all lanes.  It is the same on all ranks, and a rank waits
for a round only after it has started everything that precedes it in that order.  So no two ranks
wait for each other, and messages between two ranks are sent and received in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple, cast

from collectives.algorithms import Algorithm, Option
from collectives.programs.placement import compile_lane
from collectives.programs.steps import Aliasing, Counts, Lane
from collectives.schedule import SPECS, outgoing

SEGMENT_BYTES = 512 * 1024  # of one message; two or three of these fit into a core's cache
WIDTH = 3  # lanes that run at the same time


class Lanes:
    """The lanes of one rank; each begins `stride` elements after the previous one.

    Attributes
    ----------
    copies_input : bool
        Whether they need a copy of the input, because the output would overwrite it.
    num_slots : int
        The number of lanes that run at the same time.
    num_scratch : int
        The elements of scratch that each of these needs.
    """

    def __init__(self, lanes: Sequence[Lane], stride: int = 0, copies_input: bool = False) -> None:
        self.lanes, self.stride, self.copies_input = lanes, stride, copies_input
        self.num_rounds = len(lanes[0].steps)
        self.num_slots = min(WIDTH, len(lanes))
        self.num_scratch = max(lane.num_scratch for lane in lanes)
        self.events = _events(len(lanes), self.num_rounds)


class Event(NamedTuple):
    """The start of a round of a lane, or the wait for its messages."""

    lane: int
    round: int
    is_start: bool


def order(num_lanes: int, num_rounds: int) -> Iterator[Event]:
    """Yield the starts and waits of all lanes, in the order in which they run.

    Rounds are finished in the order in which they started; each makes room for the next.
    """
    if num_rounds == 0:
        return
    waiting, in_progress = deque((lane, 0) for lane in range(num_lanes)), deque[tuple[int, int]]()
    while waiting or in_progress:
        while waiting and len(in_progress) < WIDTH:
            in_progress.append(waiting.popleft())
            yield Event(*in_progress[-1], is_start=True)
        lane, number = in_progress.popleft()
        yield Event(lane, number, is_start=False)
        if number + 1 < num_rounds:
            waiting.appendleft((lane, number + 1))


@lru_cache(maxsize=2)
def _events(num_lanes: int, num_rounds: int) -> list[Event]:
    """Return the order as a list; all ranks of a call have the same."""
    return list(order(num_lanes, num_rounds))


def num_lanes(
    algorithm: Algorithm, size: int, num_bytes: int, options: tuple[tuple[str, Option], ...] = ()
) -> int:
    """Return the number of lanes into which all ranks cut `num_bytes` (the n of the formulas)."""
    if num_bytes <= SEGMENT_BYTES or not SPECS[algorithm.collective].is_reduction:
        return 1
    num_blocks = _num_divisible(algorithm, size, options)
    return -(-num_bytes // (SEGMENT_BYTES * num_blocks)) if num_blocks else 1


@lru_cache(maxsize=256)
def _num_divisible(
    algorithm: Algorithm, size: int, options: tuple[tuple[str, Option], ...]
) -> int | None:
    """Return into how many blocks a reduction cuts n, if lanes can cut each block further.

    None if the algorithm has its own segments, or sends several blocks in one message.
    """
    if "segments" in algorithm.options or (size == 1 and not dict(options).get("shards")):
        return None
    num_pieces = algorithm.case(size, None, **dict(options)).num_pieces
    if SPECS[algorithm.collective].has_pieces:
        return num_pieces
    sends_single_blocks = num_pieces == 1 and all(
        len(op.blocks) == 1
        for rank in range(size)
        for operations in algorithm.schedule(rank, size, None, **dict(options))
        for op in outgoing(operations)
    )
    return size if sends_single_blocks else None


def compile_lanes(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, Option], ...],
    aliasing: Aliasing,
    num_lanes: int,
) -> Lanes:
    """Return the lanes of one rank; the arguments are those of `compile_lane`."""
    compiled = partial(compile_lane, algorithm, rank, size, root, options=options)
    copies_input = False
    if num_lanes == 1 or aliasing != "none":  # else the output cannot overwrite the input
        whole = compiled(counts, aliasing=aliasing)
        copies_input = whole.copies_input
    if num_lanes == 1:
        return Lanes((whole,), copies_input=copies_input)
    aliasing = "none" if copies_input else aliasing
    blocks = (
        (counts,) if isinstance(counts, int) else cast("tuple[int, ...]", counts)
    )  # a reduction has no table
    stride = -(-max(blocks) // num_lanes)

    @cache  # most lanes are equal
    def lane(*parts: int) -> Lane:
        return compiled(counts, aliasing=aliasing, parts=parts)

    starts = [number * stride for number in range(num_lanes)]
    lanes = [lane(*(_part(count, start, stride) for count in blocks)) for start in starts]
    return Lanes(lanes, stride, copies_input)


def _part(count: int, start: int, stride: int) -> int:
    """Return the number of `count` elements that lie from `start` to `start + stride`."""
    return max(0, min(stride, count - start))
