"""Each rank sends each token directly to the ranks of its experts, once for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import collectives
from moe import dispatch
from moe.dispatch import Division, Part
from moe.exchange import Exchange, Sent, slopes_of
from moe.experts import Experts, Half
from moe.payload import form_of
from moe.routing import Integers, Routing, Values
from moe.rows import Received, Rows
from moe.ways.options import Options
from moe.ways.team import Team
from moe.ways.way import Forecast, Plan, Way
from parallel import PredictedCall
from parallel.nn import Array, ArraySpec, Step

INTEGER = np.dtype(np.int64).itemsize
MOST_ALGORITHM = "recursive_doubling"  # of the all-reduce of one number
Loads = list[list[Integers]]
"""By part of the dispatch, the rows that each rank of a team sends to each expert."""


class Flat(Way):
    """The ranks of a `team` have different `experts`, and exchange the rows of tokens."""

    def __init__(self, options: Options, team: Team, experts: Experts) -> None:
        self.options, self.team, self.experts = options, team, experts

    @property
    def axes(self) -> tuple[str, ...]:
        return () if self.team.axis is None else (self.team.axis,)

    @property
    def exchange(self) -> Exchange:
        """What sends rows to experts and back."""
        return Exchange(self.team.comm, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Sent]:
        def compute(rows: Received, out: Rows, part: Part) -> Any:
            return self.experts.forward(rows, out, part, step)

        return self.exchange.forward(tokens, weights, self._parts(routing, step), step, compute)

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            return self.experts.backward(rows, out, part, kept, half)

        dweights = slopes_of(weights, dy, saved)
        dx, rests = self.exchange.backward(dy, weights, saved, step, compute)
        return dx, dweights, rests

    def backward_weight(self, rests: Any) -> None:
        self.experts.backward_weight(rests)

    def _parts(self, routing: Routing, step: Step) -> list[Part]:
        """Return the parts of the dispatch; ranks exchange what these depend on."""
        options, team = self.options, self.team
        if options.padding == "none":
            with collectives.phase("counts"):
                told = dispatch.exchange(routing.load, team.comm)
            return dispatch.dropless(routing, step.wait(told), team.place(), options.num_parts)
        groups = self._groups(routing, step)  # first: it raises before anything is sent
        return dispatch.padded(
            routing, self._slots(routing, step), groups, team.place(), options.num_parts
        )

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
        rows = step.batch.of_rank
        return [options.num_groups(len(rows[rank])) for rank in team.group()]

    def _slots(self, routing: Routing, step: Step) -> int:
        """Return how many rows are sent for each expert and group."""
        if self.options.padding == "capacity":
            assert routing.capacity is not None, "the gate has a rule"
            return routing.capacity
        most = np.array([routing.most_slots])
        if self.team.comm is not None:
            with collectives.phase("slots"):
                work = self.team.comm.all_reduce(
                    most, "max", out=most, algorithm=MOST_ALGORITHM, async_op=True
                )
            step.wait(work.wait)
        return int(most[0])

    # What will be sent

    def plan(self, forecast: Forecast) -> Plan:
        loads = self._loads(forecast)
        plan = self.plan_of(forecast.x, loads)
        return plan._replace(forward=self.counts(forecast.rank) + plan.forward)

    def plan_of(self, x: ArraySpec, loads: Loads) -> Plan:
        """Return what follows from the `loads` on the rank of `x`, without how they are known."""
        team = self.team
        place, mine = team.place(x.rank), team.owned_by(team.place(x.rank))
        rows = [sum(load[mine] for load in part) for part in loads]
        kept = x.width * self.options.dim * sum(int(part[place].sum()) for part in loads)
        sent = self._exchanges(x, loads)
        return Plan(
            [np.asarray(each).tolist() for each in rows],
            self._numbers(x.rank, loads) + sent["dispatch", False] + sent["combine", True],
            sent["combine", False] + sent["dispatch", True], kept,
        )  # fmt: skip

    def counts(self, rank: int) -> list[PredictedCall]:
        """Return how ranks tell each other what they will send, for the first `rank` of a team."""
        team = self.team
        owned = collectives.even_counts(team.num_experts, team.size)
        if self.options.padding == "none":
            return team.exchange(rank, "counts", [owned] * team.size, INTEGER)
        if self.options.padding == "needed":
            return team.call(rank, "slots", "all_reduce", MOST_ALGORITHM, 1, INTEGER, in_place=True)
        return []

    def _numbers(self, rank: int, loads: Loads) -> list[PredictedCall]:
        """Return the calls that send the numbers of tokens, if experts need to know them."""
        tables = [dispatch.tables(part, self.team.size) for part in loads]
        return [
            call
            for table in (tables if self.experts.needs_rows else [])
            for call in self.team.exchange(rank, "numbers", table, INTEGER)
        ]

    def _exchanges(self, x: ArraySpec, loads: Loads) -> dict[tuple[str, bool], list[PredictedCall]]:
        """Return the calls that send rows, by label and whether they go back."""
        form = form_of(self.options.payload, self.options.dim, x.width)
        tables = [form.width * np.array(dispatch.tables(part, self.team.size)) for part in loads]
        return {
            (label, is_back): [
                call
                for rows in tables
                for call in self.team.exchange(
                    x.rank, label, (rows.T if is_back else rows).tolist(), form.itemsize
                )
            ]
            for label in ("dispatch", "combine") for is_back in (False, True)
        }  # fmt: skip

    def _loads(self, forecast: Forecast) -> Loads:
        x, padding = forecast.x, self.options.padding
        group = self.team.group(x.rank)
        if padding == "none":
            return self.shares([forecast.routing(rank).load for rank in group])
        if padding == "capacity":
            slots = self.options.capacity(x.context)
        else:
            slots = max(forecast.routing(rank).most_slots for rank in group)
        rows = forecast.rows
        groups = [self.options.num_groups(len(rows[rank])) for rank in group]
        return self._padded_loads(groups, slots)

    def shares(self, loads: Sequence[Integers]) -> Loads:
        """Return the `loads` of the ranks, exactly the rows that are routed, by part."""
        return [[part.of(load)[0] for load in loads] for part in self._divisions()]

    def _divisions(self) -> list[Division]:
        team, num_parts = self.team, self.options.num_parts
        return [Division(team.num_experts, team.size, num_parts, i) for i in range(num_parts)]

    def _padded_loads(self, groups: Sequence[int], slots: int) -> Loads:
        """Return the loads if so many slots of each expert and group are sent."""
        of_expert = np.full(self.team.num_experts, slots, np.int64)
        return [[part.of(of_expert)[0] * n for n in groups] for part in self._divisions()]
