"""Predict what a strategy keeps in memory on this rank, and what its offload moves."""

from __future__ import annotations

from parallel.memory import offloaded_bytes, state_bytes
from parallel.offload import DEVICE_COLUMNS, bytes_moved_by_load, bytes_moved_by_update
from parallel.shards import length, span
from parallel.strategy import Strategy


def num_shard_elements(strategy: Strategy) -> int:
    """Return the number of elements that this rank updates."""
    return sum(length(strategy.shard_slice(unit)) for unit in strategy.model.units)


def is_offloaded(strategy: Strategy) -> bool:
    """Return whether masters and optimizer states are elsewhere than the parameters."""
    return strategy.offload.memory is not strategy.memory


def activation_bytes(strategy: Strategy, rows: int, context: int) -> int:
    """Return the most bytes kept between forward and backward for batches (`rows`, `context`).

    At the end of a forward pass each layer keeps what its backward needs, or its input if it is
    recomputed.  During backward, from the last layer to the first, there is what the current layer
    needs and what the layers before it keep.  `rows` are those of this rank; its first micro-batch
    is a largest one.
    """
    recipe, width = strategy.recipe, strategy.dtype.itemsize
    largest = length(span(rows, recipe.num_micro_batches, 0))
    before, most = 0, 0
    by_layer = strategy.model.activation_bytes((largest, context), width)
    for layer, (needed, entering) in by_layer.items():
        most = max(most, before + needed)
        before += entering if layer in recipe.recompute else needed
    return max(most, before)


def peak_memory(strategy: Strategy, rows: int, context: int) -> dict[str, int]:
    """Return ``strategy.memory.peak`` after steps on batches (`rows`, `context`) of this rank."""
    kept = state_bytes(
        strategy.model.num_parameters,
        num_shard_elements(strategy),
        strategy.dtype,
        sharded=strategy.sharded,
        num_states=len(strategy.optimizer.STATES),
        is_offloaded=is_offloaded(strategy),
    )
    return kept | {
        "activations": activation_bytes(strategy, rows, context),
        "buffers": strategy.buffer_bytes(),
    }


def peak_offloaded_memory(strategy: Strategy) -> dict[str, int]:
    """Return ``strategy.offload.memory.peak`` if updates are offloaded, else an empty dict.

    The buffer for copies from and to a device is as large as the largest part of a unit.
    """
    if not is_offloaded(strategy):
        return {}
    largest = max(length(strategy.shard_slice(unit)) for unit in strategy.model.units)
    num_states = len(strategy.optimizer.STATES)
    kept = offloaded_bytes(num_shard_elements(strategy), strategy.dtype, num_states=num_states)
    return kept | {"buffers": strategy.dtype.itemsize * largest * strategy.offload.is_cross_device}


def offload_traffic(strategy: Strategy, num_updates: int) -> dict[str, int]:
    """Return ``strategy.offload.moved`` after `num_updates` updates of all units."""
    offload, elements = strategy.offload, num_shard_elements(strategy)
    update = bytes_moved_by_update(elements, strategy.dtype, len(strategy.optimizer.STATES))
    load = bytes_moved_by_load(elements, strategy.dtype)
    moved = {x: num_updates * update[x] + offload.num_loads * load[x] for x in offload.COLUMNS}
    is_zero = not offload.is_cross_device
    return {x: 0 if x in DEVICE_COLUMNS and is_zero else n for x, n in moved.items()}
