"""What several runs of a balancing scheme say together, beside those without balancing."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from bench.balance_runs import Measures, Run, baseline

MEASURES = Measures._fields


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


def summaries(runs: list[Run]) -> list[Summary]:
    """One for each scheme; runs of the same seeds without balancing must be among them."""
    found: dict[str, dict[int, Measures]] = {}
    for run in runs:
        found.setdefault(run.scheme, {})[run.seed] = run.measures
    k_of = {run.scheme: run.k for run in runs}
    return [summary(name, k, found[name], found[baseline(k)]) for name, k in k_of.items()]


def summary(name: str, k: int, mine: dict[int, Measures], none: dict[int, Measures]) -> Summary:
    """That of a scheme, beside the same seeds without balancing."""
    columns = zip(*mine.values(), strict=True)
    spreads = {what: spread(values) for what, values in zip(MEASURES, columns, strict=True)}
    is_less = [each.imbalance < none[seed].imbalance for seed, each in mine.items()]
    beside = median(each.loss - none[seed].loss for seed, each in mine.items())
    return Summary(name, k, spreads, sum(is_less), len(is_less), beside, mine is none)


def spread(values: tuple[float, ...]) -> Spread:
    """The least, the median and the most."""
    return Spread(min(values), median(values), max(values))
