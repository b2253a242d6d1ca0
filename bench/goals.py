"""What is demanded of the library's speed, and whether measured times meet it.

Pure arithmetic on seconds.  A ratio is another's time over ours: above 1 ours is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean, median
from typing import NamedTuple

from bench import sizes
from bench.case import CALL, GLOO, MEMCPY, NATIVE, PLAN

PAIR, CROWD, WITH_GLOO = "pair", "crowd", "gloo"
RANKS = {PAIR: 2, CROWD: 4, WITH_GLOO: 2}  # of each job

OURS = PLAN, CALL
MOVES = "broadcast", "scatter", "gather", "all_gather", "all_to_all"
REDUCTIONS = "all_reduce", "reduce_scatter", "reduce"

QUICK_MOST = 64 << 10  # bytes

_RIVALS = {NATIVE: "", MEMCPY: ", against one copy of the buffer", GLOO: ", against Gloo"}


class Timed(NamedTuple):
    """A case: the selected algorithm, and seconds and wrong elements of each contender.

    `size`: bytes of the whole vector.  `cores`: the fraction of the cores that the ranks had.
    """

    collective: str
    size: int
    algorithm: str
    seconds: dict[str, float]
    wrong: dict[str, int]
    cores: float


Times = Mapping[tuple[str, str, int], Timed]  # by job, collective and size


def less_disturbed(one: Timed, other: Timed) -> Timed:
    """That of two timings in which the ranks had more of the cores; all that was wrong counts."""
    wrong = {name: one.wrong[name] + other.wrong[name] for name in one.wrong}
    return max(one, other, key=lambda timed: timed.cores)._replace(wrong=wrong)


class Goal(NamedTuple):
    """A ratio to `rival` of at least `least`, in the geometric mean over the sizes.

    `judged`: which of ours must reach it.
    """

    job: str
    collective: str
    sizes: Sequence[int]
    least: float
    rival: str = NATIVE
    judged: Sequence[str] = OURS

    @property
    def contenders(self) -> tuple[str, ...]:
        """Who must be timed side by side."""
        return self.rival, *OURS

    @property
    def what(self) -> str:
        """The first column."""
        ranks = "" if RANKS[self.job] == RANKS[PAIR] else f", {RANKS[self.job]} ranks"
        return f"{in_words(self.collective)}{ranks}{_RIVALS[self.rival]}"

    @property
    def target(self) -> str:
        """What is demanded, in words."""
        by = "by plan: " if tuple(self.judged) == (PLAN,) else ""
        if self.least == 1:
            return f"{by}not slower"
        faster, slower = f"at least {self.least:g}x faster", f"at most {1 / self.least:g}x slower"
        return by + (faster if self.least > 1 else slower)

    def found(self, cases: Sequence[Timed]) -> dict[str, float]:
        """The ratios."""
        return {
            name: geometric_mean(case.seconds[self.rival] / case.seconds[name] for case in cases)
            for name in OURS
        }

    def met(self, found: Mapping[str, float]) -> dict[str, bool]:
        """By whom of those judged it is met."""
        return {name: found[name] >= self.least for name in self.judged}


class Overhead(NamedTuple):
    """A call takes at most `most` seconds longer than its plan, in the median over the sizes.

    `most`: None where it is only told.
    """

    collective: str
    sizes: Sequence[int]
    most: float | None = None
    job: str = PAIR

    @property
    def contenders(self) -> tuple[str, ...]:
        """Who must be timed side by side; MPI's own is only shown."""
        return NATIVE, *OURS

    @property
    def what(self) -> str:
        """The first column."""
        return f"{in_words(self.collective)}, a call above its plan"

    @property
    def target(self) -> str:
        """What is demanded, in words."""
        return "-" if self.most is None else f"at most {self.most * 1e6:g} us"

    def found(self, cases: Sequence[Timed]) -> dict[str, float]:
        """The seconds."""
        return {CALL: median(case.seconds[CALL] - case.seconds[PLAN] for case in cases)}

    def met(self, found: Mapping[str, float]) -> dict[str, bool]:
        """Whether it is met by the call, if anything is demanded."""
        return {} if self.most is None else {CALL: found[CALL] <= self.most}


Demand = Goal | Overhead


class Finding(NamedTuple):
    """What was found of a demand, and by whom it is met; `reason`: why nothing was found."""

    demand: Demand
    found: dict[str, float]
    met: dict[str, bool]
    reason: str | None = None


def finding(demand: Demand, times: Times, reasons: Mapping[str, str]) -> Finding:
    """`reasons`: the jobs whose times are missing or worth nothing, and why."""
    if demand.job in reasons:
        return Finding(demand, {}, {}, reasons[demand.job])
    found = demand.found([times[demand.job, demand.collective, n] for n in demand.sizes])
    return Finding(demand, found, demand.met(found))


def demands(*, is_open_mpi: bool, is_quick: bool = False) -> list[Demand]:
    """All of them; beside any other MPI they are the same as beside MPICH.

    `is_quick`: on two sizes at most, and small ones, to try the command itself.
    """

    def beside(open_mpi: float, mpich: float) -> float:
        return open_mpi if is_open_mpi else mpich

    every, small = _series("8", "64M"), _series("8", "1K")
    medium, large = _series("4K", "16M"), _series("64K", "16M")
    most = every[-1:]
    by_plan = (PLAN,)
    found: list[Demand] = [
        Goal(PAIR, "all_reduce", most, 3),
        Goal(PAIR, "all_reduce", most, 1 / 1.2, rival=MEMCPY),
        Goal(PAIR, "all_reduce", every, 1.5),
        Goal(PAIR, "all_reduce", small, beside(1 / 1.5, 1), judged=by_plan),
        Goal(PAIR, "reduce_scatter", large, 2),
        Goal(PAIR, "reduce", medium, beside(1, 2)),
        *(Goal(PAIR, name, medium, 1) for name in MOVES),
        *(Goal(PAIR, name, small, beside(1 / 1.6, 1), judged=by_plan) for name in MOVES),
        Overhead("all_reduce", small, 4e-6),
        *(Overhead(name, small) for name in (*REDUCTIONS[1:], *MOVES)),
        Goal(CROWD, "all_reduce", every, 1.2),
        Goal(WITH_GLOO, "all_reduce", every[:1], 50, rival=GLOO),
        Goal(WITH_GLOO, "all_reduce", most, 4, rival=GLOO),
    ]
    return [_quick(demand) for demand in found] if is_quick else found


def _quick(demand: Demand) -> Demand:
    ends = {min(size, QUICK_MOST) for size in (demand.sizes[0], demand.sizes[-1])}
    return demand._replace(sizes=sorted(ends))


def cases(wanted: Sequence[Demand], job: str) -> dict[tuple[str, int], list[str]]:
    """What a job must time: for each collective and size the contenders, all side by side."""
    found: dict[tuple[str, int], list[str]] = {}
    for demand in wanted:
        for size in demand.sizes if demand.job == job else ():
            names = found.setdefault((demand.collective, size), [])
            names += [name for name in demand.contenders if name not in names]
    return dict(sorted(found.items()))


def in_words(collective: str) -> str:
    """As sentences write it: all-reduce."""
    return collective.replace("_", "-")


def _series(first: str, last: str) -> list[int]:
    """One size for each power of four, and the last."""
    return sizes.series(sizes.parse(first), sizes.parse(last), factor=4)
