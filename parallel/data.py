"""Data parallelism: every rank has the whole model and a part of every batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

import collectives
from collectives import Communicator, Work
from parallel import agreement, shards
from parallel.nn import Array
from parallel.strategy import SMALL, Run, Strategy
from parallel.traffic import PredictedCall

BUCKET_BYTES = 25 * 2**20


class Finish(Protocol):
    """What a hook returns: called when the reduced gradient is needed.

    It may begin something more and return what ends that: it is called after those of all buckets.
    """

    def __call__(self) -> object: ...


class Hook(Protocol):
    """How a bucket of gradients is summed over the ranks.

    `start` begins to replace `flat`, the sum on this rank alone, by the sum over all, and returns
    what ends it; both are called in the same order on all ranks, in the phase of the bucket.
    `traffic` says what that sends.  A hook that keeps something from step to step makes it in
    `allocate`, by `strategy.new("buffers", ...)`, and says how much that is.
    """

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Finish:
        """Begin, without waiting if possible."""

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        """The calls of one bucket in one step, in the phase that `strategy.phase_of` names."""

    def allocate(self, strategy: DataParallel) -> None:
        """Make what is kept between steps: nothing, here."""
        return

    def state_bytes(self, strategy: DataParallel) -> int:
        """How much that is."""
        return 0


class AllReduce(Hook):
    """The sum as it is: one all-reduce a bucket, which goes on while backward does."""

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Finish:
        work: Work[Any] = strategy.comm.all_reduce(
            flat, op="sum", out=flat, algorithm=strategy.algorithm, async_op=True
        )
        return work.wait

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes = strategy.bucket_bytes(bucket)
        return [PredictedCall(strategy.phase_of(bucket), "all_reduce", strategy.algorithm, nbytes)]


class DataParallel(Strategy):
    """Gradients are summed over the ranks in buckets, while backward makes the next ones.

    A bucket holds the gradients of layers that follow each other in backward, up to `bucket_bytes`,
    or one that is larger.  With n(b) the bytes of bucket b, u units in l layers, and S steps, all
    ranks together send (ring; k micro-batches make no difference: only the last one's backward
    sends)

    | phase             | collective | calls | bytes a call    |
    |-------------------|------------|-------|-----------------|
    | start/broadcast   | broadcast  | u     | (p-1) n(unit)   |
    | backward/bucket b | all_reduce | S     | 2 (p-1) n(b)    |
    | unused            | all_reduce | S     | l p log2 p, with `find_unused` |

    beside what all strategies send; that is 2 Psi (p-1)/p elements a rank and step.  Each rank's
    loss is the sum over its own rows divided by the rows of the whole batch, and ranks are combined
    by a sum: exact for uneven parts too.  Every rank then makes the same update of the same
    parameters.  Li et al. 2020 (PyTorch DDP).

    Initial values are rank 0's, whatever the others drew; shapes and dtypes must be the same.
    `hook`: what sums a bucket instead of an all-reduce (`parallel.hooks`).  `find_unused`: a layer
    that took no part in a step counts as zero where others had it, and is left as it is where none
    had; one all-reduce of a byte a layer tells.  Without it NoGradient is raised.
    """

    comm: Communicator
    must_begin_alike = False
    large = ("all_reduce",)

    def __init__(
        self,
        *args: Any,
        bucket_bytes: int = BUCKET_BYTES,
        hook: Hook | None = None,
        find_unused: bool = False,
        broadcast_algorithm: str = "binomial",
        **more: Any,
    ) -> None:
        self.most_bytes, self.hook = bucket_bytes, hook or AllReduce()
        self.find_unused, self.broadcast_algorithm = find_unused, broadcast_algorithm
        self.is_syncing = True
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        super().__init__(*args, **more)

    # What is kept

    def _allocate(self) -> None:
        """Gradients are views of buckets, so that a bucket travels without packing."""
        sizes = self.model.sizes
        self.buckets = dict(self._bucketed())
        self.flats = {
            bucket: self.new("gradients", sum(sizes[unit] for unit in units))
            for bucket, units in self.buckets.items()
        }
        self.parameters = {unit: self.initial(unit, slice(0, n)) for unit, n in sizes.items()}
        self.gradients = {}
        for bucket, units in self.buckets.items():
            views = shards.split(self.flats[bucket], [sizes[unit] for unit in units])
            self.gradients |= zip(units, views, strict=True)
        self.own_parameters, self.own_gradients = self.parameters, self.gradients
        self.hook.allocate(self)
        self.bind_all()

    def _bucketed(self) -> Iterator[tuple[str, list[str]]]:
        """Units in the order in which backward completes them, as many as fit together."""
        done = [
            unit for layer in reversed(self.model.layers) for unit in self.model.completes(layer)
        ]
        groups: list[list[str]] = []
        for unit in done:
            if groups and sum(map(self.nbytes, [*groups[-1], unit])) <= self.most_bytes:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return ((f"bucket{i}", units) for i, units in enumerate(groups))

    def start(self) -> None:
        """Rank 0's parameters to all, whatever the others drew."""
        super().start()
        with self.phase("start"), collectives.phase("broadcast"):
            for flat in self.parameters.values():
                self.comm.broadcast(flat, root=0, out=flat, algorithm=self.broadcast_algorithm)
        self.place.load()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def forward_backward(self, *batch: Any) -> float:
        self._waiting = {bucket: set(units) for bucket, units in self.buckets.items()}
        self._under_way: deque[tuple[str, Finish]] = deque()
        return super().forward_backward(*batch)

    def reduce(self, unit: str) -> None:
        """Start a bucket's sum when the last of its gradients has come."""
        if not self.is_syncing:
            return
        bucket = next(bucket for bucket, units in self.buckets.items() if unit in units)
        self._waiting[bucket].discard(unit)
        if not self._waiting[bucket]:
            self._go_on(bucket, partial(self.hook.start, self, bucket, self.flats[bucket]))

    def finish_backward(self) -> None:
        """End what is under way, bucket by bucket, until no hook has begun anything more."""
        while self._under_way:
            self._go_on(*self._under_way.popleft())

    def _go_on(self, bucket: str, step: Finish) -> None:
        with collectives.phase(bucket):
            rest = step()
        if callable(rest):
            self._under_way.append((bucket, rest))

    def before_update(self) -> None:
        """Which layers nobody used."""
        if not self.find_unused:
            return
        used = np.array([name in self.used for name in self.model.layers], np.uint8)
        with self.phase("unused"):
            self.comm.all_reduce(used, op="max", out=used, algorithm=SMALL)
        by_name = dict(zip(self.model.layers, used, strict=True))
        self.unused = {
            unit for unit in self.model.units
            if not any(by_name[name] for name in self.model.layers if unit in self.model.uses(name))
        }  # fmt: skip

    def is_absent(self) -> list[bool]:
        return [not self.find_unused and each for each in super().is_absent()]

    # What it says about itself

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "bucket_bytes": self.most_bytes,
            "hook": agreement.options_of(self.hook),
            "find_unused": self.find_unused,
            "broadcast_algorithm": self.broadcast_algorithm,
        }

    def buffer_bytes(self) -> int:
        """What the hook keeps."""
        return self.hook.state_bytes(self)

    def phase_of(self, bucket: str) -> str:
        """The phase in which a bucket is sent."""
        return f"backward/{bucket}"

    def bucket_bytes(self, bucket: str) -> int:
        """The bytes of the gradients in a bucket."""
        return sum(map(self.nbytes, self.buckets[bucket]))

    def traffic_of_start(self) -> list[PredictedCall]:
        algorithm = self.broadcast_algorithm
        return [*super().traffic_of_start()] + [
            PredictedCall("start/broadcast", "broadcast", algorithm, self.nbytes(unit))
            for unit in self.model.units
        ]

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        calls = [call for bucket in self.buckets for call in self.hook.traffic(self, bucket)]
        calls = [replace(call, count=call.count * run.steps) for call in calls]
        unused = PredictedCall("unused", "all_reduce", SMALL, len(self.model.layers), run.steps)
        return calls + [unused] * self.find_unused
