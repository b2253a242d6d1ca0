"""Each rank sends each token once to each host of its experts; there it is sent on to them.

Two flat exchanges, one inside the other.  To the outer one, hosts are experts: it sends a token to
the rank that has the same place on that host.  That rank dispatches the rows that it receives among
the ranks of its host, adds up their weighted results, and sends one row back.  The choices of a
token and their weights travel with it.  DeepSeek-AI 2024 (V3), section 3.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator, SentReceived, Topology
from moe import dispatch
from moe.dispatch import Part
from moe.exchange import Exchange, Sent
from moe.experts import Experts, Half
from moe.payload import form_of
from moe.routing import Integers, Routing, Values, slots_of
from moe.rows import Received, Rows, scattered
from moe.ways.flat import INTEGER, Flat
from moe.ways.options import Options
from moe.ways.team import Team
from moe.ways.way import WIDE, Forecast, Plan, Way
from parallel.nn import Array, Step, cast


class Hosts(NamedTuple):
    """Consecutive places of a team, equally many on each host."""

    team: Team
    per_host: int

    @classmethod
    def of(cls, team: Team, topology: Topology) -> Hosts:
        """Return the hosts of a `team`, on which the ranks of the mesh have this `topology`.

        Raises ValueError unless all teams of the mesh are divided into equal parts by hosts.
        """
        groups = [team.group()] if team.axis is None else team.mesh.ranks(team.axis)
        parts = [topology.among(group) for group in groups]
        sizes = {size for part in parts for size in part.ranks_per_host}
        if len(sizes) > 1 or not all(part.is_consecutive for part in parts):
            raise ValueError(
                f"hosts ({topology}) do not have equally many neighbouring ranks along {team.axis}"
            )
        return cls(team, sizes.pop())

    @property
    def num(self) -> int:
        """The number of hosts."""
        return self.team.size // self.per_host

    def of_experts(self) -> Integers:
        """Return the first expert of each host, and the number of experts, int64 (hosts + 1,)."""
        places = range(0, self.team.size, self.per_host)
        starts = [self.team.owned_by(place).start for place in places]
        return np.array([*starts, self.team.num_experts], np.int64)

    def within(self, host: int) -> Team:
        """Return the ranks of a `host`, which divide its experts."""
        first = host * self.per_host
        starts = self.of_experts()
        return self._subset(range(first, first + self.per_host), int(np.diff(starts)[host]))

    def between(self, place: int) -> Team:
        """Return the ranks with a `place` on their hosts, which divide the hosts."""
        return self._subset(range(place, self.team.size, self.per_host), self.num)

    def _subset(self, places: range, num_experts: int) -> Team:
        mesh, axis = self.team.mesh, self.team.axis
        if axis is None or len(places) == 1:
            return Team(mesh, None, num_experts)
        return Team(mesh, mesh.subset(axis, places), num_experts)


class Travelling(NamedTuple):
    """The entries of some tokens, and the hosts that they are sent to.

    Attributes
    ----------
    pairs : Routing
        Each pair of a token and a host once, with hosts in place of experts.
    entry : array
        The entries of the whole routing that are not dropped, by host, int64 (n,).
    row, expert : array
        Of each of them: the row of the token among those sent to that host, and the number of the
        expert there, int64 (n,).
    counts : array
        The rows and the entries for each host, int64 (hosts, 2).
    """

    pairs: Routing
    entry: Integers
    row: Integers
    expert: Integers
    counts: Integers


def by_host(routing: Routing, starts: Integers) -> Travelling:
    """Return what of a `routing` goes to which host; `starts` is `Hosts.of_experts`."""
    num_hosts = len(starts) - 1
    kept = np.flatnonzero(~routing.is_dropped)
    host = np.searchsorted(starts, routing.expert[kept], side="right") - 1
    order = np.argsort(host, kind="stable")
    entry, host = kept[order], host[order]
    pairs, number = np.unique(host * routing.num_tokens + routing.token[entry], return_inverse=True)
    of_pair, token = np.divmod(pairs, max(1, routing.num_tokens))
    rows = np.bincount(of_pair, minlength=num_hosts)
    entries = np.bincount(host, minlength=num_hosts)
    zeros = np.zeros_like(token)
    return Travelling(
        Routing(token, of_pair, zeros, slots_of(of_pair, zeros == 0, num_hosts),
                routing.num_tokens, num_hosts, routing.num_groups),
        entry, number - (np.cumsum(rows) - rows)[host], routing.expert[entry] - starts[host],
        np.stack([rows, entries], axis=1).astype(np.int64),
    )  # fmt: skip


class Saved(NamedTuple):
    """What `Hierarchical.forward` keeps."""

    sent: Sent
    entry: Integers  # as in `Travelling`
    counts: SentReceived  # of entries
    weights: Values  # of the entries that were received


class Hierarchical(Way):
    """The ranks of a `team` on the hosts of a `topology` of the ranks of the mesh."""

    def __init__(self, options: Options, team: Team, experts: Experts, topology: Topology) -> None:
        if options.padding != "none":
            raise ValueError("the hierarchical dispatch sends exactly what is routed: padding none")
        self.options, self.hosts = options, Hosts.of(team, topology)
        host, place = divmod(team.place(), self.hosts.per_host)
        self.between = self.hosts.between(place)
        self.inner = Flat(options, self.hosts.within(host), experts)

    @property
    def axes(self) -> tuple[str, ...]:
        hosts = self.hosts
        teams = [hosts.within(host) for host in range(hosts.num)]
        teams += [hosts.between(place) for place in range(hosts.per_host)]
        return tuple(dict.fromkeys(team.axis for team in teams if team.axis is not None))

    @property
    def outer(self) -> Exchange:
        """What sends rows to other hosts and back."""
        return Exchange(self.between.comm, self.options.payload)

    # A step

    def forward(
        self, tokens: Array, routing: Routing, weights: Values, step: Step
    ) -> tuple[Array, Saved]:
        comm, leaving = self.between.comm, by_host(routing, self.hosts.of_experts())
        with collectives.phase("counts"):
            told = dispatch.exchange(leaving.counts.ravel(), comm)
        arriving = step.wait(told).reshape(-1, 2)
        counts = SentReceived(tuple(leaving.counts[:, 1]), tuple(arriving[:, 1]))
        choices = np.stack([leaving.row, leaving.expert], axis=1).astype(np.int32)
        choices = exchanged(choices, counts, comm, "entries")
        factors = exchanged(weights[leaving.entry], counts, comm, "weights")
        here = self._received(choices, arriving)
        parts = dispatch.dropless(leaving.pairs, arriving[:, :1], self.between.place())

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
        num_experts, host = self.inner.team.num_experts, self.between.place()
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
        of_entries: list[Array] = []

        def compute(rows: Received, out: Rows, part: Part, kept: Any) -> Any:
            dx, dweights, rests = self.inner.backward(
                rows.joined(), saved.weights, kept, step, half
            )
            of_entries.append(dweights)
            out.set(cast(dx, out.own.dtype))
            return rests

        dx, rests = self.outer.backward(dy, None, saved.sent, step, compute)
        back = SentReceived(saved.counts.received, saved.counts.sent)
        returned = exchanged(of_entries[0], back, self.between.comm, "weights")
        return dx, scattered(returned, saved.entry, len(weights), weights.dtype), rests

    def backward_weight(self, rests: Any) -> None:
        for each in rests:
            self.inner.backward_weight(each)

    # What will be sent

    def plan(self, forecast: Forecast) -> Plan:
        hosts, x, starts = self.hosts, forecast.x, self.hosts.of_experts()
        routings = [forecast.routing(rank) for rank in hosts.team.group(x.rank)]
        counts = np.stack([by_host(each, starts).counts for each in routings])
        host, place = divmod(hosts.team.place(x.rank), hosts.per_host)
        arriving = self._loads_within(host, [each.load for each in routings])
        inner = Flat(self.options, hosts.within(host), self.inner.experts)
        plan = inner.plan_of(x, inner.shares(arriving))
        outer = self._calls(x.rank, counts[place :: hosts.per_host], x.width)
        weight_bytes = max(x.width, WIDE) * int(counts[place :: hosts.per_host, host, 1].sum())
        return plan._replace(
            forward=outer.forward + inner.counts(x.rank) + plan.forward,
            backward=outer.backward + plan.backward, kept=plan.kept + weight_bytes,
        )  # fmt: skip

    def _loads_within(self, host: int, loads: Sequence[Integers]) -> list[Integers]:
        """Return the rows that each rank of a `host` sends to each expert there.

        `loads` are those of all ranks of the team.
        """
        start, stop = self.hosts.of_experts()[host : host + 2]
        here = np.stack(loads)[:, start:stop]
        return list(here.reshape(self.hosts.num, self.hosts.per_host, -1).sum(axis=0))

    def _calls(self, rank: int, counts: Integers, width: int) -> Plan:
        """Return the calls between hosts; `counts` (hosts, hosts, 2) has rows and entries.

        From each host to each, of the ranks with the same place as `rank`.
        """
        between = self.hosts.between(self.hosts.team.place(rank) % self.hosts.per_host)
        form, num = form_of(self.options.payload, self.options.dim, width), self.hosts.num
        rows, entries = form.width * counts[..., 0], counts[..., 1]
        wide = max(width, WIDE)

        def call(phase: str, table: Integers, itemsize: int) -> list[Any]:
            return between.exchange(rank, phase, table.tolist(), itemsize)

        numbers = call("numbers", counts[..., 0], INTEGER) if self.inner.experts.needs_rows else []
        forward = [
            *call("counts", np.full((num, num), 2), INTEGER), *call("entries", 2 * entries, 4),
            *call("weights", entries, wide), *numbers, *call("dispatch", rows, form.itemsize),
            *call("combine", rows.T, form.itemsize),
        ]  # fmt: skip
        backward = [
            *call("combine", rows, form.itemsize), *call("dispatch", rows.T, form.itemsize),
            *call("weights", entries.T, wide),
        ]  # fmt: skip
        return Plan([], forward, backward, 0)


def exchanged(values: Any, counts: SentReceived, comm: Communicator | None, label: str) -> Any:
    """Return what arrives if `values` (n, ...) of entries are sent, in the phase `label`."""
    if comm is None:
        return values
    with collectives.phase(label):
        return comm.all_to_all(values, counts=counts, algorithm=dispatch.ALGORITHM)
