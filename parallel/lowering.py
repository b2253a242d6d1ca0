"""The actions of a training step: of each layer, and what the sharding sends between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parallel.actions import Action
from parallel.nn import Model
from parallel.sharding import Sharding


def one_forward_one_backward(num_micro_batches: int) -> list[Action]:
    """Return the schedule of a rank that has the whole model: 0F0 0B0 0F1 0B1 ... 0UPDATE."""
    both = (Action(kind, 0, k) for k in range(num_micro_batches) for kind in "FB")
    return [*both, Action("UPDATE")]


def lower(
    schedule: Sequence[Action],
    model: Model,
    sharding: Sharding,
    *,
    buckets: dict[str, list[str]],
    needs_norm: bool = False,
) -> list[Action]:
    """Return the actions of each layer for the actions of a stage, and those of the sharding.

    `schedule` is forward and backward of micro-batches, then the update.  `buckets` are the units
    of each bucket of gradients, in the order in which backward completes them.  `needs_norm`:
    whether the update depends on the norm of the whole gradient.
    """
    lowering = _Lowering(model, sharding, buckets)
    last = max(i for i, action in enumerate(schedule) if action.kind == "B")
    for i, action in enumerate(schedule):
        if action.kind == "UPDATE":
            lowering.update(action, needs_norm=needs_norm)
        else:
            lowering.compute(action, is_last=i == last)
    return lowering.actions


class _Lowering:
    """A growing list of actions, and what is gathered and summed at the end of it."""

    def __init__(self, model: Model, sharding: Sharding, buckets: dict[str, list[str]]) -> None:
        self.model, self.sharding, self.buckets = model, sharding, buckets
        self.bucket_after = {units[-1]: bucket for bucket, units in buckets.items()}
        self.actions: list[Action] = []
        self.stage = 0
        self.gathered: set[str] = set()
        self.kept: set[str] = set()  # units of which this micro-batch has kept a secondary part
        self.is_reducing = False

    def add(self, kind: str, phase: str, part: str = "", axes: Sequence[str] = ()) -> None:
        self.actions.append(Action(kind, self.stage, None, part, tuple(axes), phase))

    def compute(self, action: Action, *, is_last: bool) -> None:
        """Run all layers forward or backward on a micro-batch; `is_last` is that of the step."""
        self.stage, keep = action.stage, self.sharding.keep_after_forward
        is_forward = action.kind == "F"
        phase, names = "forward" if is_forward else "backward", list(self.model.layers)
        layers = names if is_forward else names[::-1]
        reduces = not is_forward and self.sharding.reduces_in_backward(is_last=is_last)
        for i, layer in enumerate(layers):
            self.gather(layers[i : i + 2], phase)
            self.actions.append(action._replace(part=layer, phase=phase))
            if reduces:
                self.reduce(layer)
            if not (is_forward and keep):
                self.free(layer, layers[i + 1 :] if keep else layers[i + 1 : i + 2], phase)
        if reduces:
            self.add("WAIT", phase)
            self.is_reducing = False
        if not is_forward:
            self.kept.clear()

    def gather(self, layers: Sequence[str], phase: str) -> None:
        """Gather the parameters of a layer and of the next to run, unless they are there."""
        sharding = self.sharding
        if "parameters" not in sharding.divided:
            return
        for unit in self.units_of(layers):
            if unit not in self.gathered:
                axes = sharding.secondary_axes if unit in self.kept else sharding.shard_axes
                self.add("UNSHARD", phase, unit, axes)
                self.gathered.add(unit)
                if sharding.secondary_axes:
                    self.kept.add(unit)

    def free(self, layer: str, following: Sequence[str], phase: str) -> None:
        """Free the parameters of a layer, except those that layers `following` it need."""
        needed = self.units_of(following)
        for unit in self.model.units_of(layer):
            if unit in self.gathered and unit not in needed:
                self.gathered.remove(unit)
                self.add("RESHARD", phase, unit)

    def units_of(self, layers: Sequence[str]) -> list[str]:
        return [unit for layer in layers for unit in self.model.units_of(layer)]

    def reduce(self, layer: str) -> None:
        """Start to sum what `layer` completes; where gradients are divided, one at a time."""
        for unit in self.model.completed_units(layer):
            if unit in self.bucket_after:
                if self.is_reducing and "gradients" in self.sharding.divided:
                    self.add("WAIT", "backward")
                axes = self.sharding.shard_axes
                self.add("REDUCE", "backward", self.bucket_after[unit], axes)
                self.is_reducing = True

    def update(self, action: Action, *, needs_norm: bool) -> None:
        """Do what the gradients need after all micro-batches, and what new parameters need."""
        self.stage, sharding = action.stage, self.sharding
        if sharding.reduces_after_backward:
            self.each("REDUCE", "reduce", self.buckets, sharding.shard_axes)
        if sharding.replica_axes:
            self.each("REDUCE", "replicate", self.buckets, sharding.replica_axes)
        if sharding.find_unused_parameters:
            self.add("UNUSED", "unused", axes=sharding.axes)
        self.add("LOSS", "loss", axes=sharding.axes)
        if needs_norm:
            axes = (*(sharding.shard_axes if sharding.divided else ()), *self.model.split_axes)
            self.add("NORM", "norm" if axes else "", axes=axes)
        self.actions.append(action)
        if sharding.every is not None:
            self.each("AVERAGE", "average", self.model.units, sharding.shard_axes)
        if "optimizer" in sharding.divided and "parameters" not in sharding.divided:
            self.each("UNSHARD", "update", self.model.units, sharding.shard_axes)

    def each(self, kind: str, phase: str, parts: Iterable[str], axes: Sequence[str]) -> None:
        """Start and complete something for one part after the other."""
        for part in parts:
            self.add(kind, phase, part, axes)
            self.add("WAIT", phase)
