"""Formulas of the bytes that a rank keeps.  `MemoryTracker` counts the same from the arrays.

For n elements of w bytes in the model's dtype and W bytes in that of updates (float32 for two-byte
dtypes, else the same), and an optimizer with S states:

| category    | bytes                                                             |
|-------------|-------------------------------------------------------------------|
| parameters  | n w                                                               |
| gradients   | n w                                                               |
| optimizer   | n W S                                                             |
| master      | n W if updates have another dtype or place, else 0                |
| buffers     | `parallel.runtime.memory.Walk`                                    |
| activations | `parallel.runtime.memory.Walk`                                    |

n is the number of the model's elements, or, where ranks divide the category,
of those that this rank updates.  In float16 with Adam that is 16 Psi bytes, and 16 Psi/N where all
categories are divided among N ranks.  Rajbhandari et al. 2020.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

from parallel.optim.precision import master_dtype
from parallel.shards import length, span


def shard_size(unit_sizes: Iterable[int], num_ranks: int, rank: int) -> int:
    """Return the elements that belong to `rank` if each unit is divided among `num_ranks` ranks."""
    return sum(length(span(size, num_ranks, rank)) for size in unit_sizes)


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
