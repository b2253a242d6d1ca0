"""What several runs of a balancing scheme say together, beside those without balancing."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from bench.experts.balance_runs import Measures, Run, baseline

MEASURES = Measures._fields


class Spread(NamedTuple):
    """A measure in all seeds."""

    least: float
    median: float
    most: float


class Summary(NamedTuple):
    """All seeds of a scheme."""

    name: str
    k: int
    measures: dict[str, Spread]  # by the names in `MEASURES`
    num_better: int  # seeds in which choices are less unequal than without balancing
    num_seeds: int
    loss_beside: float  # the median of the loss without that of the same seed without balancing
    is_baseline: bool  # whether it is the scheme without balancing

    @property
    def is_better(self) -> bool:
        """Whether choices are less unequal in every seed."""
        return self.num_better == self.num_seeds

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for JSON."""
        measures = {name: spread._asdict() for name, spread in self.measures.items()}
        return self._asdict() | {"measures": measures, "is_better": self.is_better}


def summaries(runs: list[Run]) -> list[Summary]:
    """Return a summary of each scheme; `runs` have those of the same seeds without balancing."""
    measures: dict[str, dict[int, Measures]] = {}
    for run in runs:
        measures.setdefault(run.scheme, {})[run.seed] = run.measures
    k_of = {run.scheme: run.k for run in runs}
    return [summary(name, k, measures[name], measures[baseline(k)]) for name, k in k_of.items()]


def summary(name: str, k: int, mine: dict[int, Measures], none: dict[int, Measures]) -> Summary:
    """Return the summary of a scheme, beside the same seeds without balancing."""
    columns = zip(*mine.values(), strict=True)
    spreads = {what: spread(values) for what, values in zip(MEASURES, columns, strict=True)}
    is_less = [measures.imbalance < none[seed].imbalance for seed, measures in mine.items()]
    beside = median(measures.loss - none[seed].loss for seed, measures in mine.items())
    return Summary(name, k, spreads, sum(is_less), len(is_less), beside, mine is none)


def spread(values: tuple[float, ...]) -> Spread:
    """Return the least, the median and the most."""
    return Spread(min(values), median(values), max(values))
