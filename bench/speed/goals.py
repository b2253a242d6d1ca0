"""The goals for the library's speed: one table, and whether measured times meet them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.contenders.contender import (
    ASYNC,
    CALL,
    CHECKED,
    DROP_IN,
    DROP_IN_ASYNC,
    DROP_IN_PERSISTENT,
    FRESH,
    GLOO,
    MEMCPY,
    NATIVE,
    NATIVE_FRESH,
    PLAN,
)
from bench.speed.memory_limit import Limit
from bench.speed.timed_case import Timed, Times
from bench.workloads import sizes

# The jobs.  The drop-in starts a thread in its process, so it is timed apart from the other ways.
PAIR, CROWD, WAYS, MPI4PY = "pair", "crowd", "ways", "mpi4py"
WITH_GLOO, OVERLAP = "gloo", "overlap"
RANKS = {PAIR: 2, CROWD: 4, WAYS: 2, MPI4PY: 2, WITH_GLOO: 2, OVERLAP: 2}
# The contenders of an all-reduce that is overlapped with something else.
ALONE, BESIDE, IN_TURN, AT_ONCE = "all-reduce", "beside", "in turn", "at once"

# How values and bounds are written, and by how much a bound is missed.
WRITTEN: dict[str, Callable[[float], str]] = {
    "ratio": lambda value: f"{value:.3f}",
    "time": lambda value: f"{value * 1e6:.2f} us",
    "share": lambda value: f"{value:.1%}",
}
SHORT: dict[str, Callable[[float, float], str]] = {
    "ratio": lambda value, bound: f"{1 - value / bound:.1%}",
    "time": lambda value, bound: WRITTEN["time"](value - bound),
    "share": lambda value, bound: f"{abs(value - bound) * 100:.1f} percentage points",
}


class Formula(NamedTuple):
    """A quantity that goals bound."""

    words: str  # what the value is, for a reader who knows no bound
    target: str  # the bound in words
    kind: str  # how it is written: "ratio", "time" or "share"
    is_least: bool  # whether the bound is a least value
    value: Callable[..., float]  # called with a `Timed` and the contenders of a goal, ours first


FASTER = Formula(
    "times faster than {library}",
    "at least {bound:g}x faster",
    "ratio",
    True,
    lambda t, ours, other: t.seconds[other] / t.seconds[ours],
)
TIME = Formula("time", "at most {us:g} us", "time", False, lambda t, ours: t.seconds[ours])
ABOVE = Formula(
    "more than the {other}",
    "at most {us:g} us above the {other}",
    "time",
    False,
    lambda t, ours, other: t.seconds[ours] - t.seconds[other],
)
SHARE_ABOVE = Formula(
    "more than the {other}",
    "at most {bound:.0%} above the {other}",
    "share",
    False,
    lambda t, ours, other: t.seconds[ours] / t.seconds[other] - 1,
)
COPY_RATE = Formula(
    "of the rate of a copy in memory",
    "at least {bound:.0%} of the rate of a copy",
    "share",
    True,
    lambda t, ours, _: Limit(RANKS[PAIR], t).seconds / t.seconds[ours],
)
HIDDEN = Formula(
    "of the all-reduce hidden",
    "at least {bound:.0%} hidden",
    "share",
    True,
    lambda t, ours, in_turn, alone: (t.seconds[in_turn] - t.seconds[ours]) / t.seconds[alone],
)


def series(first: str, last: str, factor: int) -> list[int]:
    """Return `first` multiplied by the factor again and again, and `last`."""
    least, greatest = sizes.parse(first), sizes.parse(last)
    return sorted({*sizes.series(least, greatest, factor=factor), greatest})


FROM = 4 << 10  # bytes from which a call must not be slower than the MPI library's own
QUICK_MOST = 64 << 10  # bytes
TINY, HUGE = [8], [64 << 20]
# Every power of two, and three sizes between powers of two.
ALL_REDUCE = sorted([*series("8", "64M", 2), *map(sizes.parse, ("48K", "3M", "40M"))])
UP_TO_4K = [size for size in ALL_REDUCE if size <= FROM]
ABOVE_4K = [size for size in ALL_REDUCE if size > FROM]
EVERY = sorted({*series("8", "64M", 4), FROM})
EVERY_FROM_4K = [size for size in EVERY if size >= FROM]
OTHERS = ("broadcast", "scatter", "gather", "reduce", "reduce_scatter", "all_gather", "all_to_all")


class Goal(NamedTuple):
    """A bound of a quantity, at every size or in the geometric mean over the sizes."""

    collective: str  # or what an all-reduce is overlapped with
    job: str  # where it is measured; `RANKS` has the number of ranks
    sizes: Sequence[int]  # bytes of the whole vector
    formula: Formula
    contenders: tuple[str, ...]  # who is timed side by side; the first is judged
    bound: float
    in_the_mean: bool = False
    cores: int = 0  # that a machine needs for the goal to be demanded of it


PLAN_AND_MPI, HIDES = (PLAN, NATIVE), (AT_ONCE, IN_TURN, ALONE)
GOALS = [
    Goal("all_reduce", PAIR, ALL_REDUCE, FASTER, PLAN_AND_MPI, 1),
    Goal("all_reduce", PAIR, ALL_REDUCE, FASTER, PLAN_AND_MPI, 1.7, in_the_mean=True),
    Goal("all_reduce", PAIR, UP_TO_4K, ABOVE, (CALL, PLAN), 1e-6),
    Goal("all_reduce", PAIR, ABOVE_4K, SHARE_ABOVE, (CALL, PLAN), 0.03),
    Goal("all_reduce", PAIR, [FROM, *ABOVE_4K], FASTER, (FRESH, NATIVE_FRESH), 1),
    Goal("all_reduce", PAIR, HUGE, FASTER, PLAN_AND_MPI, 3),
    Goal("all_reduce", PAIR, HUGE, COPY_RATE, (PLAN, MEMCPY), 0.9),
    Goal("all_reduce", CROWD, ALL_REDUCE, FASTER, PLAN_AND_MPI, 1),
    Goal("all_reduce", CROWD, ALL_REDUCE, FASTER, PLAN_AND_MPI, 1.3, in_the_mean=True),
    *(Goal(name, PAIR, EVERY, FASTER, PLAN_AND_MPI, 1) for name in OTHERS),
    *(Goal(name, PAIR, EVERY_FROM_4K, FASTER, (CALL, NATIVE), 1) for name in OTHERS),
    Goal("reduce_scatter", PAIR, EVERY, FASTER, PLAN_AND_MPI, 2, in_the_mean=True),
    Goal("all_reduce", WAYS, TINY, ABOVE, (ASYNC, CALL), 2e-6),
    Goal("all_reduce", WAYS, TINY, ABOVE, (CHECKED, CALL), 3e-6),
    Goal("all_reduce", MPI4PY, TINY, ABOVE, (DROP_IN, CALL), 2e-6),
    Goal("all_reduce", MPI4PY, TINY, TIME, (DROP_IN_ASYNC,), 10e-6),
    Goal("all_reduce", MPI4PY, TINY, TIME, (DROP_IN_PERSISTENT,), 5e-6),
    # A sleep needs no core, and a Python loop needs one of its own on every rank.
    Goal("sleep", OVERLAP, HUGE, HIDDEN, HIDES, 0.9, cores=2),
    Goal("loop", OVERLAP, HUGE, HIDDEN, HIDES, 0.9, cores=4),
    Goal("all_reduce", WITH_GLOO, TINY, FASTER, (PLAN, GLOO), 50),
    Goal("all_reduce", WITH_GLOO, HUGE, FASTER, (PLAN, GLOO), 4),
]


def goals(*, is_quick: bool = False) -> list[Goal]:
    """Return all goals; quick ones are on two small sizes at most, to try the command itself."""
    if not is_quick:
        return GOALS
    ends = [{min(size, QUICK_MOST) for size in (g.sizes[0], g.sizes[-1])} for g in GOALS]
    return [goal._replace(sizes=sorted(pair)) for goal, pair in zip(GOALS, ends, strict=True)]


def cases(wanted: Sequence[Goal], job: str) -> dict[tuple[str, int], list[str]]:
    """Return what a job must time: the contenders for each collective and size."""
    contenders: dict[tuple[str, int], list[str]] = {}
    for goal in wanted:
        for size in goal.sizes if goal.job == job else ():
            names = contenders.setdefault((goal.collective, size), always(job, goal.collective))
            names += [name for name in reversed(goal.contenders) if name not in names]
    return dict(sorted(contenders.items()))


def always(job: str, collective: str) -> list[str]:
    """Return who is timed in every case, whether a goal names it or not: what the tables show."""
    if job in (WAYS, MPI4PY):
        return [NATIVE, CALL]
    if job not in (PAIR, CROWD):
        return []
    fresh = [NATIVE_FRESH, FRESH] if (job, collective) == (PAIR, "all_reduce") else []
    return [NATIVE, PLAN, CALL, *fresh]


class Finding(NamedTuple):
    """What was found of a goal."""

    goal: Goal
    value: float | None = None  # the mean, or the worst value; None if nothing was found
    worst: int | None = None  # the size at which the worst value is
    missed: Sequence[int] = ()  # the sizes at which the goal is missed
    reason: str | None = None  # why the goal is not judged, if it is not

    @property
    def is_met(self) -> bool | None:
        """None if it is not judged."""
        if self.reason is not None or self.value is None:
            return None
        return meets(self.goal, self.value)

    @property
    def verdict(self) -> str:
        """A text: "met", "missed by 3.1%, at 2 of 27 sizes", or why it is not judged."""
        goal = self.goal
        if self.reason is not None or self.value is None:
            return self.reason or "not measured"
        if self.is_met:
            return "met"
        words = f"missed by {SHORT[goal.formula.kind](self.value, goal.bound)}"
        if goal.in_the_mean or len(goal.sizes) == 1:
            return words
        return f"{words}, at {len(self.missed)} of {len(goal.sizes)} sizes"


def meets(goal: Goal, value: float) -> bool:
    """Return whether a value is as good as the bound or better."""
    return value >= goal.bound if goal.formula.is_least else value <= goal.bound


def finding(goal: Goal, times: Times, reasons: Mapping[str, str], cores: int) -> Finding:
    """Return what was found of a goal on a machine with so many cores.

    For a job whose times are missing or worth nothing, `reasons` says why.
    """
    if goal.job in reasons:
        return Finding(goal, reason=f"not measured: {reasons[goal.job]}")

    def value(timed: Timed) -> float:
        return goal.formula.value(timed, *goal.contenders)

    values = {size: value(times[goal.job, goal.collective, size]) for size in goal.sizes}
    is_judged = cores >= goal.cores
    reason = None if is_judged else f"not judged: it needs {goal.cores} cores, there are {cores}"
    if goal.in_the_mean:
        return Finding(goal, geometric_mean(values.values()), reason=reason)
    choose = min if goal.formula.is_least else max
    worst = choose(values, key=values.__getitem__)
    missed = [size for size, reached in values.items() if not meets(goal, reached)]
    return Finding(goal, values[worst], worst, missed, reason)


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of goals that are met, missed and not judged, in a sentence."""
    verdicts = [finding.is_met for finding in findings]
    counts = [verdicts.count(verdict) for verdict in (True, False, None)]
    words = f"{counts[0]} of {len(findings)} goals are met, {counts[1]} are missed"
    return words + (f", {counts[2]} are not judged." if counts[2] else ".")


