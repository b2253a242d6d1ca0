"""What is known of the samples of a contender: quartiles, by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import NamedTuple

AVERAGES = ("of rank 0", "mean", "least", "greatest")  # as nccl-tests numbers them


class Quartiles(NamedTuple):
    """Seconds per call: the median of samples, and the quartiles below and above it."""

    low: float
    median: float
    high: float


class Samples(NamedTuple):
    """What a contender took: the quartiles of each rank, and the number of samples behind them."""

    ranks: tuple[Quartiles, ...]
    number: int

    @property
    def slowest(self) -> float:
        """The median of the slowest rank."""
        return max(rank.median for rank in self.ranks)

    def over_ranks(self, average: int) -> Quartiles:
        """Return quartiles of rank 0, or their mean, least or greatest among ranks, for 0 to 3."""
        if average == 0:
            return self.ranks[0]
        kinds: dict[int, Callable[[Sequence[float]], float]] = {1: mean, 2: min, 3: max}
        return Quartiles(*(kinds[average](column) for column in zip(*self.ranks, strict=True)))
