"""The cost of an algorithm: its predicted time on a machine, and lower bounds for all algorithms.

In the model a rank sends one message and receives one message at a time.  Each bound holds by
itself; it is not always possible to meet all bounds of a collective with one algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from collectives.algorithms import Algorithm, Option
from collectives.schedule import SPECS, ceil_log2

Size = int | Fraction


class Machine(NamedTuple):
    """A machine and its MPI, in three numbers.

    `alpha`: seconds for the start-up of a message.  `beta`: seconds per byte that the busiest rank
    sends or receives.  `gamma`: seconds per byte combined.  The defaults describe two ranks that
    share the memory of one computer.
    """

    alpha: float = 2e-6
    beta: float = 1.7e-10
    gamma: float = 8e-11


def price(algorithm: Algorithm, p: int, n: int, machine: Machine, **options: Option) -> float:
    """The predicted seconds of the algorithm on `p` ranks and `n` bytes, by Hockney's model.

    alpha * start-ups + beta * bytes + gamma * bytes combined (Hockney 1994; with combining, Thakur,
    Rabenseifner and Gropp 2005).  The model ignores caches, shared links and waiting.  It separates
    slow algorithms from promising ones, but cannot rank algorithms of similar speed.
    """
    startups, num_bytes, num_combined = (
        float(formula(p=p, n=n, **options))
        for formula in (algorithm.startups, algorithm.max_bytes_per_rank, algorithm.reduction_bytes)
    )
    return machine.alpha * startups + machine.beta * num_bytes + machine.gamma * num_combined


class Bound(NamedTuple):
    """The least rounds, and the least bytes that some rank must send or receive, and combine."""

    rounds: int
    bytes: Size
    work: Size


def lower_bound(collective: str, p: int, n: int, pieces: int = 1) -> Bound:
    """Bounds for `p` ranks and a vector of `n` bytes.

    n is the size of the whole vector; for scatter and gather that of the root's buffer, for
    all-gather that of the result, for all-to-all that of one rank's input.  `pieces`: into how many
    a broadcast or reduce cuts it, each in a message of its own.

    Rounds: the data of one rank can reach two ranks in one round and four in two (Bar-Noy and
    Kipnis 1994; N pieces: Traff 2024).  Bytes: in a broadcast, all n bytes must reach every rank
    and leave the root, and in a reduce the reverse; in a scatter, all except the root's own part;
    in an all-reduce twice as many as in a scatter (Patarasuk and Yuan 2009).  Work: p vectors need
    p - 1 combinations, and some rank makes at least a p-th of them (Chan et al. 2007).

    Raises ValueError for an unknown collective, or for less than one rank or piece.
    """
    if collective not in SPECS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(SPECS)}")
    if p < 1 or pieces < 1:
        raise ValueError(f"there is no bound for {p} ranks and {pieces} pieces")
    if p == 1:
        return Bound(0, 0, 0)
    whole, part = Fraction(n), Fraction(n * (p - 1), p)
    num_bytes = {"barrier": Fraction(0), "all_reduce": 2 * part}.get(
        collective, whole if SPECS[collective].has_pieces else part
    )
    num_combined = p - 2 if collective == "exscan" else p - 1
    work = Fraction(n * num_combined, p) if SPECS[collective].is_reduction else Fraction(0)
    streams = collective in ("broadcast", "reduce")
    return Bound(ceil_log2(p) + (pieces - 1) * streams, num_bytes, work)


def bounds_met(algorithm: Algorithm, sizes: Iterable[int] = range(1, 65)) -> list[str]:
    """The bounds ("rounds", "bytes", "work") that the algorithm meets exactly at all `sizes`.

    Sizes that it does not serve are skipped, and it has its default options, with equally many
    ranks on each host.  A round in which a rank sends several messages counts several times.
    """
    met = {"rounds": "startups", "bytes": "max_bytes_per_rank", "work": "reduction_bytes"}
    if not SPECS[algorithm.collective].is_reduction:
        del met["work"]
    if algorithm.collective == "barrier":
        del met["bytes"]
    for p in filter(algorithm.serves, sizes):
        if not algorithm.hosts(p).is_even:
            continue
        n = 5040 * p
        bound = lower_bound(algorithm.collective, p, n)
        met = {
            name: formula
            for name, formula in met.items()
            if getattr(algorithm, formula)(p=p, n=n) == getattr(bound, name)
        }
    return list(met)
