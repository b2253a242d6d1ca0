"""Pure rank arithmetic that several algorithms share: distances, and the edges of trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from collectives.schedule import Block, Operation, Recv, Send


def ceil_log2(p: int) -> int:
    """Least q with 2**q >= p, for p >= 1."""
    return (p - 1).bit_length()


def floor_log2(p: int) -> int:
    """Greatest k with 2**k <= p, for p >= 1."""
    return p.bit_length() - 1


def halving_distances(p: int) -> Iterator[int]:
    """2**(q-1), ..., 2, 1 with q = ceil(log2 p): far partners first."""
    return (1 << k for k in reversed(range(ceil_log2(p))))


def doubling_distances(p: int) -> Iterator[int]:
    """1, 2, ..., 2**(q-1) with q = ceil(log2 p): near partners first."""
    return (1 << k for k in range(ceil_log2(p)))


class Edge(NamedTuple):
    """An edge of a tree; `subtree` holds the ranks that the child serves, itself included."""

    parent: int
    child: int
    subtree: range


Edges = tuple[Edge, ...]


def linear(rank: int, size: int, root: int) -> Iterator[Edges]:
    """The star: every rank is a child of the root, one per round; yields the edges at `rank`.

    Ranks above the root come first, from the top, then those below it from rank 0.  Run backwards
    the root meets its neighbours first, on both sides, so that it can combine in rank order.
    """
    for child in (*reversed(range(root + 1, size)), *range(root)):
        yield (Edge(root, child, range(child, child + 1)),) if rank in (root, child) else ()


def binomial(vrank: int, size: int) -> Iterator[Edges]:
    """The binomial tree on virtual ranks (root 0), far children first; yields the edges at `vrank`.

    The subtree below a child is the interval of ranks from the child on.
    """
    for distance in halving_distances(size):
        parent = vrank - vrank % (2 * distance)
        child = parent + distance
        is_mine = vrank in (parent, child) and child < size
        subtree = range(child, min(child + distance, size))
        yield (Edge(parent, child, subtree),) if is_mine else ()


def down(rank: int, edge: Edge, blocks: range | list[Block]) -> Operation:
    """What `rank`, at one end of the edge, does when `blocks` travel from parent to child."""
    return Send(edge.child, blocks) if rank == edge.parent else Recv(edge.parent, blocks)
