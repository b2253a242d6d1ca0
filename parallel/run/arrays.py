"""The arrays of one rank: parameters, gradients, and gathered units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives import Communicator
from parallel.accounts import MemoryTracker
from parallel.layout import RankView
from parallel.mesh import length, split
from parallel.nn import Array
from parallel.optim import LossScale


class RankArrays:
    """The arrays of one rank, flat and by unit.

    Parameters
    ----------
    view : RankView
        Says which elements of the model the rank has.

    Attributes
    ----------
    parameters, gradients : dict of str to array
        What this rank keeps of each unit.
    full_parameters, full_gradients : dict of str to array
        Whole units, or the units that exist at the moment.
    parameter_shards, gradient_shards : dict of str to array
        The parts of `parameters` and `gradients` that this rank updates.
    flats : dict of str to array
        The gradients of each bucket, if ranks keep whole gradients.
    memory : MemoryTracker
        Counts what this rank keeps.
    loss_scale : LossScale
    """

    def __init__(self, view: RankView) -> None:
        self.view, self.xp = view, view.recipe.xp
        self.memory, self.loss_scale = MemoryTracker(), LossScale(view.dtype)
        self._allocate_parameters()
        self._allocate_gradients()
        view.sharding.reduction.allocate(self)

    def new_buffer(
        self, category: str, num_elements: int, dtype: np.dtype[Any] | type | None = None
    ) -> Array:
        """Return `num_elements` zeros of a `dtype`, the model's by default, in a `category`."""
        zeros = self.xp.zeros(num_elements, dtype=self.view.dtype if dtype is None else dtype)
        return self.memory.track(category, zeros)

    def _allocate_parameters(self) -> None:
        view = self.view
        self.parameters: dict[str, Array] = {}
        for unit in view.unit_sizes:
            values = view.model.draw(unit, view.recipe.seed)[view.stored_slice(unit)]
            self.parameters[unit] = self.xp.asarray(values.astype(view.dtype))
        self.memory.track("parameters", self.parameters)
        is_divided = {u: "parameters" in view.sharding_of(u).divided for u in self.parameters}
        self.full_parameters = {u: x for u, x in self.parameters.items() if not is_divided[u]}
        self.parameter_shards = {
            unit: x if is_divided[unit] else x[view.shard_slice(unit)]
            for unit, x in self.parameters.items()
        }

    def _allocate_gradients(self) -> None:
        """Make the gradients of a bucket one flat array, or the shards of each unit."""
        view = self.view
        self.full_gradients: dict[str, Array] = {}
        self.flats: dict[str, Array] = {}
        if "gradients" in view.sharding.divided:
            sizes = {unit: length(view.shard_slice(unit)) for unit in view.unit_sizes}
            self.gradients = {u: self.new_buffer("gradients", n) for u, n in sizes.items()}
            self.gradient_shards = self.gradients
            self.full_gradients = {
                unit: x
                for unit, x in self.gradients.items()
                if "gradients" not in view.sharding_of(unit).divided
            }
            return
        for bucket, units in view.buckets.items():
            self.flats[bucket] = self.new_buffer("gradients", view.bucket_size(bucket))
            sizes_in_bucket = [view.unit_sizes[unit] for unit in units]
            views = split(self.flats[bucket], sizes_in_bucket)
            self.full_gradients |= zip(units, views, strict=True)
        self.gradients = {unit: self.full_gradients[unit] for unit in view.unit_sizes}
        self.gradient_shards = {u: x[view.shard_slice(u)] for u, x in self.gradients.items()}

    # Calls

    def start_call(
        self, axes: Sequence[str], collective: str, x: Array, **options: Any
    ) -> Callable[[], Any]:
        """Start a `collective` of `x` along `axes`; return a function that waits for its result.

        `memory` counts the scratch memory of the call until then.  By default the call has the
        algorithm of the run.
        """
        if self.view.mesh.comm is None:
            return partial(of_one_rank, x, options.get("out"))
        call = getattr(self.comm_of(axes), collective)
        work = call(x, async_op=True, **{"algorithm": self.view.layout.algorithm} | options)
        self.memory.add("scratch", work.scratch_bytes)

        def wait() -> Any:
            try:
                return work.wait()
            finally:
                self.memory.add("scratch", -work.scratch_bytes)

        return wait

    def comm_of(self, axes: Sequence[str]) -> Communicator:
        """Return the communicator along these axes of the mesh."""
        comm = self.view.mesh[axes]
        assert comm is not None, "one rank alone sends nothing"
        return comm


def of_one_rank(x: Array, out: Array | None) -> Array:
    """Return the result of any collective among one rank: the `x` that it sends, in `out`."""
    if out is None or out is x:
        return x
    out[...] = x
    return out