def what(goal: Goal) -> str:
    """Return the collective and its ranks, what is overlapped, or who is compared with."""
    if goal.job == OVERLAP:
        return f"all-reduce beside a {goal.collective}"
    ranks = f", {RANKS[goal.job]} ranks" if RANKS[goal.job] != RANKS[PAIR] else ""
    rival = ", against Gloo" if goal.job == WITH_GLOO else ""
    return f"{in_words(goal.collective)}{ranks}{rival}"


def target(goal: Goal) -> str:
    """Return the bound in words."""
    mean = " in the mean" if goal.in_the_mean else ""
    is_equal = goal.formula is FASTER and goal.bound == 1
    return ("not slower" if is_equal else _filled(goal.formula.target, goal)) + mean


def _filled(text: str, goal: Goal) -> str:
    """Return a text of a formula with the names and the bound of a goal."""
    library = "Gloo" if GLOO in goal.contenders else "the MPI library"
    other, bound = goal.contenders[-1], goal.bound
    return text.format(bound=bound, us=bound * 1e6, other=other, library=library)


def in_words(collective: str) -> str:
    """Return a collective as sentences write it: all-reduce."""
    return collective.replace("_", "-")


def cells(finding: Finding) -> list[str]:
    """Return the row of a finding in the table of goals."""
    goal = finding.goal
    ends = dict.fromkeys(sizes.text(goal.sizes[place]) for place in (0, -1))
    shown = "-" if finding.value is None else WRITTEN[goal.formula.kind](finding.value)
    at = "-" if finding.worst is None or len(goal.sizes) == 1 else sizes.text(finding.worst)
    if goal.in_the_mean and finding.value is not None:
        at = "the mean"
    span = " to ".join(ends)
    return [what(goal), goal.contenders[0], span, target(goal), shown, at, finding.verdict]


def as_dict(finding: Finding) -> dict[str, Any]:
    """Return a finding for JSON: numbers, and the cells of the table."""
    goal = finding.goal
    return {
        "cells": cells(finding),
        "sizes": list(goal.sizes),
        "bound": goal.bound,
        "value": finding.value,
        "measure": _filled(goal.formula.words, goal),
        "worst": finding.worst,
        "met": finding.is_met,
    }
