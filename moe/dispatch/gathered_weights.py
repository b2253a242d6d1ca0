"""Tokens stay where they are, and each rank gathers the weights of all experts.

Hwang et al. 2023 (Tutel) call this data parallelism of the experts: experts are stored as for any
other dispatch, and are cheaper to send than tokens if there are many tokens and small experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import collectives
from collectives import even_counts
from moe.dispatch.dispatcher import Dispatcher, ExpectedInput, Prediction
from moe.dispatch.options import Options
from moe.exchange import (
    Exchange,
    Experts,
    Half,
    Part,
    Received,
    Rows,
    SavedExchange,
    Team,
    both_halves,
    divisions,
    dropless,
    start_loads,
)
from moe.routing import Routing, Values
from parallel import PredictedCall
from parallel.mesh import length
from parallel.nn import Array, Step, namespace_of

ALGORITHM = "ring"


class GatheredWeights(Dispatcher):
    """The ranks of a team, which have different experts, gather the weights of all of them.

    Their gradients are computed and summed in the first half of backward, while the weights are
    there; the second half adds the sums to the gradients of this rank's experts.
    """

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        if options.padding != "none":
            raise ValueError("no tokens are sent if weights are gathered: padding must be none")
        super().__init__(options, team, experts)
        self.all = experts.whole()

    @property
    def exchange(self) -> Exchange:
        """What hands the rows of tokens to experts, here all on this rank."""
        return Exchange(None, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, SavedExchange]:
        def compute(rows: Received, out: Rows, part: Part) -> Any:
            with self._bound(values, {}):
                return self.all.forward(rows, out, part, step)

        values = self._gathered()
        # As many as if tokens were sent: ranks with a communicator in common wait equally often.
        loads = step.wait(start_loads(routing.load, None))
        parts = dropless(routing, loads, num_parts=self.options.num_parts)
        return self.exchange.forward(tokens, weights, parts, step, compute)

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            with self._bound(values, gradients):
                return self.all.backward(rows, out, part, kept, both_halves)

        values = self._gathered()
        gradients = {name: namespace_of(x).zeros_like(x) for name, x in values.items()}
        dweights = saved.slopes_of(weights, dy)
        dx, _ = self.exchange.backward(dy, weights, saved, step, compute)
        sums = self._summed(gradients)
        if half is both_halves:
            self.backward_weight(sums)
        return dx, dweights, None if half is both_halves else sums

    def backward_weight(self, rests: Any) -> None:
        for name, x in rests.items():
            self.experts.gradient[name] += x

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
                name: comm.all_gather(x, counts=self._num_experts(), algorithm=ALGORITHM)
                for name, x in self.experts.value.items()
            }

    def _summed(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """Return the sum of all ranks' `gradients`, of this rank's experts."""
        comm = self.team.comm
        if comm is None:
            return gradients
        with collectives.phase("gradients"):
            return {
                name: comm.reduce_scatter(x, counts=self._num_experts(), algorithm=ALGORITHM)
                for name, x in gradients.items()
            }

    def _num_experts(self) -> tuple[int, ...]:
        """Return the number of experts of each rank."""
        return even_counts(self.team.num_experts, self.team.size)

    # What will be sent

    def predict(self, expected: ExpectedInput) -> Prediction:
        x, load = expected.x, expected.routing(expected.x.rank).load
        gathers = self.calls(x.rank, x.width, "weights", "all_gather")
        sums = self.calls(x.rank, x.width, "gradients", "reduce_scatter")
        num_owned = length(self.team.owned_by(self.team.index_of(x.rank)))
        parts = divisions(len(load), 1, self.options.num_parts)
        return Prediction(
            [part.of(load)[0].tolist() for part in parts],
            gathers,
            gathers + sums,
            kept=x.width * self.options.dim * int(load.sum()),
            rest=x.width * num_owned * sum(self.experts.sizes(self.team.mesh, x.rank)),
        )

    def calls(self, rank: int, width: int, label: str, collective: str) -> list[PredictedCall]:
        """Return one call for each parameter, of numbers of `width` bytes."""
        calls = []
        for size in self.experts.sizes(self.team.mesh, rank):
            counts = tuple(size * n for n in self._num_experts())
            calls += self.team.call(rank, label, collective, ALGORITHM, counts, width)
        return calls
