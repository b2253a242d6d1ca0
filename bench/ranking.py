"""Which algorithms to measure, and the tables and machine parameters that follow from the times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives import Topology
from collectives.selection.cost import Machine, price
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

    It is asked of the built-in machine, and so says the same on all ranks.
    """
    candidates = explain(collective, None, hosts.size, num_bytes, topology=hosts).candidates
    longest = HOPELESS * candidates[0].seconds
    return [candidate.label for candidate in candidates if candidate.seconds <= longest]


# Tables


def rows(collective: str, hosts: Topology, times: Times) -> tuple[Row, ...]:
    """The table of a collective.  Between two sizes measured the limit is their geometric mean."""
    limits = [math.isqrt(low * high) for low, high in pairwise(times)]
    best = [reachable(collective, each) for each in rankings(collective, hosts, times)]
    both = zip([*limits, math.inf], best, strict=True)
    return tuple(
        Row(max(limit for limit, _ in group), labels)
        for labels, group in groupby(both, key=lambda row: row[1])
    )


def rankings(collective: str, hosts: Topology, times: Times) -> list[list[str]]:
    """The algorithms at every size, best first.

    Among those that are as fast as the fastest not luck decides: first comes what the built-in
    rules name, then what is as fast at most sizes.
    """
    fast = {num_bytes: _fast(each) for num_bytes, each in times.items()}
    num_sizes = Counter(label for labels in fast.values() for label in labels)

    def ranked(num_bytes: int) -> list[str]:
        ruled = choose(collective, None, hosts.size, num_bytes, topology=hosts).label
        level, each = fast[num_bytes], times[num_bytes]
        level.sort(key=lambda label: (label != ruled, -num_sizes[label]))
        return level + sorted(set(each) - set(level), key=each.__getitem__)

    return list(map(ranked, times))


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


# The machine


class Samples(NamedTuple):
    """What was measured, one row each: what it costs at a rate of 1 each, and seconds."""

    costs: NDArray[np.float64]
    seconds: NDArray[np.float64]


def samples(hosts: Topology, times: Mapping[str, Times]) -> Samples:
    """Of every collective on the ranks of these hosts."""
    found = [
        (_costs(collective, label, hosts, num_bytes), seconds)
        for collective, by_size in times.items()
        for num_bytes, by_label in by_size.items()
        for label, seconds in by_label.items()
    ]
    return Samples(*map(np.array, zip(*found, strict=True)))


def _costs(collective: str, label: str, hosts: Topology, num_bytes: int) -> list[float]:
    """Start-ups, bytes through the busiest port, bytes combined."""
    choice = choose(collective, label, size := hosts.size, num_bytes, topology=hosts)
    units = (Machine(*row) for row in np.eye(3))
    return [price(choice.algorithm, size, num_bytes, unit, **choice.options) for unit in units]


def fitted(found: Samples, start: Machine) -> Machine:
    """The machine whose predictions are least wrong, by the squares of the relative errors.

    A rate that comes out negative is taken to be zero, and the others are fitted again.  One that
    the samples say nothing about stays as at the `start`.
    """
    relative = found.costs / found.seconds[:, None]
    is_free = relative.any(axis=0)
    rates, ones = np.where(is_free, 0.0, start), np.ones(len(relative))
    while True:
        rates[is_free] = np.linalg.lstsq(relative[:, is_free], ones, rcond=None)[0]
        if (rates >= 0).all():
            return Machine(*rates.tolist())
        is_free &= rates > 0
        rates = np.maximum(rates, 0)


def typical_error(found: Samples, machine: Machine) -> float:
    """The median of the relative errors."""
    return float(np.median(np.abs(found.costs @ np.array(machine) / found.seconds - 1)))
