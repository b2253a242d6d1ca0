"""Actions that compute: layers forward and backward, and the update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, RankView
from parallel.nn import LayerTraffic, Model, Recompute
from parallel.optim import OFFLOADED
from parallel.step.action import Action, Clock
from parallel.step.kept import Kept
from parallel.step.layer_calls import in_groups


@dataclass(frozen=True, kw_only=True)
class LayerAction(Action):
    """An action of a layer on a micro-batch.

    Attributes
    ----------
    layer : str
    stage, micro_batch : int
    direction : str
        ``"F"`` if activations enter the layer, ``"B"`` if derivatives do; "" if nothing does.
    passes : int
        The time in units of the time of forward, without recomputation.
    """

    direction: ClassVar[str]
    passes: ClassVar[int] = 1
    layer: str
    stage: int
    micro_batch: int

    @property
    def name(self) -> str:
        return self.layer

    @property
    def where(self) -> tuple[int, int | None]:
        return self.stage, self.micro_batch

    def calls_in(self, traffic: LayerTraffic) -> Iterable[PredictedCall]:
        """Return the calls of a layer that belong to this action."""
        return ()

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterator[PredictedCall]:
        index_of = view.layout.pipe_index
        ranks = (rank for rank in range(view.mesh.size) if index_of(rank) == view.pipe_index)
        return self._first_in_groups(view, ranks, batch)

    def led(self, view: RankView, batch: BatchSize | None = None) -> Iterator[PredictedCall]:
        part_of, mine = view.layout.model_part, view.model_part
        ranks = (rank for rank in range(view.mesh.size) if part_of(rank) == mine)
        return self._first_in_groups(view, ranks, batch)

    def _first_in_groups(
        self, view: RankView, ranks: Iterable[int], batch: BatchSize | None
    ) -> Iterator[PredictedCall]:
        """Yield the calls of the groups in which one of these `ranks` is the first."""
        layout = view.layout
        for rank in ranks if view.model.mesh.size > 1 else ():
            tokens = layout.tokens_in(batch, self.micro_batch, rank)
            calls = self.calls_in(layout.layer_traffic_of(tokens)[self.layer])
            yield from in_groups(calls, view.mesh, rank, self.phase, self.layer)

    def depends_on_rows(self, model: Model) -> bool:
        return model.layers[self.layer].needs_rows

    def like(self, model: Model) -> Action:
        return self if self.depends_on_rows(model) else replace(self, micro_batch=0, slot=None)

    def needs(self, view: RankView) -> list[Hashable]:
        gathered: list[Hashable] = [*view.model.units_of(self.layer)]
        return [*gathered, (self.direction, self.stage, self.micro_batch)]

    def seconds(self, model: Model, forward_seconds: Callable[[str], float]) -> float:
        is_recomputed = self.direction == "B" and isinstance(model.layers[self.layer], Recompute)
        return (self.passes + is_recomputed) * forward_seconds(self.layer)

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.compute(self)
        clock.call(self)

    def keep(self, kept: Kept) -> None:
        """Free what has arrived; keep what layers save, which may be offloaded until backward."""
        complete_units(kept, self.layer)
        kept.free("messages", "received", self.direction, f"{self.stage}", f"{self.micro_batch}")
        self.keep_activations(kept)

    def keep_activations(self, kept: Kept) -> None:
        """Change the activations that are kept."""
        for nbytes in self.changes(kept):
            kept.change("activations", nbytes)

    def changes(self, kept: Kept) -> tuple[int, ...]:
        """Return how the bytes of activations change, one after the other."""
        return kept.activations[self.micro_batch][self.layer].changes(self.code)


class LayerForward(LayerAction):
    """Compute the output of a layer."""

    code, direction = "F", "F"

    def calls_in(self, traffic: LayerTraffic) -> Iterable[PredictedCall]:
        return traffic.forward

    def keep_activations(self, kept: Kept) -> None:
        super().keep_activations(kept)
        if kept.is_offloaded:
            move_activations(self, kept, -1)


class LayerBackward(LayerAction):
    """Compute the derivative by the input of a layer, and add to its gradients."""

    code, direction, passes = "B", "B", 2

    def calls_in(self, traffic: LayerTraffic) -> Iterable[PredictedCall]:
        return traffic.backward

    def keep_activations(self, kept: Kept) -> None:
        open_gradients(kept, self.layer)
        if kept.is_offloaded:
            move_activations(self, kept, 1)
        super().keep_activations(kept)


class LayerBackwardInput(LayerAction):
    """Compute the derivative by the input of a layer: the first half of backward."""

    code, direction = "I", "B"

    def calls_in(self, traffic: LayerTraffic) -> Iterable[PredictedCall]:
        return traffic.backward

    def keep_activations(self, kept: Kept) -> None:
        if kept.is_offloaded:
            move_activations(self, kept, 1)
        super().keep_activations(kept)


class LayerBackwardWeight(LayerAction):
    """Add to the gradients of a layer: the second half of backward."""

    code, direction = "W", ""

    def needs(self, view: RankView) -> list[Hashable]:
        return []

    def keep(self, kept: Kept) -> None:
        open_gradients(kept, self.layer)
        self.keep_activations(kept)


def move_activations(action: LayerAction, kept: Kept, sign: int) -> None:
    """Bring what a layer has saved back (`sign` 1), or move it away (-1)."""
    nbytes = sign * kept.activations[action.micro_batch][action.layer].saved
    kept.change(OFFLOADED, -nbytes)
    kept.change("activations", nbytes)


def open_gradients(kept: Kept, layer: str) -> None:
    """Make the gradients of a layer's units, if they exist only while they are computed."""
    for unit in kept.view.model.units_of(layer):
        is_divided = "gradients" in kept.view.sharding_of(unit).divided
        if is_divided and not kept.holds("buffers", "gradient", unit):
            kept.hold(kept.view.unit_nbytes(unit), "buffers", "gradient", unit)


def complete_units(kept: Kept, layer: str) -> None:
    """Wait for the units of a layer: free what was received, and keep the secondary parts."""
    view, axes = kept.view, kept.view.sharding.secondary_axes
    for unit in view.model.units_of(layer):
        kept.complete_gather(unit)
        if axes and not kept.holds("buffers", "secondary", unit):
            part = view.part(unit, axes)
            nbytes = (part.stop - part.start) * view.dtype.itemsize
            kept.hold(nbytes, "buffers", "secondary", unit)


@dataclass(frozen=True, kw_only=True)
class Update(Action):
    """Change the parameters; what follows is left out if gradients overflowed.

    Attributes
    ----------
    micro_batch : int, optional
        The micro-batch by whose gradient the parameters are changed; by default by all.
    """

    code = "UPDATE"
    stage: int = 0
    micro_batch: int | None = None

    @property
    def where(self) -> tuple[int, int | None]:
        return self.stage, self.micro_batch
