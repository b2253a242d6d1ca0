"""Barrier: no rank leaves before every rank has entered.  An all-gather of empty blocks."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import all_gather
from collectives.algorithms.registry import algorithm, costs_of
from collectives.schedule import Round

_NO_BYTES = {
    "max_bytes_per_rank": "0",
    "critical_bytes": "0",
    "total_bytes": "0",
    "scratch_bytes": "0",
}


@algorithm(
    **costs_of(all_gather.bruck) | _NO_BYTES,
    source="Hensgen, Finkel and Manber 1988",
    use="Use it on any number of ranks: no algorithm takes fewer rounds.",
)
def dissemination(rank: int, size: int, radix: int = 2) -> Iterator[Round]:
    """Notify, in round k, the rank 2**k behind this one of all arrivals that this rank knows.

    With a greater radix, notify the ranks j * radix**k behind it, for j from 1 to radix - 1.
    """
    return all_gather.bruck(rank, size, radix)


@algorithm(
    **costs_of(all_gather.gather_broadcast) | _NO_BYTES,
    source="Mellor-Crummey and Scott 1991",
    use="Use it where fewer messages count more than fewer rounds.",
)
def tree(rank: int, size: int) -> Iterator[Round]:
    """Gather arrivals on rank 0 by a binomial tree, and release all ranks by a broadcast."""
    return all_gather.gather_broadcast(rank, size)
