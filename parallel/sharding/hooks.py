"""Communication hooks for `Sharding.ddp`, which sum gradients with fewer bytes.

For float32 gradients `HalfPrecision` sends 1/2 of what `AllReduce` does, `Int8Blocks` 1/4 + 1/256,
and `PowerSGD` of rank r, for each matrix, r (rows + columns) / (rows x columns).

All ranks receive the same bits.  An inf or a NaN on one rank leaves inf or NaN on all.  The buffers
of a training run include what a hook keeps from step to step, and what it sends and receives while
a bucket is summed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from array_api_compat import array_namespace

from collectives import even_counts
from parallel import placement
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.optim.precision import dtype_of
from parallel.sharding.collective import (
    Axes,
    CommHook,
    Completion,
    Group,
    copy_rounded,
    ignore_overflow,
    predicted_sum,
    rounded_bytes,
    start_rounded,
)
from parallel.sharding.quantization import BLOCK, dequantize, num_blocks, quantize, quantized_bytes

TWO_BYTES = ("float16", "bfloat16")
ALL_TO_ALL, ALL_GATHER = "linear", "ring"  # algorithms


class GeneratorHook(CommHook):
    """A hook written as one generator, which starts one call after the other.

    It yields the function that waits for the call.  Backward and the other buckets continue then.
    """

    @abstractmethod
    def run(
        self, group: Group, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        """Replace `flat` by its sum over ranks; yield what each ``group.start_call`` returns.

        `group`, `bucket` and `axes` are as in `start`.  Every rank must make the same calls in the
        same order.
        """

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        return advance(self.run(group, bucket, flat, axes))


def advance(run: Iterator[Callable[[], object]]) -> Completion:
    """Let `run` start its next call; return a function that waits for it and advances again."""
    wait = next(run, None)

    def finish() -> Completion | None:
        if wait is None:
            return None
        wait()
        return advance(run)

    return finish


class HalfPrecision(CommHook):
    """Sum gradients rounded to float16 or bfloat16.

    This takes one all-reduce of 2 n bytes for a bucket of n elements, in any dtype of the
    model.  In float16 a value beyond 65504 becomes inf, and one below 3e-8 becomes 0.  bfloat16
    has the range of float32, and a precision of 8 bits where float16 has 11.

    `dtype` is ``"float16"`` or ``"bfloat16"``; another one raises ValueError.

    Examples
    --------
    >>> from parallel import HalfPrecision, Sharding
    >>> sharding = Sharding.ddp(hook=HalfPrecision("bfloat16"))
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in TWO_BYTES:
            raise ValueError(f"dtype is {dtype!r}: it must be {' or '.join(TWO_BYTES)}")
        self.dtype = dtype_of(dtype)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        return start_rounded(group, axes, flat, self.dtype)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [predicted_sum(group, phase, group.bucket_size(bucket), axes, self.dtype)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.bucket_size(bucket), self.dtype)


class Int8Blocks(GeneratorHook):
    """Sum gradients quantized to eight bits, with a scale for every `block` elements.

    Rank d owns a part of n(d) elements of a bucket.  The others send it their values of this part,
    quantized; it adds them in float32 and sends the quantized sum to all.  So an element is
    rounded twice, for any number of ranks: on its way to the owner, by at most half a scale
    on each of the p - 1 other ranks, and on its way back.

    An all-to-all and an all-gather each send (p-1) (n(d) + 4 ceil(n(d) / block)) bytes, summed over
    d.  Raises ValueError for a `block` of less than 1.
    """

    def __init__(self, block: int = BLOCK) -> None:
        num_blocks(0, block)
        self.block = block

    def run(
        self, group: Group, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        size, me, xp = group.mesh.size_of(axes), group.mesh.index(axes), array_namespace(flat)
        parts = [placement.span(flat.shape[0], size, rank) for rank in range(size)]
        sizes = self._part_bytes(group, bucket, size)

        others = [quantize(flat[part], self.block) for part in [*parts[:me], *parts[me + 1 :]]]
        sent = group.memory.track("buffers", xp.concat([xp.empty(0, dtype=np.uint8), *others]))
        del others
        received = group.new_buffer("buffers", (size - 1) * sizes[me], np.uint8)
        yield group.start_call(
            axes, "all_to_all", sent, out=received, counts=without_own(sizes), algorithm=ALL_TO_ALL
        )
        total = self._sum(flat[parts[me]], received.reshape(size - 1, sizes[me]))
        mine = group.memory.track("buffers", quantize(total, self.block))
        whole = group.new_buffer("buffers", sum(sizes), np.uint8)
        yield group.start_call(
            axes, "all_gather", mine, out=whole, counts=sizes, algorithm=ALL_GATHER
        )
        for part, packed in zip(parts, placement.split(whole, sizes), strict=True):
            copy_rounded(flat[part], dequantize(packed, placement.length(part), self.block))

    @ignore_overflow
    def _sum(self, own: Array, others: Array) -> Array:
        """Return the float32 sum of a part and the quantized parts of the others."""
        total = own.astype(np.float32)
        for packed in others:
            total += dequantize(packed, own.shape[0], self.block)
        return total

    def _part_bytes(self, group: Group, bucket: str, num_ranks: int) -> tuple[int, ...]:
        """Return the bytes of each rank's quantized part of a bucket."""
        counts = even_counts(group.bucket_size(bucket), num_ranks)
        return tuple(quantized_bytes(n, self.block) for n in counts)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._part_bytes(group, bucket, group.mesh.size_of(axes))
        table = without_own(sizes)
        return [
            group.predicted(phase, "all_to_all", table, axes, itemsize=1, algorithm=ALL_TO_ALL),
            group.predicted(phase, "all_gather", sizes, axes, itemsize=1, algorithm=ALL_GATHER),
        ]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes sent and received in the first call, then in the second."""
        ranks, me = group.mesh.size_of(axes), group.mesh.index(axes)
        sizes = self._part_bytes(group, bucket, ranks)
        return 2 * sum(sizes) + (ranks - 1) * sizes[me]


def without_own(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the bytes from each rank to each if rank d gets ``sizes[d]`` from every other."""
    ranks = range(len(sizes))
    return tuple(tuple(n * (d != s) for d, n in enumerate(sizes)) for s in ranks)
