"""Formulas of the bytes that a rank keeps and that offloaded updates move.

For n elements of w bytes in the model's dtype and W bytes in the dtype of updates (float32 for
two-byte dtypes, else the same), and an optimizer with S states, a rank keeps n w bytes of
parameters and of gradients, n W S of optimizer states, and n W of masters if updates have another
dtype or storage; n counts the model's elements or, where ranks divide the category, the elements
that this rank updates.  In float16 with Adam these are 16 Psi bytes, or 16 Psi/N if N ranks divide
all.  Rajbhandari et al. 2020.

An update moves n w bytes to the host and to the device, and n W (1 + S) from and to the disk;
loading masters moves n w bytes to the host and n W to the disk.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np

from parallel.optim.precision import master_dtype
from parallel.optim.storage import READ, TO_DEVICE, TO_HOST, WRITTEN


def state_bytes(
    num_elements: int,
    num_shard_elements: int,
    dtype: np.dtype[Any],
    *,
    sharded: Container[str] = (),
    num_states: int = 2,
    is_offloaded: bool = False,
) -> dict[str, int]:
    """Return the bytes that a rank keeps on its device, `sharded` categories in parts."""

    def kept(category: str) -> int:
        return num_shard_elements if category in sharded else num_elements

    updates = offloaded_bytes(kept("optimizer"), dtype, num_states=num_states)
    if master_dtype(dtype) == dtype:
        updates["master"] = 0
    if is_offloaded:
        updates = dict.fromkeys(updates, 0)
    return {x: dtype.itemsize * kept(x) for x in ("parameters", "gradients")} | updates


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
    parameters = dtype.itemsize * num_shard_elements
    masters = master_dtype(dtype).itemsize * num_shard_elements
    files = num_updates * (1 + num_states) * masters
    return {
        TO_HOST: (num_updates + num_loads) * parameters,
        TO_DEVICE: num_updates * parameters,
        READ: files,
        WRITTEN: files + num_loads * masters,
    }
