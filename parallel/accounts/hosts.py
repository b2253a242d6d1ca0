"""How much of the traffic of a mesh passes between hosts, by the order of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from parallel.accounts.calls import Int64


def renumbered(matrix: Int64, axes: Mapping[str, int], order: Sequence[str]) -> Int64:
    """Return the traffic of ranks that are numbered along the axes in another `order`.

    `matrix` has the bytes from row to column, of ranks numbered along `axes`, slowest first.

    Examples
    --------
    >>> import numpy as np
    >>> ring = np.array([[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])  # along tensor
    >>> between_hosts(renumbered(ring, {"data": 2, "tensor": 2}, ("tensor", "data")), 2)
    4
    """
    table = np.arange(len(matrix)).reshape(tuple(axes.values()))
    ranks = table.transpose([list(axes).index(axis) for axis in order]).ravel()
    found: Int64 = matrix[np.ix_(ranks, ranks)]
    return found


def between_hosts(matrix: Int64, ranks_per_host: int) -> int:
    """Return the bytes between hosts that have so many consecutive ranks each."""
    host = np.arange(len(matrix)) // ranks_per_host
    return int(matrix[host[:, None] != host[None, :]].sum())
