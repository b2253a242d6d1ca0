"""Two binary trees over the same ranks; each sends one half of a message at full speed.

Sanders, Speck and Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009.  A rank that forwards pieces in one tree is a leaf of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from collectives.schedule.trees import floor_log2

Edge = tuple[int, int, int]  # number of its tree, parent, child


class Link(NamedTuple):
    """An edge of one of two trees (0 or 1), and the round of its first piece."""

    tree: int
    parent: int
    child: int
    start: int


@lru_cache(maxsize=64)
def two_trees(size: int) -> tuple[Link, ...]:
    """Return the edges of two binary trees over all ranks, fed by rank 0 in turn.

    Every other rank has children in one of them at most, so that its edges can be coloured: in
    rounds of one colour a rank sends on one edge and receives on one at most.
    """
    parents = [_in_order_parents(size - 1), _other_parents(size - 1)]
    edges = [(tree, parent, child) for tree in (0, 1) for child, parent in parents[tree].items()]
    colour = _two_colours(edges)
    below: dict[tuple[int, int], list[Edge]] = {}
    for edge in edges:
        below.setdefault(edge[:2], []).append(edge)
    links = [Link(*edge, start) for tree in (0, 1) for edge, start in _starts(tree, below, colour)]
    return tuple(links)


def _starts(
    tree: int, below: Mapping[tuple[int, int], list[Edge]], colour: Mapping[Edge, int]
) -> Iterator[tuple[Edge, int]]:
    """Yield every edge of a tree, from its top, with the round of its first piece.

    That is the first round of the edge's colour after the one in which the parent gets the piece.
    """
    reached = [(0, -1)]
    for parent, arrival in reached:
        for edge in below.get((tree, parent), ()):
            start = arrival + 1 + (arrival + 1 + colour[edge]) % 2
            reached.append((edge[2], start))
            yield edge, start


def fill(size: int) -> int:
    """Return the rounds until the first piece of both trees has reached all ranks.

    They are at most 2 ceil(log2 p).
    """
    return max((link.start + 1 for link in two_trees(size)), default=0)


def _in_order_parents(num_nodes: int) -> dict[int, int]:
    """Return the parent of each node of the in-order binary tree on 1..num_nodes.

    Its top hangs on 0.
    """
    top = 1 << floor_log2(num_nodes) if num_nodes else 0
    parents = {top: 0} if num_nodes else {}
    for x in range(1, num_nodes + 1):
        lowest = x & -x
        above = (x ^ lowest) | (2 * lowest)
        if x != top:
            parents[x] = above if above <= num_nodes else x ^ lowest
    return parents


def _other_parents(num_nodes: int) -> dict[int, int]:
    """Return the same tree with its nodes mirrored, or shifted by one if they are odd in number."""

    def other(x: int) -> int:
        return 0 if x == 0 else x % num_nodes + 1 if num_nodes % 2 else num_nodes + 1 - x

    return {other(child): other(parent) for child, parent in _in_order_parents(num_nodes).items()}


def _two_colours(edges: Sequence[Edge]) -> dict[Edge, int]:
    """Return a colour, 0 or 1, for each edge; edges with the same sender or receiver differ."""
    at: dict[tuple[str, int], list[Edge]] = {}
    for edge in edges:
        at.setdefault(("sender", edge[1]), []).append(edge)
        at.setdefault(("receiver", edge[2]), []).append(edge)
    colour: dict[Edge, int] = {}
    for first in edges:
        waiting = [] if first in colour else [(first, 0)]
        while waiting:
            edge, value = waiting.pop()
            if edge not in colour:
                colour[edge] = value
                beside = at["sender", edge[1]] + at["receiver", edge[2]]
                waiting += [(other, 1 - value) for other in beside if other != edge]
    return colour
