"""Scan: rank r gets the combination of the vectors of ranks 0 to r, always in rank order."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms.registry import algorithm
from collectives.schedule import RecvReduce, Round, Send, trees


@algorithm(
    rounds="p - 1",
    messages="p - 1",
    max_bytes_per_rank="n",
    total_bytes="(p - 1) * n",
    critical_bytes="(p - 1) * n",
    reduction_bytes="n",
    scratch_bytes="0",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for few ranks, or for large vectors: a rank sends its result once.",
)
def linear(rank: int, size: int) -> Iterator[Round]:
    """Add each rank's part to what the previous rank sends, and forward the sum."""
    for number in range(size - 1):
        receives = [RecvReduce(rank - 1, [0], side="left")] * (rank == number + 1)
        yield (*receives, *([Send(rank + 1, [0])] * (rank == number)))


@algorithm(
    rounds="q",
    messages="p * q - 2**q + 1",
    max_bytes_per_rank="q * n",
    total_bytes="(p * q - 2**q + 1) * n",
    reduction_bytes="q * n",
    scratch_bytes="n",
    is_ordered=True,
    source="Hillis and Steele 1986",
    use="Use it for short vectors on many ranks: no algorithm takes fewer rounds.",
)
def doubling(rank: int, size: int) -> Iterator[Round]:
    """Double the number of ranks in the partial result in every round."""
    for distance in trees.powers(size):
        receives = [RecvReduce(rank - distance, [0], side="left")] * (rank >= distance)
        yield (*receives, *([Send(rank + distance, [0])] * (rank + distance < size)))
