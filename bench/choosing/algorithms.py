"""Which algorithms are fastest here: those that are measured, their times, and the tables."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from bench.choosing.sampling import Steps
from bench.commands import world
from bench.contenders.by_name import contender
from bench.contenders.contender import Contender
from bench.contenders.side_by_side import outcomes
from bench.timing.interleaved import Effort
from bench.workloads import sizes
from bench.workloads.algorithms import check_schedule, every_algorithm
from bench.workloads.collective import Buffers, Case, in_place, out_of_place
from bench.workloads.from_options import cases
from collectives import Communicator, Topology, algorithms
from collectives.console import Number, Table
from collectives.selection.decisions import Row
from collectives.selection.explanation import explain
from collectives.selection.labels import NamedAlgorithm, parse_label
from collectives.selection.select import choose

Times = Mapping[int, Mapping[str, float]]  # n in bytes, growing -> algorithm -> seconds per call

WARMUP, SAMPLES = 3, 50
HOPELESS = 4  # times the least predicted time: who needs more is not measured
LEVEL = 1.1  # times the least time: who needs no more is as fast
SIZES = range(1, 130)  # numbers of ranks that stand for all


class AlgorithmMeasurement:
    """Measures the algorithms of every collective at every size.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    options : Namespace
        The options of the command.

    Raises
    ------
    TypeError, ValueError
        If the options do not fit.
    ScheduleError
        If an algorithm that was registered is wrong on so many ranks.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.hosts, self.on_device = comm, comm.topology, options.device != "cpu"
        if self.on_device and self.hosts.num_hosts > 1:
            raise ValueError(
                "--device cuda: ranks on several hosts send messages; what was "
                "measured in host memory chooses their algorithms"
            )
        names = options.collectives or algorithms.collectives()
        if self.on_device:
            names = [name for name in names if name != "barrier"]
        if not names:
            raise ValueError("--device cuda: a barrier has no arrays")
        options.dtypes = [options.dtype]
        self.backend = world.backend(comm, options.device)
        self.cases = {name: cases(comm, name, options, self.backend) for name in names}
        for case in (case for its_cases in self.cases.values() for case in its_cases):
            for name in every_algorithm(case.collective, case.size):
                if not algorithms.info(case.collective, name).is_built_in:
                    check_schedule(case, name)

    @property
    def num_steps(self) -> int:
        """The number of cases."""
        return sum(map(len, self.cases.values()))

    def times(self, steps: Steps) -> Iterator[tuple[str, Times]]:
        """Yield the times of each collective, the same on all ranks."""
        for collective, its_cases in self.cases.items():
            yield collective, {case.num_bytes: self._times_of(case, steps) for case in its_cases}

    def _times_of(self, case: Case, steps: Steps) -> dict[str, float]:
        """Return the seconds of every promising algorithm."""
        share = steps.begin(f"{case.collective}, {sizes.text(case.num_bytes)}")
        which = for_devices if self.on_device else promising
        names = which(case.collective, self.hosts, case.num_bytes)
        buffers, made = contenders(self.comm, case, names)
        results = outcomes(case, buffers, made, Effort(WARMUP, SAMPLES, share), checks=0)
        return {name: result.seconds for name, result in zip(names, results, strict=True)}

    def rows(self, collective: str, times: Times) -> tuple[Row, ...]:
        """Return the rows of a collective for the file."""
        return rows(collective, self.hosts, times, on_device=self.on_device)

    def table(self, collective: str, times: Times) -> Table:
        """Return what is best at each size, and how much slower the built-in rule's choice is."""
        table = Table(
            Number("bytes", ",d"),
            "best",
            Number("us", ".2f"),
            "built-in",
            Number("slowdown", ".2f"),
        )
        ranked = rankings(collective, self.hosts, times, on_device=self.on_device)
        for (num_bytes, seconds), (best, *_) in zip(times.items(), ranked, strict=True):
            rule = by_rule(collective, self.hosts, num_bytes, on_device=self.on_device)
            slowdown = seconds[rule] / seconds[best] if rule in seconds else None
            table.add(num_bytes, best, seconds[best] * 1e6, rule, slowdown)
        return table

    def left_out(self, collective: str, times: Times) -> list[str]:
        """Return the algorithms that were hopeless at some size; on devices none is."""
        names = [] if self.on_device else every_algorithm(collective, self.comm.size)
        return [name for name in names if not all(name in seconds for seconds in times.values())]


