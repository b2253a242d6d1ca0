"""Each rank sends each token once to each host of its experts; there it is sent on to them.

Two flat exchanges, one inside the other.  To the outer one, hosts are experts: it sends a token to
the rank that has the same index on that host.  That rank dispatches the rows that it receives among
the ranks of its host, adds up their weighted results, and sends one row back.  The choices of a
token and their weights travel with it.  DeepSeek-AI 2024 (V3), section 3.2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator, SentReceived, Topology
from moe.dispatch.dispatcher import INTEGER_BYTES, Dispatcher, ExpectedInput, Prediction
from moe.dispatch.flat import Flat
from moe.dispatch.hosts import Hosts, by_host
from moe.dispatch.options import Options
from moe.exchange import (
    ALGORITHM,
    Exchange,
    Experts,
    Half,
    Part,
    Received,
    Rows,
    SavedExchange,
    Team,
    dropless,
    form_of,
    start_loads,
)
from moe.gates import score_bytes
from moe.routing import Integers, Routing, Values, slots_of
from moe.sums import scattered
from parallel import PredictedCall
from parallel.nn import Array, Step, cast


class Saved(NamedTuple):
    """What `Hierarchical.forward` keeps."""

    sent: SavedExchange
    entry: Integers  # as in `Leaving`
    counts: SentReceived  # of entries
    weights: Values  # of the entries that were received


class Hierarchical(Dispatcher):
    """The ranks of a team on the hosts of a `topology` of the ranks of the mesh."""

    def __init__(self, options: Options, team: Team, experts: Experts, topology: Topology) -> None:
        if options.padding != "none":
            raise ValueError("the hierarchical dispatch sends exactly what is routed: padding none")
        super().__init__(options, team, experts)
        self.hosts = Hosts.of(team, topology)
        host, local_rank = divmod(team.index_of(), self.hosts.per_host)
        self.between = self.hosts.between(local_rank)
        self.inner = Flat(options, self.hosts.within(host), experts)

    @property
    def axes(self) -> tuple[str, ...]:
        hosts = self.hosts
        teams = [hosts.within(host) for host in range(hosts.num)]
        teams += [hosts.between(local_rank) for local_rank in range(hosts.per_host)]
        return tuple(dict.fromkeys(axis for team in teams for axis in team.axes))

    @property
    def outer(self) -> Exchange:
        """What sends rows to other hosts and back."""
        return Exchange(self.between.comm, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Saved]:
        comm, leaving = self.between.comm, by_host(routing, self.hosts.bounds)
        with collectives.phase("counts"):
            finish = start_loads(leaving.counts.ravel(), comm)
        arriving = step.wait(finish).reshape(-1, 2)
        counts = SentReceived(tuple(leaving.counts[:, 1]), tuple(arriving[:, 1]))
        choices = np.stack([leaving.row, leaving.expert], axis=1).astype(np.int32)
        choices = exchanged(choices, counts, comm, "entries")
        factors = exchanged(weights[leaving.entry], counts, comm, "weights")
        here = self._received(choices, arriving)
        parts = dropless(leaving.pairs, arriving[:, :1], self.between.index_of())

        def compute(rows: Received, out: Rows, part: Part) -> Any:
            numbers = None if step.numbers is None else step.numbers.joined()
            with step.numbered(numbers):
                y, kept = self.inner.forward(rows.joined(), here, factors, step)
            out.set(cast(y, out.own.dtype))
            return kept

        y, sent = self.outer.forward(tokens, None, parts, step, compute)
        return y, Saved(sent, leaving.entry, counts, factors)

    def _received(self, choices: Any, arriving: Integers) -> Routing:
        """Return the routing of the rows that this rank receives, among the experts of its host.

        `choices` (n, 2) are rows of a source and experts, and `arriving` (hosts, 2) the rows and
        the entries of each source.
        """
        rows, entries = arriving.T
        num_experts, host = self.inner.team.num_experts, self.between.index_of()
        first = np.cumsum(rows) - rows
        first[host + 1 :] -= rows[host]
        first[host] = rows.sum() - rows[host]  # as in `Received.joined`
        token = choices[:, 0] + np.repeat(first, entries)
        expert = choices[:, 1].astype(np.int64)
        slot = slots_of(expert, np.ones(len(expert), bool), num_experts)
        group = np.zeros_like(expert)
        return Routing(token, expert, group, slot, int(rows.sum()), num_experts, 1)

    def backward(
        self, dy: Array, weights: Values, saved: Any, step: Step, half: Half
    ) -> tuple[Array, Array, Any]:
        by_part: list[Array] = []

        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            dx, dweights, rests = self.inner.backward(
                rows.joined(), saved.weights, kept, step, half
            )
            by_part.append(dweights)
            out.set(cast(dx, out.own.dtype))
            return rests

        dx, rests = self.outer.backward(dy, None, saved.sent, step, compute)
        back = SentReceived(saved.counts.received, saved.counts.sent)
        returned = exchanged(by_part[0], back, self.between.comm, "weights")
        return dx, scattered(returned, saved.entry, len(weights), weights.dtype), rests

    def backward_weight(self, rests: Any) -> None:
        for rests_of_part in rests:
            self.inner.backward_weight(rests_of_part)

    # What will be sent

    def predict(self, expected: ExpectedInput) -> Prediction:
        hosts, x = self.hosts, expected.x
        routings = [expected.routing(rank) for rank in hosts.team.group(x.rank)]
        counts = np.stack([by_host(routing, hosts.bounds).counts for routing in routings])
        host, local_rank = divmod(hosts.team.index_of(x.rank), hosts.per_host)
        between = counts[local_rank :: hosts.per_host]
        arriving = self._loads_within(host, np.stack([routing.load for routing in routings]))
        inner = Flat(self.options, hosts.within(host), self.inner.experts)
        prediction = inner.predict_rows(x, inner.shares(arriving))
        forward, backward = self._calls(x.rank, between, x.width)
        return prediction._replace(
            forward=forward + inner.counts(x.rank) + prediction.forward,
            backward=backward + prediction.backward,
            kept=prediction.kept + score_bytes(x.width) * int(between[:, host, 1].sum()),
        )

    def _loads_within(self, host: int, loads: Integers) -> Integers:
        """Return the rows that each rank of a `host` sends to each expert there, (ranks, experts).

        `loads` (ranks, experts) are the rows that all ranks of the team send to all experts.
        """
        start, stop = self.hosts.bounds[host : host + 2]
        by_source = loads[:, start:stop].reshape(self.hosts.num, self.hosts.per_host, -1)
        total: Integers = by_source.sum(axis=0)
        return total

    def _calls(
        self, rank: int, counts: Integers, width: int
    ) -> tuple[list[PredictedCall], list[PredictedCall]]:
        """Return the calls between hosts, in forward and in backward.

        `counts` (hosts, hosts, 2) are the rows and the entries from each host to each, of the ranks
        that have the same index on their host as `rank`.
        """
        between = self.hosts.between(self.hosts.team.index_of(rank) % self.hosts.per_host)
        form, num = form_of(self.options.payload, self.options.dim, width), self.hosts.num
        rows, entries = form.width * counts[..., 0], counts[..., 1]

        def call(phase: str, table: Integers, itemsize: int) -> list[PredictedCall]:
            return between.exchange(rank, phase, table, itemsize)

        is_numbered, scores = self.inner.experts.needs_rows, score_bytes(width)
        numbers = call("numbers", counts[..., 0], INTEGER_BYTES) if is_numbered else []
        forward = [
            *call("counts", np.full((num, num), 2), INTEGER_BYTES),
            *call("entries", 2 * entries, 4),
            *call("weights", entries, scores),
            *numbers,
            *call("dispatch", rows, form.itemsize),
            *call("combine", rows.T, form.itemsize),
        ]
        backward = [
            *call("combine", rows, form.itemsize),
            *call("dispatch", rows.T, form.itemsize),
            *call("weights", entries.T, scores),
        ]
        return forward, backward


def exchanged(values: Any, counts: SentReceived, comm: Communicator | None, label: str) -> Any:
    """Return what arrives if `values` (n, ...) of entries are sent, in the phase `label`."""
    if comm is None:
        return values
    with collectives.phase(label):
        return comm.all_to_all(values, counts=counts, algorithm=ALGORITHM)
