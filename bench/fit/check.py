"""The held-out check: calls that the fit has not seen, measured and predicted.

Every algorithm of every collective is measured on 2 ranks, on 3, and so on, at sizes at which
nothing was fitted; the fit has seen no collective at all.  The calls follow each other without
waiting, and so do the simulated ones.  Before each, every rank writes its input, as programs do.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from bench import sizes
from bench.case import JOINS, SPLITS, Case, in_place, out_of_place
from bench.contenders import contender
from bench.fit.measuring import Run, in_turn, sampled, sleep_until_all, writer
from bench.fit.patterns import after_work, seconds_of_calls
from bench.perf import every_algorithm
from bench.ways import nothing
from collectives import Communicator, Topology, algorithms
from collectives.programs import compile_call
from collectives.selection import select
from collectives.selection.choice import even_parts
from collectives.simulation import OTHER_HOST, SAME_HOST, Machine

MEDIAN, TAIL, REGRET = 0.10, 0.25, 1.10  # the goals: errors, their 90th percentile, the pick
LARGEST_RANKS = 8
HELD_OUT = (24, 360, 1800, 12_000, 100_000, 700_000)  # bytes; no size of a fit
_DTYPE = np.dtype(np.float32)


class Held(NamedTuple):
    """A call that was measured: seconds, and those predicted."""

    collective: str
    label: str
    size: int
    num_bytes: int
    seconds: float
    predicted: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.predicted / self.seconds - 1)


def held_out(comm: Communicator, machine: Machine, options: argparse.Namespace) -> Iterator[Held]:
    """Measure and predict as told.  All ranks call it; rank 0 has the results."""
    cases = [
        (size, collective, num_bytes)
        for size in range(2, min(comm.size, LARGEST_RANKS) + 1)
        for collective in options.collectives or algorithms.collectives()
        for num_bytes in (HELD_OUT if collective != "barrier" else (0,))
    ]
    end = time.perf_counter() + options.seconds
    groups = {size: comm.subgroup(range(size)) if comm.rank < size else None for size, *_ in cases}
    for number, (size, collective, num_bytes) in enumerate(cases):
        now = time.perf_counter()
        until = now + (end - now) / (len(cases) - number)
        if (group := groups[size]) is not None:
            yield from _measured(group, collective, num_bytes, machine, until, options.samples)
        sleep_until_all(MPI.COMM_WORLD)
    for group in filter(None, groups.values()):
        group.free()


def _measured(
    comm: Communicator,
    collective: str,
    num_bytes: int,
    machine: Machine,
    until: float,
    samples: int,
) -> list[Held]:
    """Every algorithm of a collective at one size."""
    blocks = comm.size if collective in SPLITS | JOINS else 1
    count = sizes.whole_blocks(num_bytes, _DTYPE.itemsize, blocks) if num_bytes else 0
    case = Case(collective, comm.rank, comm.size, count, _DTYPE)
    buffers = out_of_place(case) or in_place(case)
    assert buffers is not None, "every collective has one form or the other"
    names = every_algorithm(collective, comm.size)
    made = [contender(comm, case, buffers, name) for name in names]
    write = writer(buffers.x)
    runs: list[Run] = [partial(in_turn, write, run) for run in (nothing, *(x.run for x in made))]
    members = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(range(comm.size)))
    slowest = OTHER_HOST if comm.topology.num_hosts > 1 else SAME_HOST
    found = sampled(runs, members, samples, until, slowest)
    writing, *times = (each.seconds for each in found)
    writes = [writing * is_input for is_input in members.allgather(buffers.x is not None)]
    members.Free()
    for each in made:
        each.free()
    if comm.rank:
        return []
    return [
        Held(
            *(collective, name, case.size, case.num_bytes),
            each - writing,
            predicted_call(case, name, machine, comm.topology, writes),
        )
        for name, each in zip(names, times, strict=True)
    ]


def predicted_call(
    case: Case, name: str, machine: Machine, topology: Topology, writes: Sequence[float]
) -> float:
    """The predicted seconds of a call, in the mean over some that follow each other.

    `writes`: the seconds for which each rank writes its input before each call, which do not count.
    """
    itemsize = case.dtype.itemsize
    choice = select.choose(
        case.collective, name, case.size, case.num_bytes, topology=topology, itemsize=itemsize
    )
    counts = even_parts(case.collective, case.size, case.num_elements)
    spec = choice.spec(counts, itemsize)
    programs = [
        after_work(compile_call(spec, rank, case.size), seconds, machine)
        for rank, seconds in enumerate(writes)
    ]
    return float(seconds_of_calls(programs, machine, topology.host_of).max()) - max(writes)


class Verdict(NamedTuple):
    """Of some calls: the median error, its 90th percentile, and how much slower the picks are.

    `regret`: the geometric mean, over sizes, of the time of what is predicted to be best over the
    best time.  `worst`: the largest.
    """

    num_calls: int
    median: float
    tail: float
    regret: float
    worst: float

    @property
    def is_met(self) -> bool:
        """Whether all goals are met."""
        return self.median <= MEDIAN and self.tail <= TAIL and self.regret <= REGRET


def verdict(found: Sequence[Held]) -> Verdict:
    """The verdict on some calls."""
    errors = [each.error for each in found]
    lost = regrets(found)
    return Verdict(
        len(found),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(np.exp(np.mean(np.log(lost)))),
        max(lost),
    )


def regrets(found: Sequence[Held]) -> list[float]:
    """For each collective, number of ranks and size: the time of the pick over the best."""
    cases: dict[tuple[str, int, int], list[Held]] = {}
    for each in found:
        cases.setdefault((each.collective, each.size, each.num_bytes), []).append(each)
    return [
        min(calls, key=lambda each: each.predicted).seconds / min(each.seconds for each in calls)
        for calls in cases.values()
    ]


def by(found: Sequence[Held], field: str) -> Mapping[object, Verdict]:
    """The verdicts on the calls of each collective, each size, or each number of ranks."""
    values = dict.fromkeys(getattr(each, field) for each in found)
    return {
        value: verdict([each for each in found if getattr(each, field) == value])
        for value in values
    }
