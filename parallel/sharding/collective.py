"""The collectives that sum gradients and gather parameters, and the interface of others.

Each is an object with what it does and what it sends.  A training run (`parallel.Trainer`) calls it
for one bucket of gradients, or one unit of parameters, at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import numpy as np

from collectives import Communicator
from parallel.accounts.calls import PredictedCall
from parallel.accounts.tracker import MemoryTracker
from parallel.mesh import Mesh
from parallel.nn import Array, Model, Shape, cast
from parallel.optim import Optimizer

Axes: TypeAlias = Sequence[str]  # of a mesh
Completion: TypeAlias = Callable[[], object]
"""What `CommHook.start` returns: a function that waits for what the hook has started.

It may start another call and return a function of this kind, which waits for that; this one runs
after those of the other buckets."""

ignore_overflow = np.errstate(over="ignore", invalid="ignore")  # the result shows an overflow


class Group(Protocol):
    """What these collectives use of a training run; see `parallel.runtime.state.State`."""

    mesh: Mesh
    model: Model
    dtype: Any
    reduce_dtype: Any
    xp: Any
    loss_scale: Any
    buckets: dict[str, list[str]]
    unit_sizes: dict[str, int]
    parameters: dict[str, Array]
    optimizer: Optimizer
    memory: MemoryTracker

    def comm_of(self, axes: Axes) -> Communicator: ...
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

    collectives: ClassVar[tuple[str, ...]] = ()  # those that it calls by the algorithm of the run
    is_blocking: ClassVar[bool] = False  # whether `start` returns when the sum is complete

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        """Start to replace the gradients of a bucket by their sum over the ranks along `axes`.

        `group` is the training run, `bucket` a name, and `flat` a 1-d array of the model's dtype.
        Called in the phase of the bucket, in the same order on all ranks; it should not wait.
        Returns a function that is called when backward is over, in the same order on all ranks.
        The sum is complete when that returns; if it returns a function, when that returns.
        """

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        """Return what one `bucket` of a `group` sends, in this `phase`, summed along `axes`.

        In order: each call is started when the one before it is complete.
        """

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
        return [predicted_sum(group, phase, group.bucket_size(bucket), axes, group.reduce_dtype)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.bucket_size(bucket), group.reduce_dtype)


class ReduceScatter(CommHook):
    """Sum a unit's gradient and leave each rank its part of the sum, in its place."""

    collectives = ("reduce_scatter",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        sent, part = round_to(group, flat, group.reduce_dtype), group.part(bucket, axes)
        counts = group.counts(bucket, axes)
        wait = group.start_call(
            axes, "reduce_scatter", sent, op="sum", out=sent[part], counts=counts
        )
        return wait if sent is flat else rounded(wait, sent[part], flat[part])

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts, width = group.counts(bucket, axes), group.reduce_dtype.itemsize
        options = {"itemsize": width, "in_place": True}
        return [group.predicted(phase, "reduce_scatter", counts, axes, **options)]

    def buffer_bytes(self, group: Group, bucket: str, axes: Axes) -> int:
        return rounded_bytes(group, group.unit_sizes[bucket], group.reduce_dtype)


def start_sum(group: Group, axes: Axes, x: Array) -> Completion:
    """Start to sum `x` over the ranks along `axes`, in place."""
    return group.start_call(axes, "all_reduce", x, op="sum", out=x)


def predicted_sum(
    group: Group, phase: str, num_elements: int, axes: Axes, dtype: np.dtype[Any]
) -> PredictedCall:
    """Return what `start_sum` sends."""
    options = {"itemsize": dtype.itemsize, "in_place": True}
    return group.predicted(phase, "all_reduce", num_elements, axes, **options)


def start_rounded(group: Group, axes: Axes, flat: Array, dtype: Any) -> Completion:
    """Start to sum `flat` in this dtype, in place."""
    sent = round_to(group, flat, dtype)
    wait = start_sum(group, axes, sent)
    return wait if sent is flat else rounded(wait, sent, flat)


@ignore_overflow
def round_to(group: Group, x: Array, dtype: Any) -> Array:
    """Return `x` in this dtype: itself, or a copy that the memory of the `group` counts."""
    y = cast(x, dtype)
    return x if y is x else group.memory.track("buffers", y)


def rounded_bytes(group: Group, num_elements: int, dtype: Any) -> int:
    """Return the bytes of the copy that `round_to` makes of so many elements of the model."""
    return 0 if dtype == group.dtype else int(num_elements * dtype.itemsize)


def rounded(wait: Completion, total: Array, into: Array) -> Completion:
    """Return a function that waits for the sum in another dtype, and rounds it once."""

    def finish() -> None:
        wait()
        copy_rounded(into, total)

    return finish


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
        part, counts = group.part(unit, axes), group.counts(unit, axes)
        return group.start_call(axes, "all_gather", full[part], out=full, counts=counts)

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        counts = group.counts(unit, axes)
        return [group.predicted(phase, "all_gather", counts, axes, in_place=True)]
