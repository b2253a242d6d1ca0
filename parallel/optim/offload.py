"""Updates of master copies and optimizer states, in the place in which they are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from parallel.accounts.tracker import MemoryTracker
from parallel.nn import Array
from parallel.optim.optimizers import Optimizer
from parallel.optim.precision import master_dtype
from parallel.places import Place


class Offload:
    """The masters of what a rank updates, and the optimizer's states, kept at a place.

    The masters are the `parameters`, flat arrays by unit, or copies of another place or dtype.  The
    gradient of a unit is copied to the place, and its new parameters back, before the next unit is
    updated: through one buffer, as large as the largest unit.  `memory` counts what is kept, if the
    place is that of the parameters; else another tracker does.
    """

    def __init__(
        self, place: Place, parameters: Mapping[str, Array], memory: MemoryTracker
    ) -> None:
        self.place, self.parameters, self.num_loads = place, parameters, 0
        self.memory = MemoryTracker() if place.COLUMNS else memory
        self._kept: dict[str, list[Array]] = {unit: [] for unit in parameters}  # master, states
        self._buffer = None
        if place.is_cross_device:
            like = max(parameters.values(), key=lambda x: int(x.shape[0]))
            self._buffer = self.memory.track("buffers", np.empty(like.shape, like.dtype))
        self.masters = parameters
        if place.COLUMNS or any(x.dtype != master_dtype(x.dtype) for x in parameters.values()):
            self.masters = {unit: self._new("master", unit, x) for unit, x in parameters.items()}
            self.load()

    def zeros(self, master: Array) -> Array:
        """Return a new optimizer state for one of the masters."""
        unit = next(unit for unit, x in self.masters.items() if x is master)
        return self._new("optimizer", unit, master)

    def _new(self, category: str, unit: str, like: Array) -> Array:
        kept = self._kept[unit]
        name = f"{unit}.state{len(kept)}" if kept else f"{unit}.master"
        kept.append(self.place.zeros(name, like.shape[0], master_dtype(like.dtype)))
        return self.memory.track(category, kept[-1])

    def load(self) -> None:
        """Set the masters to the values of the parameters, which have been changed."""
        self.num_loads += 1
        if self.masters is not self.parameters:
            for unit, master in self.masters.items():
                master[...] = self.place.copy_here(self.parameters[unit], self._buffer)
                self.place.end_update([master])

    def update(self, optimizer: Optimizer, gradients: Mapping[str, Array], factor: float) -> None:
        """Make one step with gradients times `factor`; set the parameters of their units."""
        optimizer.step(self._one_at_a_time(gradients), factor)

    def _one_at_a_time(self, gradients: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Yield each unit's gradient at the place; finish a unit when the next is asked for."""
        for unit, gradient in gradients.items():
            self.place.begin_update(self._kept[unit])
            yield unit, self.place.copy_here(gradient, self._buffer)
            self.place.copy_back(self.masters[unit], self.parameters[unit], self._buffer)
            self.place.end_update(self._kept[unit])
