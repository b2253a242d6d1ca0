"""Quantize arrays for communication: eight or four bits, and one scale for each block of elements.

A scale for each block limits the effect of one large value to its block (Dettmers et al. 2022).
The same numbers give the same bytes on all ranks, in NumPy and in CuPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from parallel.nn import Array

BLOCK = 256  # elements that share a scale: the scales add 4/256 of a byte for each element
STEPS = {8: 127, 4: 7}  # on either side of zero, by bits
SCALE_BYTES = 4
SMALLEST = float(np.finfo(np.float32).smallest_normal)  # a smaller scale would lose digits itself


def quantized_bytes(num_elements: int, block: int = BLOCK, bits: int = 8) -> int:
    """Return ceil(n bits / 8) + 4 ceil(n / block): the elements, a float32 scale for each block."""
    return element_bytes(num_elements, bits) + SCALE_BYTES * num_blocks(num_elements, block)


def element_bytes(num_elements: int, bits: int) -> int:
    """Return the bytes of elements of `bits` bits.  Raise ValueError unless that is 4 or 8."""
    if bits not in STEPS:
        raise ValueError(f"numbers can be quantized to 4 or 8 bits, not {bits}")
    return -(-num_elements * bits // 8)


def num_blocks(num_elements: int, block: int = BLOCK) -> int:
    """Return the number of blocks; the last may be shorter.  Raise ValueError if `block` < 1."""
    if block < 1:
        raise ValueError(f"a block has at least one element, not {block}")
    return -(-num_elements // block)


def quantize(x: Array, block: int = BLOCK, bits: int = 8) -> Array:
    """Return a 1-d array as bytes: uint8 of shape (`quantized_bytes`,).

    First come the elements as int8, or with 4 `bits` two in a byte (the first in its lower half);
    then the scales as float32: max |x| / 127 of each block, or max |x| / 7, so that rounding (to
    nearest, ties to even) changes an element by at most half a scale.  A block of zeros has scale
    0.  A block with an inf or a NaN has scale NaN, and `dequantize` returns NaN for all of it, so
    that an overflow is not lost.  Any other scale is at least float32's smallest normal number.

    `x` is float16, bfloat16, float32 or float64.  The computation is in float32; a float64 beyond
    its range counts as inf.  Raises TypeError for other dtypes, ValueError for other shapes or
    numbers of bits.
    """
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":  # bfloat16 is an extension of NumPy
        raise TypeError(f"only floating-point arrays can be quantized, not {x.dtype}")
    if len(x.shape) != 1:
        raise ValueError(f"only 1-d arrays can be quantized, not shape {x.shape}")
    xp, n = array_namespace(x), x.shape[0]
    start = element_bytes(n, bits)
    blocks = empty_blocks(xp, n, block)
    with np.errstate(over="ignore"):
        blocks.reshape(-1)[:n] = x
    scales = scales_of(blocks, STEPS[bits])
    blocks[xp.isnan(scales)] = 0  # no integer is a NaN: the scale is
    blocks /= xp.where(scales > 0, scales, xp.ones_like(scales))[:, None]
    packed = xp.empty(quantized_bytes(n, block, bits), dtype=np.uint8)
    elements = xp.rint(blocks, out=blocks).reshape(-1)[:n]
    if bits == 8:
        packed[:n].view(np.int8)[...] = elements
    else:
        in_bytes = elements.astype(np.int8).view(np.uint8)
        packed[:start] = in_bytes[::2] & 15
        packed[: n // 2] |= in_bytes[1::2] << 4
    packed[start:] = scales.view(np.uint8)
    return packed


def empty_blocks(xp: Any, num_elements: int, block: int) -> Array:
    """Return zeros (blocks, elements), float32; the last block is padded."""
    width = min(block, max(num_elements, 1))
    return xp.zeros((num_blocks(num_elements, block), width), dtype=np.float32)


def scales_of(blocks: Array, steps: int) -> Array:
    """Return the scales (blocks,) of (blocks, elements), float32: `steps` on a side of zero."""
    xp = array_namespace(blocks)
    # The next number below, so that the largest element times its scale is finite.
    largest = float(np.nextafter(np.finfo(np.float32).max / np.float32(steps), np.float32(0)))
    peaks = xp.maximum(xp.max(blocks, axis=1), -xp.min(blocks, axis=1))
    scales = xp.clip(peaks / steps, SMALLEST, largest)
    scales = xp.where(xp.isfinite(peaks), scales, xp.asarray(np.nan, dtype=np.float32))
    return xp.where(peaks == 0, xp.zeros_like(peaks), scales)


def dequantize(packed: Array, num_elements: int, block: int = BLOCK, bits: int = 8) -> Array:
    """Return the float32 values (`num_elements`,) of what `quantize` returned.

    Raises TypeError if `packed` is not uint8, and ValueError if its shape is another.
    """
    wanted, start = quantized_bytes(num_elements, block, bits), element_bytes(num_elements, bits)
    if packed.dtype != np.uint8:
        raise TypeError(f"quantized numbers are uint8, not {packed.dtype}")
    if packed.shape != (wanted,):
        raise ValueError(
            f"{num_elements} quantized elements have shape ({wanted},), not {packed.shape}"
        )
    xp = array_namespace(packed)
    scales = packed[start:].copy().view(np.float32)  # a copy is aligned
    blocks = empty_blocks(xp, num_elements, block)
    flat = blocks.reshape(-1)[:num_elements]
    elements = packed[:start].view(np.int8)
    if bits == 8:
        flat[...] = elements
    else:
        flat[::2] = elements << 4 >> 4  # the second shift copies the sign
        flat[1::2] = elements[: num_elements // 2] >> 4
    blocks *= scales[:, None]
    return flat
