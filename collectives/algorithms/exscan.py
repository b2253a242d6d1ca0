"""Exscan: rank r gets the combination of the vectors of ranks 0 to r-1; rank 0 gets nothing."""

from __future__ import annotations

from collections.abc import Iterator

from collectives.algorithms import scan
from collectives.algorithms.registry import algorithm, costs_of
from collectives.algorithms.windows import OTHERS, windows
from collectives.schedule import Copy, CopyReduce, Recv, Round, Send, trees


@algorithm(
    **costs_of(scan.linear),
    reduction_bytes="n * (p > 2)",
    scratch_bytes="n",
    is_ordered=True,
    source="Thakur, Rabenseifner and Gropp 2005",
    use="Use it for few ranks, or for large vectors: a rank sends its result once.",
)
def linear(rank: int, size: int) -> Iterator[Round]:
    """Keep what the previous rank sends, and forward it with the own part added."""
    for number in range(size - 1):
        if rank == number + 1 < size - 1:
            yield Recv(rank - 1, [0], into=[OTHERS]), CopyReduce([OTHERS], [0])
        elif rank == number + 1:
            yield (Recv(rank - 1, [0]),)
        elif rank == number > 0:
            yield Send(rank + 1, [0]), Copy([OTHERS], [0])
        else:
            yield (Send(rank + 1, [0]),) if rank == number else ()


@algorithm(
    rounds="1 + log(p - 1, 2)",
    messages="p - 1 + sum(p - 1 - 2**i for i in range(log(p - 1, 2)))",
    max_bytes_per_rank="n * (1 + log(p - 1, 2))",
    total_bytes="n * (p - 1 + sum(p - 1 - 2**i for i in range(log(p - 1, 2))))",
    reduction_bytes="n * log(p - 1, 2)",
    scratch_bytes="2 * n",
    is_ordered=True,
    source="Hillis and Steele 1986",
    use="Use it where combining is expensive: it makes no more combinations than a scan of "
    "one rank less.",
)
def doubling(rank: int, size: int) -> Iterator[Round]:
    """Shift by one rank, then scan by doubling: no more combinations than needed."""
    return _on_a_line(rank, size, num_whole=1)


@algorithm(
    rounds="min(q, 2) + max(0, log(ceil((p - 1) / 3), 2))",
    messages="p - 1 + max(0, p - 2)"
    " + sum(p - 1 - 3 * 2**i for i in range(log(ceil((p - 1) / 3), 2)))",
    max_bytes_per_rank="n * (min(q, 2) + log(ceil((p - 1) / 3), 2))",
    total_bytes="n * (p - 1 + max(0, p - 2)"
    " + sum(p - 1 - 3 * 2**i for i in range(log(ceil((p - 1) / 3), 2))))",
    reduction_bytes="n * (2 * min(q, 2) - 2 + log(ceil((p - 1) / 3), 2))",
    scratch_bytes="2 * n",
    is_ordered=True,
    source="Traff 2025",
    use="Use it for short vectors on many ranks: it saves a round against doubling on most "
    "numbers of ranks.",
)
def one_two_three(rank: int, size: int) -> Iterator[Round]:
    """Combine at distances 1, 2, 3, 6, 12, ...; only the second round includes the own part."""
    return _on_a_line(rank, size, num_whole=2)


@algorithm(
    rounds="q",
    messages="sum(p - 2**i for i in range(turn(p)))"
    " + sum(max(0, p - 1 - (2**turn(p) - 1) * 2**i) for i in range(q - turn(p)))",
    max_bytes_per_rank="q * n",
    total_bytes="n * (sum(p - 2**i for i in range(turn(p)))"
    " + sum(max(0, p - 1 - (2**turn(p) - 1) * 2**i) for i in range(q - turn(p))))",
    reduction_bytes="n * (q + turn(p) - 2)",
    scratch_bytes="2 * n",
    is_ordered=True,
    source="Traff 2026",
    use="Use it for short vectors on many ranks: no algorithm takes fewer rounds.",
)
def min_round(rank: int, size: int) -> Iterator[Round]:
    """Combine in the fewest rounds possible.

    The own part is included only in the rounds that need it.
    """
    return _on_a_line(rank, size, num_whole=trees.exscan_turn(size))


def _on_a_line(rank: int, size: int, num_whole: int) -> Iterator[Round]:
    """Return the rounds of an exscan whose first `num_whole` rounds include the own part.

    A rank adds its own part by a second combination.  In these rounds the window of every rank
    doubles and grows by one; in the others it doubles.
    """
    num_whole = min(num_whole, trees.ceil_log2(size))
    plan, reach = [[True]] * num_whole, 2**num_whole - 1
    while reach < size - 1:
        plan.append([False])
        reach *= 2
    return windows(rank, size, plan, is_ring=False)
