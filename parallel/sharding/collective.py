"""The collectives that sum gradients and gather parameters, and the interface of others.

Each is an object with what it does and what it sends.  A training run (`parallel.Trainer`) calls it
for one bucket of gradients, or one unit of parameters, at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

from collectives import Communicator, Work
from parallel.accounts.calls import PredictedCall
from parallel.mesh import Mesh
from parallel.nn import Array, Model, cast
from parallel.optim import Optimizer


class Group(Protocol):
    """What these collectives use of a training run."""

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

    def comm_of(self, axes: Sequence[str]) -> Communicator:
        """Return the communicator along these axes of the mesh."""

    def predicted(
        self, phase: str, collective: str, counts: Any, axes: Sequence[str], **options: Any
    ) -> PredictedCall:
        """Return a call of all groups along these axes."""

    def counts(self, unit: str, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the elements of each rank's part of a unit, if ranks along `axes` divide it."""

    def part(self, unit: str, axes: Sequence[str]) -> slice:
        """Return this rank's part of a unit, if ranks along `axes` divide it."""

    def bucket_size(self, bucket: str) -> int:
        """Return the number of elements of a bucket."""

    def new_buffer(self, category: str, num_elements: int, dtype: Any = None) -> Array:
        """Return zeros that `memory` counts."""


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

    A subclass defines `start` and `traffic`.  If it keeps arrays from step to step, it also defines
    `allocate` and `state_bytes`.
    """

    collectives: ClassVar[tuple[str, ...]] = ()  # those that it calls by `group.algorithm`

    def start(self, group: Group, bucket: str, flat: Array, axes: Sequence[str]) -> Completion:
        """Start to replace the gradients of a bucket by their sum over ranks.

        Called in the phase of the bucket, in the same order on all ranks; it should not wait.

        Parameters
        ----------
        group : Trainer
        bucket : str
            The name of the bucket.
        flat : array, 1-d, of the model's dtype
            This rank's gradients; replaced by the sum.
        axes : sequence of str
            The axes of the mesh along which to sum.

        Returns
        -------
        function
            Called without arguments, in the same order on all ranks, when backward is over.  The
            sum is complete when it returns; but see `Completion`.
        """

    def traffic(
        self, group: Group, bucket: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        """Return what one `bucket` of a `group` sends, in this `phase`, summed along `axes`."""

    def allocate(self, group: Group) -> None:
        """Make what is kept between steps, by ``group.new_buffer("buffers", ...)``.

        By default nothing.
        """
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

    def start(self, group: Group, bucket: str, flat: Array, axes: Sequence[str]) -> Completion:
        sent = cast(flat, group.reduce_dtype)
        work: Work[Any] = group.comm_of(axes).all_reduce(
            sent, op="sum", out=sent, algorithm=group.algorithm, async_op=True
        )
        return work.wait if sent is flat else partial(rounded, work, sent, flat)

    def traffic(
        self, group: Group, bucket: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        size, width = group.bucket_size(bucket), group.reduce_dtype.itemsize
        return [group.predicted(phase, "all_reduce", size, axes, itemsize=width)]


class ReduceScatter(CommHook):
    """Sum a unit's gradient and leave each rank its part of the sum, in its place."""

    collectives = ("reduce_scatter",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Sequence[str]) -> Completion:
        sent, part = cast(flat, group.reduce_dtype), group.part(bucket, axes)
        work: Work[Any] = group.comm_of(axes).reduce_scatter(
            sent, op="sum", out=sent[part], counts=group.counts(bucket, axes),
            algorithm=group.algorithm, async_op=True,
        )  # fmt: skip
        return work.wait if sent is flat else partial(rounded, work, sent[part], flat[part])

    def traffic(
        self, group: Group, bucket: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        counts, width = group.counts(bucket, axes), group.reduce_dtype.itemsize
        return [group.predicted(phase, "reduce_scatter", counts, axes, itemsize=width)]


def rounded(work: Work[Any], total: Array, into: Array) -> None:
    """Wait for the sum of gradients in another dtype, and round it once."""
    work.wait()
    into[...] = total


class Gather(Protocol):
    """How the parameters of a unit are gathered from the ranks that divide them."""

    collectives: ClassVar[tuple[str, ...]] = ()

    def start(self, group: Group, unit: str, full: Array, axes: Sequence[str]) -> Completion:
        """Start to fill `full`, which contains this rank's part already, in its place.

        Parameters
        ----------
        group : Trainer
        unit : str
        full : array, 1-d, of the model's dtype
            The whole unit.
        axes : sequence of str
            The axes of the mesh along which ranks divide it.

        Returns
        -------
        function
            Called without arguments; `full` is complete when it returns.
        """

    def traffic(
        self, group: Group, unit: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        """Return what gathering a `unit` of a `group` along `axes` sends, in this `phase`."""

    def buffer_bytes(self, group: Group, unit: str, axes: Sequence[str]) -> int:
        """Return the bytes that `start` allocates for a `unit` gathered along `axes`.

        They are freed when `full` is complete; 0 by default.
        """
        return 0


class AllGather(Gather):
    """An exact all-gather."""

    collectives = ("all_gather",)

    def start(self, group: Group, unit: str, full: Array, axes: Sequence[str]) -> Completion:
        work: Work[Any] = group.comm_of(axes).all_gather(
            full[group.part(unit, axes)], out=full, counts=group.counts(unit, axes),
            algorithm=group.algorithm, async_op=True,
        )  # fmt: skip
        return work.wait

    def traffic(
        self, group: Group, unit: str, phase: str, axes: Sequence[str]
    ) -> list[PredictedCall]:
        return [group.predicted(phase, "all_gather", group.counts(unit, axes), axes)]
