"""Networks: which links a message uses, and how many bytes a second each carries.

Messages that are on a link at the same time share it, see `sharing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.simulation.machine import ISLAND, OTHER_HOST, SAME_HOST, Machine

Ints = NDArray[np.int64]


class Links(NamedTuple):
    """The links of a network, in the order of their numbers.

    Attributes
    ----------
    capacities : array
        The bytes per second of each link.
    kinds : array of int
        The kind of each link, as an index into `kind_names`.
    kind_names : tuple of str
        The names of the kinds.
    """

    capacities: NDArray[np.float64]
    kinds: Ints
    kind_names: tuple[str, ...]


class Network(Protocol):
    """Where ranks are, and the links between them.

    Attributes
    ----------
    num_ranks : int
        The number of ranks.
    period : int
        How many ranks are simulated; the others do the same at the same times.  All ranks can be
        moved on by so many without a change in how they are connected, and links that then move
        into each other are one.
    classes : tuple of str
        The names of the links of a `Machine` that messages use.
    links : Links
        The links between the ranks.
    """

    num_ranks: int
    period: int
    classes: tuple[str, ...]
    links: Links

    def classify(self, sources: Ints, destinations: Ints) -> Ints:
        """Return the class of each message, as an index into `classes`."""

    def routes(self, sources: Ints, destinations: Ints) -> Ints:
        """Return the numbers of the links of each message, a row for each, filled up with -1."""


class Apart:
    """Ranks on hosts that are connected without limit: messages never share a link.

    Parameters
    ----------
    hosts : sequence of int
        The host of each rank.
    """

    classes: tuple[str, ...] = (SAME_HOST, OTHER_HOST)

    def __init__(self, hosts: Sequence[int]) -> None:
        self.hosts, self.num_ranks, self.period = np.asarray(hosts), len(hosts), len(hosts)
        self.links = Links(np.zeros(0), np.zeros(0, np.int64), ())

    def classify(self, sources: Ints, destinations: Ints) -> Ints:
        """Return 0 for a message within a host, 1 for a message between hosts."""
        classes: Ints = (self.hosts[sources] != self.hosts[destinations]).astype(np.int64)
        return classes

    def routes(self, sources: Ints, destinations: Ints) -> Ints:
        """Return no links."""
        return np.full((len(sources), 0), -1)


class Level(NamedTuple):
    """A level of a tree: groups of consecutive ranks, and the links of each to the others.

    Attributes
    ----------
    name : str
        The name of a link.
    ranks : int
        The number of ranks of a group.
    lanes : int
        The number of parallel links of a group, which its ranks divide evenly.
    capacity : float
        The bytes per second of each link in each direction.
    """

    name: str
    ranks: int
    lanes: int
    capacity: float


class _Family(NamedTuple):
    """Links that are alike, out of or into the groups of a level.

    Messages of the class `link_class`, within a host or an island, use them; with None, messages to
    other groups do.
    """

    level: Level
    is_entry: bool
    link_class: int | None = None

    @property
    def name(self) -> str:
        if self.link_class is not None:
            return self.level.name
        return f"{self.level.name}, {'in' if self.is_entry else 'out'}"


class Tree:
    """Ranks in hosts, hosts in racks and so on; what connects the largest groups has no limit.

    A message to another group of a level is on a link out of the one and a link into the other.  A
    message within a host, or within an island of ranks with fast links, is only on the port of the
    rank that receives it.

    Parameters
    ----------
    machine : Machine
        Its links give the rates of the ports of ranks.
    num_ranks : int
        The number of ranks.
    levels : tuple of Level
        The levels, hosts first.
    island : int
        How many consecutive ranks fast links connect.
    is_folded : bool
        Whether the ranks of a largest group stand for all ranks.

    Raises
    ------
    ValueError
        If groups do not divide the ranks, or each other.
    """

    def __init__(
        self,
        machine: Machine,
        num_ranks: int,
        levels: tuple[Level, ...],
        *,
        island: int = 1,
        is_folded: bool = False,
    ) -> None:
        unit = max(levels[-1].ranks, island)
        _check(num_ranks if is_folded else None, unit, levels)
        self.num_ranks, self.host, self.island = num_ranks, levels[0].ranks, island
        self.period = unit if is_folded else num_ranks
        self.classes: tuple[str, ...] = (SAME_HOST, OTHER_HOST, *((ISLAND,) if island > 1 else ()))
        self.families = [
            _Family(Level(f"port, {name}", 1, 1, machine.bytes_per_second(name)), True, number)
            for number, name in enumerate(self.classes)
            if name != OTHER_HOST
        ]
        self.families += [_Family(x, is_entry) for x in levels for is_entry in (False, True)]
        numbers = [self._num_links(family.level) for family in self.families]
        self.firsts = np.cumsum([0, *numbers])
        self.links = Links(
            np.repeat([family.level.capacity for family in self.families], numbers),
            np.repeat(np.arange(len(numbers)), numbers),
            tuple(family.name for family in self.families),
        )

    def _num_links(self, level: Level) -> int:
        return -(-self.period // level.ranks) * level.lanes

    def classify(self, sources: Ints, destinations: Ints) -> Ints:
        """Return 0 for a message within a host, 1 between hosts, 2 within an island."""
        classes: Ints = (sources // self.host != destinations // self.host).astype(np.int64)
        if self.island > 1:
            classes[sources // self.island == destinations // self.island] = 2
        return classes

    def routes(self, sources: Ints, destinations: Ints) -> Ints:
        """Return a column for each family of links: the one that a message uses, or -1."""
        classes = self.classify(sources, destinations)
        columns = []
        for first, (level, is_entry, link_class) in zip(self.firsts, self.families, strict=False):
            if link_class is None:
                is_on = (sources // level.ranks != destinations // level.ranks) & (classes != 2)
            else:
                is_on = classes == link_class
            group, place = np.divmod(
                (destinations if is_entry else sources) % self.period, level.ranks
            )
            lane = place * level.lanes // level.ranks
            columns.append(np.where(is_on, first + group * level.lanes + lane, -1))
        return np.stack(columns, axis=1)


class Torus:
    """Ranks in a torus, with two links to each neighbour, one in each direction.

    A message moves along one dimension after the other, first along the fastest, and in each on the
    shorter way.  Consecutive ranks are neighbours along the last dimension.

    Parameters
    ----------
    machine : Machine
        Its link between hosts gives the rate of all links.
    shape : tuple of int
        The number of ranks along each dimension.
    is_folded : bool
        Whether the ranks of one layer of the first dimension stand for all ranks.
    """

    classes: tuple[str, ...] = (OTHER_HOST,)

    def __init__(
        self, machine: Machine, shape: tuple[int, ...], *, is_folded: bool = False
    ) -> None:
        self.shape, self.num_ranks = shape, math.prod(shape)
        self.period = self.num_ranks // shape[0] if is_folded else self.num_ranks
        capacity, number = machine.bytes_per_second(OTHER_HOST), 2 * len(shape) * self.period
        names = [f"dimension {dim}, {way}" for dim in range(len(shape)) for way in ("up", "down")]
        self.links = Links(
            np.full(number, capacity), np.arange(number) % (2 * len(shape)), tuple(names)
        )

    def classify(self, sources: Ints, destinations: Ints) -> Ints:
        """Return 0 for each message: all are between hosts."""
        return np.zeros_like(sources)

    def routes(self, sources: Ints, destinations: Ints) -> Ints:
        """Return a column for each step along each dimension."""
        at = np.stack(np.unravel_index(sources, self.shape))
        target = np.stack(np.unravel_index(destinations, self.shape))
        columns = []
        for dim in reversed(range(len(self.shape))):
            extent = self.shape[dim]
            ahead = (target[dim] - at[dim]) % extent
            is_up = 2 * ahead <= extent
            step, distance = np.where(is_up, 1, -1), np.where(is_up, ahead, extent - ahead)
            for number in range(extent // 2):
                node = np.ravel_multi_index(tuple(at), self.shape) % self.period
                link = (node * len(self.shape) + dim) * 2 + ~is_up
                is_on = number < distance
                columns.append(np.where(is_on, link, -1))
                at[dim] = (at[dim] + step * is_on) % extent
        return np.stack(columns, axis=1) if columns else np.full((len(sources), 0), -1)


def _check(num_ranks: int | None, unit: int, levels: tuple[Level, ...]) -> None:
    """Raise ValueError unless groups divide the larger groups, and links the ranks of a group."""
    sizes = [level.ranks for level in levels]
    for small, large in zip(sizes, [*sizes[1:], num_ranks or sizes[-1]], strict=True):
        if large % small:
            raise ValueError(f"groups of {small} ranks do not make up {large} ranks")
    if num_ranks is not None and num_ranks % unit:
        raise ValueError(f"groups of {unit} ranks do not make up {num_ranks} ranks")
    for level in levels:
        if level.ranks % level.lanes:
            raise ValueError(f"{level.ranks} ranks cannot share {level.lanes} links evenly")
