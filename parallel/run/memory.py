"""The bytes that a training run keeps and moves on this rank, to be compared with counts."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.layout import BatchSize
from parallel.predict import StepMemory
from parallel.run.trainer import Trainer


def step_memory(trainer: Trainer) -> StepMemory:
    """Return the prediction of what a rank keeps, for the offloads of a `trainer`."""
    return StepMemory(
        trainer.view,
        trainer.actions,
        len(trainer.optimizer.STATES),
        is_offloaded(trainer),
        bool(trainer.activations.columns),
    )


def is_offloaded(trainer: Trainer) -> bool:
    """Return whether masters and optimizer states are elsewhere than the parameters."""
    return trainer.offload.memory is not trainer.memory


def peak_memory(
    trainer: Trainer, rows: int, context: int, batches: Sequence[BatchSize] = ()
) -> dict[str, int]:
    """Return ``trainer.memory.peak`` after steps on batches; see `StepMemory.peak`."""
    return step_memory(trainer).peak(rows, context, batches) | trainer.kept_bytes()


def peak_offloaded_memory(trainer: Trainer) -> dict[str, int]:
    """Return ``trainer.offload.memory.peak`` if updates are offloaded, else an empty dict."""
    is_cross_device = trainer.offload.storage.is_cross_device
    return step_memory(trainer).peak_offloaded(is_cross_device=is_cross_device)


def offload_traffic(trainer: Trainer, num_updates: int) -> dict[str, int]:
    """Return ``trainer.offload.storage.moved`` after `num_updates` updates of all units."""
    storage, num_loads = trainer.offload.storage, trainer.offload.num_loads
    moved = step_memory(trainer).moved_by_updates(num_updates, num_loads)
    return {x: moved[x] if x in storage.columns else 0 for x in storage.COLUMNS}


def activation_traffic(
    trainer: Trainer, rows: int, context: int, batches: Sequence[BatchSize] = ()
) -> dict[str, int]:
    """Return ``trainer.activations.moved`` after ``trainer.num_batches`` of (`rows`, `context`).

    `batches` are the batches of all ranks; needed if a layer must know their rows.
    """
    memory = step_memory(trainer)
    if trainer.model.needs_rows:
        saved = sum(memory.saved_in_step(rows, context, whole) for whole in batches)
    else:
        saved = trainer.num_batches * memory.saved_in_step(rows, context)
    return dict.fromkeys(trainer.activations.columns, saved)
