"""The quantized collectives of ZeRO++.  Wang et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

import collectives
from parallel import shards
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

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        counts, sizes = group.counts(bucket, axes), self._sizes(group, bucket, axes)
        packed = group.new_buffer("buffers", sum(sizes), np.uint8)
        mine = quantize(flat[group.part(bucket, axes)], self.block)
        wait = group.start_call(axes, "all_gather", mine, out=packed, counts=sizes)

        def finish() -> None:
            values = unpacked(wait(), counts, self.block)
            flat[...] = group.xp.concat(values).astype(flat.dtype)

        return finish

    def _sizes(self, group: Group, bucket: str, axes: Axes) -> tuple[int, ...]:
        return tuple(quantized_bytes(n, self.block) for n in group.counts(bucket, axes))

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._sizes(group, bucket, axes)
        return [group.predicted(phase, "all_gather", sizes, axes, itemsize=1)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return sum(self._sizes(group, bucket, axes))


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
        parts = shards.split(flat, group.counts(bucket, axes))
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

    def _sizes(self, group: Group, bucket: str, axes: Axes) -> list[int]:
        return [quantized_bytes(n, self.block, self.bits) for n in group.counts(bucket, axes)]

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return the call within groups, and those of each column: its parts have other sizes."""
        sizes, inner = self._sizes(group, bucket, axes), group.mesh.size_of(self.within)
        to = tuple(sum(sizes[column::inner]) for column in range(inner))
        options: dict[str, Any] = {"itemsize": 1, "algorithm": ALL_TO_ALL}
        within, between = (self.within,), (self.between,)
        calls = [group.predicted(f"{phase}/within", "all_to_all", (to,) * inner, within, **options)]
        for column in group.groups(between):
            to = tuple(sizes[group.mesh.index(axes, rank)] for rank in column)
            table, options = (to,) * len(column), options | {"groups": (column,)}
            label = f"{phase}/between"
            calls.append(group.predicted(label, "all_to_all", table, between, **options))
        return calls

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes sent and received in the first call, or in the second if it is more."""
        sizes, mesh = self._sizes(group, bucket, axes), group.mesh
        inner = mesh.size_of(self.within)
        mine = sizes[mesh.index(self.within) :: inner]  # the parts of this rank's column
        within = sum(sizes) + inner * sum(mine)
        return max(within, sum(mine) + len(mine) * mine[mesh.index(self.between)])


def unpacked(packed: Array, counts: Sequence[int], block: int, bits: int = 8) -> list[Array]:
    """Return the float32 arrays of `counts` elements that are quantized in `packed`."""
    sizes = [quantized_bytes(n, block, bits) for n in counts]
    parts = zip(shards.split(packed, sizes), counts, strict=True)
    return [dequantize(part, n, block, bits) for part, n in parts]
