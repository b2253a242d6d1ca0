"""How well calls are predicted that the fit has not seen, and how good what they choose is.

Every algorithm of every collective is measured on 2 ranks, on 3, and so on, at sizes at which
nothing was fitted; the fit has seen no collective at all.  The calls follow each other without
waiting, and so do the simulated ones.  Before each, every rank writes its input, as programs do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from bench.choosing.algorithms import contenders
from bench.choosing.patterns import after_work, seconds_of_calls
from bench.choosing.sampling import Steps, after_writing, sampled, sleep_until_all
from bench.workloads import sizes
from bench.workloads.algorithms import every_algorithm
from bench.workloads.collective import JOINS, SPLITS, Case
from collectives import Communicator, Topology
from collectives.console import Number, Table
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


class Verdict(NamedTuple):
    """Of some calls: the median error, its 90th percentile, and how much slower the picks are.

    The `regret` is the time of the algorithm that is predicted to be best over the least time, in
    the geometric mean over sizes; the `worst` is the largest.
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


def cases(num_ranks: int, names: Sequence[str]) -> list[tuple[int, str, int]]:
    """Return the cases for these collectives: numbers of ranks, collectives and bytes."""
    return [
        (size, collective, num_bytes)
        for size in range(2, min(num_ranks, LARGEST_RANKS) + 1)
        for collective in names
        for num_bytes in (HELD_OUT if collective != "barrier" else (0,))
    ]


def held_out(
    comm: Communicator,
    machine: Machine,
    chosen: Sequence[tuple[int, str, int]],
    samples: int,
    steps: Steps,
) -> Iterator[Held]:
    """Measure and predict these cases.  All ranks call it; rank 0 has the results."""
    groups = {size: comm.subgroup(range(size)) if comm.rank < size else None for size, *_ in chosen}
    for size, collective, num_bytes in chosen:
        seconds = steps.begin(f"{collective} on {size} ranks, {sizes.text(num_bytes)}")
        if (group := groups[size]) is not None:
            yield from _measured(group, collective, num_bytes, machine, samples, seconds)
        sleep_until_all(MPI.COMM_WORLD)
    for group in filter(None, groups.values()):
        group.free()


def _measured(
    comm: Communicator,
    collective: str,
    num_bytes: int,
    machine: Machine,
    samples: int,
    seconds: float,
) -> list[Held]:
    """Return every algorithm of a collective at one size; on rank 0 only."""
    blocks = comm.size if collective in SPLITS | JOINS else 1
    count = sizes.whole_blocks(num_bytes, _DTYPE.itemsize, blocks) if num_bytes else 0
    case = Case(collective, comm.rank, comm.size, count, _DTYPE)
    names = every_algorithm(collective, comm.size)
    buffers, made = contenders(comm, case, names)
    runs = after_writing(buffers.x, *(contender.run for contender in made))
    members = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(range(comm.size)))
    slowest = OTHER_HOST if comm.topology.num_hosts > 1 else SAME_HOST
    writing, *times = (time.seconds for time in sampled(runs, members, samples, seconds, slowest))
    writes = [writing * is_input for is_input in members.allgather(buffers.x is not None)]
    members.Free()
    for contender in made:
        contender.free()
    if comm.rank:
        return []
    return [
        Held(
            *(collective, name, case.size, case.num_bytes),
            time - writing,
            predicted_call(case, name, machine, comm.topology, writes),
        )
        for name, time in zip(names, times, strict=True)
    ]


def predicted_call(
    case: Case, name: str, machine: Machine, topology: Topology, writes: Sequence[float]
) -> float:
    """Return the predicted seconds of a call, in the mean over some that follow each other.

    For `writes` seconds each rank writes its input before each call; they do not count.
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


def verdict(calls: Sequence[Held]) -> Verdict:
    """Return the verdict on some calls."""
    errors = [call.error for call in calls]
    lost = regrets(calls)
    return Verdict(
        len(calls),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float(np.exp(np.mean(np.log(lost)))),
        max(lost),
    )


def regrets(calls: Sequence[Held]) -> list[float]:
    """Return the time of the pick over the best, for each collective, number of ranks and size."""
    together: dict[tuple[str, int, int], list[Held]] = {}
    for call in calls:
        together.setdefault((call.collective, call.size, call.num_bytes), []).append(call)
    return [
        min(rivals, key=lambda call: call.predicted).seconds / min(call.seconds for call in rivals)
        for rivals in together.values()
    ]


def tables(calls: Sequence[Held]) -> Iterator[tuple[str, Table]]:
    """Yield the verdicts on the calls of each collective, each size, and each number of ranks."""
    values = Number("calls"), Number("median error", ".1%"), Number("90 % error", ".1%")
    picks = Number("pick", ".2f"), Number("worst pick", ".2f")
    for field, key in (
        ("collective", "collective"),
        ("num_bytes", Number("bytes", ",d")),
        ("size", Number("ranks")),
    ):
        table = Table(key, *values, *picks)
        for value in dict.fromkeys(getattr(call, field) for call in calls):
            table.add(value, *verdict([call for call in calls if getattr(call, field) == value]))
        yield table.heads[0], table


def conclusion(whole: Verdict) -> str:
    """Return the verdict on all calls beside the goals, as text."""
    goals = "All goals are met." if whole.is_met else "Not all goals are met."
    return (
        f"All {whole.num_calls} calls: median error {whole.median:.1%} (goal {MEDIAN:.0%}), "
        f"90th percentile {whole.tail:.1%} (goal {TAIL:.0%}); what is predicted to be best takes "
        f"{whole.regret:.2f} times the least time (goal {REGRET:.2f})\n{goals}"
    )
