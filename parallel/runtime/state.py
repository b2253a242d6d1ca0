"""What a rank keeps of a model: parameters, gradients, and the arrays that are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np

import collectives
from collectives import Communicator
from parallel import placement
from parallel.accounts import MemoryTracker, PredictedCall
from parallel.lowering import lower
from parallel.mesh import Mesh
from parallel.nn import (
    Array,
    ArraySpec,
    BatchRows,
    LayerTraffic,
    Model,
    Shape,
    context_positions,
)
from parallel.optim import LossScale, Optimizer, dtype_of
from parallel.runtime.recipe import Recipe
from parallel.sharding import Sharding
from parallel.stages import Stages


class BatchSize(NamedTuple):
    """The shape of the batch of all ranks, and the number of its training step."""

    rows: int
    context: int
    step: int = 0


class State:
    """The arrays of one rank, flat and by unit, and which elements of the model they are.

    - ``parameters``, ``gradients``: what this rank keeps of each unit;
    - ``full_parameters``, ``full_gradients``: whole units, or those that exist at the moment;
    - ``parameter_shards``, ``gradient_shards``: the parts of these that this rank updates;
    - ``buckets``: the units whose gradients are summed together, in the order of backward;
    - ``unit_sizes``: the elements of each unit of this rank's stages, of its part of it;
    - ``actions``: what this rank does in each step;
    - ``memory``: the `MemoryTracker` of what this rank keeps.
    """

    optimizer: Optimizer  # which a `Trainer` makes

    def __init__(
        self,
        mesh: Mesh,
        model: Model,
        recipe: Recipe,
        sharding: Sharding,
        algorithm: str,
        stages: Stages,
    ) -> None:
        self.mesh, self.model, self.recipe, self.sharding = mesh, model, recipe, sharding
        self.stages = stages
        self._shardings = {unit: sharding.of_unit(model, unit) for unit in model.units}
        self.algorithm, self.xp, self.dtype = algorithm, recipe.xp, dtype_of(recipe.dtype)
        self.reduce_dtype = dtype_of(recipe.reduce_dtype or recipe.dtype)
        self.memory, self.loss_scale = MemoryTracker(), LossScale(self.dtype)
        self._inputs: dict[ArraySpec, dict[str, ArraySpec]] = {}
        self._traffic: dict[ArraySpec, dict[str, LayerTraffic]] = {}
        self._checked: set[tuple[int, int, Shape | None]] = set()  # the shapes of batches
        self._set_place(mesh.rank)
        self._allocate_parameters()
        self._allocate_gradients()
        self.sharding.reduction.allocate(self)

    def _set_place(self, rank: int) -> None:
        """Set what depends on the part of the model that a `rank` has."""
        self.place, self.pipe_place = rank, self.pipe_place_of(rank)
        sizes = self.model.unit_sizes_of(rank)
        self.unit_sizes = {unit: sizes[unit] for unit in self.stages.units_of[self.pipe_place]}
        self._divisions: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], slice]] = {}
        self._groups: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}
        self.buckets = self._make_buckets()
        self.actions = lower(
            self.stages, self.pipe_place, self.sharding, buckets=self.buckets, mesh=self.mesh,
            needs_norm=self.needs_norm,
        )  # fmt: skip

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on the norm of the whole gradient: to clip it or to scale."""
        return self.recipe.clip is not None or self.loss_scale.is_dynamic

    def inputs_of(self, tokens: ArraySpec) -> dict[str, ArraySpec]:
        """Return what enters each layer for the input `tokens`."""
        if tokens not in self._inputs:
            self._inputs[tokens] = self.model.inputs(tokens)
        return self._inputs[tokens]

    def layer_traffic_of(self, tokens: ArraySpec) -> dict[str, LayerTraffic]:
        """Return what each layer sends for the input `tokens`."""
        if tokens not in self._traffic:
            self._traffic[tokens] = self.model.traffic(tokens)
        return self._traffic[tokens]

    # Which elements

    def sharding_of(self, part: str) -> Sharding:
        """Return the sharding of a `part`: a unit, or all of a bucket (`Sharding.of_unit`)."""
        return self._shardings[self.buckets.get(part, [part])[0]]

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
            index = self.mesh.index(axes, self.place)
            start = sum(counts[:index])
            self._divisions[unit, axes] = counts, slice(start, start + counts[index])
        return self._divisions[unit, axes]

    def shard_slice(self, unit: str) -> slice:
        """Return the elements of a unit that this rank updates."""
        sharding = self.sharding_of(unit)
        if "optimizer" not in sharding.divided:
            return slice(0, self.unit_sizes[unit])
        return self.part(unit, sharding.shard_axes)

    def stored_slice(self, unit: str) -> slice:
        """Return the elements of a unit whose parameters this rank keeps."""
        is_divided = "parameters" in self.sharding_of(unit).divided
        return self.shard_slice(unit) if is_divided else slice(0, self.unit_sizes[unit])

    def replica_group(self, unit: str) -> tuple[int, int]:
        """Return the index of this rank among those that update the same elements of a unit.

        And the number of these ranks.
        """
        sharding = self.sharding_of(unit)
        axes = sharding.replica_axes if sharding.divided else sharding.axes
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
        for unit in self.unit_sizes:
            values = self.model.draw(unit, self.recipe.seed)[self.stored_slice(unit)]
            self.parameters[unit] = self.xp.asarray(values.astype(self.dtype))
        self.memory.track("parameters", self.parameters)
        is_divided = {u: "parameters" in self.sharding_of(u).divided for u in self.parameters}
        self.full_parameters = {u: x for u, x in self.parameters.items() if not is_divided[u]}
        self.parameter_shards = {
            unit: x if is_divided[unit] else x[self.shard_slice(unit)]
            for unit, x in self.parameters.items()
        }

    def _allocate_gradients(self) -> None:
        """Make the gradients of a bucket one flat array, or the shards of each unit."""
        self.full_gradients: dict[str, Array] = {}
        if "gradients" in self.sharding.divided:
            sizes = {unit: placement.length(self.shard_slice(unit)) for unit in self.unit_sizes}
            self.gradients = {u: self.new_buffer("gradients", n) for u, n in sizes.items()}
            self.gradient_shards = self.gradients
            self.full_gradients = {
                unit: x
                for unit, x in self.gradients.items()
                if "gradients" not in self.sharding_of(unit).divided
            }
            return
        self.flats = {
            bucket: self.new_buffer("gradients", self.bucket_size(bucket))
            for bucket in self.buckets
        }
        for bucket, units in self.buckets.items():
            views = placement.split(self.flats[bucket], [self.unit_sizes[unit] for unit in units])
            self.full_gradients |= zip(units, views, strict=True)
        self.gradients = {unit: self.full_gradients[unit] for unit in self.unit_sizes}
        self.gradient_shards = {u: x[self.shard_slice(u)] for u, x in self.gradients.items()}

    def _make_buckets(self) -> dict[str, list[str]]:
        """Return buckets of units, in the order in which backward completes them.

        A bucket of one unit has its name, unless several may be together.  The sizes of whole units
        count, so that all ranks have the same buckets.  Units with divided parameters have buckets
        of their own, so that the others are rounded equally on all ranks; and so have units that
        are summed along other axes.
        """
        limit, units = self.sharding.bucket_bytes, self.model.units
        names = reversed(self.stages.layers_of[self.pipe_place])
        completed = list(dict.fromkeys(u for x in names for u in self.stages.completed_units(x)))
        if limit is None:
            is_order_of_backward = "gradients" in self.sharding.divided
            return {u: [u] for u in (completed if is_order_of_backward else self.unit_sizes)}
        sizes = {unit: sum(spec.size for spec in units[unit].values()) for unit in completed}
        kinds = {
            unit: (any(s.splits for s in units[unit].values()), self._shardings[unit].axes)
            for unit in completed
        }
        groups: list[list[str]] = []
        for unit in completed:
            together = sum(sizes[each] for each in [*(groups[-1] if groups else ()), unit])
            is_alike = bool(groups) and kinds[groups[-1][-1]] == kinds[unit]
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
        if self.mesh.comm is None:
            return partial(of_one_rank, x, options.get("out"))
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
        """Return the groups along `axes` that contain a rank with this part of the model."""
        if (axes := tuple(axes)) not in self._groups:
            mine = self.model_part(self.place)
            along = self.mesh.ranks(axes)
            found = tuple(g for g in along if any(self.model_part(rank) == mine for rank in g))
            self._groups[axes] = found
        return self._groups[axes]

    def is_first_copy(self, unit: str, name: str, axes: Iterable[str]) -> bool:
        """Return whether no rank before this one along `axes` updates this part of a parameter.

        The parameter `name` of a `unit`, of which ranks have boxes, and parts of these.
        """
        same = {*axes} - {"pipe"} - set(self.model.units[unit][name].split_axes)
        sharding = self.sharding_of(unit)
        same -= {*(sharding.shard_axes if sharding.divided else ())}
        is_first = not any(self.mesh.index(axis, self.place) for axis in same)
        return is_first and self.stages.holders[unit][0] == self.pipe_place

    def model_part(self, rank: int) -> tuple[int, ...]:
        """Return which part of the model a `rank` has: its place along the axes that divide it."""
        splits = (self.mesh.index(axis, rank) for axis in self.model.split_axes)
        return (self.pipe_place_of(rank), *splits)

    def pipe_place_of(self, rank: int) -> int:
        """Return the place of a `rank` along the axis ``pipe``."""
        return self.mesh.index("pipe", rank) if "pipe" in self.mesh.axes else 0

    def positions_of(self, context: int, rank: int) -> np.ndarray[Any, Any] | None:
        """Return the positions that a `rank` computes of a row of `context`; None if it has all.

        Raises ValueError if some rank would have none.
        """
        if (num_ranks := self.mesh.axes.get("context", 1)) == 1:
            return None
        return context_positions(context, num_ranks, self.mesh.index("context", rank))

    def tokens_of(
        self, rows: int, context: int, number: int, rank: int, *, whole: BatchSize | None = None
    ) -> ArraySpec:
        """Return the input of the model in micro-batch `number`.

        Of a `rank` with so many `rows` of `context` positions, of a `whole` batch, which must be
        given if a layer needs to know the rows.
        """
        mine = placement.length(placement.span(rows, self.recipe.num_micro_batches, number))
        positions, width = self.positions_of(context, rank), self.dtype.itemsize
        length = context if positions is None else len(positions)
        at = None if whole is None else self.rows_of_ranks(whole.rows, number, whole.step)
        return ArraySpec.tokens(mine, length, width, context=context, rank=rank, batch=at)

    def check_batch(self, rows: int, context: int, shape: Shape | None = None) -> None:
        """Raise ValueError if some rank could not compute its part of a batch of all ranks.

        The answer is the same on all ranks, and nothing is sent.  Each step checks its batch so;
        call it before the run to refuse a batch early.

        Parameters
        ----------
        rows, context : int
            The shape of the targets of all ranks.
        shape : tuple of int, optional
            The shape of a row of the inputs; by default ``(context,)``, or any shape if the first
            layer takes another one, such as that of an image.
        """
        if (rows, context, shape) in self._checked:
            return
        for x in self._distinct_tokens(rows, context):
            if shape is not None and shape != (context,):
                x = replace(x, shape=(x.shape[0], *shape))
            self.model.check_input(x)
        self._checked.add((rows, context, shape))

    def _distinct_tokens(self, rows: int, context: int) -> Iterable[ArraySpec]:
        """Return the inputs of the model in all micro-batches of a batch, on all ranks.

        Ranks that differ in nothing but which rows they have appear once.
        """
        mesh, axes = self.mesh, self.sharding.row_axes
        found: dict[tuple[Shape, int], ArraySpec] = {}
        others = tuple(axis for axis in mesh.axes if axis not in axes)
        for rank in range(mesh.size):
            mine = placement.span(rows, mesh.size_of(axes), mesh.index(axes, rank))
            for number in range(self.recipe.num_micro_batches):
                x = self.tokens_of(placement.length(mine), context, number, rank)
                found.setdefault((x.shape, mesh.index(others, rank)), x)
        return found.values()

    def rows_of_ranks(self, num_rows: int, number: int, step: int) -> BatchRows | None:
        """Return which rows of a batch each rank computes in micro-batch `number` of a `step`.

        None if no layer needs to know.
        """
        if not self.model.needs_rows:
            return None
        axes, found = self.sharding.row_axes, []
        for rank in range(self.mesh.size):
            mine = placement.span(num_rows, self.mesh.size_of(axes), self.mesh.index(axes, rank))
            num_parts = self.recipe.num_micro_batches
            part = placement.span(placement.length(mine), num_parts, number)
            found.append(range(mine.start + part.start, mine.start + part.stop))
        return BatchRows(step, tuple(found), self.recipe.seed)

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts of the model."""
        return self.stages.schedule.num_ranks > 1 or bool(self.model.split_axes)

    def as_of(self, rank: int) -> Self:
        """Return this run with the sizes of another rank's part of the model, to predict calls."""
        other = copy(self)
        other._set_place(rank)
        return other


def of_one_rank(x: Array, out: Array | None) -> Array:
    """Return the result of any collective among one rank: the `x` that it sends, in `out`."""
    if out is None or out is x:
        return x
    out[...] = x
    return out
