"""Formulas of the bytes that a rank keeps and its offload moves, which are counted from the arrays.

For n elements of w bytes in the model's dtype and W bytes in that of updates (float32 for two-byte
dtypes, else the same), and an optimizer with S states, a rank keeps

| category             | bytes                                                 |
|----------------------|-------------------------------------------------------|
| parameters           | n w                                                   |
| gradients            | n w                                                   |
| optimizer            | n W S                                                 |
| master               | n W if updates have another dtype or place, else 0    |
| buffers, activations | `parallel.runtime.memory.Walk`                        |

n is the number of the model's elements, or, where ranks divide the category, of those that this
rank updates.  In float16 with Adam that is 16 Psi bytes, and 16 Psi/N where all categories are
divided among N ranks.  Rajbhandari et al. 2020.  What moves for n elements that a rank updates, and
for A bytes of activations that all layers save in a batch:

| column          | an update   | loading masters | a batch's activations |
|-----------------|-------------|-----------------|-----------------------|
| to host         | n w         | n w             | A                     |
| to device       | n w         | 0               | A                     |
| read from disk  | n W (1 + S) | 0               | A                     |
| written to disk | n W (1 + S) | n W             | A                     |
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from parallel.optim.precision import master_dtype
from parallel.places import READ, TO_DEVICE, TO_HOST, WRITTEN


def state_bytes(
    num_elements: int,
    num_shard_elements: int,
    dtype: np.dtype[Any],
    *,
    sharded: Container[str] = (),
    num_states: int = 2,
    is_offloaded: bool = False,
) -> dict[str, int]:
    """Return the bytes that a rank keeps on its device between steps, by category.

    Of the categories in `sharded` it keeps the part that it updates alone.  `num_states` are those
    of the optimizer.  If `is_offloaded`, `offloaded_bytes` are elsewhere.
    """

    def elements_of(category: str) -> int:
        return num_shard_elements if category in sharded else num_elements

    updates = offloaded_bytes(elements_of("optimizer"), dtype, num_states=num_states)
    is_copied = master_dtype(dtype) != dtype
    return {
        "parameters": dtype.itemsize * elements_of("parameters"),
        "gradients": dtype.itemsize * elements_of("gradients"),
        "optimizer": 0 if is_offloaded else updates["optimizer"],
        "master": updates["master"] if is_copied and not is_offloaded else 0,
    }


def offloaded_bytes(
    num_shard_elements: int, dtype: np.dtype[Any], *, num_states: int = 2
) -> dict[str, int]:
    """Return the bytes of optimizer states and master copies of elements that a rank updates."""
    nbytes = master_dtype(dtype).itemsize * num_shard_elements
    return {"optimizer": num_states * nbytes, "master": nbytes}


def bytes_moved(
    num_shard_elements: int,
    dtype: np.dtype[Any],
    *,
    num_states: int = 2,
    num_updates: int = 1,
    num_loads: int = 0,
) -> dict[str, int]:
    """Return the bytes moved by updates and by loading masters, by column."""
    kept = offloaded_bytes(num_shard_elements, dtype, num_states=num_states)
    parameters, files = dtype.itemsize * num_shard_elements, sum(kept.values())
    return {
        TO_HOST: (num_updates + num_loads) * parameters,
        TO_DEVICE: num_updates * parameters,
        READ: num_updates * files,
        WRITTEN: num_updates * files + num_loads * kept["master"],
    }
