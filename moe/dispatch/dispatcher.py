"""What brings tokens and experts together: the base class, and what it predicts for a routing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe.dispatch.options import Options
from moe.exchange import Experts, Half, Team
from moe.routing import Routing, Values
from parallel import PredictedCall
from parallel.nn import Array, ArraySpec, Step

INTEGER_BYTES = np.dtype(np.int64).itemsize


class ExpectedInput(NamedTuple):
    """What will enter a layer on the rank of `x`, and how the tokens of each rank will be routed.

    `rows` are the rows of each rank of the mesh (`BatchRows.of_rank`).  `routing` is called with a
    rank, if what is sent depends on the routing.
    """

    x: ArraySpec
    rows: Sequence[range]
    routing: Callable[[int], Routing]


class Prediction(NamedTuple):
    """What a dispatcher will do, as one rank sees it.

    Attributes
    ----------
    rows : list of (list of int)
        The rows that each expert computes, by part of the dispatch.
    forward, backward : list of PredictedCall
        The calls of the teams in which this rank is the first: each call is predicted by one rank
        only.  Calls that experts make themselves are not among them.
    kept : int
        The bytes of the numbers kept from forward to backward, without what experts keep.
    rest : int, optional
        The bytes of the numbers kept between the two halves of backward; None: what experts keep.
    """

    rows: list[list[int]]
    forward: list[PredictedCall]
    backward: list[PredictedCall]
    kept: int
    rest: int | None = None


class Dispatcher(ABC):
    """How the tokens of the ranks of a `team` and their `experts` come together."""

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        self.options, self.team, self.experts = options, team, experts

    @property
    def axes(self) -> tuple[str, ...]:
        """The communicators that are used, as axes of the mesh."""
        return self.team.axes

    @abstractmethod
    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Any]:
        """Return the weighted sum of what experts make of each token, and what backward needs.

        `tokens` (tokens, dim) are routed by `routing`, whose entries have these `weights`.  The
        sum is in the dtype to compute in.
        """

    @abstractmethod
    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        """Return the derivatives by the tokens and the weights, and what `backward_weight` needs.

        `dy` is the derivative by the output; `weights` and `step` are as in `forward`, which
        returned `saved`.
        """

    def backward_weight(self, rests: Any) -> None:
        """Add the derivatives by the parameters of the experts; `rests` is from `backward`."""
        self.experts.backward_weight(rests)

    @abstractmethod
    def predict(self, expected: ExpectedInput) -> Prediction:
        """Return what will be done for an input."""
