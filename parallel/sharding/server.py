"""Collectives in which one rank, the server, has all of a unit."""

from __future__ import annotations

from typing import ClassVar

from parallel.accounts import PredictedCall
from parallel.nn import Array
from parallel.sharding.collective import Arrays, Axes, CommHook, Completion, Gather, View

SERVER = 0


class ReduceToServer(CommHook):
    """Sum a unit's gradient on the server."""

    collectives: ClassVar[tuple[str, ...]] = ("reduce",)

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        out = flat if arrays.view.index(axes) == SERVER else None
        return arrays.start_call(axes, "reduce", flat, op="sum", root=SERVER, out=out)

    def traffic(self, view: View, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, options = view.bucket_size(bucket), {"root": SERVER, "in_place": True}
        return [view.predicted(phase, "reduce", size, axes, **options)]


class PushToServer(ReduceToServer):
    """The gradients of an asynchronous server, which workers push to it by messages."""

    collectives = ()


class BroadcastFromServer(Gather):
    """Send the server's parameters to all ranks."""

    collectives = ("broadcast",)

    def start(self, arrays: Arrays, unit: str, full: Array, axes: Axes) -> Completion:
        return arrays.start_call(axes, "broadcast", full, root=SERVER, out=full)

    def traffic(self, view: View, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size, options = view.unit_sizes[unit], {"root": SERVER, "in_place": True}
        return [view.predicted(phase, "broadcast", size, axes, **options)]
