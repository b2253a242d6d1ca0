"""The quantized collectives of ZeRO++.  Wang et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

import collectives
from parallel import placement
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.sharding.collective import Axes, CommHook, Completion, Gather, Group
from parallel.sharding.quantization import BLOCK, dequantize, quantize, quantized_bytes

ALL_TO_ALL = "pairwise"


class QuantizedGather(Gather):
    """Gather parameters in int8, with a scale for each block (qwZ).

    Every part is rounded, this rank's too: all ranks compute with the same parameters.
    """

    collectives = ("all_gather",)

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block

    def start(self, group: Group, unit: str, full: Array, axes: Axes) -> Completion:
        sizes, mine = self._packed_bytes(group, unit, axes), full[group.part(unit, axes)]
        packed = group.new_buffer("buffers", sum(sizes), np.uint8)
        quantized = quantize(mine, self.block)
        wait = group.start_call(axes, "all_gather", quantized, out=packed, counts=sizes)
        return partial(self._finish, wait, full, group.counts(unit, axes))

    def _finish(self, wait: Callable[[], Array], full: Array, counts: Sequence[int]) -> None:
        values = unpacked(wait(), counts, self.block)
        full[...] = array_namespace(full).concat(values).astype(full.dtype)

    def _packed_bytes(self, group: Group, unit: str, axes: Axes) -> tuple[int, ...]:
        return tuple(quantized_bytes(n, self.block) for n in group.counts(unit, axes))

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._packed_bytes(group, unit, axes)
        return [group.predicted(phase, "all_gather", sizes, axes, itemsize=1)]

    def buffer_bytes(self, group: Group, unit: str, axes: Axes) -> int:
        return sum(self._packed_bytes(group, unit, axes))


class QuantizedExchange(CommHook):
    """Sum gradients by two quantized all-to-alls: in the group, then between groups (qgZ).

    After each exchange the values are added in float32.  A rank that is element (row, column) of
    the mesh receives column's parts from its group, and its own part from its column.

    `block` elements of `bits` bits, 8 or 4, share a scale; another number of bits raises
    ValueError.  `within` and `between` are the axes of the mesh within a group and between groups.
    """

    is_blocking = True

    def __init__(self, block: int, within: str, between: str, bits: int = 8) -> None:
        quantized_bytes(0, block, bits)
        self.block, self.within, self.between, self.bits = block, within, between, bits

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        parts = placement.split(flat, group.counts(bucket, axes))
        num_columns = group.mesh.size_of(self.within)
        columns = [parts[column::num_columns] for column in range(num_columns)]
        with collectives.phase("within"):
            sums = self._exchange(group, self.within, columns)
        with collectives.phase("between"):
            (total,) = self._exchange(group, self.between, [[part] for part in sums])
        flat[group.part(bucket, axes)] = total.astype(flat.dtype)
        return lambda: None

    def _exchange(self, group: Group, axis: str, parts: list[list[Array]]) -> list[Array]:
        """Send ``parts[r]`` to each rank r; return the float32 sums of what ranks sent here.

        What a rank sends to itself is not sent and not rounded.
        """
        packed = [[quantize(part, self.block, self.bits) for part in each] for each in parts]
        sizes, me = [sum(x.shape[0] for x in each) for each in packed], group.mesh.index(axis)
        whole = array_namespace(parts[0][0]).concat([x for each in packed for x in each])
        sent = group.memory.track("buffers", whole)
        received = group.new_buffer("buffers", len(parts) * sizes[me], np.uint8)
        table, options = [sizes] * len(parts), {"out": received, "algorithm": ALL_TO_ALL}
        group.start_call((axis,), "all_to_all", sent, counts=table, **options)()
        sums = [part.astype(np.float32) for part in parts[me]]
        counts = [part.shape[0] for part in sums]
        for rank, each in enumerate(received.reshape(len(parts), -1)):
            if rank != me:
                values = unpacked(each, counts, self.block, self.bits)
                for total, part in zip(sums, values, strict=True):
                    total += part
        return sums

    def _part_bytes(self, group: Group, bucket: str, axes: Axes) -> list[int]:
        return [quantized_bytes(n, self.block, self.bits) for n in group.counts(bucket, axes)]

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes, inner = self._part_bytes(group, bucket, axes), group.mesh.size_of(self.within)
        to = tuple(sum(sizes[column::inner]) for column in range(inner))
        options: dict[str, Any] = {"itemsize": 1, "algorithm": ALL_TO_ALL}
        first = group.predicted(
            f"{phase}/within", "all_to_all", (to,) * inner, (self.within,), **options
        )
        return [first, *self._between(group, axes, sizes, f"{phase}/between", options)]

    def _between(
        self, group: Group, axes: Axes, sizes: list[int], phase: str, options: dict[str, Any]
    ) -> list[PredictedCall]:
        """Return the calls of each column of the mesh: their parts have different sizes."""
        calls = []
        for column in group.groups((self.between,)):
            to = tuple(sizes[group.mesh.index(axes, rank)] for rank in column)
            table, options = (to,) * len(column), options | {"groups": (column,)}
            calls.append(group.predicted(phase, "all_to_all", table, (self.between,), **options))
        return calls

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes sent and received in the first call, or in the second if it is more."""
        sizes, mesh = self._part_bytes(group, bucket, axes), group.mesh
        inner = mesh.size_of(self.within)
        mine = sizes[mesh.index(self.within) :: inner]  # the parts of this rank's column
        within = sum(sizes) + inner * sum(mine)
        return max(within, sum(mine) + len(mine) * mine[mesh.index(self.between)])


def unpacked(packed: Array, counts: Sequence[int], block: int, bits: int = 8) -> list[Array]:
    """Return the float32 arrays of `counts` elements that are quantized in `packed`."""
    sizes = [quantized_bytes(n, block, bits) for n in counts]
    parts = zip(placement.split(packed, sizes), counts, strict=True)
    return [dequantize(part, n, block, bits) for part, n in parts]
