"""Collectives in which one rank, the server, has all of a unit."""

from __future__ import annotations

from typing import Any, ClassVar

from collectives import Work
from parallel.accounts.calls import PredictedCall
from parallel.nn import Array
from parallel.sharding.collective import Axes, CommHook, Completion, Gather, Group

SERVER = 0


class ReduceToServer(CommHook):
    """Sum a unit's gradient on the server."""

    collectives: ClassVar[tuple[str, ...]] = ("reduce",)

    def start(self, group: Group, bucket: str, flat: Array, axes: Axes) -> Completion:
        comm = group.comm_of(axes)
        out = flat if comm.rank == SERVER else None
        work: Work[Any] = comm.reduce(
            flat, op="sum", root=SERVER, out=out, algorithm=group.algorithm, async_op=True
        )
        return work.wait

    def traffic(self, group: Group, bucket: str, phase: str, axes: Axes) -> list[PredictedCall]:
        return [group.predicted(phase, "reduce", group.bucket_size(bucket), axes, root=SERVER)]


class PushToServer(ReduceToServer):
    """The gradients of an asynchronous server, which workers push to it by messages."""

    collectives = ()


class BroadcastFromServer(Gather):
    """Send the server's parameters to all ranks."""

    collectives = ("broadcast",)

    def start(self, group: Group, unit: str, full: Array, axes: Axes) -> Completion:
        work: Work[Any] = group.comm_of(axes).broadcast(
            full, root=SERVER, out=full, algorithm=group.algorithm, async_op=True
        )
        return work.wait

    def traffic(self, group: Group, unit: str, phase: str, axes: Axes) -> list[PredictedCall]:
        size = group.model.unit_sizes[unit]
        return [group.predicted(phase, "broadcast", size, axes, root=SERVER)]
