"""The ranks that divide some experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from collectives import Communicator
from moe.exchange.loads import ALGORITHM, experts_of
from moe.routing import Integers
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
        """The communicator of the team; None if the team is one rank."""
        return None if self.axis is None else self.mesh[self.axis]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis, if there is one."""
        return () if self.axis is None else (self.axis,)

    @property
    def owned(self) -> slice:
        """The experts of this rank."""
        return self.owned_by(self.index_of())

    def owned_by(self, index: int) -> slice:
        """Return the experts of the rank with an `index` in the team."""
        return experts_of(self.num_experts, self.size, index)

    def index_of(self, rank: int | None = None) -> int:
        """Return the index in the team of a `rank` of the mesh, by default this one."""
        return 0 if self.axis is None else self.mesh.index(self.axis, rank)

    def group(self, rank: int | None = None) -> Sequence[int]:
        """Return the ranks of the mesh in the team of a `rank`, by default this one."""
        rank = self.mesh.rank if rank is None else rank
        if self.axis is None:
            return (rank,)
        return next(group for group in self.mesh.ranks(self.axis) if rank in group)

    def call(
        self,
        rank: int,
        phase: str,
        collective: str,
        algorithm: str,
        counts: Any,
        itemsize: int,
        *,
        in_place: bool = False,
    ) -> list[PredictedCall]:
        """Return a call of the team of `rank`, for its first rank; nothing for the others."""
        if self.axis is None or self.index_of(rank):
            return []
        return [
            PredictedCall(
                phase,
                collective,
                algorithm,
                counts,
                itemsize,
                axis=self.axis,
                groups=(tuple(self.group(rank)),),
                in_place=in_place,
            )
        ]

    def exchange(
        self, rank: int, phase: str, table: Integers, itemsize: int
    ) -> list[PredictedCall]:
        """Return an all-to-all in which the rank with index i sends ``table[i, j]`` elements to j.

        It is a call of the team of `rank`, for its first rank, as in `call`.
        """
        counts = tuple(map(tuple, table.tolist()))
        return self.call(rank, phase, "all_to_all", ALGORITHM, counts, itemsize)
