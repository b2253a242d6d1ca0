"""Arithmetic with ranks that several algorithms share: logarithms, distances, trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from collectives.schedule.layout import even_counts
from collectives.schedule.rounds import Block, Operation, Recv, Round, Send


def ceil_log2(p: int) -> int:
    """Return the least q with 2**q >= p, for p >= 1."""
    return (p - 1).bit_length()


def floor_log2(p: int) -> int:
    """Return the greatest k with 2**k <= p, for p >= 1."""
    return p.bit_length() - 1


def ceil_log(p: int, radix: int) -> int:
    """Return the least q with radix**q >= p, for p >= 1 and radix >= 2."""
    q = 0
    while radix**q < p:
        q += 1
    return q


def power_within(p: int, radix: int) -> int:
    """Return the greatest power of `radix` that is at most p, for p >= 1 and radix >= 2."""
    power = 1
    while power * radix <= p:
        power *= radix
    return power


def num_children(p: int, radix: int) -> int:
    """Return the number of children of the root of a k-nomial tree of p ranks."""
    return sum(min(radix - 1, (p - 1) // radix**k) for k in range(ceil_log(p, radix)))


def num_hops(p: int, radix: int) -> int:
    """Return the number of nonzero digits, in base `radix`, of all numbers below p.

    That is the number of edges between the root of a k-nomial tree and each of its p nodes.
    """
    num, unit = 0, 1
    while unit < p:
        cycles, rest = divmod(p, radix * unit)
        num += cycles * (radix - 1) * unit + max(0, rest - unit)
        unit *= radix
    return num


def exscan_turn(p: int) -> int:
    """Return the least j with (2**j - 1) * 2**(q - j) >= p - 1.

    So many rounds of a minimal exscan add one.
    """
    q = ceil_log2(p)
    return next(j for j in range(q + 1) if (2**j - 1) * 2 ** (q - j) >= p - 1)


def powers(p: int, radix: int = 2) -> list[int]:
    """Return 1, radix, radix**2, ... below p."""
    return [radix**k for k in range(ceil_log(p, radix))]


def groups(size: int, num_groups: int) -> list[range]:
    """Return consecutive ranks in groups whose sizes differ by one at most, larger groups first."""
    ranges, start = [], 0
    for length in even_counts(size, num_groups):
        ranges.append(range(start, start + length))
        start += length
    return ranges


# Trees in which a message serves the whole subtree of the rank that gets it


class Edge(NamedTuple):
    """An edge of a tree; `subtree` holds the ranks that the child serves, itself included."""

    parent: int
    child: int
    subtree: Sequence[int]


Edges = tuple[Edge, ...]


def linear(rank: int, size: int, root: int, outstanding: int = 1) -> Iterator[Edges]:
    """Yield the edges at `rank` of the star, with `outstanding` children in each round.

    Children above the root come first, from the top, then those below it from rank 0.  Run
    backwards the root meets its neighbours first, on both sides, so that it can combine in rank
    order.
    """
    children = [*reversed(range(root + 1, size)), *range(root)]
    for start in range(0, len(children), outstanding):
        edges = (Edge(root, c, range(c, c + 1)) for c in children[start : start + outstanding])
        yield tuple(edge for edge in edges if rank in (root, edge.child))


def knomial(vrank: int, size: int, radix: int) -> Iterator[Edges]:
    """Yield the edges at `vrank` of the k-nomial tree on virtual ranks (root 0).

    Far children come first.  In each round a rank has up to radix-1 children.  The subtree below a
    child is the interval of ranks from the child on.
    """
    for distance in reversed(powers(size, radix)):
        parent = vrank - vrank % (radix * distance)
        children = range(parent + distance, min(parent + radix * distance, size), distance)
        yield tuple(
            Edge(parent, child, range(child, min(child + distance, size)))
            for child in children
            if vrank in (parent, child)
        )


class End(Protocol):
    """An edge or another connection from a parent to a child."""

    @property
    def parent(self) -> int: ...
    @property
    def child(self) -> int: ...


def down(rank: int, edge: End, blocks: Sequence[Block]) -> Operation:
    """Return the operation of `rank`, at one end of the edge, that sends `blocks` down the edge."""
    return Send(edge.child, blocks) if rank == edge.parent else Recv(edge.parent, blocks)


# Trees in which pieces are pipelined


class Stream(NamedTuple):
    """Pieces that are sent over an edge: piece k in round `start + k * period`."""

    parent: int
    child: int
    start: int
    pieces: Sequence[Block]


def pipelined(
    rank: int, streams: Sequence[Stream], period: int, num_rounds: int
) -> Iterator[Round]:
    """Yield the rounds of a rank at the ends of these streams."""
    for number in range(num_rounds):
        passing = []
        for stream in streams:
            k, rest = divmod(number - stream.start, period)
            if rest == 0 and 0 <= k < len(stream.pieces):
                passing.append(down(rank, stream, [stream.pieces[k]]))
        yield tuple(passing)


def depth(num_nodes: int) -> int:
    """Return the rounds until the first piece has reached the last node of a binary tree.

    The tree is one-ported.  The children of node x (counted from 1) are 2x and 2x+1; they get the
    piece one and two rounds after x.
    """
    return max((x.bit_length() + x.bit_count() - 2 for x in range(1, num_nodes + 1)), default=0)


def binary(node: int, num_nodes: int) -> tuple[int, int, list[int]]:
    """Return the parent, the round of the first piece, and the children of a node of that tree.

    Nodes are counted from 0.  The round is relative to the one in which the root itself gets the
    piece: 0, whatever it is.
    """
    x = node + 1
    children = [child for child in (2 * x - 1, 2 * x) if child < num_nodes]
    return x // 2 - 1, x.bit_length() + x.bit_count() - 2, children


def in_order(rank: int, size: int, root: int) -> tuple[int, int, list[int]]:
    """Return the parent, the round of the first piece, and the children in a binary tree.

    The tree is in rank order.  The ranks below and above a node within its interval hang on its
    left and right, and the more numerous are served first.  The root may be any rank, all others
    halve their intervals.
    """
    low, high, parent, node, time = 0, size, root, root, 0
    while True:
        both = sorted((range(low, node), range(node + 1, high)), key=len, reverse=True)
        sides = [side for side in both if side]
        children = [side[len(side) // 2] for side in sides]
        if node == rank:
            return parent, time, children
        number = next(i for i, side in enumerate(sides) if rank in side)
        low, high = sides[number].start, sides[number].stop
        parent, node, time = node, children[number], time + 1 + number
