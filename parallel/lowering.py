"""The actions of a training step: of each layer, and what the sharding sends between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest

from parallel.actions import Action
from parallel.mesh import Mesh
from parallel.sharding import Sharding
from parallel.stages import Stages

PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
MESSAGES = {"SEND_F": "forward", "RECV_F": "forward", "SEND_B": "backward", "RECV_B": "backward"}
SENDS = "sends"  # the part of a WAIT for all messages to be sent


def lower(
    stages: Stages,
    place: int,
    sharding: Sharding,
    *,
    buckets: dict[str, list[str]],
    mesh: Mesh | None = None,
    needs_norm: bool = False,
) -> list[Action]:
    """Return the actions of each layer for the actions of stages, and those of the sharding.

    Those of a `place` along the axis ``pipe`` of a `mesh`.  `buckets` are the units of each bucket
    of gradients, in the order in which backward completes them.  `needs_norm`: whether the update
    depends on the norm of the whole gradient.
    """
    lowering = _Lowering(stages, place, sharding, buckets, mesh or Mesh(None))
    for action in stages.actions[place]:
        if action.kind in MESSAGES:
            phase = MESSAGES[action.kind]
            lowering.actions.append(action._replace(axes=("pipe",), phase=phase))
        elif action.kind == "UPDATE":
            lowering.update_alone(action)
        else:
            lowering.compute(action)
    lowering.end()
    lowering.update(needs_norm=needs_norm)
    return lowering.actions


class _Lowering:
    """A growing list of actions, and what is gathered and summed at the end of it."""

    def __init__(
        self,
        stages: Stages,
        place: int,
        sharding: Sharding,
        buckets: dict[str, list[str]],
        mesh: Mesh,
    ) -> None:
        self.stages, self.model, self.sharding, self.mesh = stages, stages.model, sharding, mesh
        self.units, self.buckets = stages.units_of[place], buckets
        self.shardings = {unit: sharding.of_unit(self.model, unit) for unit in self.units}
        self.bucket_of = {unit: bucket for bucket, units in buckets.items() for unit in units}
        self.incomplete = {bucket: set(units) for bucket, units in buckets.items()}
        self.last_use = dict(self.uses(stages.actions[place]))
        self.actions: list[Action] = []
        self.gathered: set[str] = set()
        self.kept: set[str] = set()  # units of which this micro-batch has kept a secondary part
        self.is_reducing = False
        self.num_slots = 0

    def uses(self, actions: Iterable[Action]) -> Iterator[tuple[str, Action]]:
        """Yield each unit with the actions of layers that add to its gradient, in order."""
        for action in (part for whole in actions for part in whole.parts or (whole,)):
            for layer in self.layers_of(action) if action.kind in ("B", "W") else ():
                for unit in self.model.units_of(layer):
                    yield unit, action._replace(part=layer, phase=PHASES[action.kind])

    def layers_of(self, action: Action) -> Sequence[str]:
        """Return the layers of an action in the order in which they run."""
        names = self.stages.layers[action.stage]
        return names if action.kind == "F" else names[::-1]

    def add(self, kind: str, phase: str, part: str = "", axes: Sequence[str] = ()) -> None:
        self.actions.append(Action(kind, 0, None, part, tuple(axes), phase))

    def compute(self, action: Action) -> None:
        """Run all layers of a stage; or those of two, in turn, if they overlap.

        If each side can go on while the other waits in a layer, these layers are side by side: what
        is before them on either side is done first.
        """
        first, waiting = len(self.actions), self.waiting_layers(action)
        for _ in zip_longest(*(self.layers(x, waiting) for x in action.parts or (action,))):
            pass
        if waiting:
            found = self.actions[first:]
            self.actions[first:] = [each._replace(slot=self.num_slots) for each in found]
            self.num_slots += 1

    def waiting_layers(self, action: Action) -> set[str]:
        """Return the layers in which one side of an overlapping `action` can wait for messages.

        There are none if the two sides are of one stage, whose layers do not run twice at a time,
        or if parameters or gradients exist only while a layer runs.
        """
        is_whole = not {"parameters", "gradients"} & self.sharding.divided
        if len({part.stage for part in action.parts}) < 2 or not is_whole:
            return set()
        names = (name for part in action.parts for name in self.stages.layers[part.stage])
        return {name for name in names if self.model.axes_of(name)}

    def layers(self, action: Action, ends: Collection[str] = ()) -> Iterator[None]:
        """Run all layers of a stage forward or backward on a micro-batch.

        Pause after each; or, if there are any `ends`, after these.
        """
        is_forward, keep = action.kind == "F", self.sharding.keep_after_forward
        phase, layers = PHASES[action.kind], self.layers_of(action)
        for i, layer in enumerate(layers):
            if action.kind != "W":  # which needs no parameters
                self.gather(layers[i : i + 2], phase)
            self.actions.append(action._replace(part=layer, phase=phase))
            if action.kind in ("B", "W"):
                self.reduce(self.actions[-1])
            if action.kind != "W" and not (is_forward and keep):
                self.free(layer, layers[i + 1 :] if keep else layers[i + 1 : i + 2], phase)
            if not ends or layer in ends:
                yield
        if self.is_reducing and "gradients" in self.sharding.divided and not is_forward:
            self.wait()
        if not is_forward:
            self.kept.clear()

    def gather(self, layers: Sequence[str], phase: str) -> None:
        """Gather the parameters of a layer and of the next to run, unless they are there."""
        for unit in self.units_of(layers):
            sharding = self.shardings[unit]
            if "parameters" in sharding.divided and unit not in self.gathered:
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

    def reduce(self, action: Action) -> None:
        """Start to sum what an action completes; where gradients are divided, one at a time."""
        if not self.sharding.reduces_in_backward or self.stages.schedule.is_asynchronous:
            return
        if "gradients" in self.sharding.divided:
            for unit in self.stages.completed_units(action.part):
                self.start_sum(unit)
            return
        for unit in self.model.units_of(action.part):
            if self.last_use[unit] == action:
                units = self.incomplete[bucket := self.bucket_of[unit]]
                units.discard(unit)
                if not units:
                    self.start_sum(bucket)

    def start_sum(self, bucket: str) -> None:
        """Start to sum a bucket, unless this rank has it alone."""
        if axes := self.sharding_of(bucket).shard_axes:
            if self.is_reducing and "gradients" in self.sharding.divided:
                self.wait()
            self.add("REDUCE", "backward", bucket, axes)
            self.is_reducing = True

    def sharding_of(self, bucket: str) -> Sharding:
        """Return the sharding of all units of a bucket."""
        return self.shardings[self.buckets[bucket][0]]

    def wait(self) -> None:
        self.add("WAIT", "backward")
        self.is_reducing = False

    def end(self) -> None:
        """Complete what is in progress after all micro-batches."""
        if self.is_reducing:
            self.wait()
        if any(action.kind in MESSAGES for action in self.actions):
            self.add("WAIT", "", SENDS)

    def update_alone(self, action: Action) -> None:
        """Update by the gradient of one micro-batch, while others are in progress."""
        for bucket in self.buckets:
            self.at_once("REDUCE", "reduce", bucket, self.sharding_of(bucket).shard_axes)
        self.sum_along_other_axes()
        self.actions.append(action)

    def sum_along_other_axes(self) -> None:
        """Sum gradients along axes that are not those of the sharding."""
        for unit in self.units:
            for axis in self.summed_axes(unit):
                self.at_once("REDUCE", "partial", unit, [axis])

    def update(self, *, needs_norm: bool) -> None:
        """Do what the gradients need after all micro-batches, and what new parameters need."""
        sharding, divides = self.sharding, self.divides
        if self.stages.schedule.is_asynchronous:
            self.add("LOSS", "loss", axes=(*self.pipe, *sharding.axes))
            return
        for bucket in self.buckets if sharding.reduces_after_backward else ():
            self.at_once("REDUCE", "reduce", bucket, self.sharding_of(bucket).shard_axes)
        for bucket in self.buckets:
            self.at_once("REDUCE", "replicate", bucket, self.sharding_of(bucket).replica_axes)
        self.sum_along_other_axes()
        if sharding.find_unused_parameters:
            self.add("UNUSED", "unused", axes=(*self.pipe, *sharding.axes))
        self.add("LOSS", "loss", axes=(*self.pipe, *sharding.axes))
        if needs_norm:
            both = (*(sharding.shard_axes if sharding.divided else ()), *divides)
            axes = tuple(dict.fromkeys(both))
            self.add("NORM", "norm" if axes else "", axes=axes)
        self.add("UPDATE", "")
        if self.model.num_counts:
            self.add("COUNT", "count", axes=(*self.pipe, *sharding.axes))
        for unit, each in self.shardings.items():
            if each.every is not None:
                self.at_once("AVERAGE", "average", unit, each.shard_axes)
            if "optimizer" in each.divided and "parameters" not in each.divided:
                self.at_once("UNSHARD", "update", unit, each.shard_axes)

    @property
    def pipe(self) -> tuple[str, ...]:
        return ("pipe",) if self.mesh.axes.get("pipe", 1) > 1 else ()

    @property
    def divides(self) -> tuple[str, ...]:
        """The axes along which ranks have different parts of the model."""
        return (*self.pipe, *self.model.split_axes)

    def summed_axes(self, unit: str) -> list[str]:
        """Return the other axes than those of the sharding along which a gradient is summed."""
        holders = self.stages.holders[unit]
        shared = [self.mesh.subset("pipe", holders)] if len(holders) > 1 else []
        return [*self.model.partial_axes(unit), *shared]

    def at_once(self, kind: str, phase: str, part: str, axes: Sequence[str]) -> None:
        """Start and complete something for one part, if it has axes."""
        if axes:
            self.add(kind, phase, part, axes)
            self.add("WAIT", phase)
