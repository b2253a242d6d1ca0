"""What a rank of a training run will keep and move, read off the actions of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.layout import BatchSize, RankView
from parallel.mesh import length
from parallel.optim import OFFLOADED, bytes_moved, offloaded_bytes, state_bytes
from parallel.pipeline import simulate
from parallel.step import Action, Kept, LayerForward, activations_of, tokens_of


@dataclass(frozen=True)
class StepMemory:
    """What a rank keeps in training, and moves between memories.

    Attributes
    ----------
    view : RankView
    actions : sequence of Action
        What the rank does in a step.
    num_states : int
        The number of optimizer states of an element.
    offloads_updates, offloads_activations : bool
        Whether masters and optimizer states, and activations between forward and backward, are
        elsewhere than the parameters.
    """

    view: RankView
    actions: Sequence[Action]
    num_states: int = 2
    offloads_updates: bool = False
    offloads_activations: bool = False

    @property
    def num_updated(self) -> int:
        """The number of elements that the rank updates."""
        return sum(map(self._num_updated_of, self.view.unit_sizes))

    def _num_updated_of(self, unit: str) -> int:
        return length(self.view.shard_slice(unit))

    def peak(self, rows: int, context: int, batches: Sequence[BatchSize] = ()) -> dict[str, int]:
        """Return the most bytes of each category, after steps on batches (`rows`, `context`).

        Parameters
        ----------
        rows, context : int
            The shape of the rank's part of each batch.
        batches : sequence of BatchSize
            The batches of all ranks; needed if a layer must know their rows.
        """
        view = self.view
        kept = state_bytes(
            sum(view.unit_sizes.values()),
            self.num_updated,
            view.dtype,
            sharded=view.sharding.divided,
            num_states=self.num_states,
            is_offloaded=self.offloads_updates,
        )
        if (schedule := view.stages.schedule).is_asynchronous:
            kept["parameters"] *= simulate(schedule).versions(view.pipe_index)[1]
        peak: Counter[str] = Counter()
        for whole in batches if view.model.needs_rows else [None]:
            peak |= self._peak_of_step(rows, context, whole)  # the larger of both
        buffers = peak["buffers"] + view.sharding.reduction.state_bytes(view)
        of_step = {"activations": peak["activations"], "buffers": buffers}
        of_step |= {name: peak[name] for name in ("scratch", "messages")}
        if self.offloads_activations:
            of_step[OFFLOADED] = peak[OFFLOADED]
        return kept | of_step

    def _peak_of_step(self, rows: int, context: int, whole: BatchSize | None) -> Counter[str]:
        kept = Kept(self.view, rows, context, whole, is_offloaded=self.offloads_activations)
        for action in self.actions:
            action.keep(kept)
        return kept.peak

    def peak_offloaded(self, *, is_cross_device: bool = False) -> dict[str, int]:
        """Return the most bytes of offloaded updates, by category; none if they are not offloaded.

        If the model is on a device and updates are not (`is_cross_device`), a buffer is as large as
        the largest part of a unit.
        """
        if not self.offloads_updates:
            return {}
        largest = max(map(self._num_updated_of, self.view.unit_sizes))
        dtype = self.view.dtype
        kept = offloaded_bytes(self.num_updated, dtype, num_states=self.num_states)
        return kept | {"buffers": dtype.itemsize * largest * is_cross_device}

    def moved_by_updates(self, num_updates: int, num_loads: int) -> dict[str, int]:
        """Return the bytes that updates of all units, and loads of masters, move, by column."""
        return bytes_moved(
            self.num_updated,
            self.view.dtype,
            num_states=self.num_states,
            num_updates=num_updates,
            num_loads=num_loads,
        )

    def saved_in_step(self, rows: int, context: int, whole: BatchSize | None = None) -> int:
        """Return the bytes that the layers of the rank save in a step; see `Kept`."""
        layers = activations_of(self.view, tokens_of(self.view, rows, context, whole))
        forward = [action for action in self.actions if isinstance(action, LayerForward)]
        return sum(layers[action.micro_batch][action.layer].saved for action in forward)
