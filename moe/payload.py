"""In which form rows are sent between ranks: as they are, in two bytes, or in one.

Rounding depends on the row alone, and a rank rounds the rows that it keeps for itself too: with the
flat way to dispatch, results do not depend on the number of ranks.  The hierarchical way rounds
rows once more within the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parallel.nn import Array, cast, namespace_of
from parallel.optim import dtype_of
from parallel.sharding.quantization import SCALE_BYTES, num_blocks, scales_of

PAYLOADS = ("same", "bfloat16", "int8")
BLOCK = 128  # elements of a row that share a scale
STEPS = 127


class Encoded(NamedTuple):
    """The form of a row: how many numbers of how many bytes."""

    width: int
    itemsize: int


def form_of(payload: str, dim: int, itemsize: int) -> Encoded:
    """Return the form of a row of `dim` numbers of `itemsize` bytes in a `payload`."""
    if payload == "int8":
        return Encoded(dim + SCALE_BYTES * num_blocks(dim, BLOCK), 1)
    return Encoded(dim, 2 if payload == "bfloat16" else itemsize)


def encode(rows: Array, payload: str) -> Array:
    """Return `rows` (n, dim) in the form of a `payload`, (n, width).

    In ``"int8"``, uint8: the elements, then a float32 scale for each block of 128 of them (the last
    may be shorter), max |x| / 127.  A block with an inf or a NaN has scale NaN.
    """
    if payload == "same":
        return rows
    if payload == "bfloat16":
        return cast(rows, dtype_of("bfloat16"))
    xp, (n, dim) = namespace_of(rows), rows.shape
    blocks = _blocks(rows)
    scales = scales_of(blocks.reshape(n * blocks.shape[1], BLOCK), STEPS)
    scales = scales.reshape(blocks.shape[:2])
    blocks[xp.isnan(scales)] = 0  # no integer is a NaN: the scale is
    blocks /= xp.where(scales > 0, scales, xp.ones_like(scales))[..., None]
    packed = xp.empty((n, form_of("int8", dim, 1).width), dtype=np.uint8)
    elements = xp.rint(blocks).reshape(n, blocks.shape[1] * BLOCK)[:, :dim].astype(np.int8)
    packed[:, :dim] = elements.view(np.uint8)
    packed[:, dim:] = scales.view(np.uint8)
    return packed


def decode(packed: Array, payload: str, dim: int, dtype: object) -> Array:
    """Return the rows (n, `dim`) of this `dtype` that `encode` got, rounded."""
    if payload != "int8":
        return cast(packed, dtype)
    xp, n = namespace_of(packed), packed.shape[0]
    scales = xp.ascontiguousarray(packed[:, dim:]).view(np.float32)
    blocks = _blocks(xp.ascontiguousarray(packed[:, :dim]).view(np.int8))
    blocks *= scales[..., None]
    return blocks.reshape(n, blocks.shape[1] * BLOCK)[:, :dim].astype(dtype)


def _blocks(rows: Array) -> Array:
    """Return a float32 copy of `rows` (n, dim) in blocks, (n, blocks, 128), the last padded."""
    xp, (n, dim) = namespace_of(rows), rows.shape
    padded = xp.zeros((n, num_blocks(dim, BLOCK) * BLOCK), dtype=np.float32)
    padded[:, :dim] = rows
    return padded.reshape(n, num_blocks(dim, BLOCK), BLOCK)
