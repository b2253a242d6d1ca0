"""In each micro-batch, send tokens to experts or weights to tokens, whichever sends fewer bytes.

Hwang et al. 2023 (Tutel), section 3.1: experts are stored equally for both, so that nothing has to
be moved to change from one to the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from moe.dispatch.dispatcher import INTEGER_BYTES, Dispatcher, ExpectedInput, Prediction
from moe.dispatch.flat import Flat
from moe.dispatch.gathered_weights import GatheredWeights
from moe.dispatch.options import Options
from moe.exchange import Experts, Half, Team, form_of, rows_to_ranks
from moe.routing import Routing, Values
from parallel.nn import Array, Step
from parallel.step import SCALAR_ALGORITHM

EXCHANGES = 4  # of the rows of tokens: there and back, in forward and in backward


class Saved(NamedTuple):
    """What `Cheaper.forward` keeps: the dispatcher that was taken, and what that keeps."""

    dispatcher: Dispatcher
    inner: Any


class Cheaper(Dispatcher):
    """The ranks of a team dispatch tokens (`Flat`) or gather weights (`GatheredWeights`).

    They add up how many rows they would send to each other.  The bytes of these rows are compared
    with the bytes of the weights and their gradients.
    """

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        super().__init__(options, team, experts)
        self.weights = GatheredWeights(options, team, experts)  # which refuses padding
        self.tokens = Flat(options, team, experts)
        self._num_bytes: dict[tuple[int, int], int] = {}  # that the weights and gradients take

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Saved]:
        comm = self.team.comm
        chosen: Dispatcher = self.tokens
        if comm is not None:
            num_rows = self._added_up(self._num_leaving(routing, self.team.index_of()), comm)
            chosen = self.cheaper(num_rows, self.team.mesh.rank, tokens.dtype.itemsize)
        y, inner = chosen.forward(tokens, routing, weights, step)
        return y, Saved(chosen, inner)

    def _num_leaving(self, routing: Routing, index: int) -> int:
        """Return the rows that the rank with an `index` would send to others."""
        rows = rows_to_ranks(routing.load, self.team.size)
        return int(rows.sum() - rows[index])

    def _added_up(self, number: int, comm: Communicator) -> int:
        """Return the sum of the numbers of all ranks."""
        total = np.array([number])
        with collectives.phase("choice"):
            comm.all_reduce(total, out=total, algorithm=SCALAR_ALGORITHM)
        return int(total[0])

    def cheaper(self, num_rows: int, rank: int, width: int) -> Dispatcher:
        """Return the dispatcher that sends fewer bytes on the team of `rank`.

        If tokens are dispatched, `num_rows` go from a rank to another one; numbers of the model
        have `width` bytes.
        """
        bytes_of_weights = self._bytes_of_weights(self.team.group(rank)[0], width)
        form = form_of(self.options.payload, self.options.dim, width)
        bytes_of_tokens = EXCHANGES * num_rows * form.width * form.itemsize
        return self.tokens if bytes_of_tokens <= bytes_of_weights else self.weights

    def _bytes_of_weights(self, first: int, width: int) -> int:
        """Return the bytes of weights and their gradients on the team with this `first` rank."""
        if (first, width) not in self._num_bytes:
            calls = self.weights.calls(first, width, "", "all_gather") * 2
            calls += self.weights.calls(first, width, "", "reduce_scatter")
            total = sum(call.sent(self.team.mesh.size).bytes for call in calls)
            self._num_bytes[first, width] = total
        return self._num_bytes[first, width]

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        dx, dweights, rests = saved.dispatcher.backward(dy, weights, saved.inner, step, half)
        return dx, dweights, (saved.dispatcher, rests)

    def backward_weight(self, rests: Any) -> None:
        dispatcher, inner = rests
        dispatcher.backward_weight(inner)

    def predict(self, expected: ExpectedInput) -> Prediction:
        x, team = expected.x, self.team
        if team.axis is None:
            return self.tokens.predict(expected)
        routings = [expected.routing(rank) for rank in team.group(x.rank)]
        num_rows = sum(self._num_leaving(routing, i) for i, routing in enumerate(routings))
        prediction = self.cheaper(num_rows, x.rank, x.width).predict(expected)
        choice = team.call(
            x.rank, "choice", "all_reduce", SCALAR_ALGORITHM, 1, INTEGER_BYTES, in_place=True
        )
        return prediction._replace(forward=choice + prediction.forward)
