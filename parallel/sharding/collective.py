"""The collectives that sum gradients and gather parameters, and the interface of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from parallel.accounts.calls import PredictedCall
from parallel.accounts.tracker import MemoryTracker
from parallel.mesh import Mesh
from parallel.nn import Array, Shape, cast
from parallel.optim import Optimizer

Axes: TypeAlias = Sequence[str]  # of a mesh
Completion: TypeAlias = Callable[[], object]
"""Waits for what `CommHook.start` has started.

It may start another call and return a function of this kind, which waits for that and runs after
those of the other buckets."""

ignore_overflow = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow
cast_quietly = ignore_overflow(cast)


class Group(Protocol):
    """What these collectives use of a training run; see `parallel.runtime.state.State`."""

    mesh: Mesh
    dtype: Any
    reduce_dtype: Any
    xp: Any
    loss_scale: Any
    buckets: dict[str, list[str]]
    unit_sizes: dict[str, int]
    parameters: dict[str, Array]
    optimizer: Optimizer
    memory: MemoryTracker

    def counts(self, unit: str, axes: Axes) -> tuple[int, ...]: ...
    def part(self, unit: str, axes: Axes) -> slice: ...
    def bucket_size(self, bucket: str) -> int: ...
    def shapes(self, unit: str) -> dict[str, Shape]: ...
    def new_buffer(self, category: str, num_elements: int, dtype: Any = None) -> Array: ...
    def start_call(
        self, axes: Axes, collective: str, x: Array, **options: Any
    ) -> Callable[[], Any]: ...
    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Axes, **options: Any
    ) -> PredictedCall: ...
    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]: ...


class HookState(NamedTuple):
    """The arrays of a hook that checkpoints contain, by name."""

    equal: Mapping[str, Array] = MappingProxyType({})  # on all ranks
    # Their sum over ranks matters: if another number of ranks loads them, rank 0 gets the sum.
    summed: Mapping[str, Array] = MappingProxyType({})
    own: Mapping[str, Array] = MappingProxyType({})  # read by the same number of ranks only


class CommHook(Protocol):
    """A communication hook: how a bucket of gradients is summed, or a unit of parameters gathered.

    A subclass defines `start` and `traffic`, and if it keeps arrays from step to step also
    `allocate`, `state_bytes` and `state`.  In all methods `group` is the training run, `bucket` the
    name of a bucket or unit, and `axes` are those of the mesh along which ranks communicate.
    """

    collectives: ClassVar[tuple[str, ...]] = ()  # those that it calls by the algorithm of the run
    is_blocking: ClassVar[bool] = False  # whether `start` returns when the sum is complete

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace `flat`, the gradients of a `bucket` of this `group`, by their sum.

        `flat` is 1-d and has the model's dtype; ranks along `axes` add theirs.  (To gather is to
        fill `flat`, a unit that these ranks divide, which has this rank's part.)  Called in the
        phase of the bucket, in the same order on all ranks; it should not wait.  Returns a function
        that is called when backward is over, in the same order on all ranks.  The sum is complete
        when that returns; if it returns a function, when that returns.
        """

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return what `start` of a `bucket` of a `group` sends along `axes`, in this `phase`.

        In order: each call is started when the one before it is complete.
        """

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes that are needed from `start` until the sum is complete.

        `group`, `bucket` and `axes` are those of `start`, which lets ``group.memory`` count the
        arrays in the category "buffers".
        """
        return 0

    def allocate(self, group: Group) -> None:
        """Make what is kept between steps, by ``group.new_buffer("buffers", ...)``."""
        return

    def state_bytes(self, group: Group) -> int:
        """Return the bytes that `allocate` makes for a `group`; 0 by default."""
        return 0

    def state(self, group: Group) -> HookState:
        """Return what checkpoints of a `group` contain; nothing by default."""
        return HookState()


Gather: TypeAlias = CommHook  # one that gathers parameters


class AllReduce(CommHook):
    """The default hook: an exact all-reduce of each bucket, which runs during backward."""

    collectives = ("all_reduce",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        return start_sum(group, axes, flat, group.reduce_dtype)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [predicted_sum(group, phase, group.bucket_size(bucket), axes, group.reduce_dtype)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.bucket_size(bucket), group.reduce_dtype)


class ReduceScatter(CommHook):
    """Sum a unit's gradient and leave each rank its part of the sum, in its place."""

    collectives = ("reduce_scatter",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        part, counts = group.part(bucket, axes), group.counts(bucket, axes)
        dtype = group.reduce_dtype
        return start_sum(group, axes, flat, dtype, "reduce_scatter", part, counts=counts)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts, dtype = group.counts(bucket, axes), group.reduce_dtype
        return [predicted_sum(group, phase, counts, axes, dtype, "reduce_scatter")]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.unit_sizes[bucket], group.reduce_dtype)


class AllGather(Gather):
    """An exact all-gather."""

    collectives = ("all_gather",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        part, counts = group.part(bucket, axes), group.counts(bucket, axes)
        return group.start_call(axes, "all_gather", flat[part], out=flat, counts=counts)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts = group.counts(bucket, axes)
        return [group.predicted(phase, "all_gather", counts, axes, in_place=True)]


def start_sum(
    group: Group,
    axes: Axes,
    flat: Array,
    dtype: Any = None,
    collective: str = "all_reduce",
    part: slice = slice(None),
    **options: Any,
) -> Completion:
    """Start to sum `flat` over the ranks along `axes`, in this dtype, and to set its `part`."""
    sent = flat if dtype is None else cast_quietly(flat, dtype)
    if sent is not flat:
        group.memory.track("buffers", sent)
    wait = group.start_call(axes, collective, sent, op="sum", out=sent[part], **options)

    def finish() -> None:
        wait()
        if sent is not flat:
            copy_rounded(flat[part], sent[part])

    return finish


def predicted_sum(
    group: Group, phase: str, counts: Any, axes: Axes, dtype: Any, collective: str = "all_reduce"
) -> PredictedCall:
    """Return what `start_sum` sends."""
    options = {"itemsize": dtype.itemsize, "in_place": True}
    return group.predicted(phase, collective, counts, axes, **options)


def rounded_bytes(group: Group, num_elements: int, dtype: Any) -> int:
    """Return the bytes of the copy that `start_sum` makes of so many elements of the model."""
    return 0 if dtype == group.dtype else int(num_elements * dtype.itemsize)


@ignore_overflow
def copy_rounded(target: Array, values: Array) -> None:
    """Copy `values` into `target`, rounded to its dtype."""
    target[...] = values
