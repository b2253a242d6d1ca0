"""Data parallelism: every rank has the whole model and a part of every batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, Unpack

import numpy as np

import collectives
from collectives import Communicator, Work
from parallel import agreement, shards
from parallel.nn import Array, Model
from parallel.strategy import SCALAR_ALGORITHM, Recipe, RunSize, Strategy, StrategyOptions
from parallel.text import Tokens
from parallel.traffic import PredictedCall

BUCKET_BYTES = 25 * 2**20


class Completion(Protocol):
    """What `CommHook.start` returns: a function that waits for what the hook has started.

    It may start another call and return a function of this kind, which waits for that; this one
    runs after those of the other buckets.
    """

    def __call__(self) -> object: ...


class CommHook(Protocol):
    """A communication hook: how `DataParallel` sums a bucket of gradients over the ranks.

    A subclass defines `start` and `traffic`.  If it keeps arrays from step to step, it also defines
    `allocate` and `state_bytes`.
    """

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Completion:
        """Start to replace the gradients of a bucket by their sum over all ranks.

        Called in the phase of the bucket, in the same order on all ranks; it should not wait.

        Parameters
        ----------
        strategy : DataParallel
        bucket : str
            The name of the bucket.
        flat : array, 1-d, of the model's dtype
            This rank's gradients; replaced by the sum.

        Returns
        -------
        function
            Called without arguments, in the same order on all ranks, when backward is over.  The
            sum is complete when it returns; but see `Completion`.
        """

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        """Return what one bucket sends in one step, in phase ``strategy.phase_of(bucket)``."""

    def allocate(self, strategy: DataParallel) -> None:
        """Make what is kept between steps, by ``strategy.new_buffer("buffers", ...)``.

        By default nothing.
        """
        return

    def state_bytes(self, strategy: DataParallel) -> int:
        """Return the bytes that `allocate` makes for a `strategy`; 0 by default."""
        return 0


class AllReduce(CommHook):
    """The default hook: an exact all-reduce of each bucket, which runs during backward."""

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Completion:
        work: Work[Any] = strategy.comm.all_reduce(
            flat, op="sum", out=flat, algorithm=strategy.algorithm, async_op=True
        )
        return work.wait

    def traffic(self, strategy: DataParallel, bucket: str) -> list[PredictedCall]:
        nbytes = strategy.bucket_nbytes(bucket)
        return [PredictedCall(strategy.phase_of(bucket), "all_reduce", strategy.algorithm, nbytes)]


class DataParallelOptions(StrategyOptions, total=False):
    """The keyword arguments of `DataParallel` and `Elastic`."""

    bucket_bytes: int
    find_unused_parameters: bool
    broadcast_algorithm: str


class DataParallel(Strategy):
    """Sum the gradients over ranks in buckets, while backward computes the next ones.

    Li et al. 2020 (PyTorch DistributedDataParallel).

    A bucket holds the gradients of layers that are adjacent in backward, up to `bucket_bytes`, or
    those of one larger layer.  With n(b) the bytes of bucket b, u units in l layers, S steps and p
    ranks, all ranks together send by ring

    | phase             | collective | calls | bytes a call    |
    |-------------------|------------|-------|-----------------|
    | start/broadcast   | broadcast  | u     | (p-1) n(unit)   |
    | backward/bucket b | all_reduce | S     | 2 (p-1) n(b)    |
    | unused            | all_reduce | S     | l p log2 p, with `find_unused_parameters` |

    in addition to what all strategies send (`Strategy`).  That is 2 Psi (p-1)/p elements for each
    rank and step.  The number of micro-batches does not matter: only the last one's backward sends.

    Each rank's loss is the sum over its own rows divided by the rows of the whole batch, and the
    ranks' gradients are added: this is exact for uneven parts too.  Every rank makes the same
    update of the same parameters.  Initial values are those of rank 0; shapes and dtypes must be
    the same on all ranks.

    Parameters
    ----------
    comm : Communicator
    model : Model
    recipe : Recipe, optional
    bucket_bytes : int
        The most bytes of a bucket of several layers, at least 1; by default 25 MiB.
    hook : CommHook, optional
        How a bucket is summed; by default `AllReduce`.  See `parallel.comm_hooks`.
    find_unused_parameters : bool
        Allow layers that take no part in a step.  The gradient is zero on ranks that did not use a
        layer, and a layer that no rank used is not updated.  This takes an all-reduce of a byte for
        each layer.  Otherwise `step` raises MissingGradient.
    broadcast_algorithm : str
        Of the initial values; by default ``"binomial"``.
    algorithm, phase
        As in `Strategy`.

    Raises
    ------
    ValueError
        As `Strategy`, and if `bucket_bytes` is less than 1.

    Examples
    --------
    >>> import collectives
    >>> from parallel import DataParallel, Recipe, gpt, text
    >>> def train(comm):
    ...     model = gpt(num_layers=1, hidden=16, context=8)
    ...     strategy = DataParallel(comm, model, Recipe("float32"))
    ...     strategy.start()
    ...     rows = text.batch(text.load(), seed=0, step=0, batch_size=4, context=8,
    ...                       rank=comm.rank, num_ranks=comm.size)
    ...     return strategy.step(*rows, total=4 * 8)
    >>> first, second = collectives.run(train, size=2)
    >>> first == second
    True
    """

    comm: Communicator
    needs_same_initial_values = False
    algorithm_collectives = ("all_reduce",)

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        hook: CommHook | None = None,
        find_unused_parameters: bool = False,
        broadcast_algorithm: str = "binomial",
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.max_bucket_bytes, self.hook = bucket_bytes, hook or AllReduce()
        self.find_unused_parameters = find_unused_parameters
        self.broadcast_algorithm = broadcast_algorithm
        self.is_syncing = True
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}: it must be at least 1")
        super().__init__(comm, model, recipe, **options)

    def _allocate(self) -> None:
        """Make the gradients of a bucket one flat array."""
        sizes = self.model.unit_sizes
        self.buckets = dict(self._make_buckets())
        self.flats = {
            bucket: self.new_buffer("gradients", sum(sizes[unit] for unit in units))
            for bucket, units in self.buckets.items()
        }
        self.parameters = {
            unit: self.initial_values(unit, slice(0, n)) for unit, n in sizes.items()
        }
        self.gradients = {}
        for bucket, units in self.buckets.items():
            views = shards.split(self.flats[bucket], [sizes[unit] for unit in units])
            self.gradients |= zip(units, views, strict=True)
        self.parameter_shards, self.gradient_shards = self.parameters, self.gradients
        self.hook.allocate(self)
        self.bind_layers()

    def _make_buckets(self) -> Iterator[tuple[str, list[str]]]:
        """Return buckets of units, in the order in which backward completes them."""
        completed = [
            unit
            for layer in reversed(self.model.layers)
            for unit in self.model.completed_units(layer)
        ]
        groups: list[list[str]] = []
        for unit in completed:
            if groups and sum(map(self.unit_nbytes, [*groups[-1], unit])) <= self.max_bucket_bytes:
                groups[-1].append(unit)
            else:
                groups.append([unit])
        return ((f"bucket{i}", units) for i, units in enumerate(groups))

    def start(self) -> None:
        """Check that ranks agree, and broadcast the parameters of rank 0.

        All ranks call this.  Raises ModelMismatch, on all ranks, if shapes or options differ.
        """
        super().start()
        with self.phase("start"), collectives.phase("broadcast"):
            for flat in self.parameters.values():
                self.comm.broadcast(flat, root=0, out=flat, algorithm=self.broadcast_algorithm)
        self.offload.load()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_syncing = self.is_syncing, False
        try:
            yield
        finally:
            self.is_syncing = before

    def forward_backward(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        self._missing = {bucket: set(units) for bucket, units in self.buckets.items()}
        self._pending: deque[tuple[str, Completion]] = deque()
        return super().forward_backward(inputs, targets, total)

    def gradient_ready(self, unit: str) -> None:
        """Start the sum of a bucket when the last of its gradients is complete."""
        if not self.is_syncing:
            return
        bucket = next(bucket for bucket, units in self.buckets.items() if unit in units)
        self._missing[bucket].discard(unit)
        if not self._missing[bucket]:
            self._advance(bucket, partial(self.hook.start, self, bucket, self.flats[bucket]))

    def finish_backward(self) -> None:
        """Complete the pending sums, bucket by bucket, until no hook starts another call."""
        while self._pending:
            self._advance(*self._pending.popleft())

    def _advance(self, bucket: str, step: Completion) -> None:
        with collectives.phase(bucket):
            rest = step()
        if callable(rest):
            self._pending.append((bucket, rest))

    def before_update(self) -> None:
        """Find the units that no rank used."""
        if not self.find_unused_parameters:
            return
        used = np.array([name in self.used_layers for name in self.model.layers], np.uint8)
        with self.phase("unused"):
            self.comm.all_reduce(used, op="max", out=used, algorithm=SCALAR_ALGORITHM)
        is_used = dict(zip(self.model.layers, used, strict=True))
        self.unused_units = {
            unit for unit in self.model.units
            if not any(is_used[x] for x in self.model.layers if unit in self.model.units_of(x))
        }  # fmt: skip

    def absent_layers(self) -> list[bool]:
        return [not self.find_unused_parameters and each for each in super().absent_layers()]

    # Reports and predictions

    def options(self) -> dict[str, Any]:
        return super().options() | {
            "bucket_bytes": self.max_bucket_bytes,
            "hook": agreement.options_of(self.hook),
            "find_unused_parameters": self.find_unused_parameters,
            "broadcast_algorithm": self.broadcast_algorithm,
        }

    def buffer_bytes(self) -> int:
        """Return the bytes that the hook keeps."""
        return self.hook.state_bytes(self)

    def phase_of(self, bucket: str) -> str:
        """Return the label of the phase in which a bucket is sent."""
        return f"backward/{bucket}"

    def bucket_nbytes(self, bucket: str) -> int:
        """Return the bytes of the gradients in a bucket."""
        return sum(map(self.unit_nbytes, self.buckets[bucket]))

    def start_traffic(self) -> list[PredictedCall]:
        algorithm = self.broadcast_algorithm
        return [*super().start_traffic()] + [
            PredictedCall("start/broadcast", "broadcast", algorithm, self.unit_nbytes(unit))
            for unit in self.model.units
        ]

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        steps, num_layers = run.num_steps, len(self.model.layers)
        calls = [call for bucket in self.buckets for call in self.hook.traffic(self, bucket)]
        calls = [replace(call, num_calls=call.num_calls * steps) for call in calls]
        unused = PredictedCall("unused", "all_reduce", SCALAR_ALGORITHM, num_layers, steps)
        return calls + [unused] * self.find_unused_parameters
