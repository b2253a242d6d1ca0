"""The fixed tree of an invariant reduction: which contributions are combined with which.

The tree over n leaves has on its left the greatest power of two below n, and on its right the rest;
both sides are trees of the same kind.  It depends on n only: not on ranks, sizes or messages.  So a
result that is combined along it always has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from collectives.schedule.trees import floor_log2, groups


class Merge(NamedTuple):
    """The combination of the leaves from `start` to `middle` with those from there to `stop`."""

    start: int
    middle: int
    stop: int


def middle(start: int, stop: int) -> int:
    """Return where the tree over two or more leaves divides them."""
    return start + (1 << floor_log2(stop - start - 1))


def merges(start: int, stop: int) -> Iterator[Merge]:
    """Yield all combinations of the tree over these leaves, each after those that it needs."""
    if stop - start > 1:
        at = middle(start, stop)
        yield from merges(start, at)
        yield from merges(at, stop)
        yield Merge(start, at, stop)


class Division(NamedTuple):
    """The tree, whose leaves are divided evenly among ranks.

    Attributes
    ----------
    within : tuple of list of Merge
        The combinations that each rank can make alone.
    between : list of list of Merge
        All others, in levels of which none needs another of its own level.
    subtrees : tuple of list of int
        The first leaves of the subtrees that remain on each rank when it has made its own.
    """

    within: tuple[list[Merge], ...]
    between: list[list[Merge]]
    subtrees: tuple[list[int], ...]


@lru_cache(maxsize=64)
def divided(num_leaves: int, num_ranks: int) -> Division:
    """Return the tree over all leaves, divided among the ranks: larger parts first."""
    parts = groups(num_leaves, num_ranks)
    owner = [rank for rank, leaves in enumerate(parts) for _ in leaves]
    within: tuple[list[Merge], ...] = tuple([] for _ in parts)
    between: dict[int, list[Merge]] = {}
    for merge in merges(0, num_leaves):
        first, last = owner[merge.start], owner[merge.stop - 1]
        if first == last:
            within[first].append(merge)
        else:
            between.setdefault(merge.middle - merge.start, []).append(merge)
    subtrees = tuple(
        sorted({*leaves} - {merge.middle for merge in mine})
        for leaves, mine in zip(parts, within, strict=True)
    )
    return Division(within, [between[level] for level in sorted(between)], subtrees)


# Functions of formulas; without shards every rank has one


def num_subtrees(p: int, num_shards: int) -> list[int]:
    """Return the number of subtrees that remain on each rank."""
    return [len(starts) for starts in divided(num_shards or p, p).subtrees]


def num_within(p: int, num_shards: int) -> list[int]:
    """Return the number of combinations that each rank makes alone."""
    return [len(mine) for mine in divided(num_shards or p, p).within]
