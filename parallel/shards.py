"""Divide flat arrays and batches among ranks: contiguous parts, as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from collectives import even_counts
from parallel.nn import Array


def span(total: int, num_ranks: int, rank: int) -> slice:
    """Return the part of ``range(total)`` that belongs to `rank`, by `even_counts`."""
    sizes = even_counts(total, num_ranks)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def length(part: slice) -> int:
    """Return the number of elements of a slice with explicit start and stop."""
    return int(part.stop - part.start)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Return views of consecutive parts of a 1-d array, of the given sizes."""
    return [x[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]
