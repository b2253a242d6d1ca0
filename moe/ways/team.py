"""The ranks that divide some experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives import Communicator
from moe import dispatch
from parallel import Mesh, PredictedCall


class Team(NamedTuple):
    """The ranks along an `axis` of a `mesh`, or a subset of it, that divide some experts.

    None as `axis`: each rank has all of these experts.
    """

    mesh: Mesh
    axis: str | None
    num_experts: int

    @classmethod
    def along(cls, mesh: Mesh, axis: str, num_experts: int) -> Team:
        """Return the team of the ranks along an `axis`, which may not exist or have one rank."""
        return cls(mesh, axis if mesh.axes.get(axis, 1) > 1 else None, num_experts)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.axis is None else self.mesh.size_of(self.axis)

    @property
    def comm(self) -> Communicator | None:
        """Their communicator; None if it is one rank."""
        return None if self.axis is None else self.mesh[self.axis]

    @property
    def owned(self) -> slice:
        """The experts of this rank."""
        return self.owned_by(self.place())

    def owned_by(self, place: int) -> slice:
        """Return the experts of the rank at a `place`."""
        return dispatch.experts_of(self.num_experts, self.size, place)

    def place(self, rank: int | None = None) -> int:
        """Return the place of a `rank` of the mesh, by default this one."""
        return 0 if self.axis is None else self.mesh.index(self.axis, rank)

    def group(self, rank: int | None = None) -> Sequence[int]:
        """Return the ranks of the mesh in the team of a `rank`, by default this one."""
        mine = self.mesh.rank if rank is None else rank
        if self.axis is None:
            return (mine,)
        return next(group for group in self.mesh.ranks(self.axis) if mine in group)

    def call(
        self, rank: int, phase: str, collective: str, algorithm: str, counts: Any, itemsize: int,
        *, in_place: bool = False,
    ) -> list[PredictedCall]:  # fmt: skip
        """Return a call of the team of `rank`, for its first rank; nothing for the others."""
        if self.axis is None or self.place(rank):
            return []
        return [PredictedCall(
            phase, collective, algorithm, counts, itemsize, axis=self.axis,
            groups=(tuple(self.group(rank)),), in_place=in_place,
        )]  # fmt: skip

    def exchange(
        self, rank: int, phase: str, table: Sequence[Sequence[int]], itemsize: int
    ) -> list[PredictedCall]:
        """Return an all-to-all in which the rank at place i sends ``table[i][j]`` elements to j."""
        counts = tuple(map(tuple, table))
        return self.call(rank, phase, "all_to_all", dispatch.ALGORITHM, counts, itemsize)
