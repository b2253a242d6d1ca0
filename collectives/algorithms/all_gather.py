"""All-gather: every rank's block to every rank."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms import reduce_scatter
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import Recv, Round, Send
from collectives.transform import dual


@algorithm(**costs_of("reduce_scatter", "ring"), source="Patarasuk and Yuan 2009")
def ring(rank: int, size: int) -> Iterator[Round]:
    """Every block travels once round the ring."""
    return dual(reduce_scatter.ring(rank, size), rank, combine=False)


@algorithm(
    **costs_of("reduce_scatter", "recursive_halving"),
    source="Thakur, Rabenseifner and Gropp 2005",
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Partners exchange all they hold; every round doubles it."""
    return dual(reduce_scatter.recursive_halving(rank, size), rank, combine=False)


@algorithm(
    rounds="q",
    messages="p * q",
    busiest="n * (p - 1) / p",
    total="(p - 1) * n",
    source="Bruck et al. 1997",
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """Rank r gathers the blocks r, r+1, ...: every round it fetches as many again, ending at p."""
    for distance in trees.doubling_distances(size):
        held = range(rank, rank + min(distance, size - distance))
        yield (
            Send((rank - distance) % size, [b % size for b in held]),
            Recv((rank + distance) % size, [(b + distance) % size for b in held]),
        )
