"""In which form rows are sent between ranks: as they are, in two bytes, or in one.

Rounding depends on the row alone, and a rank rounds the rows that it keeps for itself too: with the
flat dispatch, results do not depend on the number of ranks.  The hierarchical dispatch rounds rows
once more within the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from parallel.nn import Array, cast, namespace_of
from parallel.optim import dtype_of
from parallel.sharding import dequantize, quantize, quantized_bytes

PAYLOADS = ("same", "bfloat16", "int8")
BLOCK = 128  # elements of a row that share a scale
SCALE_BYTES = 4  # of a float32


class Encoded(NamedTuple):
    """The form of a row: how many numbers of how many bytes."""

    width: int
    itemsize: int


def form_of(payload: str, dim: int, itemsize: int) -> Encoded:
    """Return the form of a row of `dim` numbers of `itemsize` bytes in a `payload`."""
    if payload == "int8":
        return Encoded(quantized_bytes(dim, BLOCK), 1)
    return Encoded(dim, 2 if payload == "bfloat16" else itemsize)


def encode(rows: Array, payload: str) -> Array:
    """Return `rows` (n, dim) in the form of a `payload`, (n, width).

    A row in ``"int8"`` is what `parallel.sharding.quantize` makes of it, with a scale for each
    block of 128 elements (the last may be shorter).  A block with an inf or a NaN has scale NaN.
    """
    if payload == "same":
        return rows
    if payload == "bfloat16":
        return cast(rows, dtype_of("bfloat16"))
    xp, (n, dim) = namespace_of(rows), rows.shape
    whole_blocks = xp.zeros((n, padded_to_blocks(dim)), dtype=np.float32)
    whole_blocks[:, :dim] = rows
    packed = quantize(whole_blocks.reshape(-1), BLOCK)
    elements, scales = divided(packed, n, whole_blocks.shape[1])
    return xp.concat([elements[:, :dim], scales], axis=1)


def decode(packed: Array, payload: str, dim: int, dtype: object) -> Array:
    """Return the rows (n, `dim`) of this `dtype` that `encode` got, rounded."""
    if payload != "int8":
        return cast(packed, dtype)
    xp, n, width = namespace_of(packed), packed.shape[0], padded_to_blocks(dim)
    whole = xp.zeros(quantized_bytes(n * width, BLOCK), dtype=np.uint8)
    elements, scales = divided(whole, n, width)
    elements[:, :dim], scales[...] = packed[:, :dim], packed[:, dim:]
    return dequantize(whole, n * width, BLOCK).reshape(n, width)[:, :dim].astype(dtype)


def padded_to_blocks(dim: int) -> int:
    """Return the elements of as many whole blocks as a row of `dim` elements needs."""
    return BLOCK * -(-dim // BLOCK)


def divided(packed: Array, num_rows: int, width: int) -> tuple[Array, Array]:
    """Return views of the elements and of the scales of quantized rows of whole blocks."""
    num_elements = num_rows * width
    elements, scales = packed[:num_elements], packed[num_elements:]
    return elements.reshape(num_rows, width), scales.reshape(
        num_rows, SCALE_BYTES * (width // BLOCK)
    )
