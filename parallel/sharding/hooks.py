"""Communication hooks that sum gradients with fewer bytes, or average models from time to time.

For float32 gradients `HalfPrecision` sends 1/2 of what `AllReduce` does, `Int8Blocks` 1/4 + 1/256,
and `PowerSGD` of rank r, for each matrix, r (rows + columns) / (rows x columns).  All ranks receive
the same bits.  An inf or a NaN on one rank leaves inf or NaN on all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

from collectives import even_counts
from parallel.accounts import PredictedCall
from parallel.mesh import split
from parallel.nn import Array
from parallel.optim import Optimizer, dtype_of, master_dtype
from parallel.sharding.collective import (
    Arrays,
    Axes,
    CommHook,
    Completion,
    HookState,
    View,
    copy_rounded,
    ignore_overflow,
    predicted_sum,
    rounded_bytes,
    start_sum,
)
from parallel.sharding.quantization import (
    BLOCK,
    dequantize,
    num_blocks,
    quantize,
    quantized_bytes,
    without_own,
)

TWO_BYTES = ("float16", "bfloat16")
ALL_TO_ALL, ALL_GATHER = "linear", "ring"  # their algorithms


class GeneratorHook(CommHook):
    """A hook written as one generator, which starts one call after the other."""

    @abstractmethod
    def run(
        self, arrays: Arrays, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        """Replace `flat` by its sum; yield what each ``arrays.start_call`` returns, as in `start`.

        Backward and the other buckets continue at each yield.  `arrays`, `bucket` and `axes` are as
        in `start`.  Every rank must make the same calls in the same order.
        """

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        return advance(self.run(arrays, bucket, flat, axes))


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

    A bucket of n elements takes one all-reduce of 2 n bytes.  In float16 a value beyond 65504
    becomes inf, and one below 3e-8 becomes 0.  bfloat16 has the range of float32, and a precision
    of 8 bits where float16 has 11.  Another `dtype` raises ValueError.

    Examples
    --------
    >>> from parallel import HalfPrecision, Sharding
    >>> sharding = Sharding.ddp(hook=HalfPrecision("bfloat16"))
    """

    collectives = ("all_reduce",)

    def __init__(self, dtype: str) -> None:
        if dtype not in TWO_BYTES:
            raise ValueError(f"dtype is {dtype!r}: it must be {' or '.join(TWO_BYTES)}")
        self.dtype = dtype_of(dtype)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        return start_sum(arrays, axes, flat, self.dtype)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [predicted_sum(view, phase, view.bucket_size(bucket), axes, self.dtype)]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        return rounded_bytes(view, view.bucket_size(bucket), self.dtype)


class Int8Blocks(GeneratorHook):
    """Sum gradients quantized to eight bits, with a scale for every `block` elements.

    Rank d owns a part of n(d) elements of a bucket.  The other ranks send their quantized values of
    this part to the owner, which adds them in float32 and sends the quantized sum to all.  So an
    element is rounded twice, for any number of ranks: on its way to the owner, by at most half a
    scale on each of the p - 1 other ranks, and on its way back.

    An all-to-all and an all-gather each send (p-1) (n(d) + 4 ceil(n(d) / block)) bytes, summed over
    d.  Raises ValueError for a `block` of less than 1.
    """

    def __init__(self, block: int = BLOCK) -> None:
        num_blocks(0, block)
        self.block = block

    def run(
        self, arrays: Arrays, bucket: str, flat: Array, axes: Axes
    ) -> Iterator[Callable[[], object]]:
        sizes, me, xp = self._sizes(arrays.view, bucket, axes), arrays.view.index(axes), arrays.xp
        parts = split(flat, even_counts(flat.shape[0], len(sizes)))
        others = [quantize(part, self.block) for part in [*parts[:me], *parts[me + 1 :]]]
        sent = arrays.memory.track("buffers", xp.concat([xp.empty(0, dtype=np.uint8), *others]))
        del others
        received = arrays.new_buffer("buffers", (len(parts) - 1) * sizes[me], np.uint8)
        options = {"out": received, "counts": without_own(sizes), "algorithm": ALL_TO_ALL}
        yield arrays.start_call(axes, "all_to_all", sent, **options)
        total = self._sum(parts[me], received.reshape(len(parts) - 1, sizes[me]))
        mine = arrays.memory.track("buffers", quantize(total, self.block))
        whole = arrays.new_buffer("buffers", sum(sizes), np.uint8)
        options = {"out": whole, "counts": sizes, "algorithm": ALL_GATHER}
        yield arrays.start_call(axes, "all_gather", mine, **options)
        for part, packed in zip(parts, split(whole, sizes), strict=True):
            copy_rounded(part, dequantize(packed, part.shape[0], self.block))

    @ignore_overflow
    def _sum(self, own: Array, others: Array) -> Array:
        """Return the float32 sum of a part and the quantized parts of the other ranks."""
        total = own.astype(np.float32)
        for packed in others:
            total += dequantize(packed, own.shape[0], self.block)
        return total

    def _sizes(self, view: View, bucket: str, axes: Axes) -> tuple[int, ...]:
        """Return the bytes of each rank's quantized part of a bucket."""
        counts = even_counts(view.bucket_size(bucket), view.mesh.size_of(axes))
        return tuple(quantized_bytes(n, self.block) for n in counts)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        sizes = self._sizes(view, bucket, axes)
        table = without_own(sizes)
        return [
            view.predicted(phase, "all_to_all", table, axes, itemsize=1, algorithm=ALL_TO_ALL),
            view.predicted(phase, "all_gather", sizes, axes, itemsize=1, algorithm=ALL_GATHER),
        ]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        """Return the bytes sent and received in the first call, then in the second."""
        sizes = self._sizes(view, bucket, axes)
        return 2 * sum(sizes) + (len(sizes) - 1) * sizes[view.index(axes)]


