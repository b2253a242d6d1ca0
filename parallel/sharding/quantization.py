"""Quantization to eight or four bits, and the collectives of ZeRO++ (Wang et al. 2023).

A scale for each block limits the effect of one large value to its block (Dettmers et al. 2022).
The same numbers give the same bytes on all ranks, in NumPy and in CuPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import collectives
from parallel.accounts import PredictedCall
from parallel.mesh import split
from parallel.nn import Array, namespace_of, scales_for
from parallel.sharding.collective import Arrays, Axes, CommHook, Completion, Gather, View

BLOCK = 256  # elements that share a scale: the scales add 4/256 of a byte for each element
ALL_TO_ALL = "pairwise"  # the algorithm of the exchange
STEPS = {8: 127, 4: 7}  # on either side of zero, by bits
SCALE_BYTES = 4


def quantized_bytes(num_elements: int, block: int = BLOCK, bits: int = 8) -> int:
    """Return ceil(n bits / 8) + 4 ceil(n / block): the elements, a float32 scale for each block."""
    return element_bytes(num_elements, bits) + SCALE_BYTES * num_blocks(num_elements, block)


def element_bytes(num_elements: int, bits: int) -> int:
    """Return the bytes of elements of `bits` bits.  Raise ValueError unless `bits` is 4 or 8."""
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
    xp, n = namespace_of(x), x.shape[0]
    start = element_bytes(n, bits)
    blocks = empty_blocks(xp, n, block)
    with np.errstate(over="ignore"):
        blocks.reshape(-1)[:n] = x
    scales = scales_of(blocks, STEPS[bits])
    # No integer is a NaN: the scale is.  (To assign by a mask, the host waits for a device.)
    blocks = xp.where(xp.isnan(scales)[:, None], xp.zeros((), dtype=np.float32), blocks)
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
    xp = namespace_of(blocks)
    # The next number below, so that the largest element times its scale is finite.
    largest = float(np.nextafter(np.finfo(np.float32).max / np.float32(steps), np.float32(0)))
    peaks = xp.maximum(xp.max(blocks, axis=1), -xp.min(blocks, axis=1))
    scales = xp.minimum(scales_for(peaks, steps), largest)
    scales = xp.where(xp.isfinite(peaks), scales, xp.asarray(np.nan, dtype=np.float32))
    return xp.where(peaks == 0, xp.zeros_like(peaks), scales)


def dequantize(packed: Array, num_elements: int, block: int = BLOCK, bits: int = 8) -> Array:
    """Return the float32 values (`num_elements`,) of what `quantize` returned.

    Raises TypeError if `packed` is not uint8, and ValueError if its shape is wrong.
    """
    wanted, start = quantized_bytes(num_elements, block, bits), element_bytes(num_elements, bits)
    if packed.dtype != np.uint8:
        raise TypeError(f"quantized numbers are uint8, not {packed.dtype}")
    if packed.shape != (wanted,):
        raise ValueError(
            f"{num_elements} quantized elements have shape ({wanted},), not {packed.shape}"
        )
    xp = namespace_of(packed)
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


def unpacked(packed: Array, counts: Sequence[int], block: int, bits: int = 8) -> list[Array]:
    """Return the float32 arrays of `counts` elements that are quantized in `packed`."""
    sizes = [quantized_bytes(n, block, bits) for n in counts]
    parts = zip(split(packed, sizes), counts, strict=True)
    return [dequantize(part, n, block, bits) for part, n in parts]


def without_own(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the bytes from each rank to each if rank d gets ``sizes[d]`` from every other."""
    ranks = range(len(sizes))
    return tuple(tuple(n * (d != s) for d, n in enumerate(sizes)) for s in ranks)


class QuantizedGather(Gather):
    """Gather parameters in int8, with a scale for each block (qwZ).

    Every part is rounded, this rank's too: all ranks compute with the same parameters.
    """

    collectives = ("all_gather",)

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        counts, sizes = arrays.view.counts(bucket, axes), self._sizes(arrays.view, bucket, axes)
        packed = arrays.new_buffer("buffers", sum(sizes), np.uint8)
        mine = quantize(flat[arrays.view.part(bucket, axes)], self.block)
        wait = arrays.start_call(axes, "all_gather", mine, out=packed, counts=sizes)

        def finish() -> None:
            values = unpacked(wait(), counts, self.block)
            flat[...] = arrays.xp.concat(values).astype(flat.dtype)

        return finish

    def _sizes(self, view: View, bucket: str, axes: Axes) -> tuple[int, ...]:
        return tuple(quantized_bytes(n, self.block) for n in view.counts(bucket, axes))

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._sizes(view, bucket, axes)
        return [view.predicted(phase, "all_gather", sizes, axes, itemsize=1)]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        return sum(self._sizes(view, bucket, axes))


