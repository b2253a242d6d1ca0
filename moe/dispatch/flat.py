"""Each rank sends each token directly to the ranks of its experts, once for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import collectives
from moe.dispatch.dispatcher import INTEGER_BYTES, Dispatcher, ExpectedInput, Prediction
from moe.exchange import (
    Exchange,
    Half,
    Part,
    Received,
    Rows,
    SavedExchange,
    divisions,
    dropless,
    form_of,
    padded,
    rows_to_ranks,
    start_loads,
)
from moe.routing import Integers, Routing, Values
from parallel import PredictedCall
from parallel.nn import Array, ArraySpec, Step
from parallel.step import SCALAR_ALGORITHM


class Flat(Dispatcher):
    """The ranks of a team have different experts, and exchange the rows of tokens."""

    @property
    def exchange(self) -> Exchange:
        """What sends rows to experts and back."""
        return Exchange(self.team.comm, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, SavedExchange]:
        def compute(rows: Received, out: Rows, part: Part) -> Any:
            return self.experts.forward(rows, out, part, step)

        return self.exchange.forward(tokens, weights, self._parts(routing, step), step, compute)

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            return self.experts.backward(rows, out, part, kept, half)

        dweights = saved.slopes_of(weights, dy)
        dx, rests = self.exchange.backward(dy, weights, saved, step, compute)
        return dx, dweights, rests

    def _parts(self, routing: Routing, step: Step) -> list[Part]:
        """Return the parts of the dispatch; ranks exchange what these depend on."""
        team, num_parts = self.team, self.options.num_parts
        if self.options.padding == "none":
            with collectives.phase("counts"):
                finish = start_loads(routing.load, team.comm)
            return dropless(routing, step.wait(finish), team.index_of(), num_parts)
        groups = self._groups(routing, step)  # first: it raises before anything is sent
        return padded(routing, self._slots(routing, step), groups, team.index_of(), num_parts)

    def _groups(self, routing: Routing, step: Step) -> list[int]:
        """Return the number of groups of each rank of the team.

        Raises ValueError if this is not known, which needs ``step.batch`` on several ranks.
        """
        options, team = self.options, self.team
        if team.axis is None:
            return [routing.num_groups]
        if step.batch is None:
            raise ValueError(
                f"the padding {options.padding!r} of the layer {options.name} needs the numbers of"
                " rows of all ranks, which are in Step.batch"
            )
        return self._num_groups(step.batch.of_rank, team.group())

    def _num_groups(self, rows: Sequence[range], ranks: Sequence[int]) -> list[int]:
        """Return the number of groups of some `ranks`, of the `rows` of all."""
        return [self.options.num_groups(len(rows[rank])) for rank in ranks]

    def _slots(self, routing: Routing, step: Step) -> int:
        """Return how many rows are sent for each expert and group."""
        if self.options.padding == "capacity":
            assert routing.capacity is not None, "the gate has a rule"
            return routing.capacity
        most = np.array([routing.most_slots])
        if self.team.comm is not None:
            with collectives.phase("slots"):
                work = self.team.comm.all_reduce(
                    most, "max", out=most, algorithm=SCALAR_ALGORITHM, async_op=True
                )
            step.wait(work.wait)
        return int(most[0])

    # What will be sent

    def predict(self, expected: ExpectedInput) -> Prediction:
        prediction = self.predict_rows(expected.x, self._loads(expected))
        return prediction._replace(forward=self.counts(expected.x.rank) + prediction.forward)

    def predict_rows(self, x: ArraySpec, loads: list[Integers]) -> Prediction:
        """Return what follows from the `loads` on the rank of `x`, without how they are known.

        `loads` are by part of the dispatch the rows that each rank of the team sends to each
        expert, int64 (ranks, experts).
        """
        team, index = self.team, self.team.index_of(x.rank)
        form = form_of(self.options.payload, self.options.dim, x.width)
        tables = [rows_to_ranks(load, team.size) for load in loads]
        elements = [form.width * table for table in tables]
        back = [table.T for table in elements]

        def calls(label: str, tables: list[Integers], itemsize: int) -> list[PredictedCall]:
            sent = (team.exchange(x.rank, label, table, itemsize) for table in tables)
            return [call for of_part in sent for call in of_part]

        numbers = calls("numbers", tables if self.experts.needs_rows else [], INTEGER_BYTES)
        there = [calls(label, elements, form.itemsize) for label in ("dispatch", "combine")]
        again = [calls(label, back, form.itemsize) for label in ("combine", "dispatch")]
        return Prediction(
            [load[:, team.owned_by(index)].sum(axis=0).tolist() for load in loads],
            numbers + there[0] + again[0],
            there[1] + again[1],
            x.width * self.options.dim * sum(int(load[index].sum()) for load in loads),
        )

    def counts(self, rank: int) -> list[PredictedCall]:
        """Return how ranks tell each other what they will send, for the first `rank` of a team."""
        team = self.team
        if self.options.padding == "none":
            owned = collectives.even_counts(team.num_experts, team.size)
            return team.exchange(rank, "counts", np.array([owned] * team.size), INTEGER_BYTES)
        if self.options.padding == "needed":
            return team.call(
                rank, "slots", "all_reduce", SCALAR_ALGORITHM, 1, INTEGER_BYTES, in_place=True
            )
        return []

    def _loads(self, expected: ExpectedInput) -> list[Integers]:
        """Return the rows that each rank of the team sends to each expert, by part."""
        group = self.team.group(expected.x.rank)
        if self.options.padding == "none":
            return self.shares(np.stack([expected.routing(rank).load for rank in group]))
        slots = self.options.capacity(expected.x.context)
        if self.options.padding == "needed":
            slots = max(expected.routing(rank).most_slots for rank in group)
        groups = self._num_groups(expected.rows, group)
        slots_of_parts = self.shares(np.full(self.team.num_experts, slots, np.int64))
        return [np.outer(groups, slots_of_part) for slots_of_part in slots_of_parts]

    def shares(self, totals: Integers) -> list[Integers]:
        """Return how many of the `totals` (..., experts) each part has."""
        parts = divisions(self.team.num_experts, self.team.size, self.options.num_parts)
        return [part.of(totals)[0] for part in parts]
