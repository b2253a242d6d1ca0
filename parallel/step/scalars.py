"""Actions that add up a few numbers over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, RankView
from parallel.nn import Model
from parallel.step.action import SCALAR_ALGORITHM, Action
from parallel.step.kept import Kept


class SumOfScalars(Action, ABC):
    """An all-reduce of a few numbers; the base class of such actions."""

    @abstractmethod
    def num_elements(self, model: Model) -> int:
        """Return how many numbers there are."""

    @property
    def itemsize(self) -> int:
        """The bytes of a number."""
        return 8

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        if not self.axes:
            return []
        options = {"itemsize": self.itemsize, "algorithm": SCALAR_ALGORITHM, "in_place": True}
        size = self.num_elements(view.model)
        return [view.predicted(self.phase, "all_reduce", size, self.axes, **options)]

    def keep(self, kept: Kept) -> None:
        kept.run(self.sends(kept.view), self.code)


class FindUnused(SumOfScalars):
    """Find the layers that no rank has used."""

    code = "UNUSED"

    def num_elements(self, model: Model) -> int:
        return len(model.layers_with_parameters)

    @property
    def itemsize(self) -> int:
        return 1


class SumLoss(SumOfScalars):
    """Sum the loss over ranks, and the number of layers that took no part."""

    code = "LOSS"

    def num_elements(self, model: Model) -> int:
        return 2


class SumNorm(SumOfScalars):
    """Sum the squares of the gradients over ranks."""

    code = "NORM"

    def num_elements(self, model: Model) -> int:
        return 1


class SumCounts(SumOfScalars):
    """Sum over ranks what layers have counted, and let them use it."""

    code = "COUNT"

    def num_elements(self, model: Model) -> int:
        return model.num_counts


class SendNorm(Action):
    """Send the sum of the squares of the gradients from the server that has all of them."""

    code = "NORM"

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        if not self.axes:
            return []
        options = {"itemsize": 8, "algorithm": "linear"}
        return [view.predicted(self.phase, "broadcast", 1, self.axes, **options)]

    def keep(self, kept: Kept) -> None:
        kept.run(self.sends(kept.view), self.code)
