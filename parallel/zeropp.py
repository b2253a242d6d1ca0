"""ZeRO++: ZeRO-3 with a fraction of the traffic, for int8 precision of what travels.

Wang et al. 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace

import collectives
from collectives import Communicator
from parallel import shards
from parallel.hsdp import Grouped
from parallel.nn import Array
from parallel.quantise import BLOCK, dequantise, quantise, quantised_bytes
from parallel.strategy import Run
from parallel.traffic import PredictedCall
from parallel.zero import Arrival

ALL_TO_ALL = "pairwise"


class Quantised(NamedTuple):
    """Parameters that arrive as int8 blocks; `unpack` puts them where they belong."""

    coming: Arrival
    unpack: Callable[[], None]

    def wait(self) -> None:
        """Return when they are there."""
        self.coming.wait()
        self.unpack()


class ZeroPlusPlus(Grouped):
    """ZeRO-3 of p ranks in G groups of g neighbours, which are the ranks of a host, as a rule.

    - Weights travel quantised in forward: int8 with a scale for every block (qwZ).
    - Each rank then keeps its g-th of them, so that backward gathers within the group (hpZ).
    - Gradients are exchanged quantised, within the group and then between groups; every hop sums
      what came in float32 (qgZ).

    With q(n) the bytes of n quantised elements and Q(unit) those of all its shards together,

    | phase                 | collective | calls          | bytes a call                        |
    |-----------------------|------------|----------------|-------------------------------------|
    | forward/unit          | all_gather | k S            | (p-1) Q(unit)                       |
    | backward/unit/within  | all_gather | k S a group    | (g-1) n(unit)                       |
    | backward/unit/within  | all_to_all | k S a group    | (g-1) Q(unit)                       |
    | backward/unit/between | all_to_all | k S a column   | (G-1) q(the shards of the column)   |

    and the norm, in S steps of k micro-batches.

    Between groups that is about a quarter of what ZeRO-3 sends in two bytes.  Training is not that
    of one rank, for what is sent is rounded; but all ranks compute with the same parameters.  The
    paper sends gradients in four bits, this in eight.  `block`: elements that share a scale.
    """

    def __init__(self, *args: Any, block: int = BLOCK, **more: Any) -> None:
        if more.get("keep_after_forward"):
            raise ValueError("ZeRO++ keeps a part of the parameters: it has no keep_after_forward")
        self.block = block
        self.secondary: dict[str, Array] = {}
        super().__init__(*args, **more)

    def calls_of_many(self) -> dict[str, Collection[int]]:
        return {"all_gather": (self.size, self.group)}

    def options(self) -> dict[str, Any]:
        return super().options() | {"block": self.block}

    # Parameters

    def gather_into(self, unit: str, whole: Array) -> Arrival:
        if unit in self.secondary:
            return self._gather_within(unit, whole)
        sizes = self.packed_bytes(unit)
        packed = self.new("buffers", sum(sizes), np.uint8)
        with collectives.phase(unit):
            coming = self.comm.all_gather(
                quantise(self.parameters[unit], self.block), out=packed, counts=sizes,
                algorithm=self.algorithm, async_op=True,
            )  # fmt: skip
        return Quantised(coming, lambda: self._unpack(unit, packed, whole))

    def _unpack(self, unit: str, packed: Array, whole: Array) -> None:
        """Every shard alike, the own one too: all ranks compute with the same numbers."""
        values = self.unpacked(packed, self.counts(unit))
        whole[...] = array_namespace(whole).concat(values).astype(self.dtype)
        self.secondary[unit] = self.memory.count("buffers", whole[self._kept(unit)].copy())

    def _gather_within(self, unit: str, whole: Array) -> Arrival:
        part = whole[self._kept(unit)]
        part[...] = self.secondary[unit]
        with collectives.phase(unit), collectives.phase("within"):
            work: Arrival = self.mesh.inner.all_gather(
                part, out=whole, counts=shards.counts(self.model.sizes[unit], self.mesh.group),
                algorithm=self.algorithm, async_op=True,
            )  # fmt: skip
        return work

    def _kept(self, unit: str) -> slice:
        """What this rank keeps of a unit for backward."""
        return shards.span(self.model.sizes[unit], self.mesh.group, self.mesh.column)

    # Gradients

    def reduce(self, unit: str) -> None:
        """Two exchanges; before each, what goes to one rank is quantised shard by shard."""
        mesh, counts = self.mesh, self.counts(unit)
        parts = shards.split(self.whole_gradients.pop(unit), counts)
        with collectives.phase(unit):
            sums = self._exchange("within", mesh.inner, [
                [parts[row * mesh.group + column] for row in range(mesh.groups)]
                for column in range(mesh.group)
            ])  # fmt: skip
            (total,) = self._exchange("between", mesh.outer, [[part] for part in sums])
        self.gradients[unit] += total.astype(self.dtype)
        del self.secondary[unit]

    def _exchange(self, label: str, comm: Communicator, parts: list[list[Array]]) -> list[Array]:
        """Send `parts[r]` to each rank r; what all ranks sent here, summed in float32.

        What a rank sends to itself does not travel, and is not rounded.
        """
        packed = [[quantise(part, self.block) for part in each] for each in parts]
        sizes = [sum(x.shape[0] for x in each) for each in packed]
        concat = array_namespace(parts[0][0]).concat
        with collectives.phase(label):
            came = comm.all_to_all(
                concat([x for each in packed for x in each]), counts=[sizes] * comm.size,
                algorithm=ALL_TO_ALL,
            )  # fmt: skip
        mine = parts[comm.rank]
        counts = [part.shape[0] for part in mine]
        sums = [part.astype(np.float32) for part in mine]
        for rank, each in enumerate(shards.split(came, [sizes[comm.rank]] * comm.size)):
            if rank != comm.rank:
                for total, part in zip(sums, self.unpacked(each, counts), strict=True):
                    total += part
        return sums

    # Sizes

    def packed_bytes(self, unit: str) -> list[int]:
        """Of every rank's shard of a unit."""
        return [quantised_bytes(n, self.block) for n in self.counts(unit)]

    def unpacked(self, packed: Array, counts: Sequence[int]) -> list[Array]:
        """Arrays of so many elements, float32, that were quantised each and then joined."""
        sizes = [quantised_bytes(n, self.block) for n in counts]
        parts = zip(shards.split(packed, sizes), counts, strict=True)
        return [dequantise(part, n, self.block) for part, n in parts]

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """A unit that several layers use is gathered within the group from the second time on."""
        return [call for unit in self.model.units for call in self._traffic_of(unit, run.steps)]

    def _traffic_of(self, unit: str, steps: int) -> Iterator[PredictedCall]:
        mesh, ring = self.mesh, self.algorithm
        calls, more = steps * self.recipe.micro_batches, self.model.times_gathered()[unit]
        group = {"ranks": mesh.group, "groups": mesh.groups}
        sizes, n = self.packed_bytes(unit), self.nbytes(unit)
        yield PredictedCall(f"forward/{unit}", "all_gather", ring, sum(sizes), calls)
        if more > 1:
            again = calls * (more - 1)
            yield PredictedCall(f"forward/{unit}/within", "all_gather", ring, n, again, **group)
        within = f"backward/{unit}/within"
        yield PredictedCall(within, "all_gather", ring, n, calls * more, **group)
        yield PredictedCall(within, "all_to_all", ALL_TO_ALL, sum(sizes), calls, **group)
        for column in range(mesh.group):
            column_bytes = sum(sizes[column :: mesh.group])
            yield PredictedCall(
                f"backward/{unit}/between", "all_to_all", ALL_TO_ALL, column_bytes, calls,
                ranks=mesh.groups,
            )  # fmt: skip

    def buffer_bytes(self) -> int:
        """ZeRO-3's, what is kept for backward so far, and in forward what is on its way."""
        model, most = self.model, 0
        for layer in model.layers:
            following, preceding = model.after(layer), model.before(layer)
            kept = sum(
                self.dtype.itemsize * shards.length(self._kept(u)) for u in model.used_until(layer)
            )
            arriving = sum(
                sum(self.packed_bytes(unit))
                for name in (layer, following) if name is not None
                for unit in model.completes(name)
            )  # fmt: skip
            gradients = sum(map(self.nbytes, self.open_gradients(layer)))
            most = max(
                most,
                kept + self._bytes_of([layer, following]) + arriving,
                kept + self._bytes_of([layer, preceding]) + gradients,
            )
        return most
