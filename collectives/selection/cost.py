"""The cost of calls: predicted times on a machine, and lower bounds for all algorithms.

For the bounds a rank sends one message and receives one message at a time.  Each bound holds by
itself; it is not always possible to meet all bounds of a collective with one algorithm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from collectives.algorithms import Algorithm
from collectives.programs import Program, compile_call
from collectives.schedule import SPECS, ceil_log2
from collectives.selection.choice import Choice, even_parts
from collectives.simulation import OTHER_HOST, SAME_HOST, Link, Machine, simulate

Size = int | Fraction

MAX_SIMULATED = 16  # ranks, up to which a call is priced by simulation

# Two ranks that share the memory of one computer, and hosts on a fast network.
BUILT_IN = Machine(
    links={
        SAME_HOST: (
            Link(4056, 1e-7, 0, 1e-7, 1e-7, 2e-10),
            Link(65536, 1e-7, 0, 2.4e-6, 1e-7, 9e-11, is_rendezvous=True),
            Link(
                overhead_seconds=1e-7,
                latency_seconds=2.5e-6,
                gap_seconds=1e-7,
                seconds_per_byte=8e-11,
                is_rendezvous=True,
            ),
        ),
        OTHER_HOST: (
            Link(65536, 1e-6, 0, 8e-6, 1e-6, 2e-10),
            Link(
                overhead_seconds=1e-6,
                latency_seconds=2e-5,
                gap_seconds=1e-6,
                seconds_per_byte=1e-10,
                is_rendezvous=True,
            ),
        ),
    },
    call_seconds=4e-7,
    copy_seconds_per_byte=2.2e-11,
    combine_seconds_per_byte=2.4e-11,
)


def price(
    programs: Sequence[Program], machine: Machine, hosts: Sequence[int] | None = None
) -> float:
    """Return the predicted seconds of one call, from its programs on all ranks.

    All ranks begin at the same time; the call ends when the last rank has ended.  `hosts` has the
    host of each rank; None if all are on the same host.
    """
    return simulate(programs, machine, hosts=hosts).seconds


def price_call(
    choice: Choice,
    size: int,
    num_bytes: int,
    machine: Machine | None,
    hosts: Sequence[int] | None = None,
) -> float:
    """Return the predicted seconds of a call of `num_bytes` bytes in even parts.

    `num_bytes` is the n of the formulas.  On a fitted machine the call is simulated, up to
    MAX_SIMULATED ranks; for more ranks that would take too long for a choice inside a call, and the
    formulas of the algorithm are used.  If no `machine` was fitted, formulas are used with rough
    costs.  All ranks compute the same number.
    """
    if machine is None or size > MAX_SIMULATED:
        return price_by_formulas(choice, size, num_bytes, machine or BUILT_IN, hosts)
    spec = choice.spec(even_parts(choice.algorithm.collective, size, num_bytes))
    return price([compile_call(spec, rank, size) for rank in range(size)], machine, hosts)


def price_by_formulas(
    choice: Choice, size: int, num_bytes: int, machine: Machine, hosts: Sequence[int] | None = None
) -> float:
    """Return the seconds of start-ups, bytes and bytes combined of the busiest rank.

    This is Hockney's model (1994; with combining, Thakur, Rabenseifner and Gropp 2005), with the
    costs of a message of the mean size between hosts, if there are several.  It ignores waiting and
    what happens at the same time.
    """
    of, options = choice.algorithm, dict(choice.options)
    startups, most_bytes, combined = (
        float(formula(p=size, n=num_bytes, **options))
        for formula in (of.startups, of.max_bytes_per_rank, of.reduction_bytes)
    )
    name = SAME_HOST if hosts is None or len(set(hosts)) == 1 else OTHER_HOST
    message_bytes = most_bytes / startups if startups else 0.0
    seconds = startups * machine.link(name, message_bytes).seconds(message_bytes)
    return machine.call_seconds + seconds + machine.combine_seconds_per_byte * combined


class Bound(NamedTuple):
    """The least rounds, and the least bytes that some rank must send or receive, and combine."""

    rounds: int
    bytes: Size
    work: Size


def lower_bound(collective: str, p: int, n: int, pieces: int = 1) -> Bound:
    """Return bounds for `p` ranks and a vector of `n` bytes.

    n is the size of the whole vector; for scatter and gather the size of the root's buffer, for
    all-gather of the result, for all-to-all of one rank's input.  A broadcast or reduce cuts it
    into `pieces`, each in a message of its own.

    Rounds: the data of one rank can reach two ranks in one round and four in two (Bar-Noy and
    Kipnis 1994; N pieces: Traff 2024).  Bytes: in a broadcast, all n bytes must reach every rank
    and leave the root, and in a reduce the reverse; in a scatter, all except the root's own part;
    in an all-reduce twice as many as in a scatter (Patarasuk and Yuan 2009).  Work: p vectors need
    p - 1 combinations, and some rank makes at least a p-th of them (Chan et al. 2007).

    Raises
    ------
    ValueError
        For an unknown collective, or for less than one rank or piece.
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
    """Return the bounds that the algorithm meets exactly at all `sizes`: "rounds", "bytes", "work".

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
