"""What the torch command measures, with both backends side by side, and the tables of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.contenders.contender import GLOO
from bench.results.summary import mean_ratio
from collectives.console import Number, Table

RING = "ring"
BACKENDS = (RING, GLOO)
CALLS, DDP, FSDP, START = "all_reduce", "ddp", "fsdp", "start"
HEADS = 4  # of attention, which divide the width of a model


class Both(NamedTuple):
    """The same done with both backends: seconds of each, and what was wrong."""

    amount: int  # the bytes of a call, the width of a model, the number of ranks that start
    seconds: dict[str, float]
    wrong: int | None = None  # None if it was not checked

    @property
    def other(self) -> str:
        """The backend beside ours."""
        return next(name for name in self.seconds if name != RING)

    @property
    def ratio(self) -> float:
        """How many times faster ours is."""
        return self.seconds[self.other] / self.seconds[RING]

    def as_dict(self) -> dict[str, Any]:
        """Return the case for JSON."""
        return self._asdict() | {"ratio": self.ratio}


CasesByPart = Mapping[str, Sequence[Both]]  # by part


class Part(NamedTuple):
    """A part of the command: its title, what its amounts are, and the unit of its times."""

    title: str
    amount: str
    unit: float
    has_mean: bool = True


PARTS = {
    CALLS: Part("all_reduce of float32, us", "size (B)", 1e-6),
    DDP: Part("A training step with DistributedDataParallel, ms", "hidden", 1e-3),
    FSDP: Part("A training step with fully_shard, ms", "hidden", 1e-3),
    START: Part("From the start of Python to the first all_reduce, ms", "ranks", 1e-3, False),
}


def cases_in(result: Mapping[str, Any]) -> dict[str, list[Both]]:
    """Return the JSON of a job by part; nothing of a job that failed."""
    return {name: [Both(**case) for case in result[name]] for name in PARTS if name in result}


def tables(cases_by_part: CasesByPart) -> dict[str, Table]:
    """Return the table of each part that was measured by its title."""
    measured = {PARTS[name]: cases for name, cases in cases_by_part.items() if cases}
    return {part.title: table(part, cases) for part, cases in measured.items()}


def table(part: Part, cases: Sequence[Both]) -> Table:
    """Return a line for each case, and one of the geometric mean of the ratios."""
    other = cases[0].other
    times = [Number(head, ".2f") for head in (RING, other, f"{other} / {RING}")]
    made = Table(Number(part.amount), *times, Number("wrong"))
    for case in cases:
        seconds = (case.seconds[name] / part.unit for name in (RING, other))
        wrong = "-" if case.wrong is None else case.wrong
        made.add(case.amount, *seconds, case.ratio, wrong)
    if part.has_mean:
        made.add("geom. mean", None, None, mean(cases), None)
    return made


def mean(cases: Iterable[Both]) -> float | None:
    """Return the geometric mean of the ratios."""
    return mean_ratio(case.ratio for case in cases)


def as_dict(cases_by_part: CasesByPart) -> dict[str, Any]:
    """Return every part with its cases, and the means of those that have one, for JSON."""
    parts = {name: [case.as_dict() for case in cases] for name, cases in cases_by_part.items()}
    means = {name: mean(cases) for name, cases in cases_by_part.items() if PARTS[name].has_mean}
    return {**parts, "geometric_mean": means}
