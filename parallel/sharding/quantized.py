"""The quantized collectives of ZeRO++.  Wang et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from array_api_compat import array_namespace

import collectives
from collectives import Communicator, Work
from parallel import shards
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.sharding.collective import CommHook, Completion, Gather, Group
from parallel.sharding.quantization import BLOCK, dequantize, quantize, quantized_bytes

ALL_TO_ALL = "pairwise"


class QuantizedGather(Gather):
    """Gather parameters in int8, with a scale for each block (qwZ).

    Every part is rounded, this rank's too: all ranks compute with the same parameters.
    """

    collectives = ("all_gather",)

    def __init__(self, block: int = BLOCK) -> None:
        self.block = block

    def start(self, group: Group, unit: str, full: Array, axes: Sequence[str]) -> Completion:
        sizes = self.packed_bytes(group, unit, axes)
        packed = group.new_buffer("buffers", sum(sizes), np.uint8)
        work: Work[Any] = group.comm_of(axes).all_gather(
            quantize(full[group.part(unit, axes)], self.block), out=packed, counts=sizes,
            algorithm=group.algorithm, async_op=True,
        )  # fmt: skip
        return partial(self._finish, work, packed, full, group.counts(unit, axes))

    def _finish(self, work: Work[Any], packed: Array, full: Array, counts: Sequence[int]) -> None:
        work.wait()
        values = unpacked(packed, counts, self.block)
        full[...] = array_namespace(full).concat(values).astype(full.dtype)

    def packed_bytes(self, group: Group, unit: str, axes: Sequence[str]) -> list[int]:
        """Return the quantized bytes of the part of a `unit` of each rank along `axes`.

        `group` is a training run.
        """
        return [quantized_bytes(n, self.block) for n in group.counts(unit, axes)]

    def traffic(
        self, group: Group, unit: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        sizes = tuple(self.packed_bytes(group, unit, axes))
        return [group.predicted(phase, "all_gather", sizes, axes, itemsize=1)]

    def buffer_bytes(self, group: Group, unit: str, axes: Sequence[str]) -> int:
        return sum(self.packed_bytes(group, unit, axes))


class QuantizedExchange(CommHook):
    """Sum gradients by two quantized all-to-alls: in the group, then between groups (qgZ).

    After each exchange the values are added in float32.  A rank that is element (row, column) of
    the mesh receives column's parts from its group, and its own part from its column.

    Parameters
    ----------
    block : int
        The number of elements that share a scale.
    within, between : str
        The axes of the mesh within a group, and between groups.
    bits : {8, 4}
        Of an element that is sent.

    Raises
    ------
    ValueError
        For another number of bits.
    """

    def __init__(self, block: int, within: str, between: str, bits: int = 8) -> None:
        quantized_bytes(0, block, bits)
        self.block, self.within, self.between, self.bits = block, within, between, bits

    def start(self, group: Group, bucket: str, flat: Array, axes: Sequence[str]) -> Completion:
        counts = group.counts(bucket, axes)
        inner, outer = group.comm_of((self.within,)), group.comm_of((self.between,))
        parts = shards.split(flat, counts)
        columns = [parts[column :: inner.size] for column in range(inner.size)]
        with collectives.phase("within"):
            sums = self._exchange(inner, columns)
        with collectives.phase("between"):
            (total,) = self._exchange(outer, [[part] for part in sums])
        flat[group.part(bucket, axes)] = total.astype(flat.dtype)
        return lambda: None

    def _exchange(self, comm: Communicator, parts: list[list[Array]]) -> list[Array]:
        """Send ``parts[r]`` to each rank r; return the float32 sums of what ranks sent here.

        What a rank sends to itself is not sent and not rounded.
        """
        packed = [[quantize(part, self.block, self.bits) for part in each] for each in parts]
        sizes = [sum(x.shape[0] for x in each) for each in packed]
        concat = array_namespace(parts[0][0]).concat
        received = comm.all_to_all(
            concat([x for each in packed for x in each]), counts=[sizes] * comm.size,
            algorithm=ALL_TO_ALL,
        )  # fmt: skip
        mine = parts[comm.rank]
        counts = [part.shape[0] for part in mine]
        sums = [part.astype(np.float32) for part in mine]
        for rank, each in enumerate(shards.split(received, [sizes[comm.rank]] * comm.size)):
            if rank != comm.rank:
                values = unpacked(each, counts, self.block, self.bits)
                for total, part in zip(sums, values, strict=True):
                    total += part
        return sums

    def traffic(
        self, group: Group, bucket: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        counts = group.counts(bucket, axes)
        sizes = [quantized_bytes(n, self.block, self.bits) for n in counts]
        (inner,) = {len(ranks) for ranks in group.mesh.ranks((self.within,))}
        to = tuple(sum(sizes[column::inner]) for column in range(inner))
        call = group.predicted(
            f"{phase}/within", "all_to_all", (to,) * inner, (self.within,), itemsize=1,
            algorithm=ALL_TO_ALL,
        )  # fmt: skip
        return [call, *self._between(group, sizes, f"{phase}/between")]

    def _between(self, group: Group, sizes: list[int], phase: str) -> list[PredictedCall]:
        """Return the calls of each column of the mesh: their parts have different sizes."""
        return [
            group.predicted(
                phase, "all_to_all", (tuple(sizes[i] for i in column),) * len(column),
                (self.between,), itemsize=1, algorithm=ALL_TO_ALL, groups=(column,),
            )
            for column in group.mesh.ranks((self.between,))
        ]  # fmt: skip


def unpacked(packed: Array, counts: Sequence[int], block: int, bits: int = 8) -> list[Array]:
    """Return the float32 arrays of `counts` elements that are quantized in `packed`.

    An element has `bits` bits; `block` elements share a scale.
    """
    sizes = [quantized_bytes(n, block, bits) for n in counts]
    parts = zip(shards.split(packed, sizes), counts, strict=True)
    return [dequantize(part, n, block, bits) for part, n in parts]
