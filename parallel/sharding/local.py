"""Local updates: ranks train alone, and from time to time agree on one model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from collectives import Work
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.optim.precision import master_dtype
from parallel.sharding.collective import Axes, CommHook, Completion, Group, HookState


class OuterMomentum(CommHook):
    """Update the common model by the mean of what ranks have changed, with Nesterov momentum.

    Douillard et al. 2023 (DiLoCo).  With the common model x, what the ranks have made of it, and d,
    the mean over ranks of the difference: v = m v + d, then x -= lr (d + m v), and ranks continue
    from x.  `lr` 1 without momentum is the mean of all ranks' parameters (McMahan et al. 2017).

    Parameters
    ----------
    lr : float
        The outer learning rate, more than 0.
    momentum : float
        At least 0 and less than 1.

    Raises
    ------
    ValueError
        If an option is out of range.
    """

    collectives = ("all_reduce",)

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        if not (0 < lr < float("inf") and 0 <= momentum < 1):
            raise ValueError(
                f"the outer lr is {lr} and the outer momentum {momentum}: they must be more than 0,"
                " and at least 0 and less than 1"
            )
        self.lr, self.momentum = lr, momentum
        self.common: dict[str, Array] = {}  # x and v of each unit
        self.velocity: dict[str, Array] = {}

    def allocate(self, group: Group) -> None:
        for unit, n in group.model.unit_sizes.items():
            for arrays in (self.common, self.velocity):
                arrays[unit] = group.new_buffer("buffers", n, master_dtype(group.dtype))
            self.common[unit][...] = group.parameters[unit]

    def state(self, group: Group) -> HookState:
        """Return the common model, and the states of each rank's own optimizer."""
        common = flattened({"common": self.common, "velocity": self.velocity})
        return HookState(common, own=flattened(group.optimizer.states))

    def state_bytes(self, group: Group) -> int:
        return 2 * group.model.num_parameters * master_dtype(group.dtype).itemsize

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace this rank's values of a unit, `flat`, by the next common model's."""
        changed = group.memory.track("buffers", self.common[bucket] - flat)
        comm = group.comm_of(axes)
        work: Work[Any] = comm.all_reduce(
            changed, op="sum", out=changed, algorithm=group.algorithm, async_op=True
        )
        return partial(self._finish, work, bucket, flat, 1 / comm.size)

    def _finish(self, work: Work[Any], unit: str, flat: Array, factor: float) -> None:
        mean, x, v = work.wait() * factor, self.common[unit], self.velocity[unit]
        v *= self.momentum
        v += mean
        x -= self.lr * (mean + self.momentum * v)
        flat[...] = x

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        n, width = group.model.unit_sizes[bucket], master_dtype(group.dtype).itemsize
        return [group.predicted(phase, "all_reduce", n, axes, itemsize=width)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return group.model.unit_sizes[bucket] * master_dtype(group.dtype).itemsize


def flattened(arrays: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return arrays by names such as ``velocity.block0``."""
    return {f"{kind}.{unit}": x for kind, each in arrays.items() for unit, x in each.items()}
