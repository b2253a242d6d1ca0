"""The goals for the library's speed, and whether measured times meet them.

This is arithmetic on seconds; `measures.py` has the quantities that are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from bench import sizes
from bench.case import (
    ASYNC,
    CALL,
    CHECKED,
    DROP_IN,
    DROP_IN_ASYNC,
    DROP_IN_PERSISTENT,
    FRESH,
    GLOO,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
)
from bench.measures import Excess, Hidden, Measure, MemoryRate, Ratio, RelativeExcess, Seconds
from bench.timed import Times

# The jobs.  The drop-in starts a thread in its process, so it is timed apart from the other ways.
PAIR, CROWD, WAYS, MPI4PY = "pair", "crowd", "ways", "mpi4py"
WITH_GLOO, OVERLAP = "gloo", "overlap"
RANKS = {PAIR: 2, CROWD: 4, WAYS: 2, MPI4PY: 2, WITH_GLOO: 2, OVERLAP: 2}

OTHERS = ("broadcast", "scatter", "gather", "reduce", "reduce_scatter", "all_gather", "all_to_all")
FROM = 4 << 10  # bytes from which a call must not be slower than the MPI library's own
QUICK_MOST = 64 << 10  # bytes


class Goal(NamedTuple):
    """A bound of a measure, at every size or in the geometric mean over the sizes.

    `cores`: how many a machine needs for the goal to be demanded of it.
    """

    job: str
    collective: str
    sizes: Sequence[int]
    measure: Measure
    bound: float
    in_the_mean: bool = False
    cores: int = 0

    @property
    def what(self) -> str:
        """The collective and its ranks; what is overlapped, or who is compared with."""
        if self.job == OVERLAP:
            return f"all-reduce beside a {self.collective}"
        ranks = f", {RANKS[self.job]} ranks" if RANKS[self.job] != RANKS[PAIR] else ""
        rival = ", against Gloo" if self.job == WITH_GLOO else ""
        return f"{in_words(self.collective)}{ranks}{rival}"

    @property
    def target(self) -> str:
        """The goal, as text."""
        mean = " in the mean" if self.in_the_mean else ""
        return self.measure.target(self.bound) + mean


class Finding(NamedTuple):
    """What was found of a goal: the mean, or the worst value and the size at which it is.

    `value`: None if nothing was found.  `reason`: why the goal is not judged, if it is not.
    `missed`: the sizes at which it is missed.
    """

    goal: Goal
    value: float | None = None
    worst: int | None = None
    missed: Sequence[int] = ()
    reason: str | None = None

    @property
    def is_met(self) -> bool | None:
        """None if it is not judged."""
        if self.reason is not None or self.value is None:
            return None
        return self.goal.measure.meets(self.value, self.goal.bound)

    @property
    def verdict(self) -> str:
        """A text: "met", "missed by 3.1%, at 2 of 27 sizes", or why it is not judged."""
        if self.reason is not None or self.value is None:
            return self.reason or "not measured"
        if self.is_met:
            return "met"
        words = f"missed by {self.goal.measure.shortfall(self.value, self.goal.bound)}"
        if self.goal.in_the_mean or len(self.goal.sizes) == 1:
            return words
        return f"{words}, at {len(self.missed)} of {len(self.goal.sizes)} sizes"


def finding(goal: Goal, times: Times, reasons: Mapping[str, str], cores: int) -> Finding:
    """`reasons`: the jobs whose times are missing or worth nothing, and why."""
    if goal.job in reasons:
        return Finding(goal, reason=f"not measured: {reasons[goal.job]}")
    values = {n: goal.measure.of(times[goal.job, goal.collective, n]) for n in goal.sizes}
    reason = None
    if cores < goal.cores:
        reason = f"not judged: it needs {goal.cores} cores, there are {cores}"
    if goal.in_the_mean:
        return Finding(goal, geometric_mean(values.values()), reason=reason)
    choose = min if goal.measure.wants_more else max
    worst = choose(values, key=values.__getitem__)
    missed = [n for n, value in values.items() if not goal.measure.meets(value, goal.bound)]
    return Finding(goal, values[worst], worst, missed, reason)


def summary(found: Sequence[Finding]) -> str:
    """The numbers of goals that are met, missed and not judged."""
    counts = [sum(each.is_met is verdict for each in found) for verdict in (True, False, None)]
    words = f"{counts[0]} of {len(found)} goals are met, {counts[1]} are missed"
    return words + (f", {counts[2]} are not judged." if counts[2] else ".")


def goals(*, is_quick: bool = False) -> list[Goal]:
    """All goals.  `is_quick`: on two small sizes at most, to try the command itself."""
    found = [*of_the_all_reduce(), *of_the_others(), *of_the_ways(), *of_overlap(), *of_gloo()]
    return [_quick(goal) for goal in found] if is_quick else found


def of_the_all_reduce() -> list[Goal]:
    """Beside the MPI library's own, on 2 and 4 ranks."""
    every = all_reduce_sizes()
    small = [size for size in every if size <= FROM]
    large = [size for size in every if size > FROM]
    name, most, from_4k = "all_reduce", every[-1:], [FROM, *large]
    return [
        Goal(PAIR, name, every, Ratio(PLAN), 1),
        Goal(PAIR, name, every, Ratio(PLAN), 1.7, in_the_mean=True),
        Goal(PAIR, name, small, Excess(CALL, PLAN), 1e-6),
        Goal(PAIR, name, large, RelativeExcess(CALL, PLAN), 0.03),
        Goal(PAIR, name, from_4k, Ratio(FRESH, NATIVE_FRESH), 1),
        Goal(PAIR, name, most, Ratio(PLAN), 3),
        Goal(PAIR, name, most, MemoryRate(PLAN, RANKS[PAIR]), 0.9),
        Goal(CROWD, name, every, Ratio(PLAN), 1),
        Goal(CROWD, name, every, Ratio(PLAN), 1.3, in_the_mean=True),
    ]


