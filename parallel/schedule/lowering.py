"""From a schedule of stages to the actions of every layer, with what the sharding sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallel.nn import Model
from parallel.schedule.actions import Action
from parallel.sharding import Sharding


def lower(
    schedule: Sequence[Action],
    model: Model,
    sharding: Sharding,
    *,
    buckets: dict[str, list[str]],
    needs_norm: bool = False,
) -> list[Action]:
    """Return the actions of each layer for the actions of a stage, and those of the sharding.

    Parameters
    ----------
    schedule : sequence of Action
        Forward and backward of micro-batches, then the update.
    model : Model
    sharding : Sharding
    buckets : dict of str to list of str
        The units of each bucket of gradients, in the order in which backward completes them.
    needs_norm : bool
        Whether the update depends on the norm of the whole gradient.
    """
    return _Lowering(model, sharding, buckets, needs_norm=needs_norm).of(schedule)


class _Lowering:
    """Adds actions to a list, and knows which units are gathered at the end of it."""

    def __init__(
        self, model: Model, sharding: Sharding, buckets: dict[str, list[str]], *, needs_norm: bool
    ) -> None:
        self.model, self.sharding, self.buckets = model, sharding, buckets
        self.needs_norm = needs_norm
        self.actions: list[Action] = []
        self.open: set[str] = set()  # units whose parameters are gathered
        self.kept: set[str] = set()  # units of which this micro-batch has kept a secondary part

    def of(self, schedule: Sequence[Action]) -> list[Action]:
        last = max(i for i, action in enumerate(schedule) if action.kind == "B")
        for i, action in enumerate(schedule):
            if action.kind == "F":
                self.forward(action)
            elif action.kind == "B":
                self.backward(action, is_last=i == last)
            else:
                self.update(action)
        return self.actions

    def add(self, kind: str, like: Action, part: str, axes: Sequence[str], phase: str) -> None:
        self.actions.append(Action(kind, like.stage, None, part, ",".join(axes), phase))

    # Passes

    def forward(self, action: Action) -> None:
        for layer in self.model.layers:
            following = self.model.next_layer(layer)
            self.unshard(action, layer, following, "forward")
            self.actions.append(action._replace(part=layer, phase="forward"))
            if not self.sharding.keep_after_forward:
                self.reshard(action, layer, following, "forward")

    def backward(self, action: Action, *, is_last: bool) -> None:
        missing = {bucket: set(units) for bucket, units in self.buckets.items()}
        for layer in reversed(self.model.layers):
            preceding = self.model.previous_layer(layer)
            self.unshard(action, layer, preceding, "backward")
            self.actions.append(action._replace(part=layer, phase="backward"))
            for unit in self.model.completed_units(layer):
                for bucket, units in missing.items():
                    if unit in units:
                        units.remove(unit)
                        self.reduce(action, bucket, is_complete=not units, is_last=is_last)
            if self.sharding.keep_after_forward:
                for unit in self.model.completed_units(layer):
                    self.free(action, unit, "backward")
            else:
                self.reshard(action, layer, preceding, "backward")
        if self.actions[-1].kind != "WAIT" and self.sharding.reduces_in_backward(is_last=is_last):
            self.add("WAIT", action, "", (), "backward")
        self.kept.clear()

    # Parameters

    def unshard(self, action: Action, layer: str, neighbor: str | None, phase: str) -> None:
        """Gather the parameters of a layer and of the next to run, unless they are there."""
        if "parameters" not in self.sharding.divided:
            return
        for unit in (*self.model.units_of(layer), *self.model.units_of(neighbor)):
            if unit not in self.open:
                self.open.add(unit)
                self.add("UNSHARD", action, unit, self._gather_axes(unit), phase)

    def _gather_axes(self, unit: str) -> tuple[str, ...]:
        if unit in self.kept:
            return self.sharding.secondary_axes
        if self.sharding.secondary_axes:
            self.kept.add(unit)
        return self.sharding.shard_axes

    def reshard(self, action: Action, layer: str, neighbor: str | None, phase: str) -> None:
        """Free the parameters of a layer, except those that the next to run needs."""
        for unit in self.model.units_of(layer):
            if unit not in self.model.units_of(neighbor):
                self.free(action, unit, phase)

    def free(self, action: Action, unit: str, phase: str) -> None:
        if unit in self.open:
            self.open.remove(unit)
            self.add("RESHARD", action, unit, (), phase)

    # Gradients

    def reduce(self, action: Action, bucket: str, *, is_complete: bool, is_last: bool) -> None:
        """Start to sum a complete bucket; where gradients are divided, one at a time."""
        if not is_complete or not self.sharding.reduces_in_backward(is_last=is_last):
            return
        if "gradients" in self.sharding.divided and self._is_reducing():
            self.add("WAIT", action, "", (), "backward")
        self.add("REDUCE", action, bucket, self.sharding.shard_axes, "backward")

    def _is_reducing(self) -> bool:
        """Whether a sum was started and not completed."""
        kinds = (each.kind for each in reversed(self.actions) if each.kind in ("REDUCE", "WAIT"))
        return next(kinds, "") == "REDUCE"

    def update(self, action: Action) -> None:
        sharding = self.sharding
        if sharding.reduces_after_backward:
            self.each("REDUCE", action, self.buckets, sharding.shard_axes, "reduce")
        if sharding.replica_axes:
            self.each("REDUCE", action, self.buckets, sharding.replica_axes, "replicate")
        if sharding.find_unused_parameters:
            self.add("UNUSED", action, "", sharding.axes, "unused")
        self.add("LOSS", action, "", sharding.axes, "loss")
        if self.needs_norm:
            axes = (*(sharding.shard_axes if sharding.divided else ()), *self.model.split_axes)
            self.add("NORM", action, "", axes, "norm" if axes else "")
        self.actions.append(action)
        if sharding.every is not None:
            self.each("AVERAGE", action, self.model.units, sharding.shard_axes, "average")
        if "optimizer" in sharding.divided and "parameters" not in sharding.divided:
            self.each("UNSHARD", action, self.model.units, sharding.shard_axes, "update")

    def each(
        self, kind: str, action: Action, parts: Iterable[str],
        axes: Sequence[str], phase: str,
    ) -> None:  # fmt: skip
        """Start and complete something for one part after the other."""
        for part in parts:
            self.add(kind, action, part, axes, phase)
            self.add("WAIT", action, "", (), phase)
