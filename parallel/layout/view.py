"""What one rank has of a model: slices, counts, groups and buckets, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import collectives
from parallel.accounts import PredictedCall
from parallel.layout.layout import Layout
from parallel.nn import Shape
from parallel.sharding import Sharding


class RankView:
    """What a rank has of a layout: which elements of which units, and with whom it communicates.

    Any rank can be viewed on any rank: nothing is allocated or sent.

    Parameters
    ----------
    layout : Layout
    rank : int

    Attributes
    ----------
    mesh, model, sharding, stages, recipe, dtype, reduce_dtype
        As in `Layout`.
    pipe_index : int
        The index of the rank along the axis ``pipe``.
    unit_sizes : dict of str to int
        How many elements the rank has of each unit that its stages use.
    buckets : dict of str to (list of str)
        The units whose gradients are summed together, in the order in which backward completes
        them.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.mesh, self.model, self.recipe = layout.mesh, layout.model, layout.recipe
        self.sharding, self.stages = layout.sharding, layout.stages
        self.dtype, self.reduce_dtype = layout.dtype, layout.reduce_dtype
        self.pipe_index = layout.pipe_index(rank)
        sizes = self.model.unit_sizes_of(rank)
        self.unit_sizes = {unit: sizes[unit] for unit in self.stages.units_of[self.pipe_index]}
        self.buckets = self._make_buckets()
        self._divisions: dict[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], slice]] = {}
        self._groups: dict[tuple[str, ...], tuple[tuple[int, ...], ...]] = {}

    def at(self, rank: int) -> RankView:
        """Return the view of another `rank`."""
        return RankView(self.layout, rank)

    @property
    def model_part(self) -> tuple[int, ...]:
        """The part of the model that the rank has (`Layout.model_part`)."""
        return self.layout.model_part(self.rank)

    # Units

    def sharding_of(self, part: str) -> Sharding:
        """Return the sharding of a `part`: a unit, or all units of a bucket."""
        return self.layout.shardings[self.buckets.get(part, [part])[0]]

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
            if (server := self.sharding.server) is None:
                counts = collectives.even_counts(size, num_ranks)
            else:
                counts = tuple(size * (rank == server) for rank in range(num_ranks))
            index = self.index(axes)
            start = sum(counts[:index])
            self._divisions[unit, axes] = counts, slice(start, start + counts[index])
        return self._divisions[unit, axes]

    def shard_slice(self, unit: str) -> slice:
        """Return the elements of a unit that this rank updates."""
        sharding = self.sharding_of(unit)
        if "optimizer" not in sharding.divided:
            return slice(0, self.unit_sizes[unit])
        return self.part(unit, sharding.shard_axes)

    def shard_size(self, unit: str, rank: int) -> int:
        """Return how many elements of a unit a `rank` with this part of the model updates."""
        sharding = self.sharding_of(unit)
        if "optimizer" not in sharding.divided:
            return self.unit_sizes[unit]
        axes = sharding.shard_axes
        return self.counts(unit, axes)[self.mesh.index(axes, rank)]

    def stored_slice(self, unit: str) -> slice:
        """Return the elements of a unit whose parameters this rank keeps."""
        is_divided = "parameters" in self.sharding_of(unit).divided
        return self.shard_slice(unit) if is_divided else slice(0, self.unit_sizes[unit])

    def unit_nbytes(self, unit: str) -> int:
        """Return the bytes of a whole unit's parameters, or of its gradients."""
        return int(self.unit_sizes[unit] * self.dtype.itemsize)

    def shapes(self, unit: str) -> dict[str, Shape]:
        """Return the shapes of a unit's parameters."""
        return {key: box.shape for key, box in self.model.boxes(unit, self.rank).items()}

    def bucket_size(self, bucket: str) -> int:
        """Return the number of elements of a bucket."""
        return sum(self.unit_sizes[unit] for unit in self.buckets[bucket])

    def _make_buckets(self) -> dict[str, list[str]]:
        """Return buckets of units, in the order in which backward completes them.

        If each unit has a bucket of its own, the bucket has the unit's name.  The sizes of whole
        units count, so that all ranks have the same buckets.  Units with divided parameters have
        buckets of their own, so that other units are rounded equally on all ranks; and so have
        units that are summed along other axes.
        """
        limit, units = self.sharding.bucket_bytes, self.model.units
        names = reversed(self.stages.layers_of[self.pipe_index])
        completed = list(dict.fromkeys(u for x in names for u in self.stages.completed_units(x)))
        if limit is None:
            is_order_of_backward = "gradients" in self.sharding.divided
            return {u: [u] for u in (completed if is_order_of_backward else self.unit_sizes)}
        sizes = {unit: sum(spec.size for spec in units[unit].values()) for unit in completed}
        kinds = {
            unit: (
                any(spec.splits for spec in units[unit].values()),
                self.layout.shardings[unit].axes,
            )
            for unit in completed
        }
        groups: list[list[str]] = []
        for unit in completed:
            together = sum(sizes[name] for name in [*(groups[-1] if groups else ()), unit])
            is_alike = bool(groups) and kinds[groups[-1][-1]] == kinds[unit]
            if is_alike and together * self.dtype.itemsize <= limit:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return {f"bucket{i}": units for i, units in enumerate(groups)}

    # Ranks

    def index(self, axes: str | Sequence[str]) -> int:
        """Return the index of this rank along `axes`."""
        return self.mesh.index(axes, self.rank)

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the groups along `axes` that contain a rank with this part of the model."""
        if (axes := tuple(axes)) not in self._groups:
            mine, part_of = self.model_part, self.layout.model_part
            self._groups[axes] = tuple(
                group
                for group in self.mesh.ranks(axes)
                if any(part_of(rank) == mine for rank in group)
            )
        return self._groups[axes]

    def replicas(self, unit: str) -> tuple[int, int]:
        """Return the index of this rank among the ranks that update the same elements of a unit.

        The second result is the number of these ranks.
        """
        sharding = self.sharding_of(unit)
        axes = sharding.replica_axes if sharding.divided else sharding.axes
        return self.index(axes), self.mesh.size_of(axes)

    def is_first_copy(self, unit: str, name: str, axes: Iterable[str]) -> bool:
        """Return whether no rank before this one along `axes` updates this part of a parameter.

        `name` is a parameter of a `unit`; ranks have boxes of it, and parts of these.
        """
        same = {*axes} - {"pipe"} - set(self.model.units[unit][name].split_axes)
        sharding = self.sharding_of(unit)
        same -= {*(sharding.shard_axes if sharding.divided else ())}
        is_first = not any(self.index(axis) for axis in same)
        return is_first and self.stages.holders[unit][0] == self.pipe_index

    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Sequence[str], **options: Any
    ) -> PredictedCall:
        """Return a call of the groups along `axes`, of the dtype and algorithm of the run.

        `phase`, `collective`, `counts` and `options` are attributes of `PredictedCall`.
        """
        defaults: dict[str, Any] = {
            "itemsize": self.dtype.itemsize,
            "algorithm": self.layout.algorithm,
            "groups": self.groups(axes),
            "axis": ",".join(axes),
        }
        return PredictedCall(phase, collective, counts=counts, **(defaults | options))


def views_of_parts(layout: Layout) -> list[RankView]:
    """Return the views of ranks with different parts of the model: the first rank of each part."""
    if not layout.is_divided:
        return [RankView(layout, layout.mesh.rank)]
    first = {layout.model_part(rank): rank for rank in reversed(range(layout.mesh.size))}
    return [RankView(layout, rank) for rank in sorted(first.values())]
