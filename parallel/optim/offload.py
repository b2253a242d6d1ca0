"""Updates of master copies and optimizer states, in the storage in which they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parallel.accounts import MemoryTracker
from parallel.nn import Array
from parallel.optim.optimizers import Optimizer
from parallel.optim.precision import master_dtype
from parallel.optim.storage import Storage


class Offload:
    """The masters and the optimizer states of a rank, in a storage.

    The masters are the `parameters`, flat arrays by unit, or copies in another storage or dtype.
    The gradient of a unit is copied to the storage, and its new parameters back, before the next
    unit is updated: through one buffer, as large as the largest unit.  `memory` counts what is
    kept, if the parameters are in the same storage; else another tracker counts it.
    """

    def __init__(
        self, storage: Storage, parameters: Mapping[str, Array], memory: MemoryTracker
    ) -> None:
        self.storage, self.parameters, self.num_loads = storage, parameters, 0
        self.memory = MemoryTracker() if storage.COLUMNS else memory
        self._kept: dict[str, list[Array]] = {unit: [] for unit in parameters}  # master, states
        self._buffer = None
        if storage.is_cross_device:
            like = max(parameters.values(), key=lambda x: int(x.shape[0]))
            self._buffer = self.memory.track("buffers", np.empty(like.shape, like.dtype))
        self.masters = parameters
        if storage.COLUMNS or any(x.dtype != master_dtype(x.dtype) for x in parameters.values()):
            self.masters = {unit: self._new("master", unit, x) for unit, x in parameters.items()}
            self.load()

    def zeros(self, master: Array) -> Array:
        """Return a new optimizer state for one of the masters."""
        unit = next(unit for unit, x in self.masters.items() if x is master)
        return self._new("optimizer", unit, master)

    def _new(self, category: str, unit: str, like: Array) -> Array:
        kept = self._kept[unit]
        name = f"{unit}.state{len(kept)}" if kept else f"{unit}.master"
        kept.append(self.storage.zeros(name, like.shape[0], master_dtype(like.dtype)))
        return self.memory.track(category, kept[-1])

    def load(self) -> None:
        """Set the masters to the values of the parameters, which have been changed."""
        self.num_loads += 1
        if self.masters is not self.parameters:
            for unit, master in self.masters.items():
                master[...] = self.storage.copy_here(self.parameters[unit], self._buffer)
                self.storage.end_update([master])

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        """Make one step with gradients times `factor`; set the parameters of their units."""
        optimizer.step(self._one_at_a_time(gradients), factor)

    def _one_at_a_time(self, gradients: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield each unit's gradient in the storage; finish a unit when the next is asked for."""
        for unit, gradient in gradients.items():
            self.storage.begin_update(self._kept[unit])
            yield unit, self.storage.copy_here(gradient, self._buffer)
            self.storage.copy_back(self.masters[unit], self.parameters[unit], self._buffer)
            self.storage.end_update(self._kept[unit])