class QuantizedExchange(CommHook):
    """Sum gradients by two quantized all-to-alls: in the group, then between groups (qgZ).

    After each exchange the values are added in float32.  A rank that is element (row, column) of
    the mesh receives the parts of its column from its group, and its own part from its column.

    `block` elements of `bits` bits, 8 or 4, share a scale; another number of bits raises
    ValueError.  `within` and `between` are the axes of the mesh within a group and between groups.
    """

    is_blocking = True

    def __init__(self, block: int, within: str, between: str, bits: int = 8) -> None:
        quantized_bytes(0, block, bits)
        self.block, self.within, self.between, self.bits = block, within, between, bits

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        parts = split(flat, arrays.view.counts(bucket, axes))
        num_columns = arrays.view.mesh.size_of(self.within)
        columns = [parts[column::num_columns] for column in range(num_columns)]
        with collectives.phase("within"):
            sums = self._exchange(arrays, self.within, columns)
        with collectives.phase("between"):
            (total,) = self._exchange(arrays, self.between, [[part] for part in sums])
        flat[arrays.view.part(bucket, axes)] = total.astype(flat.dtype)
        return lambda: None

    def _exchange(self, arrays: Arrays, axis: str, parts: list[list[Array]]) -> list[Array]:
        """Send ``parts[r]`` to each rank r; return the float32 sums of what ranks sent to this one.

        What a rank would send to itself is not rounded.
        """
        me = arrays.view.index(axis)
        counts = [[part.shape[0] for part in of_rank] for of_rank in parts]
        table = without_own([sum(self._packed_bytes(of_rank)) for of_rank in counts])
        sent = arrays.new_buffer("buffers", sum(table[me]), np.uint8)
        for target, of_rank in zip(split(sent, table[me]), parts, strict=True):
            if target.shape[0]:
                packed = [quantize(part, self.block, self.bits) for part in of_rank]
                target[...] = arrays.xp.concat(packed)
        sizes = [row[me] for row in table]
        received = arrays.new_buffer("buffers", sum(sizes), np.uint8)
        options = {"out": received, "counts": table, "algorithm": ALL_TO_ALL}
        arrays.start_call((axis,), "all_to_all", sent, **options)()
        sums = [part.astype(np.float32) for part in parts[me]]
        for source in split(received, sizes):
            if source.shape[0]:
                values = unpacked(source, counts[me], self.block, self.bits)
                for total, part in zip(sums, values, strict=True):
                    total += part
        return sums

    def _packed_bytes(self, counts: Iterable[int]) -> list[int]:
        return [quantized_bytes(n, self.block, self.bits) for n in counts]

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return the call within groups, and the calls of columns, whose parts differ in size."""
        sizes = self._packed_bytes(view.counts(bucket, axes))
        inner = view.mesh.size_of(self.within)
        table = without_own([sum(sizes[column::inner]) for column in range(inner)])
        options: dict[str, Any] = {"itemsize": 1, "algorithm": ALL_TO_ALL}
        within, between = (self.within,), (self.between,)
        calls = [view.predicted(f"{phase}/within", "all_to_all", table, within, **options)]
        for column in view.groups(between):
            table = without_own([sizes[view.mesh.index(axes, rank)] for rank in column])
            label, options = f"{phase}/between", options | {"groups": (column,)}
            calls.append(view.predicted(label, "all_to_all", table, between, **options))
        return calls

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        """Return the bytes sent and received in the first call, or in the second if it is more."""
        sizes, mesh = self._packed_bytes(view.counts(bucket, axes)), view.mesh
        inner = mesh.size_of(self.within)
        mine = sizes[view.index(self.within) :: inner]  # the parts of this rank's column
        within = sum(sizes) + (inner - 2) * sum(mine)
        return max(within, sum(mine) + (len(mine) - 2) * mine[view.index(self.between)])
