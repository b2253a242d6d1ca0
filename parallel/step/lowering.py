"""The actions of a training step: of each layer, and what the sharding sends between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from parallel.layout import RankView
from parallel.pipeline import actions as of_stage
from parallel.sharding import Sharding
from parallel.step.action import Action
from parallel.step.computing import (
    LayerAction,
    LayerBackward,
    LayerBackwardInput,
    LayerBackwardWeight,
    LayerForward,
    Update,
)
from parallel.step.messages import Receive, Send, StageMessage, WaitForSends
from parallel.step.scalars import FindUnused, SendNorm, SumCounts, SumLoss, SumNorm
from parallel.step.units import Average, Reduce, Reshard, UnitAction, Unshard, WaitForCalls

OF_LAYER: dict[type[of_stage.Computation], type[LayerAction]] = {
    of_stage.Forward: LayerForward,
    of_stage.Backward: LayerBackward,
    of_stage.BackwardInput: LayerBackwardInput,
    of_stage.BackwardWeight: LayerBackwardWeight,
}
ADD_TO_GRADIENTS = LayerBackward, LayerBackwardWeight


def lower(view: RankView) -> list[Action]:
    """Return the actions of a rank: of layers instead of stages, and of the sharding."""
    lowering = _Lowering(view)
    for action in view.stages.actions[view.pipe_index]:
        match action:
            case of_stage.Message():
                lowering.message(action)
            case of_stage.Update():
                lowering.update_alone(action)
            case _:
                lowering.compute(action)
    lowering.end()
    lowering.update()
    return lowering.actions


class _Lowering:
    """A growing list of actions, and what is gathered and summed at the end of it."""

    def __init__(self, view: RankView) -> None:
        self.view, self.stages, self.model = view, view.stages, view.model
        self.sharding, self.buckets = view.sharding, view.buckets
        self.is_asynchronous = view.stages.schedule.is_asynchronous
        self.bucket_of = {unit: bucket for bucket, units in self.buckets.items() for unit in units}
        self.incomplete = {bucket: set(units) for bucket, units in self.buckets.items()}
        self.last_use = dict(self.uses(view.stages.actions[view.pipe_index]))
        self.actions: list[Action] = []
        self.gathered: set[str] = set()
        self.kept: set[str] = set()  # units of which this micro-batch has kept a secondary part
        self.is_reducing = False
        self.num_slots = 0

    def uses(self, actions: Iterable[of_stage.Action]) -> Iterator[tuple[str, LayerAction]]:
        """Yield each unit with the actions of layers that add to its gradient, in order."""
        for part in (part for action in actions for part in action.parts):
            for action in self.of_layers(part) if isinstance(part, of_stage.Computation) else ():
                if isinstance(action, ADD_TO_GRADIENTS):
                    for unit in self.model.units_of(action.layer):
                        yield unit, action

    def of_layers(self, action: of_stage.Computation) -> list[LayerAction]:
        """Return a computation as actions of its layers, in the order in which they run."""
        kind, layers = OF_LAYER[type(action)], self.stages.layers[action.stage]
        is_forward = isinstance(action, of_stage.Forward)
        return [
            kind(
                layer=layer,
                stage=action.stage,
                micro_batch=action.micro_batch,
                phase="forward" if is_forward else "backward",
            )
            for layer in (layers if is_forward else layers[::-1])
        ]

    def message(self, action: of_stage.Message) -> None:
        """Send or receive what a stage computes."""
        kind: type[StageMessage] = Send if isinstance(action, of_stage.Send) else Receive
        message = self.stages.message(action)
        phase = "forward" if message.direction == "F" else "backward"
        self.actions.append(kind(message=message, axes=("pipe",), phase=phase))

    # Layers, and their units

    def compute(self, action: of_stage.Action) -> None:
        """Run all layers of a stage; or the layers of two stages in turn, if these overlap.

        If each side can go on while the other waits in a layer, these layers are side by side: the
        layers before them on either side run first.
        """
        first, waiting = len(self.actions), self.waiting_layers(action)
        sides = (x for x in action.parts if isinstance(x, of_stage.Computation))
        for _ in zip_longest(*(self.run(side, waiting) for side in sides)):
            pass
        if waiting:
            overlapping = self.actions[first:]
            self.actions[first:] = [replace(x, slot=self.num_slots) for x in overlapping]
            self.num_slots += 1

    def waiting_layers(self, action: of_stage.Action) -> set[str]:
        """Return the layers in which one side of an overlapping `action` can wait for messages.

        There are none if the two sides are of one stage, whose layers do not run twice at a time,
        or if parameters or gradients exist only while a layer runs.
        """
        is_whole = not {"parameters", "gradients"} & self.sharding.divided
        if len({part.stage for part in action.parts}) < 2 or not is_whole:
            return set()
        names = (name for part in action.parts for name in self.stages.layers[part.stage])
        return {name for name in names if self.model.axes_of(name)}

    def run(self, computation: of_stage.Computation, ends: Collection[str] = ()) -> Iterator[None]:
        """Run all layers of a stage forward or backward on a micro-batch.

        Pause after each layer or, if there are any `ends`, after the layers in `ends`.
        """
        actions, keep = self.of_layers(computation), self.sharding.keep_after_forward
        layers = [action.layer for action in actions]
        is_forward = isinstance(computation, of_stage.Forward)
        for i, action in enumerate(actions):
            needs_parameters = not isinstance(action, LayerBackwardWeight)
            if needs_parameters:
                self.gather(layers[i : i + 2], action.phase)
            self.actions.append(action)
            if isinstance(action, ADD_TO_GRADIENTS):
                self.reduce(action)
            if needs_parameters and not (is_forward and keep):
                following = layers[i + 1 :] if keep else layers[i + 1 : i + 2]
                self.free(action.layer, following, action.phase)
            if not ends or action.layer in ends:
                yield
        if self.is_reducing and "gradients" in self.sharding.divided and not is_forward:
            self.wait()
        if not is_forward:
            self.kept.clear()

    def gather(self, layers: Sequence[str], phase: str) -> None:
        """Gather the parameters of a layer and of the next to run, unless they are there."""
        for unit in self.units_of(layers):
            sharding = self.view.sharding_of(unit)
            if "parameters" in sharding.divided and unit not in self.gathered:
                axes = sharding.secondary_axes if unit in self.kept else sharding.shard_axes
                self.actions.append(Unshard(part=unit, axes=axes, phase=phase))
                self.gathered.add(unit)
                if sharding.secondary_axes:
                    self.kept.add(unit)

    def free(self, layer: str, following: Sequence[str], phase: str) -> None:
        """Free the parameters of a layer, except units that layers `following` it need."""
        needed = self.units_of(following)
        for unit in self.model.units_of(layer):
            if unit in self.gathered and unit not in needed:
                self.gathered.remove(unit)
                self.actions.append(Reshard(part=unit, phase=phase))

    def units_of(self, layers: Sequence[str]) -> list[str]:
        return [unit for layer in layers for unit in self.model.units_of(layer)]

    def reduce(self, action: LayerAction) -> None:
        """Start to sum the gradients that an action completes: units if divided, else buckets."""
        if not self.sharding.reduces_in_backward or self.is_asynchronous:
            return
        if "gradients" in self.sharding.divided:
            for unit in self.stages.completed_units(action.layer):
                self.start_sum(unit)
            return
        for unit in self.model.units_of(action.layer):
            if self.last_use[unit] == action:
                units = self.incomplete[bucket := self.bucket_of[unit]]
                units.discard(unit)
                if not units:
                    self.start_sum(bucket)

    def start_sum(self, bucket: str) -> None:
        """Start to sum a bucket, unless this rank has it alone."""
        if axes := self.view.sharding_of(bucket).shard_axes:
            if self.is_reducing and "gradients" in self.sharding.divided:
                self.wait()
            self.actions.append(Reduce(part=bucket, axes=axes, phase="backward"))
            self.is_reducing = True

    def wait(self) -> None:
        self.actions.append(WaitForCalls(phase="backward"))
        self.is_reducing = False

    def end(self) -> None:
        """Complete what is in progress after all micro-batches."""
        if self.is_reducing:
            self.wait()
        if any(isinstance(action, StageMessage) for action in self.actions):
            self.actions.append(WaitForSends())

    # Updates

    def update_alone(self, action: of_stage.Update) -> None:
        """Update by the gradient of one micro-batch, while others are in progress."""
        for bucket in self.buckets:
            self.at_once(Reduce, "reduce", bucket, self.view.sharding_of(bucket).shard_axes)
        self.sum_along_other_axes()
        self.actions.append(Update(stage=action.stage, micro_batch=action.micro_batch))

    def sum_along_other_axes(self) -> None:
        """Sum gradients along axes that the sharding does not have."""
        for unit in self.view.unit_sizes:
            for axis in self.summed_axes(unit):
                self.at_once(Reduce, "partial", unit, [axis])

    def summed_axes(self, unit: str) -> list[str]:
        """Return the axes, besides the axes of the sharding, along which a gradient is summed."""
        holders = self.stages.holders[unit]
        shared = [self.view.mesh.subset("pipe", holders)] if len(holders) > 1 else []
        return [*self.model.partial_axes(unit), *shared]

    def at_once(self, kind: type[UnitAction], phase: str, part: str, axes: Sequence[str]) -> None:
        """Start and complete one kind of action for a `part`, if it has axes."""
        if axes:
            self.actions += [kind(part=part, axes=tuple(axes), phase=phase)]
            self.actions += [WaitForCalls(phase=phase)]

    def update(self) -> None:
        """Do what the gradients need after all micro-batches, and what new parameters need."""
        all_axes = (*self.pipe, *self.sharding.axes)
        if self.is_asynchronous:
            self.actions.append(SumLoss(phase="loss", axes=all_axes))
            return
        self.sum_gradients()
        if self.sharding.find_unused_parameters:
            self.actions.append(FindUnused(phase="unused", axes=all_axes))
        self.actions.append(SumLoss(phase="loss", axes=all_axes))
        if self.view.layout.needs_norm:
            self.add_norm()
        self.actions.append(Update())
        if self.model.num_counts:
            self.actions.append(SumCounts(phase="count", axes=all_axes))
        for unit in self.view.unit_sizes:
            self.spread(unit, self.view.sharding_of(unit))

    def sum_gradients(self) -> None:
        """Sum what backward has not summed."""
        for bucket in self.buckets if self.sharding.reduces_after_backward else ():
            self.at_once(Reduce, "reduce", bucket, self.view.sharding_of(bucket).shard_axes)
        for bucket in self.buckets:
            self.at_once(Reduce, "replicate", bucket, self.view.sharding_of(bucket).replica_axes)
        self.sum_along_other_axes()

    def add_norm(self) -> None:
        """Add up the norm of the gradient over ranks with different parts of it.

        A server has the whole gradient, and tells other ranks its norm if it may overflow.
        """
        sharding = self.sharding
        if sharding.server is None:
            shard_axes = sharding.shard_axes if sharding.divided else ()
            axes = tuple(dict.fromkeys((*shard_axes, *self.pipe, *self.model.split_axes)))
            self.actions.append(SumNorm(phase="norm" if axes else "", axes=axes))
        else:
            axes = sharding.shard_axes if self.view.layout.has_dynamic_scale else ()
            self.actions.append(SendNorm(phase="norm", axes=axes))

    def spread(self, unit: str, sharding: Sharding) -> None:
        """Send new parameters of a unit to the ranks that need them, or average them."""
        if sharding.every is not None:
            self.at_once(Average, "average", unit, sharding.shard_axes)
        if "optimizer" in sharding.divided and "parameters" not in sharding.divided:
            self.at_once(Unshard, "update", unit, sharding.shard_axes)

    @property
    def pipe(self) -> tuple[str, ...]:
        return ("pipe",) if self.view.mesh.axes.get("pipe", 1) > 1 else ()
