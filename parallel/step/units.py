"""Actions that gather and free parameters, and sum gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, RankView
from parallel.mesh import length
from parallel.sharding import AllGather, AllReduce, CommHook, Gather, rounded_bytes
from parallel.step.action import STARTED_CALLS, Action, Clock
from parallel.step.kept import Kept


@dataclass(frozen=True, kw_only=True)
class UnitAction(Action):
    """An action of a unit of parameters, or of a bucket of gradients.

    Attributes
    ----------
    part : str
        The name of the unit, or of the bucket.
    """

    part: str

    @property
    def name(self) -> str:
        return self.part


class Unshard(UnitAction):
    """Start to gather the parameters of a unit."""

    code = "UNSHARD"

    def hook(self, view: RankView) -> Gather:
        """Return the hook that gathers: the sharding's, or a plain one for secondary parts."""
        sharding = view.sharding_of(self.part)
        return sharding.gather if self.axes == sharding.shard_axes else AllGather()

    def is_into_buffer(self, view: RankView) -> bool:
        """Return whether the gathered unit is an array that exists for a while only."""
        return "parameters" in view.sharding.divided

    def is_secondary(self, view: RankView) -> bool:
        """Return whether the parts are the secondary parts that ranks keep from forward."""
        return self.axes == view.sharding.secondary_axes

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        label = f"{self.phase}/{self.part}" + "/within" * self.is_secondary(view)
        return self.hook(view).traffic(view, self.part, label, self.axes)

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.start(self, self.part if self.is_into_buffer(view) else STARTED_CALLS)

    def keep(self, kept: Kept) -> None:
        view, calls = kept.view, self.sends(kept.view)
        if not self.is_into_buffer(view):
            kept.start(calls, self.code, self.part)
            return
        kept.hold(view.unit_nbytes(self.part), "buffers", "full", self.part)
        nbytes = self.hook(view).buffer_bytes(view, self.part, self.axes)
        kept.hold(nbytes, "buffers", "arriving", self.part)
        kept.start_gather(calls, self.part)


class Reshard(UnitAction):
    """Free the gathered parameters of a unit."""

    code = "RESHARD"

    def keep(self, kept: Kept) -> None:
        kept.free("buffers", "full", self.part)


class Reduce(UnitAction):
    """Start to sum the gradients of a unit or bucket over ranks."""

    code = "REDUCE"

    def hook(self, view: RankView) -> CommHook:
        """Return the hook that sums: the sharding's, or a plain one along other axes."""
        sharding = view.sharding_of(self.part)
        return sharding.reduction if self.is_of_sharding(view) else AllReduce()

    def is_of_sharding(self, view: RankView) -> bool:
        """Return whether ranks sum along the axes along which they divide."""
        return self.axes == view.sharding_of(self.part).shard_axes

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        phase = f"{self.phase}/{self.part}"
        if self.is_of_sharding(view):
            return self.hook(view).traffic(view, self.part, phase, self.axes)
        options = {"itemsize": view.reduce_dtype.itemsize, "in_place": True}
        return [  # shards differ in size
            view.predicted(
                phase,
                "all_reduce",
                view.shard_size(self.part, group[0]),
                self.axes,
                groups=(group,),
                **options,
            )
            for group in view.groups(self.axes)
        ]

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.start(self, STARTED_CALLS)

    def buffer_bytes(self, view: RankView) -> int:
        """Return the bytes that are needed until the sum is complete."""
        if self.is_of_sharding(view):
            return self.hook(view).buffer_bytes(view, self.part, self.axes)
        return rounded_bytes(view, length(view.shard_slice(self.part)), view.reduce_dtype)

    def keep(self, kept: Kept) -> None:
        keep_sum(kept, self, self.hook(kept.view), self.buffer_bytes(kept.view))


class Average(UnitAction):
    """Start to make the parameters of a unit equal again, after several steps."""

    code = "AVERAGE"

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        hook = view.sharding.reduction
        return hook.traffic(view, self.part, f"{self.phase}/{self.part}", self.axes)

    def pass_time(self, clock: Clock, view: RankView) -> None:
        clock.start(self, STARTED_CALLS)

    def keep(self, kept: Kept) -> None:
        hook = kept.view.sharding.reduction
        keep_sum(kept, self, hook, hook.buffer_bytes(kept.view, self.part, self.axes))


def keep_sum(kept: Kept, action: UnitAction, hook: CommHook, buffer_bytes: int) -> None:
    """Keep what a hook needs until its sum is complete: at once, or at the next wait."""
    calls, part = action.sends(kept.view), action.part
    kept.hold(buffer_bytes, "buffers", "sent", part)
    if hook.is_blocking:
        kept.run(calls, action.code, part)
        kept.free("buffers", "sent", part)
    else:
        kept.start(calls, action.code, part)
    kept.reducing.append(part)


class WaitForCalls(Action):
    """Complete the calls that were started, and free the gradients that they have summed."""

    code = "WAIT"

    def needs(self, view: RankView) -> list[Hashable]:
        return [STARTED_CALLS]

    def keep(self, kept: Kept) -> None:
        kept.complete()
        for part in kept.reducing:
            for what in ("gradient", "secondary", "sent"):
                kept.free("buffers", what, part)
        kept.reducing.clear()