def contenders(
    comm: Communicator, case: Case, names: Sequence[str]
) -> tuple[Buffers, list[Contender]]:
    """Return plans of these algorithms, out of place where there is such a form."""
    buffers = out_of_place(case) or in_place(case)
    assert buffers is not None, "every collective has one form or the other"
    return buffers, [contender(comm, case, buffers, name) for name in names]


def promising(collective: str, hosts: Topology, num_bytes: int) -> list[str]:
    """Return the algorithms that can run, without those that the cost model finds hopeless.

    No machine is asked that was fitted: a wrong one would hide what is fast.
    """
    candidates = explain(collective, None, hosts.size, num_bytes, topology=hosts).candidates
    longest = HOPELESS * candidates[0].seconds
    return [candidate.label for candidate in candidates if candidate.seconds <= longest]


def for_devices(collective: str, hosts: Topology, num_bytes: int) -> list[str]:
    """Return the algorithms for ranks that read each other's arrays on devices.

    They are the choice of the built-in rules, which may have options, and all that do not cut
    messages into segments: every segment is one more call of the driver.
    """
    every = {name: algorithms.info(collective, name) for name in algorithms.names(collective)}
    names = [
        name
        for name, algorithm in every.items()
        if algorithm.serves(hosts.size) and "segments" not in algorithm.options
    ]
    ruled = by_rule(collective, hosts, num_bytes, on_device=True)
    return list(dict.fromkeys([*names, ruled]))


def rows(
    collective: str, hosts: Topology, times: Times, *, on_device: bool = False
) -> tuple[Row, ...]:
    """Return the rows of a collective; they end at the geometric means of neighbouring sizes."""
    limits = [math.isqrt(low * high) for low, high in pairwise(times)]
    ranked = rankings(collective, hosts, times, on_device=on_device)
    best = [reachable(collective, labels) for labels in ranked]
    both = zip([*limits, math.inf], best, strict=True)
    return tuple(
        Row(max(limit for limit, _ in group), labels)
        for labels, group in groupby(both, key=lambda row: row[1])
    )


def rankings(
    collective: str, hosts: Topology, times: Times, *, on_device: bool = False
) -> list[list[str]]:
    """Return the algorithms at every size, best first.

    Among those that are as fast as the fastest not luck decides: first comes what the built-in
    rules name, then what is as fast at most sizes.
    """
    fast = {num_bytes: _fast(seconds) for num_bytes, seconds in times.items()}
    num_sizes = Counter(label for labels in fast.values() for label in labels)

    def ranked(num_bytes: int) -> list[str]:
        ruled = by_rule(collective, hosts, num_bytes, on_device=on_device)
        level, seconds = fast[num_bytes], times[num_bytes]
        level.sort(key=lambda label: (label != ruled, -num_sizes[label]))
        return level + sorted(set(seconds) - set(level), key=seconds.__getitem__)

    return list(map(ranked, times))


def by_rule(collective: str, hosts: Topology, num_bytes: int, *, on_device: bool) -> str:
    """Return the choice of the built-in rules."""
    call = collective, None, hosts.size, num_bytes
    return choose(*call, topology=hosts, on_device=on_device).label


def _fast(times: Mapping[str, float]) -> list[str]:
    """Return the algorithms that are as fast as the fastest."""
    most = LEVEL * min(times.values())
    return [label for label, seconds in times.items() if seconds <= most]


def reachable(collective: str, labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels without those that come after one that can run wherever they can."""
    kept: list[NamedAlgorithm] = []
    for label in labels:
        other = parse_label(collective, label)
        if not any(_covers(better, other) for better in kept):
            kept.append(other)
    return tuple(named.label for named in kept)


def _covers(better: NamedAlgorithm, other: NamedAlgorithm) -> bool:
    """Return whether the one can run wherever the other can."""
    keeps_order = better.algorithm.is_ordered or not other.algorithm.is_ordered
    return keeps_order and all(better.serves(p) for p in SIZES if other.serves(p))