class OuterMomentum(CommHook):
    """Update the common model by the mean of the ranks' changes, with Nesterov momentum.

    Douillard et al. 2023 (DiLoCo).  With the common model x, and d, the mean over ranks of x minus
    the parameters of the rank: v = m v + d, then x -= lr (d + m v), and all ranks continue from x.
    `lr` 1 without momentum is the mean of all ranks' parameters (McMahan et al. 2017).

    The outer learning rate, `lr`, is more than 0, and `momentum` at least 0 and less than 1; other
    values raise ValueError.
    """

    collectives = ("all_reduce",)

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        if not (0 < lr < float("inf") and 0 <= momentum < 1):
            raise ValueError(
                f"the outer lr is {lr} and the outer momentum {momentum}: they must be more than 0,"
                " and at least 0 and less than 1"
            )
        self.lr, self.momentum = lr, momentum
        self.common: dict[str, Array] = {}  # x and v of each unit
        self.velocity: dict[str, Array] = {}

    def allocate(self, arrays: Arrays) -> None:
        for unit, n in arrays.view.unit_sizes.items():
            for kept in (self.common, self.velocity):
                kept[unit] = arrays.new_buffer("buffers", n, master_dtype(arrays.view.dtype))
            self.common[unit][...] = arrays.parameters[unit]

    def state(self, optimizer: Optimizer) -> HookState:
        """Return the common model, and the states of each rank's own optimizer."""
        common = flattened({"common": self.common, "velocity": self.velocity})
        return HookState(common, own=flattened(optimizer.states))

    def state_bytes(self, view: View) -> int:
        return sum(2 * self.buffer_bytes(view, unit, ()) for unit in view.unit_sizes)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace this rank's values of a unit, `flat`, by the next common model's."""
        changed = arrays.memory.track("buffers", self.common[bucket] - flat)
        wait = arrays.start_call(axes, "all_reduce", changed, op="sum", out=changed)
        return partial(self._finish, wait, bucket, flat, 1 / arrays.view.mesh.size_of(axes))

    def _finish(self, wait: Callable[[], Array], unit: str, flat: Array, factor: float) -> None:
        mean, x, v = wait() * factor, self.common[unit], self.velocity[unit]
        v *= self.momentum
        v += mean
        x -= self.lr * (mean + self.momentum * v)
        flat[...] = x

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, dtype = view.unit_sizes[bucket], master_dtype(view.dtype)
        return [predicted_sum(view, phase, size, axes, dtype)]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        return view.unit_sizes[bucket] * master_dtype(view.dtype).itemsize


def flattened(arrays: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    """Return arrays by names such as ``velocity.block0``."""
    return {f"{kind}.{unit}": x for kind, by_unit in arrays.items() for unit, x in by_unit.items()}
