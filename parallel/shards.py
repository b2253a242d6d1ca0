"""Divide flat arrays and batches among ranks: contiguous parts, as even as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallel.nn import Array


def span(total: int, num_ranks: int, rank: int) -> slice:
    """Return the part of ``range(total)`` that belongs to `rank`.

    The sizes of the parts differ by at most one; the larger parts come first.
    """
    size, rest = divmod(total, num_ranks)
    start = rank * size + min(rank, rest)
    return slice(start, start + size + (rank < rest))


def length(part: slice) -> int:
    """Return the number of elements of a slice with explicit start and stop."""
    return int(part.stop - part.start)


def counts(total: int, num_ranks: int) -> tuple[int, ...]:
    """Return the number of elements of every rank's part, in the order of ranks."""
    return tuple(length(span(total, num_ranks, rank)) for rank in range(num_ranks))


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Return views of consecutive parts of a 1-d array, of the given sizes."""
    return [x[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]
