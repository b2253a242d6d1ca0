"""How the ranks of a mesh divide the training of a model: what all ranks have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parallel.layout.checks import check_arguments, check_model, check_recipe, check_schedule
from parallel.layout.recipe import Recipe
from parallel.layout.stages import Stages
from parallel.mesh import Mesh, length, span
from parallel.nn import ArraySpec, BatchRows, LayerTraffic, Model, Shape, context_positions
from parallel.optim import LossScale, dtype_of
from parallel.pipeline import Schedule, make, validate
from parallel.sharding import Sharding


class BatchSize(NamedTuple):
    """The shape of the batch of all ranks, and the number of its training step."""

    rows: int
    context: int
    step: int = 0


class Layout:
    """How the ranks of a mesh divide the training of a model: a value, without arrays.

    Nothing is sent or allocated, so that the ranks of the mesh need not exist.  The arguments
    `mesh`, `model`, `recipe`, `sharding`, `schedule` and `algorithm` are those of
    `parallel.Trainer`, which says what is raised.

    Attributes
    ----------
    stages : Stages
        The layers and the units of the ranks along the axis ``pipe``.
    shardings : dict of str to Sharding
        The sharding of each unit (`Sharding.of_unit`).
    dtype, reduce_dtype : dtype
        The dtype of the model, and the dtype in which gradients are summed.
    """

    def __init__(
        self,
        mesh: Mesh,
        model: Model,
        recipe: Recipe | None = None,
        *,
        sharding: Sharding | None = None,
        schedule: str | Schedule = "1f1b",
        algorithm: str = "ring",
    ) -> None:
        sharding, recipe = sharding or Sharding(), recipe or Recipe()
        self.shardings = {unit: sharding.of_unit(model, unit) for unit in model.units}
        for used in (sharding, *self.shardings.values()):
            check_arguments(mesh.axes, used, algorithm)
        check_recipe(recipe, sharding)
        check_model(model, mesh, sharding)
        if isinstance(schedule, str):
            schedule = make(schedule, mesh.axes.get("pipe", 1), recipe.num_micro_batches)
        else:  # tests have not proved it
            validate(schedule)
        check_schedule(schedule, mesh, recipe, sharding, model)
        self.mesh, self.model, self.recipe, self.sharding = mesh, model, recipe, sharding
        self.algorithm, self.stages = algorithm, Stages(model, schedule)
        self.dtype = dtype_of(recipe.dtype)
        self.reduce_dtype = dtype_of(recipe.reduce_dtype or recipe.dtype)
        self._inputs: dict[ArraySpec, dict[str, ArraySpec]] = {}
        self._traffic: dict[ArraySpec, dict[str, LayerTraffic]] = {}
        self._checked: set[tuple[int, int, Shape | None]] = set()  # the shapes of batches

    def on(self, mesh: Mesh) -> Layout:
        """Return how the ranks of another mesh divide the same training."""
        return Layout(
            mesh,
            self.model,
            self.recipe,
            sharding=self.sharding,
            schedule=self.stages.schedule,
            algorithm=self.algorithm,
        )

    @property
    def has_dynamic_scale(self) -> bool:
        """Whether the loss scale changes, so that updates may be skipped."""
        return LossScale(self.dtype).is_dynamic

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on the norm of the whole gradient: to clip it or to scale."""
        return self.recipe.clip is not None or self.has_dynamic_scale

    # The model

    @property
    def is_divided(self) -> bool:
        """Whether ranks have different parts of the model."""
        return self.stages.schedule.num_ranks > 1 or bool(self.model.split_axes)

    def pipe_index(self, rank: int) -> int:
        """Return the index of a `rank` along the axis ``pipe``."""
        return self.mesh.index("pipe", rank) if "pipe" in self.mesh.axes else 0

    def model_part(self, rank: int) -> tuple[int, ...]:
        """Return which part of the model a `rank` has: its index along the axes that divide it."""
        splits = (self.mesh.index(axis, rank) for axis in self.model.split_axes)
        return (self.pipe_index(rank), *splits)

    def inputs_of(self, tokens: ArraySpec) -> dict[str, ArraySpec]:
        """Return what enters each layer for the input `tokens` of the model."""
        if tokens not in self._inputs:
            self._inputs[tokens] = self.model.inputs(tokens)
        return self._inputs[tokens]

    def layer_traffic_of(self, tokens: ArraySpec) -> dict[str, LayerTraffic]:
        """Return what each layer sends for the input `tokens` of the model."""
        if tokens not in self._traffic:
            self._traffic[tokens] = self.model.traffic(tokens)
        return self._traffic[tokens]

    # Batches

    def batch_part(self, rank: int) -> tuple[int, int]:
        """Return which part of the rows of a batch a `rank` computes: (index, number of parts)."""
        axes = self.sharding.row_axes
        return self.mesh.index(axes, rank), self.mesh.size_of(axes)

    def num_rows_of(self, rows: int, rank: int) -> int:
        """Return how many rows a `rank` computes of a batch of `rows`."""
        index, num_parts = self.batch_part(rank)
        return length(span(rows, num_parts, index))

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
        """Return the input of the model on a `rank` in micro-batch `number`.

        Parameters
        ----------
        rows, context : int
            The shape of the rank's part of a batch: its rows, and the positions of a whole row.
        number, rank : int
        whole : BatchSize, optional
            The batch of all ranks; needed if a layer must know which rows it computes.
        """
        mine = length(span(rows, self.recipe.num_micro_batches, number))
        positions, width = self.positions_of(context, rank), self.dtype.itemsize
        num_tokens = context if positions is None else len(positions)
        at = None if whole is None else self.rows_of_ranks(whole.rows, number, whole.step)
        return ArraySpec.tokens(mine, num_tokens, width, context=context, rank=rank, batch=at)

    def tokens_in(self, batch: BatchSize | None, number: int, rank: int) -> ArraySpec:
        """Return the input of the model on a `rank` in micro-batch `number` of a `batch`.

        Raises ValueError without a batch, because messages depend on it.
        """
        if batch is None:
            raise ValueError("layers of this model send messages: pass batch=(rows, context)")
        rows = self.num_rows_of(batch.rows, rank)
        return self.tokens_of(rows, batch.context, number, rank, whole=batch)

    def rows_of_ranks(self, num_rows: int, number: int, step: int) -> BatchRows | None:
        """Return which rows of a batch each rank computes in micro-batch `number` of a `step`.

        None if no layer needs to know.
        """
        if not self.model.needs_rows:
            return None
        rows = []
        for rank in range(self.mesh.size):
            index, num_parts = self.batch_part(rank)
            mine = span(num_rows, num_parts, index)
            part = span(length(mine), self.recipe.num_micro_batches, number)
            rows.append(range(mine.start + part.start, mine.start + part.stop))
        return BatchRows(step, tuple(rows), self.recipe.seed)

    def check_batch(self, rows: int, context: int, shape: Shape | None = None) -> None:
        """Raise ValueError if some rank could not compute its part of a batch of all ranks.

        The answer is the same on all ranks, and nothing is sent.  Each step checks its batch;
        call this before the run to refuse a batch early.

        Parameters
        ----------
        rows, context : int
            The shape of the targets of all ranks.
        shape : tuple of int, optional
            The shape of a row of the inputs; by default ``(context,)``, or any shape if the first
            layer takes another shape, such as the shape of an image.
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

        Ranks that differ only in their rows appear once.
        """
        axes = self.sharding.row_axes
        others = tuple(axis for axis in self.mesh.axes if axis not in axes)
        inputs: dict[tuple[Shape, int], ArraySpec] = {}
        for rank in range(self.mesh.size):
            for number in range(self.recipe.num_micro_batches):
                x = self.tokens_of(self.num_rows_of(rows, rank), context, number, rank)
                inputs.setdefault((x.shape, self.mesh.index(others, rank)), x)
        return inputs.values()
