"""Scatter: block r of the root's buffer to rank r."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms.registry import algorithm
from collectives.schedule import Round
from collectives.transform import rooted


@algorithm(
    rounds="p - 1",
    messages="p - 1",
    busiest="n * (p - 1) / p",
    total="n * (p - 1) / p",
    source="Chan et al. 2007",
)
def linear(rank: int, size: int, root: int) -> Iterator[Round]:
    """The root sends every other rank its block, one after the other."""
    for edges in trees.linear(rank, size, root):
        yield tuple(trees.down(rank, edge, edge.subtree) for edge in edges)


@algorithm(
    rounds="q",
    messages="p - 1",
    busiest="n * (p - 1) / p",
    total="n / p * sum(popcount(i) for i in range(p))",
    source="Chan et al. 2007",
)
@rooted(blocks_are_ranks=True)
def binomial(rank: int, size: int) -> Iterator[Round]:
    """Each rank hands the far half of what it holds to the rank in the middle."""
    for edges in trees.binomial(rank, size):
        yield tuple(trees.down(rank, edge, edge.subtree) for edge in edges)
