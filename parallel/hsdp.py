"""Hybrid sharding: groups of ranks divide the model, and every group has all of it.

A group is usually the ranks of one host, so that parameters are gathered within the host.  Zhao et
al. 2023 (PyTorch FSDP, hybrid sharding); Zhang et al. 2022 (MiCS).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Unpack

import collectives
from collectives import Communicator
from parallel.nn import Model
from parallel.strategy import Recipe, RunSize
from parallel.traffic import PredictedCall
from parallel.zero import Zero3, Zero3Options


def choose_group_size(num_ranks: int, wanted: int | None = None) -> int:
    """Return how many consecutive ranks form a group.

    This is `wanted`, or by default the largest proper divisor of `num_ranks` above 1; `num_ranks`
    if there is none.  Raises ValueError if `wanted` does not divide `num_ranks`.
    """
    if wanted is None:
        divisors = [n for n in range(2, num_ranks) if num_ranks % n == 0]
        return divisors[-1] if divisors else num_ranks
    if wanted < 1 or num_ranks % wanted:
        raise ValueError(f"{num_ranks} ranks cannot be divided into groups of {wanted}")
    return wanted


class Mesh:
    """A 2-d mesh of ranks: each row is a group of `group_size` consecutive ranks.

    `inner` is the communicator of this rank's row, `outer` that of its column.  All ranks make a
    mesh together.  Raises ValueError as `choose_group_size`.
    """

    def __init__(self, comm: Communicator, group_size: int | None = None) -> None:
        self.group_size = choose_group_size(comm.size, group_size)
        self.num_groups = comm.size // self.group_size
        self.row, self.column = divmod(comm.rank, self.group_size)
        inner, outer = comm.split(self.row), comm.split(self.column)
        assert inner is not None and outer is not None
        self.inner, self.outer = inner, outer

    def free(self) -> None:
        """Free both communicators.  All ranks call this."""
        self.inner.free()
        self.outer.free()


class GroupedZero3(Zero3):
    """ZeRO-3 on a mesh of ranks; the base class of `HSDP` and `ZeroPlusPlus`.

    Parameters
    ----------
    comm, model, recipe, keep_after_forward, algorithm, phase
        As in `Zero3`.
    group_size : int, optional
        The number of consecutive ranks that form a group; see `choose_group_size`.

    Raises
    ------
    ValueError
        As `Zero3`, and if `group_size` does not divide the number of ranks.

    Attributes
    ----------
    mesh : Mesh
    """

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        group_size: int | None = None,
        **options: Unpack[Zero3Options],
    ) -> None:
        self.group_size = choose_group_size(comm.size, group_size)
        super().__init__(comm, model, recipe, **options)

    def _allocate(self) -> None:
        # After the arguments have been checked: all ranks make the mesh together.
        self.mesh = Mesh(self.comm, self.group_size)
        super()._allocate()

    def close(self) -> None:
        self.mesh.free()

    def options(self) -> dict[str, Any]:
        return super().options() | {"group_size": self.group_size}


class HSDP(GroupedZero3):
    """ZeRO-3 within each group of g ranks; G groups sum their gradients once a step.

    Zhao et al. 2023 (PyTorch FSDP, hybrid sharding).  In S steps of k micro-batches all ranks
    together send, by ring,

    | phase          | collective     | calls                | bytes a call      |
    |----------------|----------------|----------------------|-------------------|
    | forward/unit   | all_gather     | k S for each group   | (g-1) n(unit)     |
    | backward/unit  | all_gather     | k S for each group   | (g-1) n(unit)     |
    | backward/unit  | reduce_scatter | k S for each group   | (g-1) n(unit)     |
    | replicate/unit | all_reduce     | S for each shard     | 2 (G-1) n(shard)  |

    and the norm within each group.  In a step a rank sends 3 k Psi (g-1)/g elements within its
    group and 2 Psi/g (G-1)/G to other groups.  With one group this is ZeRO-3; with groups of one
    rank it is data parallelism.

    Parameters
    ----------
    comm, model, recipe, keep_after_forward, algorithm, phase
        As in `Zero3`.
    group_size : int, optional
        The number of consecutive ranks that form a group.  By default the largest proper divisor
        of the number of ranks above 1, or all ranks if there is none.

    Raises
    ------
    ValueError
        As `Zero3`, and if `group_size` does not divide the number of ranks.

    Examples
    --------
    >>> import collectives
    >>> from parallel import HSDP, gpt
    >>> make = lambda comm: HSDP(comm, gpt(num_layers=1), group_size=2)
    >>> collectives.run(lambda comm: make(comm).mesh.num_groups, size=4)
    [2, 2, 2, 2]
    """

    def collective_sizes(self) -> dict[str, Collection[int]]:
        sizes: dict[str, Collection[int]] = {"all_reduce": (self.size // self.group_size,)}
        return sizes | dict.fromkeys(self.algorithm_collectives, (self.group_size,))

    @property
    def shard_comm(self) -> Communicator:
        return self.mesh.inner

    @property
    def replica_group(self) -> tuple[int, int]:
        return self.mesh.row, self.mesh.num_groups

    def before_update(self) -> None:
        with self.phase("replicate"):
            for unit, gradient in self.gradients.items():
                with collectives.phase(unit):
                    self.mesh.outer.all_reduce(
                        gradient, op="sum", out=gradient, algorithm=self.algorithm
                    )

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send: ZeRO-3 within groups, then the sums over groups."""
        num_groups = self.mesh.num_groups
        return super().step_traffic(run) + [
            PredictedCall(
                f"replicate/{unit}", "all_reduce", self.algorithm, self.dtype.itemsize * n,
                run.num_steps, num_ranks=num_groups,
            )
            for unit in self.model.units
            for n in self.counts(unit)
        ]  # fmt: skip
