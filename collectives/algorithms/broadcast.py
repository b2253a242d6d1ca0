"""Broadcast: the root's vector to every rank.  The vector is cut into pieces 0, 1, ..."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms.registry import algorithm
from collectives.schedule import Recv, Round, Send
from collectives.transform import rooted


@algorithm(
    rounds="p - 1",
    messages="p - 1",
    busiest="(p - 1) * n",
    total="(p - 1) * n",
    source="Chan et al. 2007",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root sends to every other rank, one after the other."""
    for edges in trees.linear(rank, size, root):
        yield tuple(trees.down(rank, edge, [0]) for edge in edges)


@algorithm(
    rounds="q",
    messages="p - 1",
    busiest="q * n",
    total="(p - 1) * n",
    source="Thakur, Rabenseifner and Gropp 2005",
)
@rooted(blocks_are_ranks=False)
def binomial(rank: int, size: int) -> Iterator[Round]:
    """Every round doubles the number of ranks that have the vector."""
    for edges in trees.binomial(rank, size):
        yield tuple(trees.down(rank, edge, [0]) for edge in edges)


@algorithm(
    rounds="(p - 2 + N) * (p > 1)",
    messages="(p - 1) * N",
    busiest="n * (p > 1)",
    total="(p - 1) * n",
    pieces="N",
    options={"segments": 1},
    source="Chan et al. 2007",
)
@rooted(blocks_are_ranks=False)
def chain(rank: int, size: int, segments: int = 1) -> Iterator[Round]:
    """The pieces follow one another along the line of ranks; each rank passes on what it got."""
    for k in range(size - 2 + segments if size > 1 else 0):
        arriving, leaving = k - rank + 1, k - rank
        receives = rank > 0 and 0 <= arriving < segments
        sends = rank < size - 1 and 0 <= leaving < segments
        yield (
            *([Recv(rank - 1, [arriving])] if receives else []),
            *([Send(rank + 1, [leaving])] if sends else []),
        )
