"""Tokens stay where they are, and each rank gathers the weights of all experts.

What Hwang et al. 2023 (Tutel) call data parallelism of the experts: they are stored as for any
other way, and cheaper to send than tokens if there are many tokens and small experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collectives
from collectives import even_counts
from moe import dispatch
from moe.dispatch import Part
from moe.exchange import Exchange, Sent, slopes_of
from moe.experts import Experts, Half, both_halves
from moe.routing import Routing, Values
from moe.rows import Received, Rows
from moe.ways.options import Options
from moe.ways.team import Team
from moe.ways.way import Forecast, Plan, Way
from parallel import PredictedCall
from parallel.nn import Array, Step, namespace_of
from parallel.placement import length

ALGORITHM = "ring"


class GatheredWeights(Way):
    """The ranks of a `team`, which have different `experts`, gather the weights of all of them.

    Their gradients are computed and summed in the first half of backward, while the weights are
    there; the second half adds the sums to those of this rank's experts.
    """

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        if options.padding != "none":
            raise ValueError("no tokens are sent if weights are gathered: padding must be none")
        self.options, self.team, self.experts = options, team, experts
        self.all = experts.whole()

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.team.axis is None else (self.team.axis,)

    @property
    def exchange(self) -> Exchange:
        """What hands the rows of tokens to experts, here all on this rank."""
        return Exchange(None, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Sent]:
        def compute(rows: Received, out: Rows, part: Part) -> Any:
            with self._bound(values, {}):
                return self.all.forward(rows, out, part, step)

        values = self._gathered()
        # As many as if tokens were sent: ranks with a communicator in common wait equally often.
        loads = step.wait(dispatch.exchange(routing.load, None))
        num_parts = self.options.num_parts
        parts = dispatch.dropless(routing, loads, num_parts=num_parts)
        return self.exchange.forward(tokens, weights, parts, step, compute)

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            with self._bound(values, gradients):
                return self.all.backward(rows, out, part, kept, both_halves)

        values = self._gathered()
        gradients = {key: namespace_of(x).zeros_like(x) for key, x in values.items()}
        dweights = slopes_of(weights, dy, saved)
        dx, _ = self.exchange.backward(dy, weights, saved, step, compute)
        sums = self._summed(gradients)
        if half is both_halves:
            self.backward_weight(sums)
        return dx, dweights, None if half is both_halves else sums

    def backward_weight(self, rests: Any) -> None:
        for key, x in rests.items():
            self.experts.gradient[key] += x

    @contextmanager
    def _bound(self, values: dict[str, Array], gradients: dict[str, Array]) -> Iterator[None]:
        """Let all experts work on these arrays in this context, and no longer: they are freed."""
        self.all.bind(values, gradients)
        try:
            yield
        finally:
            self.all.bind({}, {})

    def _gathered(self) -> dict[str, Array]:
        """Return the parameters of all experts."""
        comm = self.team.comm
        if comm is None:
            return self.experts.value
        with collectives.phase("weights"):
            return {
                key: comm.all_gather(x, counts=self._num_experts(), algorithm=ALGORITHM)
                for key, x in self.experts.value.items()
            }

    def _summed(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """Return the sum of all ranks' `gradients`, of this rank's experts."""
        comm = self.team.comm
        if comm is None:
            return gradients
        with collectives.phase("gradients"):
            return {
                key: comm.reduce_scatter(x, counts=self._num_experts(), algorithm=ALGORITHM)
                for key, x in gradients.items()
            }

    def _num_experts(self) -> tuple[int, ...]:
        return even_counts(self.team.num_experts, self.team.size)

    # What will be sent

    def plan(self, forecast: Forecast) -> Plan:
        x, load = forecast.x, forecast.routing(forecast.rank).load
        gathers = self.calls(x.rank, x.width, "weights", "all_gather")
        sums = self.calls(x.rank, x.width, "gradients", "reduce_scatter")
        kept = x.width * self.options.dim * int(load.sum())
        specs, mesh = self.experts.pattern.specs().values(), self.team.mesh
        mine = self.team.owned_by(self.team.place(x.rank))
        sizes = (length(mine) * math.prod(spec.box(mesh, x.rank).shape) for spec in specs)
        n = self.options.num_parts
        parts = (dispatch.Division(len(load), 1, n, i) for i in range(n))
        rows = [part.of(load)[0].tolist() for part in parts]
        return Plan(rows, gathers, gathers + sums, kept, rest=x.width * sum(sizes))

    def calls(self, rank: int, width: int, label: str, collective: str) -> list[PredictedCall]:
        """Return one call for each parameter, of numbers of `width` bytes."""
        found = []
        for spec in self.experts.pattern.specs().values():
            each = math.prod(spec.box(self.team.mesh, rank).shape)
            counts = tuple(each * n for n in self._num_experts())
            found += self.team.call(rank, label, collective, ALGORITHM, counts, width)
        return found
