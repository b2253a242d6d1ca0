"""ZeRO++: ZeRO-3 with less traffic, because it sends quantized values.  Wang et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import numpy as np
from array_api_compat import array_namespace

import collectives
from collectives import Communicator
from parallel import shards
from parallel.hsdp import GroupedZero3
from parallel.nn import Array, Model
from parallel.quantization import BLOCK, dequantize, quantize, quantized_bytes
from parallel.strategy import Recipe, RunSize, StrategyOptions
from parallel.traffic import PredictedCall
from parallel.zero import PendingGather

ALL_TO_ALL = "pairwise"


class QuantizedGather(NamedTuple):
    """A pending all-gather of quantized parameters, and what unpacks them."""

    gather: PendingGather
    unpack: Callable[[], None]

    def wait(self) -> None:
        """Return when the parameters are complete."""
        self.gather.wait()
        self.unpack()


class ZeroPlusPlus(GroupedZero3):
    """ZeRO++ on p ranks in G groups of g consecutive ranks, which are usually those of a host.

    Wang et al. 2023:

    - Forward gathers quantized parameters: int8, with a scale for each block (qwZ).
    - Each rank then keeps a g-th of them, so that backward gathers within the group (hpZ).
    - Gradients are exchanged quantized, within the group and then between groups; after each
      exchange they are added in float32 (qgZ).

    With q(n) the bytes of n quantized elements, and Q(unit) those of all shards of a unit, all
    ranks together send in S steps of k micro-batches

    | phase                 | collective | calls               | bytes a call                      |
    |-----------------------|------------|---------------------|-----------------------------------|
    | forward/unit          | all_gather | k S                 | (p-1) Q(unit)                     |
    | backward/unit/within  | all_gather | k S for each group  | (g-1) n(unit)                     |
    | backward/unit/within  | all_to_all | k S for each group  | (g-1) Q(unit)                     |
    | backward/unit/between | all_to_all | k S for each column | (G-1) q(the shards of the column) |

    and the norm.  Between groups this is about a quarter of what ZeRO-3 sends in two bytes.  What
    is sent is rounded, so losses differ from those of one rank; but all ranks compute with the same
    parameters.  The paper sends gradients in four bits, this class in eight.

    Parameters
    ----------
    comm, model, recipe, algorithm, phase
        As in `Zero3`.
    group_size : int, optional
        As in `HSDP`.
    block : int
        The number of elements that share a scale, by default 256.

    Raises
    ------
    ValueError
        As `HSDP`, and for ``keep_after_forward=True``: the parameters that backward needs are kept
        in another way.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        group_size: int | None = None,
        block: int = BLOCK,
        keep_after_forward: bool = False,
        **options: Unpack[StrategyOptions],
    ) -> None:
        if keep_after_forward:
            raise ValueError("ZeRO++ keeps a part of the parameters: it has no keep_after_forward")
        self.block = block
        self.secondary: dict[str, Array] = {}
        super().__init__(comm, model, recipe, group_size=group_size, **options)

    def collective_sizes(self) -> dict[str, Collection[int]]:
        return {"all_gather": (self.size, self.group_size)}

    def options(self) -> dict[str, Any]:
        return super().options() | {"block": self.block}

    # Parameters

    def start_gather(self, unit: str, full: Array) -> PendingGather:
        if unit in self.secondary:
            return self._gather_within(unit, full)
        sizes = self.packed_bytes(unit)
        packed = self.new_buffer("buffers", sum(sizes), np.uint8)
        with collectives.phase(unit):
            gather = self.comm.all_gather(
                quantize(self.parameters[unit], self.block), out=packed, counts=sizes,
                algorithm=self.algorithm, async_op=True,
            )  # fmt: skip
        return QuantizedGather(gather, lambda: self._unpack(unit, packed, full))

    def _unpack(self, unit: str, packed: Array, full: Array) -> None:
        """Dequantize every shard, this rank's too: all ranks compute with the same parameters."""
        values = self.unpacked(packed, self.counts(unit))
        full[...] = array_namespace(full).concat(values).astype(self.dtype)
        kept = full[self._secondary_slice(unit)].copy()
        self.secondary[unit] = self.memory.track("buffers", kept)

    def _gather_within(self, unit: str, full: Array) -> PendingGather:
        """Start to gather the parameters that the ranks of the group kept for backward."""
        part = full[self._secondary_slice(unit)]
        part[...] = self.secondary[unit]
        counts = collectives.even_counts(self.model.unit_sizes[unit], self.mesh.group_size)
        with collectives.phase(unit), collectives.phase("within"):
            work: PendingGather = self.mesh.inner.all_gather(
                part, out=full, counts=counts, algorithm=self.algorithm, async_op=True
            )
        return work

    def _secondary_slice(self, unit: str) -> slice:
        """Return the part of a unit that this rank keeps for backward."""
        mesh = self.mesh
        return shards.span(self.model.unit_sizes[unit], mesh.group_size, mesh.column)

    # Gradients

    def gradient_ready(self, unit: str) -> None:
        """Exchange the gradient in the group, then between groups, each shard quantized apart."""
        mesh, counts = self.mesh, self.counts(unit)
        parts = shards.split(self.full_gradients.pop(unit), counts)
        with collectives.phase(unit):
            sums = self._exchange("within", mesh.inner, [
                [parts[row * mesh.group_size + column] for row in range(mesh.num_groups)]
                for column in range(mesh.group_size)
            ])  # fmt: skip
            (total,) = self._exchange("between", mesh.outer, [[part] for part in sums])
        self.gradients[unit] += total.astype(self.dtype)
        del self.secondary[unit]

    def _exchange(self, label: str, comm: Communicator, parts: list[list[Array]]) -> list[Array]:
        """Send ``parts[r]`` to each rank r; return the float32 sums of what ranks sent here.

        What a rank sends to itself is not sent and not rounded.
        """
        packed = [[quantize(part, self.block) for part in each] for each in parts]
        sizes = [sum(x.shape[0] for x in each) for each in packed]
        concat = array_namespace(parts[0][0]).concat
        with collectives.phase(label):
            received = comm.all_to_all(
                concat([x for each in packed for x in each]), counts=[sizes] * comm.size,
                algorithm=ALL_TO_ALL,
            )  # fmt: skip
        mine = parts[comm.rank]
        counts = [part.shape[0] for part in mine]
        sums = [part.astype(np.float32) for part in mine]
        for rank, each in enumerate(shards.split(received, [sizes[comm.rank]] * comm.size)):
            if rank != comm.rank:
                for total, part in zip(sums, self.unpacked(each, counts), strict=True):
                    total += part
        return sums

    # Sizes

    def packed_bytes(self, unit: str) -> list[int]:
        """Return the quantized bytes of every rank's shard of a unit."""
        return [quantized_bytes(n, self.block) for n in self.counts(unit)]

    def unpacked(self, packed: Array, counts: Sequence[int]) -> list[Array]:
        """Return the float32 arrays of `counts` elements that are quantized in `packed`."""
        sizes = [quantized_bytes(n, self.block) for n in counts]
        parts = zip(shards.split(packed, sizes), counts, strict=True)
        return [dequantize(part, n, self.block) for part, n in parts]

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send.

        A unit that several layers use is gathered within the group from the second time on.
        """
        units = self.model.units
        return [call for unit in units for call in self._traffic_of(unit, run.num_steps)]

    def _traffic_of(self, unit: str, steps: int) -> Iterator[PredictedCall]:
        mesh, algorithm = self.mesh, self.algorithm
        passes, gathers = steps * self.recipe.num_micro_batches, self.model.num_gathers()[unit]
        group = {"num_ranks": mesh.group_size, "num_groups": mesh.num_groups}
        sizes, n = self.packed_bytes(unit), self.unit_nbytes(unit)
        yield PredictedCall(f"forward/{unit}", "all_gather", algorithm, sum(sizes), passes)
        if gathers > 1:
            within, again = f"forward/{unit}/within", passes * (gathers - 1)
            yield PredictedCall(within, "all_gather", algorithm, n, again, **group)
        within = f"backward/{unit}/within"
        yield PredictedCall(within, "all_gather", algorithm, n, passes * gathers, **group)
        yield PredictedCall(within, "all_to_all", ALL_TO_ALL, sum(sizes), passes, **group)
        for column in range(mesh.group_size):
            column_bytes = sum(sizes[column :: mesh.group_size])
            yield PredictedCall(
                f"backward/{unit}/between", "all_to_all", ALL_TO_ALL, column_bytes, passes,
                num_ranks=mesh.num_groups,
            )  # fmt: skip

    def buffer_bytes(self) -> int:
        """Return the bytes of ZeRO-3's buffers, the secondary shards and the packed parameters."""
        model, most = self.model, 0
        for layer in model.layers:
            following, preceding = model.next_layer(layer), model.previous_layer(layer)
            kept = sum(
                self.dtype.itemsize * shards.length(self._secondary_slice(unit))
                for unit in model.units_until(layer)
            )
            arriving = sum(
                sum(self.packed_bytes(unit))
                for name in (layer, following) if name is not None
                for unit in model.completed_units(name)
            )  # fmt: skip
            gradients = sum(map(self.unit_nbytes, self.open_gradients(layer)))
            most = max(
                most,
                kept + self._bytes_of([layer, following]) + arriving,
                kept + self._bytes_of([layer, preceding]) + gradients,
            )
        return most
