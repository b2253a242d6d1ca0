"""Reduce-scatter: block r of the combination of every rank's vector, at rank r."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms.registry import algorithm
from collectives.schedule import RecvReduce, Round, Send


@algorithm(
    rounds="p - 1",
    messages="p * (p - 1)",
    busiest="n * (p - 1) / p",
    total="(p - 1) * n",
    source="Patarasuk and Yuan 2009",
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Every block travels once round the ring and picks up each rank's contribution."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(1, size):
        yield Send(right, [(rank - k) % size]), RecvReduce(left, [(rank - k - 1) % size])


@algorithm(
    rounds="q",
    messages="p * q",
    busiest="n * (p - 1) / p",
    total="(p - 1) * n",
    ranks="power of two",
    source="Thakur, Rabenseifner and Gropp 2005",
)
def recursive_halving(rank: int, size: int) -> Iterator[Round]:
    """Partners split what is left between them: each gives away the half that the other keeps."""
    for distance in trees.halving_distances(size):
        partner = rank ^ distance
        mine, theirs = (r - r % distance for r in (rank, partner))
        yield (
            Send(partner, range(theirs, theirs + distance)),
            RecvReduce(partner, range(mine, mine + distance)),
        )
