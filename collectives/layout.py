"""From block names to places: how many elements a block has, and where it lies in a buffer.

Sizes are bound late.  An algorithm that was written for equal blocks therefore serves unequal ones
(the v-variants of MPI) without a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.schedule import Block


class Extent(NamedTuple):
    """The elements `start` up to, not including, `stop` of a buffer."""

    start: int
    stop: int


def even(num_elements: int, num_parts: int) -> tuple[int, ...]:
    """Sizes of `num_parts` parts of `num_elements` elements; they differ by one at most.

    The larger parts come first, as in `numpy.array_split`.
    """
    size, extra = divmod(num_elements, num_parts)
    return tuple(size + (part < extra) for part in range(num_parts))


def consecutive(blocks: Iterable[Block], sizes: Mapping[Block, int]) -> dict[Block, Extent]:
    """The blocks laid one behind the other in the order given."""
    extents, start = {}, 0
    for block in blocks:
        extents[block] = Extent(start, start + sizes[block])
        start += sizes[block]
    return extents


def by_rank(counts: Sequence[int]) -> dict[Block, int]:
    """Sizes of blocks that are named by number: block i has counts[i] elements."""
    return dict(enumerate(counts))


def by_pair(counts: Sequence[Sequence[int]]) -> dict[Block, int]:
    """Sizes of the blocks (source, destination) of an all-to-all, from its p x p table."""
    return {(s, d): count for s, row in enumerate(counts) for d, count in enumerate(row)}
