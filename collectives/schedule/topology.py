"""The hosts of the ranks: which ranks share one, and which stand for others on another host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, repeat

from collectives.schedule.layout import even_counts


@dataclass(frozen=True, init=False)
class Topology:
    """Which ranks share a host.  Hosts are numbered in the order of their lowest ranks.

    Topologies are equal and hash alike if the same ranks share hosts.

    Parameters
    ----------
    keys : iterable
        A name or number for each rank, equal for ranks on the same host.

    Attributes
    ----------
    host_of : tuple of int
        The number of each rank's host.
    hosts : tuple of tuple of int
        The ranks of each host, in their order.

    Raises
    ------
    ValueError
        If there is no rank.

    Examples
    --------
    >>> from collectives import Topology
    >>> Topology("aabbc").hosts
    ((0, 1), (2, 3), (4,))
    >>> Topology.consecutive(6, 4).hosts
    ((0, 1, 2, 3), (4, 5))
    """

    host_of: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...] = field(compare=False, repr=False)

    def __init__(self, keys: Iterable[Hashable]) -> None:
        ranks_of: dict[Hashable, list[int]] = {}
        for rank, key in enumerate(keys):
            ranks_of.setdefault(key, []).append(rank)
        if not ranks_of:
            raise ValueError("a topology needs at least one rank")
        host_of = {rank: host for host, ranks in enumerate(ranks_of.values()) for rank in ranks}
        object.__setattr__(self, "host_of", tuple(host_of[rank] for rank in range(len(host_of))))
        object.__setattr__(self, "hosts", tuple(map(tuple, ranks_of.values())))

    @classmethod
    def consecutive(cls, size: int, per_host: int | Sequence[int]) -> Topology:
        """Return the topology of `size` ranks that fill one host after the other.

        Parameters
        ----------
        size : int
            The number of ranks.
        per_host : int or sequence of int
            The ranks of each host, where the last host has what is left; or the numbers of ranks of
            all hosts.

        Raises
        ------
        ValueError
            If the numbers are not positive, or do not add up to `size`.
        """
        if isinstance(per_host, int):
            if per_host < 1:
                raise ValueError(f"a host has at least 1 rank, got per_host={per_host}")
            return cls(rank // per_host for rank in range(size))
        if sum(per_host) != size or min(per_host, default=1) < 1:
            raise ValueError(f"hosts of {tuple(per_host)} ranks are not hosts of {size} ranks")
        return cls(chain(*(repeat(host, count) for host, count in enumerate(per_host))))

    def check_size(self, size: int) -> None:
        """Raise ValueError unless this is a topology of `size` ranks."""
        if self.size != size:
            raise ValueError(f"a topology of {self.size} ranks does not fit {size} ranks")

    def among(self, ranks: Iterable[int]) -> Topology:
        """Return the topology of some of the ranks, numbered in the order given."""
        return Topology(self.host_of[rank] for rank in ranks)

    def __str__(self) -> str:
        """Return "4x2" (hosts x ranks) or "3+2+1".

        If ranks of a host are not consecutive, return the host of each rank, such as "hosts 0,1,0".
        """
        if not self.is_consecutive:
            return f"hosts {','.join(map(str, self.host_of))}"
        if self.is_even:
            return f"{self.num_hosts}x{self.max_per_host}"
        return "+".join(map(str, self.ranks_per_host))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.host_of)

    @cached_property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @cached_property
    def ranks_per_host(self) -> tuple[int, ...]:
        """The number of ranks of each host."""
        return tuple(map(len, self.hosts))

    @cached_property
    def max_per_host(self) -> int:
        """The number of ranks of the largest host."""
        return max(map(len, self.hosts))

    @cached_property
    def is_even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len(set(map(len, self.hosts))) == 1

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether the ranks of each host have consecutive numbers."""
        return self.host_of == tuple(sorted(self.host_of))

    def mates(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the host of `rank`, itself included, in their order."""
        return self.hosts[self.host_of[rank]]

    def place(self, rank: int) -> int:
        """Return the place of `rank` on its host: 0 for the lowest rank of the host."""
        return self._order[rank] - self._starts[self.host_of[rank]]

    def counterpart(self, rank: int, host: int) -> int:
        """Return the rank of `host` that stands for `rank` there.

        On its own host that is `rank` itself, and, if all hosts have equally many ranks, it is the
        one with the same place.  In any case each rank of a host stands for equally many ranks, to
        within one.
        """
        ranks = self.hosts[host]
        return ranks[(self._order[rank] - self._starts[host]) % len(ranks)]

    def in_column(self, column: int, host: int) -> int:
        """Return the rank of `host` that has this column, of `max_per_host` columns.

        Each host divides all columns among its ranks, equally to within one.
        """
        return self._columns[host][column]

    def columns(self, rank: int) -> list[int]:
        """Return the columns of a rank; see `in_column`."""
        holders = self._columns[self.host_of[rank]]
        return [column for column, holder in enumerate(holders) if holder == rank]

    @cached_property
    def _columns(self) -> list[list[int]]:
        """For each host, the rank that has each column."""
        shares = [
            zip(ranks, even_counts(self.max_per_host, len(ranks)), strict=True)
            for ranks in self.hosts
        ]
        return [[rank for rank, count in of_host for _ in range(count)] for of_host in shares]

    @cached_property
    def _order(self) -> dict[int, int]:
        """The number of each rank if ranks are counted host by host."""
        return {rank: number for number, rank in enumerate(chain(*self.hosts))}

    @cached_property
    def _starts(self) -> list[int]:
        """The number, counted in this way, of the first rank of each host."""
        return [0, *accumulate(self.ranks_per_host)]
