"""All-reduce: the combination of every rank's vector, at every rank."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms import all_gather, broadcast, reduce, reduce_scatter
from collectives.algorithms.registry import algorithm
from collectives.schedule import Recv, RecvReduce, Round, Send


@algorithm(
    rounds="2 * (p - 1)",
    messages="2 * p * (p - 1)",
    busiest="2 * n * (p - 1) / p",
    total="2 * (p - 1) * n",
    pieces="p",
    source="Patarasuk and Yuan 2009",
)
def ring(rank: int, size: int) -> Iterator[Round]:
    """Reduce-scatter round a ring, then all-gather round it: the fewest bytes there can be."""
    yield from reduce_scatter.ring(rank, size)
    yield from all_gather.ring(rank, size)


@algorithm(
    rounds="2 * q",
    messages="2 * (p - 1)",
    busiest="q * n",
    total="2 * (p - 1) * n",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
)
def reduce_broadcast(rank: int, size: int) -> Iterator[Round]:
    """Binomial reduce to rank 0, then binomial broadcast from it."""
    yield from reduce.binomial(rank, size, 0)
    yield from broadcast.binomial(rank, size, 0)


@algorithm(
    rounds="k + 2 * (p != P)",
    messages="P * k + 2 * (p - P)",
    busiest="(k + (p != P)) * n",
    total="(P * k + 2 * (p - P)) * n",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
)
def recursive_doubling(rank: int, size: int) -> Iterator[Round]:
    """Partners exchange and combine whole vectors; every round doubles the ranks combined.

    When p is not a power of two, the first 2(p - P) ranks fold in pairs: the odd one hands its
    vector to the even one, sits out, and gets the result at the end.
    """
    num_odd = size - (1 << trees.floor_log2(size))
    is_folded, is_out = rank < 2 * num_odd, rank < 2 * num_odd and rank % 2 == 1
    if num_odd:
        to_even, from_odd = Send(rank - 1, [0]), RecvReduce(rank + 1, [0], side="right")
        yield (to_even if is_out else from_odd,) if is_folded else ()
    vrank = rank // 2 if is_folded else rank - num_odd
    for distance in trees.doubling_distances(size - num_odd):
        vpeer = vrank ^ distance
        peer = 2 * vpeer if vpeer < num_odd else vpeer + num_odd
        exchange = Send(peer, [0]), RecvReduce(peer, [0], "left" if peer < rank else "right")
        yield () if is_out else exchange
    if num_odd:
        yield (Recv(rank - 1, [0]) if is_out else Send(rank + 1, [0]),) if is_folded else ()
