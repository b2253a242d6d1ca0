"""What a rank keeps of a model: parameters, gradients, and the arrays that are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import numpy as np

import collectives
from collectives import Communicator
from parallel import placement
from parallel.accounts import MemoryTracker, PredictedCall
from parallel.mesh import Mesh
from parallel.nn import Array, Model, Shape
from parallel.optim import LossScale, Optimizer, dtype_of
from parallel.runtime.recipe import Recipe
from parallel.sharding import Sharding


class State:
    """The arrays of one rank, flat and by unit, and which elements of the model they are.

    - ``parameters``, ``gradients``: what this rank keeps of each unit;
    - ``full_parameters``, ``full_gradients``: whole units, or those that exist at the moment;
    - ``parameter_shards``, ``gradient_shards``: the parts of these that this rank updates;
    - ``secondary``: the parts of gathered units that it keeps for backward;
    - ``buckets``: the units whose gradients are summed together, in the order of backward;
    - ``unit_sizes``: the elements of each unit, of this rank's part of the model;
    - ``memory``: the `MemoryTracker` of what this rank keeps.
    """

    optimizer: Optimizer  # which a `Trainer` makes

    def __init__(
        self, mesh: Mesh, model: Model, recipe: Recipe, sharding: Sharding, algorithm: str
    ) -> None:
        self.mesh, self.model, self.recipe, self.sharding = mesh, model, recipe, sharding
        self.algorithm, self.xp, self.dtype = algorithm, recipe.xp, dtype_of(recipe.dtype)
        self.reduce_dtype = dtype_of(recipe.reduce_dtype or recipe.dtype)
        self.memory, self.loss_scale = MemoryTracker(), LossScale(self.dtype)
        self.unit_sizes = model.unit_sizes
        self.place: int | None = None  # see `as_of`
        self._divisions: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], slice]] = {}
        self.buckets = self._make_buckets()
        self.secondary: dict[str, Array] = {}
        self._allocate_parameters()
        self._allocate_gradients()
        self.sharding.reduction.allocate(self)

    # Which elements

    def counts(self, unit: str, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the elements of each rank's part of a unit, if ranks along `axes` divide it."""
        return self._division(unit, tuple(axes))[0]

    def part(self, unit: str, axes: Sequence[str]) -> slice:
        """Return this rank's part of a unit, if ranks along `axes` divide it."""
        return self._division(unit, tuple(axes))[1]

    def _division(self, unit: str, axes: tuple[str, ...]) -> tuple[tuple[int, ...], slice]:
        """Return `counts` and `part`, which are computed once."""
        if (unit, axes) not in self._divisions:
            size, num_ranks = self.unit_sizes[unit], self.mesh.size_of(axes)
            if self.sharding.server is None:
                counts = collectives.even_counts(size, num_ranks)
            else:
                counts = tuple(size * (rank == self.sharding.server) for rank in range(num_ranks))
            index = self.mesh.index(axes)
            start = sum(counts[:index])
            self._divisions[unit, axes] = counts, slice(start, start + counts[index])
        return self._divisions[unit, axes]

    def shard_slice(self, unit: str) -> slice:
        """Return the elements of a unit that this rank updates."""
        if "optimizer" not in self.sharding.divided:
            return slice(0, self.unit_sizes[unit])
        return self.part(unit, self.sharding.shard_axes)

    def stored_slice(self, unit: str) -> slice:
        """Return the elements of a unit whose parameters this rank keeps."""
        is_divided = "parameters" in self.sharding.divided
        return self.shard_slice(unit) if is_divided else slice(0, self.unit_sizes[unit])

    @property
    def replica_group(self) -> tuple[int, int]:
        """The index of this rank among those that update the same elements, and their number."""
        divided = bool(self.sharding.divided)
        axes = self.sharding.replica_axes if divided else self.sharding.axes
        return self.mesh.index(axes), self.mesh.size_of(axes)

    def unit_nbytes(self, unit: str) -> int:
        """Return the bytes of a whole unit's parameters, or gradients."""
        return int(self.unit_sizes[unit] * self.dtype.itemsize)

    def bucket_size(self, bucket: str) -> int:
        """Return the number of elements of a bucket."""
        return sum(self.unit_sizes[unit] for unit in self.buckets[bucket])

    def shapes(self, unit: str) -> dict[str, Shape]:
        """Return the shapes of a unit's parameters."""
        return {key: box.shape for key, box in self.model.boxes(unit, self.place).items()}

    # Arrays

    def new_buffer(
        self, category: str, num_elements: int, dtype: np.dtype[Any] | type | None = None
    ) -> Array:
        """Return `num_elements` zeros of a `dtype`, the model's by default, in a `category`."""
        zeros = self.xp.zeros(num_elements, dtype=self.dtype if dtype is None else dtype)
        return self.memory.track(category, zeros)

    def _allocate_parameters(self) -> None:
        self.parameters: dict[str, Array] = {}
        for unit in self.model.units:
            values = self.model.draw(unit, self.recipe.seed)[self.stored_slice(unit)]
            self.parameters[unit] = self.xp.asarray(values.astype(self.dtype))
        self.memory.track("parameters", self.parameters)
        is_divided = "parameters" in self.sharding.divided
        self.full_parameters = {} if is_divided else self.parameters
        self.parameter_shards = (
            self.parameters
            if is_divided
            else {unit: x[self.shard_slice(unit)] for unit, x in self.parameters.items()}
        )

    def _allocate_gradients(self) -> None:
        """Make the gradients of a bucket one flat array, or the shards of each unit."""
        self.full_gradients: dict[str, Array] = {}
        if "gradients" in self.sharding.divided:
            sizes = {unit: placement.length(self.shard_slice(unit)) for unit in self.model.units}
            self.gradients = {u: self.new_buffer("gradients", n) for u, n in sizes.items()}
            self.gradient_shards = self.gradients
            return
        self.flats = {
            bucket: self.new_buffer("gradients", self.bucket_size(bucket))
            for bucket in self.buckets
        }
        for bucket, units in self.buckets.items():
            views = placement.split(self.flats[bucket], [self.unit_sizes[unit] for unit in units])
            self.full_gradients |= zip(units, views, strict=True)
        self.gradients = {unit: self.full_gradients[unit] for unit in self.model.units}
        self.gradient_shards = {u: x[self.shard_slice(u)] for u, x in self.gradients.items()}

    def _make_buckets(self) -> dict[str, list[str]]:
        """Return buckets of units, in the order in which backward completes them.

        A bucket of one unit has its name, unless several may be together.  The sizes of whole units
        count, so that all ranks have the same buckets.  Units with divided parameters have buckets
        of their own, so that the others are rounded equally on all ranks.
        """
        model, limit = self.model, self.sharding.bucket_bytes
        completed = [u for x in reversed(model.layers) for u in model.completed_units(x)]
        if limit is None:
            names = completed if "gradients" in self.sharding.divided else list(model.units)
            return {unit: [unit] for unit in names}
        sizes = {u: sum(spec.size for spec in specs.values()) for u, specs in model.units.items()}
        is_split = {u: any(s.splits for s in specs.values()) for u, specs in model.units.items()}
        groups: list[list[str]] = []
        for unit in completed:
            together = sum(sizes[each] for each in [*(groups[-1] if groups else ()), unit])
            is_alike = bool(groups) and is_split[groups[-1][-1]] == is_split[unit]
            if is_alike and together * self.dtype.itemsize <= limit:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return {f"bucket{i}": units for i, units in enumerate(groups)}

    # Calls

    def start_call(
        self, axes: Sequence[str], collective: str, x: Array, **options: Any
    ) -> Callable[[], Any]:
        """Start a `collective` of `x` along `axes`; return a function that waits for its result.

        `memory` counts the scratch memory of the call until then.  By default the call has the
        algorithm of the run.
        """
        call = getattr(self.comm_of(axes), collective)
        work = call(x, async_op=True, **{"algorithm": self.algorithm} | options)
        self.memory.add("scratch", work.scratch_bytes)

        def wait() -> Any:
            try:
                return work.wait()
            finally:
                self.memory.add("scratch", -work.scratch_bytes)

        return wait

    def comm_of(self, axes: Sequence[str]) -> Communicator:
        """Return the communicator along these axes of the mesh."""
        comm = self.mesh[axes]
        assert comm is not None, "one rank alone sends nothing"
        return comm

    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Sequence[str], **options: Any
    ) -> PredictedCall:
        """Return a call of the groups along `axes`, of the dtype and algorithm of the run.

        `phase`, `collective`, `counts` and `options` are attributes of `PredictedCall`.
        """
        defaults: dict[str, Any] = {
            "itemsize": self.dtype.itemsize, "algorithm": self.algorithm,
            "groups": self.groups(axes), "axis": ",".join(axes),
        }  # fmt: skip
        return PredictedCall(phase, collective, counts=counts, **(defaults | options))

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups along `axes` of ranks with this part of the model."""
        mine = self.model_part(self.place)
        return tuple(g for g in self.mesh.ranks(axes) if self.model_part(g[0]) == mine)

    def is_first_copy(self, unit: str, name: str, axes: Iterable[str]) -> bool:
        """Return whether no rank before this one along `axes` has the box of a `unit`'s `name`."""
        divided = {axis for _, axis in self.model.units[unit][name].splits}
        return not any(self.mesh.index(axis) for axis in axes if axis not in divided)

    def model_part(self, rank: int | None) -> tuple[int, ...]:
        """Return which part of the model a `rank` has: its place along the axes that divide it."""
        return tuple(self.mesh.index(axis, rank) for axis in self.model.split_axes)

    def as_of(self, rank: int) -> State:
        """Return this run with the sizes of another rank's part of the model, to predict calls."""
        other = copy(self)
        other.place, other.unit_sizes = rank, self.model.unit_sizes_of(rank)
        other._divisions = {}
        return other
