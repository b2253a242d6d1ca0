"""The sizes of blocks, and their places in a buffer.

Sizes are bound late.  An algorithm that was written for equal blocks therefore serves unequal ones
(the v-variants of MPI) without extra code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Literal, NamedTuple

from collectives.schedule.rounds import Block, original

Buffer = Literal["input", "output", "scratch"]


class Region(NamedTuple):
    """The elements `start` up to, not including, `stop` of one of the three buffers."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def even_counts(num_elements: int, num_parts: int) -> tuple[int, ...]:
    """Return the sizes of parts that differ by at most one.

    The larger parts come first, as in `numpy.array_split`.  Calls without `counts` divide rows in
    this way.

    Parameters
    ----------
    num_elements : int
        The rows or elements that are divided.
    num_parts : int

    Examples
    --------
    >>> import collectives
    >>> collectives.even_counts(10, 4)
    (3, 3, 2, 2)
    """
    size, extra = divmod(num_elements, num_parts)
    return tuple(size + (part < extra) for part in range(num_parts))


def consecutive(
    buffer: Buffer, blocks: Iterable[Block], sizes: Mapping[Block, int], start: int = 0
) -> dict[Block, Region]:
    """Return the regions of consecutive blocks in a buffer from `start` on, in the order given."""
    regions = {}
    for block in blocks:
        stop = start + sizes[original(block, sizes)]
        regions[block] = Region(buffer, start, stop)
        start = stop
    return regions


def by_rank(counts: Sequence[int]) -> dict[Block, int]:
    """Return sizes of blocks that are named by number: block i has counts[i] elements."""
    return dict(enumerate(counts))


def by_pair(counts: Sequence[Sequence[int]]) -> dict[Block, int]:
    """Return sizes of the blocks (source, destination) of an all-to-all, from its p x p table."""
    return dict(zip(product(range(len(counts)), repeat=2), chain(*counts), strict=True))
