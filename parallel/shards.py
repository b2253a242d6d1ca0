"""How flat arrays and batches are divided among ranks: contiguous, as evenly as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from parallel.nn import Array


def counts(total: int, ranks: int) -> tuple[int, ...]:
    """The sizes of the parts of range(total); they differ by at most one, larger ones first."""
    size, rest = divmod(total, ranks)
    return tuple(size + (rank < rest) for rank in range(ranks))


def span(total: int, ranks: int, rank: int) -> slice:
    """One rank's part of range(total)."""
    size, rest = divmod(total, ranks)
    start = rank * size + min(rank, rest)
    return slice(start, start + size + (rank < rest))


def length(part: slice) -> int:
    """How many elements a part has."""
    return int(part.stop - part.start)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Views of a 1-d array's parts of these sizes, one after the other."""
    return [x[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]
