"""Collectives in which one rank, the server, has all of a unit."""

from __future__ import annotations

from typing import ClassVar

from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.sharding.collective import Axes, CommHook, Completion, Gather, Group

SERVER = 0


class ReduceToServer(CommHook):
    """Sum a unit's gradient on the server."""

    collectives: ClassVar[tuple[str, ...]] = ("reduce",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        out = flat if group.mesh.index(axes) == SERVER else None
        return group.start_call(axes, "reduce", flat, op="sum", root=SERVER, out=out)

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, options = group.bucket_size(bucket), {"root": SERVER, "in_place": True}
        return [group.predicted(phase, "reduce", size, axes, **options)]


class PushToServer(ReduceToServer):
    """The gradients of an asynchronous server, which workers push to it by messages."""

    collectives = ()


class BroadcastFromServer(Gather):
    """Send the server's parameters to all ranks."""

    collectives = ("broadcast",)

    def start(self, group: Group, unit: str, full: Array, axes: Axes) -> Completion:
        return group.start_call(axes, "broadcast", full, root=SERVER, out=full)

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, options = group.unit_sizes[unit], {"root": SERVER, "in_place": True}
        return [group.predicted(phase, "broadcast", size, axes, **options)]
