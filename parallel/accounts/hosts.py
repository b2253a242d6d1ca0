"""How much of the traffic of a mesh passes between hosts, by the order of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from collectives import Topology
from parallel.accounts.calls import Int64


def renumbered(matrix: Int64, axes: Mapping[str, int], order: Sequence[str]) -> Int64:
    """Return the traffic of ranks that are numbered along the axes in another `order`.

    `matrix` has the bytes from row to column, of ranks numbered along `axes`, slowest first.

    Examples
    --------
    >>> import numpy as np
    >>> from collectives import Topology
    >>> ring = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])  # along tensor
    >>> other = renumbered(ring, {"data": 2, "tensor": 2}, ("tensor", "data"))
    >>> between_hosts(other, Topology.consecutive(4, 2))
    4
    """
    table = np.arange(len(matrix)).reshape(tuple(axes.values()))
    ranks = table.transpose([list(axes).index(axis) for axis in order]).ravel()
    between: Int64 = matrix[np.ix_(ranks, ranks)]
    return between


def off_host(topology: Topology) -> NDArray[np.bool_]:
    """Return whether a message from row to column leaves its host, (ranks, ranks)."""
    host = np.array(topology.host_of)
    crosses: NDArray[np.bool_] = host[:, None] != host[None, :]
    return crosses


def between_hosts(matrix: Int64, topology: Topology) -> int:
    """Return the bytes between hosts; `matrix` has the bytes from row to column."""
    return int(matrix[off_host(topology)].sum())
