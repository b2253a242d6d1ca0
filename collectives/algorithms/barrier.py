"""Barrier: no rank leaves before every rank has entered.  An all-gather of empty blocks."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import all_gather
from collectives.algorithms.registry import algorithm
from collectives.schedule import Round


@algorithm(
    rounds="q",
    messages="p * q",
    busiest="0",
    total="0",
    source="Hensgen, Finkel and Manber 1988",
)
def dissemination(rank: int, size: int) -> Iterator[Round]:
    """In round k every rank notifies the one 2**k behind it of all the arrivals it knows of."""
    return all_gather.bruck(rank, size)
