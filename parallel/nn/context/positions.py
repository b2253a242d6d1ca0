"""Which positions of a row every rank has, and which queries see which keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collectives import Communicator
from parallel.mesh import Mesh, length, span
from parallel.nn.functional import Array, on_host
from parallel.nn.layer import ArraySpec, Step


def context_positions(
    context: int, num_ranks: int, index: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the positions of a row that a rank has, so that causal attention is balanced.

    The row is cut into 2 C contiguous parts for C ranks, as even as possible; rank i has part i and
    part 2 C - 1 - i.  A position attends to all positions before it, so the work of position t is
    proportional to t + 1, and an early part balances a late one.  Llama Team 2024, section 3.3.2.

    Parameters
    ----------
    context : int
        The number of positions in a row.
    num_ranks, index : int
        The number of ranks that divide the row, and the index of the rank among them.

    Returns
    -------
    array of int64
        The positions in ascending order.  Every position is on exactly one rank.

    Raises
    ------
    ValueError
        If a rank would have no position, or there is no rank `index`.

    Examples
    --------
    >>> from parallel.nn import context_positions
    >>> [context_positions(8, 2, i).tolist() for i in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    parts = parts_of(context, num_ranks, index)
    return np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])


def parts_of(context: int, num_ranks: int, index: int) -> tuple[slice, slice]:
    """Return the early and the late part of a row that the rank `index` has.

    The arguments are as in `context_positions`.
    """
    if not 0 <= index < num_ranks:
        raise ValueError(f"there is no place {index} among {num_ranks} ranks")
    if context < num_ranks:
        raise ValueError(f"{num_ranks} ranks cannot divide {context} positions: some have none")
    num_parts = 2 * num_ranks
    return span(context, num_parts, index), span(context, num_parts, num_parts - 1 - index)


class Tile(NamedTuple):
    """Some queries of one rank, and the keys of one rank that they see.

    All queries see all keys, unless `is_diagonal`: then query i sees keys 0 to i.
    """

    queries: slice
    keys: slice
    is_diagonal: bool = False


def tiles(context: int, num_ranks: int, mine: int, owner: int) -> list[Tile]:
    """Return what the queries of rank `mine` see of the keys of rank `owner`.

    The slices count from the first query, or key, of the rank; `context` and `num_ranks` are as in
    `context_positions`.  With parts of n positions, the rank computes 2 n n scores for the keys of
    every other `owner`, and 3 n n for its own keys: on diagonal tiles also the scores above the
    diagonal.
    """
    queries = _local(parts_of(context, num_ranks, mine))
    keys = _local(parts_of(context, num_ranks, owner))
    (early, late), all_keys = queries, slice(0, keys[1].stop)
    if owner < mine:
        seen = [Tile(slice(0, late.stop), keys[0])]
    elif owner > mine:
        seen = [Tile(late, all_keys)]
    else:
        seen = [Tile(early, early, True), Tile(late, early), Tile(late, late, True)]
    return [tile for tile in seen if length(tile.queries) and length(tile.keys)]


def _local(parts: tuple[slice, slice]) -> tuple[slice, slice]:
    """Return an early and a late part of a row as slices of the array of the rank that has both."""
    num_early, num_late = map(length, parts)
    return slice(0, num_early), slice(num_early, num_early + num_late)


@dataclass(frozen=True)
class ContextGroup:
    """The ranks along an axis of a mesh, which divide the positions of every row.

    Attributes
    ----------
    mesh : Mesh
        The mesh of all ranks.
    axis : str
        The axis.  A mesh without this axis has one rank along it.
    """

    mesh: Mesh
    axis: str = "context"

    def __post_init__(self) -> None:
        if self.size > 1:
            self.mesh[self.axis]  # now, because all ranks make it together, and some never send

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.mesh.axes.get(self.axis, 1)

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks."""
        comm = self.mesh[self.axis]
        assert comm is not None, "one rank alone sends nothing"
        return comm

    def index(self, rank: int | None = None) -> int:
        """Return the index of a `rank` of the mesh, by default this one, along the axis."""
        return self.mesh.index(self.axis, rank) if self.size > 1 else 0

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the mesh that divide rows with a `rank`."""
        if self.size == 1:
            return (rank,)
        return next(group for group in self.mesh.ranks(self.axis) if rank in group)

    def parts(self, context: int, index: int) -> tuple[slice, slice]:
        """Return the parts of a row of `context` positions that the rank `index` has."""
        return parts_of(context, self.size, index)

    def num_positions(self, context: int, index: int) -> int:
        """Return how many of `context` positions the rank `index` has."""
        return sum(map(length, self.parts(context, index)))

    def context_of(self, x: Array, step: Step) -> int:
        """Return the number of positions in a whole row, for the part `x` (batch, length, ...).

        Raises ValueError unless the positions in `step` are those of `context_positions`.
        """
        context = step.context or x.shape[1]
        mine = context_positions(context, self.size, self.index())
        given = np.arange(x.shape[1]) if step.positions is None else on_host(step.positions)
        if x.shape[1] != len(mine) or not np.array_equal(mine, given):
            raise ValueError(
                f"rank {self.index()} of {self.size} has {x.shape[1]} tokens at positions"
                f" {given.tolist()} of a row of {context}: they must be {mine.tolist()}"
            )
        return int(context)

    def whole_row(self, x: ArraySpec) -> int:
        """Return the number of positions in a whole row, for the part `x` (batch, length, ...)."""
        return x.context if self.size > 1 else x.shape[1]
