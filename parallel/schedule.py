"""A training step as a list of actions: what computes, what sends, and what is kept when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel.nn import Model
from parallel.sharding import Sharding

# What each kind does.  The first three are those of a schedule; `lower` adds the others.
KINDS = {
    "F": "forward of a layer, or of all layers of a stage",
    "B": "backward, which adds to the gradients",
    "UPDATE": "change the parameters; what follows is left out if gradients overflowed",
    "UNSHARD": "start to gather the parameters of a unit",
    "AVERAGE": "start to make the parameters of a unit equal again, after several steps",
    "RESHARD": "free the gathered parameters of a unit",
    "REDUCE": "start to sum the gradients of a unit or bucket over ranks",
    "WAIT": "complete what was started, and free the gradients that it has summed",
    "UNUSED": "find the layers that no rank has used",
    "LOSS": "sum the loss over ranks",
    "NORM": "sum the squares of the gradients over ranks",
}


class Action(NamedTuple):
    """One action of one rank.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    stage : int
        The part of the model that it is of.
    micro_batch : int, optional
        The number of the micro-batch that it computes.
    part : str
        The layer, unit or bucket; "" for all of a stage.
    axis : str
        The axes of the mesh along which it communicates, joined by commas.
    phase : str
        The label of the ledger for what is sent meanwhile.
    """

    kind: str
    stage: int = 0
    micro_batch: int | None = None
    part: str = ""
    axis: str = ""
    phase: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes in `axis`."""
        return tuple(self.axis.split(",")) if self.axis else ()

    def __str__(self) -> str:
        """Return ``0F1`` for a stage, as PyTorch writes it, or ``0F1[block0]`` for a layer."""
        number = "" if self.micro_batch is None else str(self.micro_batch)
        part = f"[{self.part}]" if self.part else ""
        axis = f"@{self.axis}" if self.axis else ""
        return f"{self.stage}{self.kind}{number}{part}{axis}"


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
    """A growing list of actions, and which units are gathered at the end of it."""

    def __init__(self, model: Model, sharding: Sharding, buckets: dict[str, list[str]]) -> None:
        self.model, self.sharding, self.buckets = model, sharding, buckets
        self.bucket_after = {units[-1]: bucket for bucket, units in buckets.items()}
        self.actions: list[Action] = []
        self.gathered: set[str] = set()
        self.kept: set[str] = set()  # units of which this micro-batch has kept a secondary part
        self.is_reducing = False

    def add(self, kind: str, like: Action, part: str, axes: Sequence[str], phase: str) -> None:
        self.actions.append(Action(kind, like.stage, None, part, ",".join(axes), phase))

    def compute(self, action: Action, *, is_last: bool) -> None:
        """Run all layers forward or backward on a micro-batch; `is_last` is that of the step."""
        is_forward, keep = action.kind == "F", self.sharding.keep_after_forward
        layers = list(self.model.layers) if is_forward else list(reversed(self.model.layers))
        phase = "forward" if is_forward else "backward"
        is_reduced = not is_forward and self.sharding.reduces_in_backward(is_last=is_last)
        for i, layer in enumerate(layers):
            self.gather(action, layers[i : i + 2], phase)
            self.actions.append(action._replace(part=layer, phase=phase))
            if is_reduced:
                self.reduce(action, layer)
            if not (is_forward and keep):
                self.free(action, layer, layers[i + 1 :] if keep else layers[i + 1 : i + 2], phase)
        if is_reduced:
            self.add("WAIT", action, "", (), phase)
            self.is_reducing = False
        if not is_forward:
            self.kept.clear()

    def gather(self, action: Action, layers: Sequence[str], phase: str) -> None:
        """Gather the parameters of a layer and of the next to run, unless they are there."""
        sharding = self.sharding
        if "parameters" not in sharding.divided:
            return
        for unit in self.units_of(layers):
            if unit not in self.gathered:
                axes = sharding.secondary_axes if unit in self.kept else sharding.shard_axes
                self.add("UNSHARD", action, unit, axes, phase)
                self.gathered.add(unit)
                if sharding.secondary_axes:
                    self.kept.add(unit)

    def free(self, action: Action, layer: str, following: Sequence[str], phase: str) -> None:
        """Free the parameters of a layer, except those that layers `following` it need."""
        needed = self.units_of(following)
        for unit in self.model.units_of(layer):
            if unit in self.gathered and unit not in needed:
                self.gathered.remove(unit)
                self.add("RESHARD", action, unit, (), phase)

    def units_of(self, layers: Sequence[str]) -> list[str]:
        return [unit for layer in layers for unit in self.model.units_of(layer)]

    def reduce(self, action: Action, layer: str) -> None:
        """Start to sum what `layer` completes; where gradients are divided, one at a time."""
        for unit in self.model.completed_units(layer):
            if unit in self.bucket_after:
                if self.is_reducing and "gradients" in self.sharding.divided:
                    self.add("WAIT", action, "", (), "backward")
                bucket, axes = self.bucket_after[unit], self.sharding.shard_axes
                self.add("REDUCE", action, bucket, axes, "backward")
                self.is_reducing = True

    def update(self, action: Action, *, needs_norm: bool) -> None:
        """Do what the gradients need after all micro-batches, and what new parameters need."""
        sharding = self.sharding
        if sharding.reduces_after_backward:
            self.each("REDUCE", action, self.buckets, sharding.shard_axes, "reduce")
        if sharding.replica_axes:
            self.each("REDUCE", action, self.buckets, sharding.replica_axes, "replicate")
        if sharding.find_unused_parameters:
            self.add("UNUSED", action, "", sharding.axes, "unused")
        self.add("LOSS", action, "", sharding.axes, "loss")
        if needs_norm:
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
