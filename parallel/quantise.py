"""Eight-bit numbers on the wire: symmetric int8 with one scale for every block of elements.

One large value would cost all others their digits if a whole array shared a scale (Dettmers et al.
2022).  All ranks get the same bytes from the same numbers, on NumPy and on CuPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from parallel.nn import Array

BLOCK = 256  # elements that share a scale: 4/256 of a byte an element
STEPS = 127  # on either side of zero
SCALE_BYTES = 4
SMALLEST = float(np.finfo(np.float32).smallest_normal)  # scales below would lose their own digits
LARGEST = float(np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0)))


def quantised_bytes(num_elements: int, block: int = BLOCK) -> int:
    """n + 4 ceil(n / block): a byte an element, and a float32 scale a block."""
    return num_elements + SCALE_BYTES * num_blocks(num_elements, block)


def num_blocks(num_elements: int, block: int = BLOCK) -> int:
    """The last one may be shorter.  ValueError for a block of no elements."""
    if block < 1:
        raise ValueError(f"a block holds one element or more, not {block}")
    return -(-num_elements // block)


def quantise(x: Array, block: int = BLOCK) -> Array:
    """A 1-d array of float16, bfloat16, float32 or float64 -> uint8 (`quantised_bytes`,).

    First the elements as int8, then the scales as float32: max |x| / 127 of each block, so that no
    element moves by more than half a scale.  Rounds to nearest, ties to even.  A block of zeros has
    scale 0.  A block with an inf or a NaN has scale NaN, and so is NaN when it comes out: an
    overflow must not be lost.  The smallest other scale is float32's smallest normal number.

    Computes in float32, beyond whose range a float64 counts as inf.  TypeError for other dtypes,
    ValueError for other shapes.
    """
    refuse_unless_flat(x)
    xp, n = array_namespace(x), x.shape[0]
    blocks = empty_blocks(xp, n, block)
    with np.errstate(over="ignore"):
        blocks.reshape(-1)[:n] = x
    scales = scales_of(blocks)
    blocks[xp.isnan(scales)] = 0  # no int8 is a NaN; the scale says it
    blocks /= xp.where(scales > 0, scales, xp.ones_like(scales))[:, None]
    packed = xp.empty(quantised_bytes(n, block), dtype=np.uint8)
    packed[:n].view(np.int8)[...] = xp.rint(blocks, out=blocks).reshape(-1)[:n]
    packed[n:] = scales.view(np.uint8)
    return packed


def empty_blocks(xp: Any, num_elements: int, block: int) -> Array:
    """Zeros (blocks, elements) float32, the last block filled up; none is longer than needed."""
    width = min(block, max(num_elements, 1))
    return xp.zeros((num_blocks(num_elements, block), width), dtype=np.float32)


def scales_of(blocks: Array) -> Array:
    """(blocks, elements) float32 -> (blocks,) float32."""
    xp = array_namespace(blocks)
    peaks = xp.maximum(xp.max(blocks, axis=1), -xp.min(blocks, axis=1))
    scales = xp.clip(peaks / STEPS, SMALLEST, LARGEST)
    scales = xp.where(xp.isfinite(peaks), scales, xp.asarray(np.nan, dtype=np.float32))
    return xp.where(peaks == 0, xp.zeros_like(peaks), scales)


def dequantise(packed: Array, num_elements: int, block: int = BLOCK) -> Array:
    """What `quantise` made of `num_elements` elements -> float32 (num_elements,).

    ValueError if `packed` has not as many bytes as that takes, TypeError if they are not uint8.
    """
    wanted = quantised_bytes(num_elements, block)
    if packed.dtype != np.uint8:
        raise TypeError(f"quantised numbers are uint8, not {packed.dtype}")
    if packed.shape != (wanted,):
        raise ValueError(
            f"{num_elements} elements are {wanted} bytes, not an array of shape {packed.shape}"
        )
    xp = array_namespace(packed)
    scales = packed[num_elements:].copy().view(np.float32)  # float32 must not lie at odd addresses
    blocks = empty_blocks(xp, num_elements, block)
    flat = blocks.reshape(-1)[:num_elements]
    flat[...] = packed[:num_elements].view(np.int8)
    blocks *= scales[:, None]
    return flat


def refuse_unless_flat(x: Any) -> None:
    """TypeError unless the elements are floating-point, ValueError unless x is 1-d."""
    if x.dtype.kind != "f" and x.dtype.name != "bfloat16":  # a dtype of NumPy's by extension
        raise TypeError(f"floating-point numbers can be quantised, {x.dtype} cannot")
    if len(x.shape) != 1:
        raise ValueError(f"a flat array can be quantised, one of shape {x.shape} cannot")
