"""Hierarchical sharding: a model is divided within a group of ranks and repeated in every group.

A group is the ranks of a host, as a rule, so that what is gathered does not leave it.  Zhao et al.
2023 (PyTorch FSDP, hybrid sharding); Zhang et al. 2022 (MiCS).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import collectives
from collectives import Communicator
from parallel.nn import Model
from parallel.strategy import Recipe, Run
from parallel.traffic import PredictedCall
from parallel.zero import Zero3


def group_size(ranks: int, wanted: int | None = None) -> int:
    """How many neighbouring ranks are a group.

    As wanted, else the greatest number below `ranks` that divides it, or `ranks` itself if that is
    1.  ValueError if `wanted` does not divide `ranks`.
    """
    if wanted is None:
        divisors = [n for n in range(2, ranks) if ranks % n == 0]
        return divisors[-1] if divisors else ranks
    if wanted < 1 or ranks % wanted:
        raise ValueError(f"{ranks} ranks cannot be divided into groups of {wanted}")
    return wanted


class Mesh:
    """Ranks as rows of `group` neighbours: `inner` is this rank's row, `outer` its column.

    Making one is a collective call.
    """

    def __init__(self, comm: Communicator, group: int | None = None) -> None:
        self.group = group_size(comm.size, group)
        self.groups = comm.size // self.group
        self.row, self.column = divmod(comm.rank, self.group)
        inner, outer = comm.split(self.row), comm.split(self.column)
        assert inner is not None and outer is not None
        self.inner, self.outer = inner, outer

    def free(self) -> None:
        """Give both communicators back to MPI.  All ranks call this."""
        self.inner.free()
        self.outer.free()


class Grouped(Zero3):
    """ZeRO-3 of ranks that form a mesh: `group` neighbours are the ranks of a host, as a rule.

    ValueError if groups of that size do not divide the ranks; see `group_size` for the default.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        group: int | None = None,
        **more: Any,
    ) -> None:
        self.group = group_size(comm.size, group)
        super().__init__(comm, model, recipe, **more)

    def _allocate(self) -> None:
        """The mesh too, after all arguments have been checked: ranks make it together."""
        self.mesh = Mesh(self.comm, self.group)
        super()._allocate()

    def close(self) -> None:
        self.mesh.free()

    def options(self) -> dict[str, Any]:
        return super().options() | {"group": self.group}


class Hsdp(Grouped):
    """ZeRO-3 within each group of g ranks; between the G groups gradients are summed once a step.

    In S steps of k micro-batches

    | phase          | collective     | calls           | bytes a call      |
    |----------------|----------------|-----------------|-------------------|
    | forward/unit   | all_gather     | k S a group     | (g-1) n(unit)     |
    | backward/unit  | all_gather     | k S a group     | (g-1) n(unit)     |
    | backward/unit  | reduce_scatter | k S a group     | (g-1) n(unit)     |
    | replicate/unit | all_reduce     | S of each shard | 2 (G-1) n(shard)  |

    and the norm, within each group.  In a step a rank sends 3 k Psi (g-1)/g elements within its
    group and 2 Psi/g (G-1)/G out of it.
    With one group it is ZeRO-3, with groups of one rank data parallelism.
    """

    def calls_of_many(self) -> dict[str, Collection[int]]:
        calls: dict[str, Collection[int]] = {"all_reduce": (self.size // self.group,)}
        return calls | dict.fromkeys(self.large, (self.group,))

    @property
    def shard_comm(self) -> Communicator:
        return self.mesh.inner

    @property
    def replicas(self) -> tuple[int, int]:
        return self.mesh.row, self.mesh.groups

    def before_update(self) -> None:
        with self.phase("replicate"):
            for unit, gradient in self.gradients.items():
                with collectives.phase(unit):
                    self.mesh.outer.all_reduce(
                        gradient, op="sum", out=gradient, algorithm=self.algorithm
                    )

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        width, calls, groups = self.dtype.itemsize, run.steps, self.mesh.groups
        return super().traffic_of_steps(run) + [
            PredictedCall(
                f"replicate/{unit}", "all_reduce", self.algorithm, width * n, calls, ranks=groups
            )
            for unit in self.model.units
            for n in self.counts(unit)
        ]
