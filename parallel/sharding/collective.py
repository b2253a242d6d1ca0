"""The collectives that sum gradients and gather parameters, and the interface of others.

Each is an object with what it does and what it sends.  A training run (`parallel.Trainer`) calls it
for one bucket of gradients, or one unit of parameters, at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from collectives import Communicator, Work
from parallel.accounts.calls import PredictedCall
from parallel.accounts.tracker import MemoryTracker
from parallel.mesh import Mesh
from parallel.nn import Array, Model, cast
from parallel.optim import Optimizer

Axes: TypeAlias = Sequence[str]  # of a mesh
ignore_overflow = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow


class Group(Protocol):
    """What these collectives use of a training run; see `parallel.runtime.state.State`."""

    mesh: Mesh
    model: Model
    dtype: Any
    reduce_dtype: Any
    xp: Any
    algorithm: str
    loss_scale: Any
    buckets: dict[str, list[str]]
    parameters: dict[str, Array]
    optimizer: Optimizer
    memory: MemoryTracker

    def comm_of(self, axes: Axes) -> Communicator: ...
    def counts(self, unit: str, axes: Axes) -> tuple[int, ...]: ...
    def part(self, unit: str, axes: Axes) -> slice: ...
    def bucket_size(self, bucket: str) -> int: ...
    def new_buffer(self, category: str, num_elements: int, dtype: Any = None) -> Array: ...
    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Axes, **options: Any
    ) -> PredictedCall: ...


class Completion(Protocol):
    """What `CommHook.start` returns: a function that waits for what the hook has started.

    It may start another call and return a function of this kind, which waits for that; this one
    runs after those of the other buckets.
    """

    def __call__(self) -> object: ...


class HookState(NamedTuple):
    """The arrays of a hook that checkpoints contain, by name.

    Attributes
    ----------
    equal : mapping of str to array
        Equal on all ranks.
    summed : mapping of str to array
        Whose sum over ranks matters: if another number of ranks loads them, rank 0 gets the sum.
    own : mapping of str to array
        Of each rank; if another number of ranks loads the checkpoint, they are not read.
    """

    equal: Mapping[str, Array] = MappingProxyType({})
    summed: Mapping[str, Array] = MappingProxyType({})
    own: Mapping[str, Array] = MappingProxyType({})


class CommHook(Protocol):
    """A communication hook: how a bucket of gradients is summed over the ranks.

    A subclass defines `start` and `traffic`, and if it keeps arrays from step to step also
    `allocate`, `state_bytes` and `state`.
    """

    collectives: ClassVar[tuple[str, ...]] = ()  # those that it calls by `group.algorithm`
    is_blocking: ClassVar[bool] = False  # whether `start` returns when the sum is complete

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace the gradients of a bucket by their sum over the ranks along `axes`.

        `group` is the training run, `bucket` a name, and `flat` a 1-d array of the model's dtype.
        Called in the phase of the bucket, in the same order on all ranks; it should not wait.
        Returns a function that is called when backward is over, in the same order on all ranks.
        The sum is complete when that returns; but see `Completion`.
        """

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return what one `bucket` of a `group` sends, in this `phase`, summed along `axes`."""

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        """Return the bytes that the sum of a bucket needs from `start` until it is complete.

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


class AllReduce(CommHook):
    """The default hook: an exact all-reduce of each bucket, which runs during backward."""

    collectives = ("all_reduce",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        return start_rounded(group, axes, flat, group.reduce_dtype)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, width = group.bucket_size(bucket), group.reduce_dtype.itemsize
        return [group.predicted(phase, "all_reduce", size, axes, itemsize=width)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.bucket_size(bucket), group.reduce_dtype)


class ReduceScatter(CommHook):
    """Sum a unit's gradient and leave each rank its part of the sum, in its place."""

    collectives = ("reduce_scatter",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        sent, part = round_to(group, flat, group.reduce_dtype), group.part(bucket, axes)
        work: Work[Any] = group.comm_of(axes).reduce_scatter(
            sent, op="sum", out=sent[part], counts=group.counts(bucket, axes),
            algorithm=group.algorithm, async_op=True,
        )  # fmt: skip
        return work.wait if sent is flat else partial(rounded, work, sent[part], flat[part])

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts, width = group.counts(bucket, axes), group.reduce_dtype.itemsize
        return [group.predicted(phase, "reduce_scatter", counts, axes, itemsize=width)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.model.unit_sizes[bucket], group.reduce_dtype)


def all_reduce(group: Group, axes: Axes, x: Array) -> Work[Any]:
    """Start to sum `x` over the ranks along `axes`, in place."""
    work: Work[Any] = group.comm_of(axes).all_reduce(
        x, op="sum", out=x, algorithm=group.algorithm, async_op=True
    )
    return work


def start_rounded(group: Group, axes: Axes, flat: Array, dtype: Any) -> Completion:
    """Start to sum `flat` in this dtype, in place."""
    sent = round_to(group, flat, dtype)
    work = all_reduce(group, axes, sent)
    return work.wait if sent is flat else partial(rounded, work, sent, flat)


@ignore_overflow
def round_to(group: Group, x: Array, dtype: Any) -> Array:
    """Return `x` in this dtype: itself, or a copy that the memory of the `group` counts."""
    y = cast(x, dtype)
    return x if y is x else group.memory.track("buffers", y)


def rounded_bytes(group: Group, num_elements: int, dtype: Any) -> int:
    """Return the bytes of the copy that `round_to` makes of so many elements of the model."""
    return 0 if dtype == group.dtype else int(num_elements * dtype.itemsize)


def rounded(work: Work[Any], total: Array, into: Array) -> None:
    """Wait for the sum of gradients in another dtype, and round it once."""
    work.wait()
    copy_rounded(into, total)


@ignore_overflow
def copy_rounded(target: Array, values: Array) -> None:
    """Copy `values` into `target`, rounded to its dtype."""
    target[...] = values


class Gather(Protocol):
    """How the parameters of a unit are gathered from the ranks that divide them."""

    collectives: ClassVar[tuple[str, ...]] = ()

    def start(self, group: Group, unit: str, full: Array, axes: Axes) -> Completion:
        """Start to fill `full`, a unit that ranks along `axes` divide; it has this rank's part.

        Returns a function that returns when `full` is complete.
        """

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return what gathering a `unit` of a `group` along `axes` sends, in this `phase`."""

    def buffer_bytes(self, group: Group, unit: str, axes: Axes) -> int:
        """Return the bytes that `start` allocates and that are freed when `full` is complete."""
        return 0


class AllGather(Gather):
    """An exact all-gather."""

    collectives = ("all_gather",)

    def start(self, group: Group, unit: str, full: Array, axes: Axes) -> Completion:
        work: Work[Any] = group.comm_of(axes).all_gather(
            full[group.part(unit, axes)], out=full, counts=group.counts(unit, axes),
            algorithm=group.algorithm, async_op=True,
        )  # fmt: skip
        return work.wait

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [group.predicted(phase, "all_gather", group.counts(unit, axes), axes)]