def of_the_others() -> list[Goal]:
    """The seven other collectives with data, beside the MPI library's own."""
    every = sorted({*_series("8", "64M"), FROM})
    from_4k = [size for size in every if size >= FROM]
    return [
        *(Goal(PAIR, name, every, Ratio(PLAN), 1) for name in OTHERS),
        *(Goal(PAIR, name, from_4k, Ratio(CALL), 1) for name in OTHERS),
        Goal(PAIR, "reduce_scatter", every, Ratio(PLAN), 2, in_the_mean=True),
    ]


def of_the_ways() -> list[Goal]:
    """The other ways to make a small all-reduce: asynchronous, checked, and as mpi4py's."""
    wanted: list[tuple[str, Measure, float]] = [
        (WAYS, Excess(ASYNC, CALL), 2e-6),
        (WAYS, Excess(CHECKED, CALL), 3e-6),
        (MPI4PY, Excess(DROP_IN, CALL), 2e-6),
        (MPI4PY, Seconds(DROP_IN_ASYNC), 10e-6),
        (MPI4PY, Seconds(DROP_IN_PERSISTENT), 5e-6),
    ]
    return [Goal(job, "all_reduce", (8,), measure, bound) for job, measure, bound in wanted]


def of_overlap() -> list[Goal]:
    """Beside what needs no core, and beside what needs one of its own on every rank."""
    ranks, size = RANKS[OVERLAP], (64 << 20,)
    return [
        Goal(OVERLAP, "sleep", size, Hidden(), 0.9, cores=ranks),
        Goal(OVERLAP, "loop", size, Hidden(), 0.9, cores=2 * ranks),
    ]


def of_gloo() -> list[Goal]:
    """Beside PyTorch's."""
    return [
        Goal(WITH_GLOO, "all_reduce", (8,), Ratio(PLAN, GLOO), 50),
        Goal(WITH_GLOO, "all_reduce", (64 << 20,), Ratio(PLAN, GLOO), 4),
    ]


def all_reduce_sizes() -> list[int]:
    """Every power of two, and three sizes between powers of two."""
    between = map(sizes.parse, ("48K", "3M", "40M"))
    return sorted([*_series("8", "64M", factor=2), *between])


def cases(wanted: Sequence[Goal], job: str) -> dict[tuple[str, int], list[str]]:
    """What a job must time: for each collective and size the contenders, all side by side."""
    found: dict[tuple[str, int], list[str]] = {}
    for goal in wanted:
        for size in goal.sizes if goal.job == job else ():
            names = found.setdefault((goal.collective, size), always(job, goal.collective))
            names += [name for name in goal.measure.contenders if name not in names]
    return dict(sorted(found.items()))


def always(job: str, collective: str) -> list[str]:
    """Who is timed in every case, whether a goal names it or not: what the tables show."""
    if job in (WAYS, MPI4PY):
        return [NATIVE, CALL]
    if job not in (PAIR, CROWD):
        return []
    fresh = [NATIVE_FRESH, FRESH] if (job, collective) == (PAIR, "all_reduce") else []
    return [NATIVE, PLAN, CALL, *fresh]


def in_words(collective: str) -> str:
    """As sentences write it: all-reduce."""
    return collective.replace("_", "-")


def _quick(goal: Goal) -> Goal:
    ends = {min(size, QUICK_MOST) for size in (goal.sizes[0], goal.sizes[-1])}
    return goal._replace(sizes=sorted(ends))


def _series(first: str, last: str, factor: int = 4) -> list[int]:
    """`first` multiplied by the factor again and again, and the last."""
    least, greatest = sizes.parse(first), sizes.parse(last)
    return sorted({*sizes.series(least, greatest, factor=factor), greatest})
