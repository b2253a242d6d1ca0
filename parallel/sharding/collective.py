"""The collectives that sum gradients and gather parameters, and the interface of hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from parallel.accounts import MemoryTracker, PredictedCall
from parallel.mesh import Mesh
from parallel.nn import Array, Shape, cast
from parallel.optim import Optimizer

Axes: TypeAlias = Sequence[str]  # of a mesh
Completion: TypeAlias = Callable[[], object]
"""Waits for what `CommHook.start` has started.

It may start another call and return a function of this kind, which waits for that call and runs
after the functions of the other buckets."""

ignore_overflow = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow
cast_quietly = ignore_overflow(cast)


class View(Protocol):
    """What hooks use of the view of a rank: `parallel.layout.RankView`."""

    mesh: Mesh
    dtype: Any
    reduce_dtype: Any
    buckets: dict[str, list[str]]
    unit_sizes: dict[str, int]

    def index(self, axes: str | Axes) -> int: ...
    def counts(self, unit: str, axes: Axes) -> tuple[int, ...]: ...
    def part(self, unit: str, axes: Axes) -> slice: ...
    def bucket_size(self, bucket: str) -> int: ...
    def shapes(self, unit: str) -> dict[str, Shape]: ...
    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]: ...
    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Axes, **options: Any
    ) -> PredictedCall: ...


class Arrays(Protocol):
    """What hooks use of the arrays of a rank: `parallel.run.RankArrays`."""

    @property
    def view(self) -> View: ...

    xp: Any
    loss_scale: Any
    parameters: dict[str, Array]
    memory: MemoryTracker

    def new_buffer(self, category: str, num_elements: int, dtype: Any = None) -> Array: ...
    def start_call(
        self, axes: Axes, collective: str, x: Array, **options: Any
    ) -> Callable[[], Any]: ...


class HookState(NamedTuple):
    """The arrays of a hook that checkpoints contain, by name."""

    equal: Mapping[str, Array] = MappingProxyType({})  # on all ranks
    # Their sum over ranks matters: if another number of ranks loads them, rank 0 gets the sum.
    summed: Mapping[str, Array] = MappingProxyType({})
    own: Mapping[str, Array] = MappingProxyType({})  # read by the same number of ranks only


class CommHook(Protocol):
    """A communication hook: how a bucket of gradients is summed, or a unit of parameters gathered.

    A subclass defines `start` and `traffic`, and if it keeps arrays from step to step also
    `allocate`, `state_bytes` and `state`.  In all methods `arrays` are the arrays of this rank,
    `view` is the view of any rank, `bucket` is the name of a bucket or unit, and ranks communicate
    along `axes` of the mesh.
    """

    collectives: ClassVar[tuple[str, ...]] = ()  # called by the algorithm of the run
    is_blocking: ClassVar[bool] = False  # whether `start` returns when the sum is complete

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace `flat`, the gradients of a `bucket`, by their sum.

        `arrays` are the arrays of this rank.  `flat` is 1-d and has the model's dtype; ranks along
        `axes` add theirs.  (A gather fills `flat`, a unit that these ranks divide; `flat` already
        has this rank's part.)  `start` is called in the phase of the bucket, in the same order on
        all ranks, and should not wait.  It returns a function that is called when backward is over,
        in the same order on all ranks.  The sum is complete when that function returns; if it
        returns another function, when the other one returns.
        """

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return what `start` of a `bucket` sends along `axes`, in a `phase`, in a rank's `view`.

        The calls are in order: each is started when the call before it is complete.
        """

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        """Return the bytes that are needed from `start` until the sum is complete.

        `bucket` and `axes` are as in `start`, and `view` is the view of the rank.  `start` lets
        ``arrays.memory`` count these arrays in the category "buffers".
        """
        return 0

    def allocate(self, arrays: Arrays) -> None:
        """Make the arrays that are kept between steps, by ``arrays.new_buffer("buffers", ...)``."""
        return

    def state_bytes(self, view: View) -> int:
        """Return the bytes that `allocate` makes on the rank of a `view`; 0 by default."""
        return 0

    def state(self, optimizer: Optimizer) -> HookState:
        """Return what checkpoints contain of a run with an `optimizer`; nothing by default."""
        return HookState()


Gather: TypeAlias = CommHook  # a hook that gathers parameters


class AllReduce(CommHook):
    """The default hook: an exact all-reduce of each bucket, which runs during backward."""

    collectives = ("all_reduce",)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        return start_sum(arrays, axes, flat, arrays.view.reduce_dtype)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [predicted_sum(view, phase, view.bucket_size(bucket), axes, view.reduce_dtype)]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        return rounded_bytes(view, view.bucket_size(bucket), view.reduce_dtype)


class ReduceScatter(CommHook):
    """Sum a unit's gradient and leave each rank its part of the sum, in its place."""

    collectives = ("reduce_scatter",)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        part, counts = arrays.view.part(bucket, axes), arrays.view.counts(bucket, axes)
        dtype = arrays.view.reduce_dtype
        return start_sum(arrays, axes, flat, dtype, "reduce_scatter", part, counts=counts)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts, dtype = view.counts(bucket, axes), view.reduce_dtype
        return [predicted_sum(view, phase, counts, axes, dtype, "reduce_scatter")]

    def buffer_bytes(self, view: View, bucket: str, axes: Axes) -> int:
        return rounded_bytes(view, view.unit_sizes[bucket], view.reduce_dtype)


class AllGather(Gather):
    """An exact all-gather."""

    collectives = ("all_gather",)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        part, counts = arrays.view.part(bucket, axes), arrays.view.counts(bucket, axes)
        return arrays.start_call(axes, "all_gather", flat[part], out=flat, counts=counts)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts = view.counts(bucket, axes)
        return [view.predicted(phase, "all_gather", counts, axes, in_place=True)]


def start_sum(
    arrays: Arrays,
    axes: Axes,
    flat: Array,
    dtype: Any = None,
    collective: str = "all_reduce",
    part: slice = slice(None),
    **options: Any,
) -> Completion:
    """Start to sum `flat` over the ranks along `axes`, in `dtype`, and to set its `part`."""
    sent = flat if dtype is None else cast_quietly(flat, dtype)
    if sent is not flat:
        arrays.memory.track("buffers", sent)
    wait = arrays.start_call(axes, collective, sent, op="sum", out=sent[part], **options)

    def finish() -> None:
        wait()
        if sent is not flat:
            copy_rounded(flat[part], sent[part])

    return finish


def predicted_sum(
    view: View, phase: str, counts: Any, axes: Axes, dtype: Any, collective: str = "all_reduce"
) -> PredictedCall:
    """Return what `start_sum` sends."""
    options = {"itemsize": dtype.itemsize, "in_place": True}
    return view.predicted(phase, collective, counts, axes, **options)


def rounded_bytes(view: View, num_elements: int, dtype: Any) -> int:
    """Return the bytes of the copy that `start_sum` makes of `num_elements` elements."""
    return 0 if dtype == view.dtype else int(num_elements * dtype.itemsize)


@ignore_overflow
def copy_rounded(target: Array, values: Array) -> None:
    """Copy `values` into `target`, rounded to its dtype."""
    target[...] = values
