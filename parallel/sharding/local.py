"""Local updates: ranks train alone, and from time to time agree on one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.optim.precision import master_dtype
from parallel.sharding.collective import (
    Axes,
    CommHook,
    Completion,
    Group,
    HookState,
    predicted_sum,
)


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
        for unit, n in group.unit_sizes.items():
            for arrays in (self.common, self.velocity):
                arrays[unit] = group.new_buffer("buffers", n, master_dtype(group.dtype))
            self.common[unit][...] = group.parameters[unit]

    def state(self, group: Group) -> HookState:
        """Return the common model, and the states of each rank's own optimizer."""
        common = flattened({"common": self.common, "velocity": self.velocity})
        return HookState(common, own=flattened(group.optimizer.states))

    def state_bytes(self, group: Group) -> int:
        return 2 * sum(group.unit_sizes.values()) * master_dtype(group.dtype).itemsize

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace this rank's values of a unit, `flat`, by the next common model's."""
        changed = group.memory.track("buffers", self.common[bucket] - flat)
        wait = group.start_call(axes, "all_reduce", changed, op="sum", out=changed)
        return partial(self._finish, wait, bucket, flat, 1 / group.mesh.size_of(axes))

    def _finish(self, wait: Callable[[], Array], unit: str, flat: Array, factor: float) -> None:
        mean, x, v = wait() * factor, self.common[unit], self.velocity[unit]
        v *= self.momentum
        v += mean
        x -= self.lr * (mean + self.momentum * v)
        flat[...] = x

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        dtype = master_dtype(group.dtype)
        return [predicted_sum(group, phase, group.unit_sizes[bucket], axes, dtype)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return group.unit_sizes[bucket] * master_dtype(group.dtype).itemsize


def flattened(arrays: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return arrays by names such as ``velocity.block0``."""
    return {f"{kind}.{unit}": x for kind, each in arrays.items() for unit, x in each.items()}
