"""Which algorithms to measure, and the tables that follow from the times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

from collectives import Topology, algorithms
from collectives.selection.decisions import Row
from collectives.selection.explanation import explain
from collectives.selection.labels import NamedAlgorithm, parse_label
from collectives.selection.select import choose

Times = Mapping[int, Mapping[str, float]]  # n in bytes, growing -> algorithm -> seconds per call

HOPELESS = 4  # times the least predicted time: who needs more is not measured
LEVEL = 1.1  # times the least time: who needs no more is as fast
SIZES = range(1, 130)  # numbers of ranks that stand for all


def promising(collective: str, hosts: Topology, num_bytes: int) -> list[str]:
    """The algorithms that can run, without those that the cost model finds hopeless.

    No machine is asked that was fitted: a wrong one would hide what is fast.
    """
    candidates = explain(collective, None, hosts.size, num_bytes, topology=hosts).candidates
    longest = HOPELESS * candidates[0].seconds
    return [candidate.label for candidate in candidates if candidate.seconds <= longest]


def for_devices(collective: str, hosts: Topology, num_bytes: int) -> list[str]:
    """The algorithms that ranks can run which read each other's arrays on devices.

    The choice of the built-in rules, which may have options, and all that do not cut messages into
    segments: every segment is one more call of the driver.
    """
    every = {name: algorithms.info(collective, name) for name in algorithms.names(collective)}
    names = [
        name
        for name, algorithm in every.items()
        if algorithm.serves(hosts.size) and "segments" not in algorithm.options
    ]
    ruled = by_rule(collective, hosts, num_bytes, on_device=True)
    return list(dict.fromkeys([*names, ruled]))


# Tables


def rows(
    collective: str, hosts: Topology, times: Times, *, on_device: bool = False
) -> tuple[Row, ...]:
    """The table of a collective.  Between two sizes measured the limit is their geometric mean."""
    limits = [math.isqrt(low * high) for low, high in pairwise(times)]
    found = rankings(collective, hosts, times, on_device=on_device)
    best = [reachable(collective, each) for each in found]
    both = zip([*limits, math.inf], best, strict=True)
    return tuple(
        Row(max(limit for limit, _ in group), labels)
        for labels, group in groupby(both, key=lambda row: row[1])
    )


def rankings(
    collective: str, hosts: Topology, times: Times, *, on_device: bool = False
) -> list[list[str]]:
    """The algorithms at every size, best first.

    Among those that are as fast as the fastest not luck decides: first comes what the built-in
    rules name, then what is as fast at most sizes.
    """
    fast = {num_bytes: _fast(each) for num_bytes, each in times.items()}
    num_sizes = Counter(label for labels in fast.values() for label in labels)

    def ranked(num_bytes: int) -> list[str]:
        ruled = by_rule(collective, hosts, num_bytes, on_device=on_device)
        level, each = fast[num_bytes], times[num_bytes]
        level.sort(key=lambda label: (label != ruled, -num_sizes[label]))
        return level + sorted(set(each) - set(level), key=each.__getitem__)

    return list(map(ranked, times))


def by_rule(collective: str, hosts: Topology, num_bytes: int, *, on_device: bool) -> str:
    """The choice of the built-in rules."""
    call = collective, None, hosts.size, num_bytes
    return choose(*call, topology=hosts, on_device=on_device).label


def _fast(times: Mapping[str, float]) -> list[str]:
    """Those as fast as the fastest."""
    most = LEVEL * min(times.values())
    return [label for label, seconds in times.items() if seconds <= most]


def reachable(collective: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Without those that come after one that can run wherever they can."""
    kept: list[NamedAlgorithm] = []
    for label in labels:
        other = parse_label(collective, label)
        if not any(_covers(better, other) for better in kept):
            kept.append(other)
    return tuple(each.label for each in kept)


def _covers(better: NamedAlgorithm, other: NamedAlgorithm) -> bool:
    """Whether the one can run wherever the other can."""
    keeps_order = better.algorithm.is_ordered or not other.algorithm.is_ordered
    return keeps_order and all(better.serves(p) for p in SIZES if other.serves(p))
