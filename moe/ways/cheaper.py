"""In each micro-batch, send tokens to experts or weights to tokens, whichever sends fewer bytes.

Hwang et al. 2023 (Tutel), section 3.1: experts are stored equally for both, so that nothing has to
be moved to change from one to the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from moe import dispatch
from moe.experts import Experts, Half
from moe.payload import form_of
from moe.routing import Routing, Values
from moe.ways.flat import INTEGER, MOST_ALGORITHM, Flat
from moe.ways.options import Options
from moe.ways.team import Team
from moe.ways.way import Forecast, Plan, Way
from moe.ways.weights import GatheredWeights
from parallel.nn import Array, Step

EXCHANGES = 4  # of the rows of tokens: there and back, in forward and in backward


class Saved(NamedTuple):
    """What `Cheaper.forward` keeps: the way that was taken, and what that keeps."""

    way: Way
    inner: Any


class Cheaper(Way):
    """The ranks of a `team` dispatch tokens (`Flat`) or gather weights (`GatheredWeights`).

    They add up how many rows they would send to each other.  The bytes of these rows are compared
    with the bytes of the weights and their gradients.
    """

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        self.options, self.team = options, team
        self.weights = GatheredWeights(options, team, experts)  # which refuses padding
        self.tokens = Flat(options, team, experts)
        self._num_bytes: dict[tuple[int, int], int] = {}  # that the weights and gradients take

    @property
    def axes(self) -> tuple[str, ...]:
        return self.tokens.axes

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Saved]:
        comm = self.team.comm
        way: Way = self.tokens
        if comm is not None:
            num_rows = self._added_up(self._num_leaving(routing, self.team.place()), comm)
            way = self.cheaper(num_rows, self.team.mesh.rank, tokens.dtype.itemsize)
        y, inner = way.forward(tokens, routing, weights, step)
        return y, Saved(way, inner)

    def _num_leaving(self, routing: Routing, place: int) -> int:
        """Return the rows that the rank at a `place` would send to others."""
        (row,) = dispatch.tables([routing.load], self.team.size)
        return sum(row) - row[place]

    def _added_up(self, number: int, comm: Communicator) -> int:
        total = np.array([number])
        with collectives.phase("choice"):
            comm.all_reduce(total, out=total, algorithm=MOST_ALGORITHM)
        return int(total[0])

    def cheaper(self, num_rows: int, rank: int, width: int) -> Way:
        """Return the way that sends fewer bytes on the team of `rank`.

        If tokens are dispatched, `num_rows` go from a rank to another one; numbers of the model
        have `width` bytes.
        """
        of_weights = self._of_weights(self.team.group(rank)[0], width)
        form = form_of(self.options.payload, self.options.dim, width)
        of_tokens = EXCHANGES * num_rows * form.width * form.itemsize
        return self.tokens if of_tokens <= of_weights else self.weights

    def _of_weights(self, first: int, width: int) -> int:
        """Return the bytes of weights and their gradients on the team with this `first` rank."""
        if (first, width) not in self._num_bytes:
            calls = self.weights.calls(first, width, "", "all_gather") * 2
            calls += self.weights.calls(first, width, "", "reduce_scatter")
            found = sum(call.sent(self.team.mesh.size).bytes for call in calls)
            self._num_bytes[first, width] = found
        return self._num_bytes[first, width]

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        dx, dweights, rests = saved.way.backward(dy, weights, saved.inner, step, half)
        return dx, dweights, (saved.way, rests)

    def backward_weight(self, rests: Any) -> None:
        way, inner = rests
        way.backward_weight(inner)

    def plan(self, forecast: Forecast) -> Plan:
        x, team = forecast.x, self.team
        if team.axis is None:
            return self.tokens.plan(forecast)
        routings = [forecast.routing(rank) for rank in team.group(x.rank)]
        num_rows = sum(self._num_leaving(each, place) for place, each in enumerate(routings))
        plan = self.cheaper(num_rows, x.rank, x.width).plan(forecast)
        choice = team.call(
            x.rank, "choice", "all_reduce", MOST_ALGORITHM, 1, INTEGER, in_place=True
        )
        return plan._replace(forward=choice + plan.forward)
