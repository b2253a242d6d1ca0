"""Ranks arranged in a mesh with named axes, and the communicators along its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from collectives import Communicator, Topology

AXES = ("pipe", "replicate", "shard", "data", "context", "expert", "tensor")
ROW_AXES = ("data", "context", "expert")  # along which ranks compute different tokens


class Mesh:
    """An n-dimensional arrangement of all ranks of a communicator.

        mesh = Mesh(comm, pipe=2, data=2, tensor=2)      # rank 5 has coordinates 1, 0, 1
        mesh["tensor"].all_reduce(x)

    Consecutive ranks are neighbors on the last axis.  Ledgers show the axes of a communicator in
    the column ``axis``.  Methods take one axis or several, and raise KeyError for an unknown one.
    As the only axis, ``"pipe[0,3]"`` stands for the ranks 0 and 3 along ``pipe`` (`subset`).

    Parameters
    ----------
    comm : Communicator or None
        With None nothing can be sent: a mesh of one rank trains, and a mesh of more ranks, which
        need not exist, only predicts.
    axes : int
        The number of ranks along each axis, slowest first: ``pipe``, ``replicate``, ``shard``,
        ``data`` (by default, all ranks), ``context``, ``expert``, ``tensor``.  Raises ValueError
        for another name, for a size less than 1, and unless their product is the size of `comm`.

    Attributes
    ----------
    axes : dict of str to int
        The sizes, by name.
    size, rank : int
        The number of ranks, and this rank; 0 without a communicator.
    coordinates : dict of str to int
        The index of this rank along each axis.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Mesh
    >>> collectives.run(lambda comm: Mesh(comm, data=2, tensor=2).coordinates, size=4)[2]
    {'data': 1, 'tensor': 0}
    """

    def __init__(self, comm: Communicator | None, **axes: int) -> None:
        self.comm = comm
        self.rank = 0 if comm is None else comm.rank
        self.axes = axes or {"data": 1 if comm is None else comm.size}
        if unknown := [name for name in self.axes if name not in AXES]:
            raise ValueError(f"there is no axis {unknown[0]!r}; choose from {', '.join(AXES)}")
        self.size = math.prod(self.axes.values())
        words = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        if min(self.axes.values()) < 1:
            raise ValueError(f"a mesh of {words} has an axis of less than one rank")
        if comm is not None and self.size != comm.size:
            raise ValueError(f"a mesh of {words} has {self.size} ranks, not {comm.size}")
        self._valid: set[tuple[str, ...]] = set()  # names that have been checked
        steps = np.cumprod([1, *reversed(self.axes.values())])[-2::-1].tolist()
        self._steps = dict(zip(self.axes, steps, strict=True))  # between neighbors along an axis
        self.coordinates = {name: self.index(name) for name in self.axes}
        self._comms: dict[tuple[str, ...], Communicator | None] = {}
        self._groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}

    def __getitem__(self, axes: str | Sequence[str]) -> Communicator | None:
        """Return the communicator of this rank along `axes`; None if this rank has none.

        The first use of an axis makes its communicators: all ranks of the mesh take part.
        """
        names = self._names(axes)
        if self.comm is not None and names not in self._comms:
            self._comms[names] = self._make(self.comm, names)
        return self._comms.get(names)

    def _make(self, whole: Communicator, names: tuple[str, ...]) -> Communicator | None:
        """Return a new communicator along `names`, or `whole` if it is the same."""
        label, groups = ",".join(names), self.ranks(names)
        if whole.name == label and groups == [tuple(range(self.size))]:
            return whole
        color = next((i for i, ranks in enumerate(groups) if self.rank in ranks), None)
        return whole.split(color, 0 if color is None else self.index(names), name=label)

    def ranks(self, axes: str | Sequence[str]) -> list[tuple[int, ...]]:
        """Return all groups of ranks along `axes`, in the order given; every rank is in one.

        Along a subset of an axis, only the ranks of the subset are in a group.
        """
        names = self._names(axes)
        if names not in self._groups:
            if (part := _subset_of(names)) is not None:
                whole = self.ranks(part[0])
                self._groups[names] = [tuple(group[i] for i in part[1]) for group in whole]
                return self._groups[names]
            along = [list(self.axes).index(name) for name in names]
            others = [i for i in range(len(self.axes)) if i not in along]
            table = np.arange(self.size).reshape(tuple(self.axes.values()))
            groups = table.transpose(*others, *along).reshape(-1, self.size_of(names))
            self._groups[names] = [tuple(group) for group in groups.tolist()]
        return self._groups[names]

    def size_of(self, axes: str | Sequence[str]) -> int:
        """Return the number of ranks along `axes`."""
        names = self._names(axes)
        if (part := _subset_of(names)) is not None:
            return len(part[1])
        return math.prod(self.axes[name] for name in names)

    def index(self, axes: str | Sequence[str], rank: int | None = None) -> int:
        """Return the index of a `rank`, by default this one, along `axes`.

        Raises ValueError for a rank that is not in a subset of an axis.
        """
        rank, index = self.rank if rank is None else rank, 0
        names = self._names(axes)
        if (part := _subset_of(names)) is not None:
            return part[1].index(self.index(part[0], rank))
        for name in names:
            index = index * self.axes[name] + rank // self._steps[name] % self.axes[name]
        return index

    def _names(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._valid:
            self._check(names)
            self._valid.add(names)
        return names

    def _check(self, names: tuple[str, ...]) -> None:
        if (part := _subset_of(names)) is not None:
            self._names(part[0])
            return
        if unknown := [name for name in names if name not in self.axes]:
            raise KeyError(f"the mesh has no axis {unknown[0]!r}, only {', '.join(self.axes)}")
        if len(set(names)) < len(names):
            raise ValueError(f"an axis is named twice in {', '.join(names)}")

    def subset(self, axis: str, indices: Sequence[int]) -> str:
        """Return a name, used like an axis, of the ranks with some `indices` along an `axis`.

        Raises ValueError for an index that does not exist, or that occurs twice.

        Examples
        --------
        >>> import collectives
        >>> from parallel import Mesh
        >>> def ends(comm):
        ...     mesh = Mesh(comm, pipe=3)
        ...     name = mesh.subset("pipe", (0, 2))
        ...     return name, mesh.ranks(name), mesh[name] is None
        >>> collectives.run(ends, size=3)[1]
        ('pipe[0,2]', [(0, 2)], True)
        """
        size = self.size_of(axis)
        if len(set(indices)) < len(indices) or not all(0 <= i < size for i in indices):
            raise ValueError(f"{tuple(indices)} are not indices along {axis!r}, of {size} ranks")
        return axis if len(indices) == size else f"{axis}[{','.join(map(str, sorted(indices)))}]"

    def hosts(self, ranks_per_host: int | None = None) -> Topology:
        """Return the hosts of the ranks.

        With `ranks_per_host`, each host has so many consecutive ranks; by default hosts are the
        hosts of `comm`.  Raises ValueError for less than one rank per host.
        """
        if ranks_per_host is not None:
            return Topology.consecutive(self.size, ranks_per_host)
        return Topology([0]) if self.comm is None else self.comm.topology

    def free(self) -> None:
        """Free the communicators of all axes, but not `comm`.  All ranks call this."""
        for comm in self._comms.values():
            if comm is not None and comm is not self.comm:
                comm.free()
        self._comms.clear()


@lru_cache(maxsize=1024)
def _subset_of(names: tuple[str, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return the axis and the indices of a subset of an axis; None for axes."""
    axis, _, indices = names[0].rstrip("]").partition("[") if len(names) == 1 else ("", "", "")
    return (axis, tuple(map(int, indices.split(",")))) if indices else None
