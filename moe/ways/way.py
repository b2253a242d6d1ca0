"""A way to bring tokens and experts together, and what it sends for a routing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moe.experts import Half
from moe.routing import Routing, Values
from parallel import PredictedCall
from parallel.nn import Array, ArraySpec, Step

WIDE = 4  # bytes of a weight of the gate, at least


class Forecast(NamedTuple):
    """What will enter a layer on the rank of `x`, and how the tokens of each rank will be routed.

    `rows` are those of each rank of the mesh (`BatchRows.of_rank`).  `routing` is called with a
    rank, if what a way sends depends on the routing.
    """

    x: ArraySpec
    rows: Sequence[range]
    routing: Callable[[int], Routing]

    @property
    def rank(self) -> int:
        """The rank of the mesh."""
        return self.x.rank


class Plan(NamedTuple):
    """What a way does for a forecast, as its rank sees it.

    Attributes
    ----------
    rows : list of (list of int)
        The rows that each expert computes, by part of the dispatch.
    forward, backward : list of PredictedCall
        The calls of the teams in which this rank is the first: each call is in the plan of one
        rank only.  Calls that experts make themselves are not among them.
    kept : int
        The bytes of the numbers kept from forward to backward, without those that experts keep.
    rest : int, optional
        The bytes of the numbers kept between the two halves of backward; None: what experts keep.
    """

    rows: list[list[int]]
    forward: list[PredictedCall]
    backward: list[PredictedCall]
    kept: int
    rest: int | None = None


class Way(ABC):
    """How the tokens of a rank and their experts come together."""

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The communicators that are used, as axes of the mesh."""

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

        `dy` is that by the output; `weights`, `step` and `saved` are those of `forward`.
        """

    @abstractmethod
    def backward_weight(self, rests: Any) -> None:
        """Add the derivatives by the parameters of the experts; `rests` is from `backward`."""

    @abstractmethod
    def plan(self, forecast: Forecast) -> Plan:
        """Return what will be done."""
