"""All-to-all: block (s, d) from rank s to rank d, for every pair of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from collectives import trees
from collectives.algorithms.registry import algorithm
from collectives.schedule import Block, Recv, Round, Send


@algorithm(
    rounds="min(1, p - 1)",
    messages="p * (p - 1)",
    busiest="n * (p - 1) / p",
    total="n * (p - 1)",
    source="Thakur, Rabenseifner and Gropp 2005",
)
def linear(rank: int, size: int) -> Iterator[Round]:
    """All messages at once, nearest partner first."""
    if size > 1:
        sends = (Send(d, [(rank, d)]) for d in ((rank + i) % size for i in range(1, size)))
        receives = (Recv(s, [(s, rank)]) for s in ((rank - i) % size for i in range(1, size)))
        yield (*receives, *sends)


@algorithm(
    rounds="p - 1",
    messages="p * (p - 1)",
    busiest="n * (p - 1) / p",
    total="n * (p - 1)",
    source="Thakur, Rabenseifner and Gropp 2005",
)
def pairwise(rank: int, size: int) -> Iterator[Round]:
    """One partner ahead and one behind in every round, one step further each time."""
    for distance in range(1, size):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield Send(ahead, [(rank, ahead)]), Recv(behind, [(behind, rank)])


@algorithm(
    rounds="q",
    messages="p * q",
    busiest="n / p * sum(popcount(i) for i in range(p))",
    total="n * sum(popcount(i) for i in range(p))",
    source="Bruck et al. 1997",
)
def bruck(rank: int, size: int) -> Iterator[Round]:
    """A block that has i ranks to go hops 2**k ahead in round k if bit k of i is set."""
    for distance in trees.doubling_distances(size):

        def travelling(holder: int, hop: int = distance) -> list[Block]:
            # A block with i to go that reached `holder` has made the hops of i's lower bits.
            sources = ((i, (holder - i % hop) % size) for i in range(size) if i & hop)
            return [(source, (source + i) % size) for i, source in sources]

        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield Send(ahead, travelling(rank)), Recv(behind, travelling(behind))
