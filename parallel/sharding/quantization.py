"""Quantize arrays for communication: symmetric int8 with one scale for each block of elements.

A scale for each block limits the effect of one large value to its block (Dettmers et al. 2022).
The same numbers give the same bytes on all ranks, in NumPy and in CuPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from parallel.nn import Array

BLOCK = 256  # elements that share a scale: the scales add 4/256 of a byte for each element
STEPS = 127  # on either side of zero
SCALE_BYTES = 4
SMALLEST = float(np.finfo(np.float32).smallest_normal)  # a smaller scale would lose digits itself
LARGEST = float(np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0)))


def quantized_bytes(num_elements: int, block: int = BLOCK) -> int:
    """Return n + 4 ceil(n / block): a byte for each element, a float32 scale for each block."""
    return num_elements + SCALE_BYTES * num_blocks(num_elements, block)


def num_blocks(num_elements: int, block: int = BLOCK) -> int:
    """Return the number of blocks; the last may be shorter.  Raise ValueError if `block` < 1."""
    if block < 1:
        raise ValueError(f"a block has at least one element, not {block}")
    return -(-num_elements // block)


def quantize(x: Array, block: int = BLOCK) -> Array:
    """Return a 1-d array as bytes: uint8 of shape (`quantized_bytes`,).

    First come the elements as int8, then the scales as float32: max |x| / 127 of each block, so
    that rounding (to nearest, ties to even) changes an element by at most half a scale.  A block
    of zeros has scale 0.  A block with an inf or a NaN has scale NaN, and `dequantize` returns
    NaN for all of it, so that an overflow is not lost.  Any other scale is at least float32's
    smallest normal number.

    `x` is float16, bfloat16, float32 or float64.  The computation is in float32; a float64 beyond
    its range counts as inf.  Raises TypeError for other dtypes, ValueError for other shapes.
    """
    check_is_flat_float(x)
    xp, n = array_namespace(x), x.shape[0]
    blocks = empty_blocks(xp, n, block)
    with np.errstate(over="ignore"):
        blocks.reshape(-1)[:n] = x
    scales = scales_of(blocks)
    blocks[xp.isnan(scales)] = 0  # no int8 is a NaN: the scale is
    blocks /= xp.where(scales > 0, scales, xp.ones_like(scales))[:, None]
    packed = xp.empty(quantized_bytes(n, block), dtype=np.uint8)
    packed[:n].view(np.int8)[...] = xp.rint(blocks, out=blocks).reshape(-1)[:n]
    packed[n:] = scales.view(np.uint8)
    return packed


def empty_blocks(xp: Any, num_elements: int, block: int) -> Array:
    """Return zeros (blocks, elements), float32; the last block is padded."""
    width = min(block, max(num_elements, 1))
    return xp.zeros((num_blocks(num_elements, block), width), dtype=np.float32)


def scales_of(blocks: Array) -> Array:
    """Return the scale of each block, (blocks,) float32, for (blocks, elements) float32."""
    xp = array_namespace(blocks)
    peaks = xp.maximum(xp.max(blocks, axis=1), -xp.min(blocks, axis=1))
    scales = xp.clip(peaks / STEPS, SMALLEST, LARGEST)
    scales = xp.where(xp.isfinite(peaks), scales, xp.asarray(np.nan, dtype=np.float32))
    return xp.where(peaks == 0, xp.zeros_like(peaks), scales)


def dequantize(packed: Array, num_elements: int, block: int = BLOCK) -> Array:
    """Return the float32 values (`num_elements`,) of what `quantize` returned.

    Raises TypeError if `packed` is not uint8, and ValueError if its shape is not
    (`quantized_bytes`,).
    """
    wanted = quantized_bytes(num_elements, block)
    if packed.dtype != np.uint8:
        raise TypeError(f"quantized numbers are uint8, not {packed.dtype}")
    if packed.shape != (wanted,):
        raise ValueError(
            f"{num_elements} quantized elements have shape ({wanted},), not {packed.shape}"
        )
    xp = array_namespace(packed)
    scales = packed[num_elements:].copy().view(np.float32)  # a copy is aligned
    blocks = empty_blocks(xp, num_elements, block)
    flat = blocks.reshape(-1)[:num_elements]
    flat[...] = packed[:num_elements].view(np.int8)
    blocks *= scales[:, None]
    return flat


def check_is_flat_float(x: Array) -> None:
    """Raise TypeError unless `x` is floating-point, ValueError unless it is 1-d."""
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":  # bfloat16 is an extension of NumPy
        raise TypeError(f"only floating-point arrays can be quantized, not {x.dtype}")
    if len(x.shape) != 1:
        raise ValueError(f"only 1-d arrays can be quantized, not shape {x.shape}")
