"""The hosts of a team, and which tokens of a routing go to which host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from collectives import Topology
from moe.exchange import Team
from moe.routing import Integers, Routing, slots_of


class Hosts(NamedTuple):
    """The hosts of a team: consecutive ranks of the team, equally many on each host."""

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

    @property
    def bounds(self) -> Integers:
        """The first expert of each host, and the number of experts, int64 (hosts + 1,)."""
        starts = [self.team.owned_by(i).start for i in range(0, self.team.size, self.per_host)]
        return np.array([*starts, self.team.num_experts], np.int64)

    def within(self, host: int) -> Team:
        """Return the ranks of a `host`, which divide its experts."""
        first = host * self.per_host
        num_experts = int(np.diff(self.bounds)[host])
        return self._subset(range(first, first + self.per_host), num_experts)

    def between(self, local_rank: int) -> Team:
        """Return the ranks with this index on their hosts, which divide the hosts."""
        return self._subset(range(local_rank, self.team.size, self.per_host), self.num)

    def _subset(self, indices: range, num_experts: int) -> Team:
        """Return the ranks with these `indices` in the team, which divide so many experts."""
        mesh, axis = self.team.mesh, self.team.axis
        if axis is None or len(indices) == 1:
            return Team(mesh, None, num_experts)
        return Team(mesh, mesh.subset(axis, indices), num_experts)


class Leaving(NamedTuple):
    """The entries of some tokens, and the hosts that they are sent to.

    Attributes
    ----------
    pairs : Routing
        Each pair of a token and a host once, with hosts in place of experts.
    entry : array
        The entries of the whole routing that are not dropped, by host, int64 (n,).
    row : array
        The row of the token of each of them among the rows sent to that host, int64 (n,).
    expert : array
        The number on that host of the expert of each of them, int64 (n,).
    counts : array
        The rows and the entries for each host, int64 (hosts, 2).
    """

    pairs: Routing
    entry: Integers
    row: Integers
    expert: Integers
    counts: Integers


def by_host(routing: Routing, bounds: Integers) -> Leaving:
    """Return what of a `routing` goes to which host; `bounds` is `Hosts.bounds`."""
    num_hosts = len(bounds) - 1
    kept = np.flatnonzero(~routing.is_dropped)
    host = np.searchsorted(bounds, routing.expert[kept], side="right") - 1
    order = np.argsort(host, kind="stable")
    entry, host = kept[order], host[order]
    pairs, number = np.unique(host * routing.num_tokens + routing.token[entry], return_inverse=True)
    of_pair, token = np.divmod(pairs, max(1, routing.num_tokens))
    rows = np.bincount(of_pair, minlength=num_hosts)
    entries = np.bincount(host, minlength=num_hosts)
    zeros = np.zeros_like(token)
    slot = slots_of(of_pair, zeros == 0, num_hosts)
    return Leaving(
        Routing(token, of_pair, zeros, slot, routing.num_tokens, num_hosts, routing.num_groups),
        entry,
        number - (np.cumsum(rows) - rows)[host],
        routing.expert[entry] - bounds[host],
        np.stack([rows, entries], axis=1).astype(np.int64),
    )
