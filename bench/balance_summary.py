"""What several runs of a balancing scheme say together, beside those without balancing."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from bench.balance_runs import Course, Last

MEASURES = Last._fields


class Spread(NamedTuple):
    """A measure in all seeds."""

    least: float
    median: float
    most: float


class Summary(NamedTuple):
    """All seeds of a scheme.

    Attributes
    ----------
    name : str
    k : int
    measures : dict of str to Spread
        By the names in `MEASURES`.
    num_better, num_seeds : int
        In how many of all seeds choices are less unequal than without balancing.
    loss_beside : float
        The median of the loss without the loss of the same seed without balancing.
    is_baseline : bool
        Whether it is the scheme without balancing.
    """

    name: str
    k: int
    measures: dict[str, Spread]
    num_better: int
    num_seeds: int
    loss_beside: float
    is_baseline: bool

    @property
    def is_better(self) -> bool:
        """Whether choices are less unequal in every seed."""
        return self.num_better == self.num_seeds

    def as_dict(self) -> dict[str, Any]:
        """The summary for JSON."""
        measures = {name: spread._asdict() for name, spread in self.measures.items()}
        return self._asdict() | {"measures": measures, "is_better": self.is_better}


def summaries(courses: list[Course], steps: int) -> list[Summary]:
    """One for each scheme, of so many last steps; runs without balancing must be among them."""
    found: dict[str, dict[int, Last]] = {}
    for course in courses:
        found.setdefault(course.scheme.name, {})[course.seed] = course.last(steps)
    schemes = {course.scheme.name: course.scheme for course in courses}
    return [
        summary(each.name, each.k, found[each.name], found[each.baseline])
        for each in schemes.values()
    ]


def summary(name: str, k: int, of_seeds: dict[int, Last], baseline: dict[int, Last]) -> Summary:
    """That of a scheme, beside the same seeds without balancing."""
    columns = zip(*of_seeds.values(), strict=True)
    spreads = {what: spread(values) for what, values in zip(MEASURES, columns, strict=True)}
    is_less = [last.imbalance < baseline[seed].imbalance for seed, last in of_seeds.items()]
    beside = median(last.loss - baseline[seed].loss for seed, last in of_seeds.items())
    return Summary(name, k, spreads, sum(is_less), len(is_less), beside, of_seeds is baseline)


def spread(values: tuple[float, ...]) -> Spread:
    """The least, the median and the most."""
    return Spread(min(values), median(values), max(values))
