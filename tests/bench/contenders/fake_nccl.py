"""CuPy's wrapper of NCCL, on the fake GPU: as it should be, or with a fault.

The names are those of `cupy.cuda.nccl`.  The data goes by MPI on the host, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from tests.fakes.driver import Mark, gpu

FLOAT32, SUM = 7, 0


class FakeNccl:
    """The module.  `version`: what the library says of itself."""

    available, NCCL_FLOAT32, NCCL_SUM = True, FLOAT32, SUM

    def __init__(self, version: int = 23203) -> None:
        self._version, self.world = version, MPI.COMM_WORLD.Dup()
        self._grouped: list[Callable[[], object]] = []

    def get_version(self) -> int:
        return self._version

    def get_unique_id(self) -> tuple[int, ...]:
        return tuple(range(128))

    def NcclCommunicator(self, size: int, unique_id: tuple[int, ...], rank: int) -> Any:  # noqa: N802
        assert (size, unique_id, rank) == (self.world.size, self.get_unique_id(), self.world.rank)
        return self.communicator()

    def communicator(self) -> FakeCommunicator:
        return FakeCommunicator(self)

    def groupStart(self) -> None:  # noqa: N802
        assert not self._grouped

    def groupEnd(self) -> None:  # noqa: N802
        requests = [begin() for begin in self._grouped]
        self._grouped.clear()
        MPI.Request.Waitall(requests)

    def add(self, begin: Callable[[], object]) -> None:
        self._grouped.append(begin)


class FakeCommunicator:
    """A communicator, whose calls take addresses."""

    def __init__(self, library: FakeNccl) -> None:
        self.library, self.world, self.is_ended = library, library.world, False

    def view(self, place: int, count: int, kind: int, stream: int) -> np.ndarray:
        """The elements at an address, when the stream has come so far."""
        assert kind == FLOAT32 and not self.is_ended
        gpu().synchronize(stream)
        return gpu().memory.view(place, 4 * count).view(np.float32)

    def allReduce(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        assert op == SUM
        source, target = (self.view(place, count, kind, stream) for place in (x, y))
        self.world.Allreduce(source.copy(), target)

    def reduce(
        self, x: int, y: int, count: int, kind: int, op: int, root: int, stream: int
    ) -> None:
        assert op == SUM
        source, result = self.view(x, count, kind, stream), np.empty(count, np.float32)
        self.world.Reduce(source.copy(), result, root=root)
        if self.world.rank == root:
            self.view(y, count, kind, stream)[...] = result

    def broadcast(self, x: int, y: int, count: int, kind: int, root: int, stream: int) -> None:
        assert x == y
        self.world.Bcast(self.view(y, count, kind, stream), root)

    def reduceScatter(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        assert op == SUM
        source = self.view(x, count * self.world.size, kind, stream).copy()
        self.world.Reduce_scatter_block(source, self.view(y, count, kind, stream))

    def allGather(self, x: int, y: int, count: int, kind: int, stream: int) -> None:  # noqa: N802
        source = self.view(x, count, kind, stream).copy()
        self.world.Allgather(source, self.view(y, count * self.world.size, kind, stream))

    def send(self, place: int, count: int, kind: int, peer: int, stream: int) -> None:
        source = self.view(place, count, kind, stream)
        self.library.add(lambda: self.world.Isend(source.copy(), peer))

    def recv(self, place: int, count: int, kind: int, peer: int, stream: int) -> None:
        target = self.view(place, count, kind, stream)
        self.library.add(lambda: self.world.Irecv(target, peer))

    def destroy(self) -> None:
        self.is_ended = True

    abort = destroy


class Hanging(FakeCommunicator):
    """One whose all-reduce of many elements never ends on the device, unless it is aborted."""

    most = 1000  # elements with which it works

    def __init__(self, library: FakeNccl) -> None:
        super().__init__(library)
        self.end = Mark()

    def allReduce(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        if count > self.most:
            gpu().wait_for_mark(stream, self.end)
        else:
            super().allReduce(x, y, count, kind, op, stream)

    def abort(self) -> None:
        self.end.pass_by()
        super().abort()


class FailingOnOne(Hanging):
    """One whose call fails on rank 1, for which the others wait on the device."""

    most = -1

    def allReduce(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        if self.world.rank == 1:
            raise RuntimeError("NCCL_ERROR_INTERNAL_ERROR:\ninternal error")
        super().allReduce(x, y, count, kind, op, stream)


class Endless(Hanging):
    """One whose abort does not return on rank 1."""

    def abort(self) -> None:
        if self.world.rank == 1:
            threading.Event().wait()
        super().abort()


class Wrong(FakeCommunicator):
    """One whose sums are wrong in an element of rank 1."""

    def allReduce(self, x: int, y: int, count: int, kind: int, op: int, stream: int) -> None:  # noqa: N802
        super().allReduce(x, y, count, kind, op, stream)
        self.view(y, count, kind, stream)[: self.world.rank] += 1


class NotConnecting(FakeNccl):
    """One in which no rank can make a communicator."""

    def communicator(self) -> FakeCommunicator:
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no route")


class ConnectingWithoutOne(NotConnecting):
    """One in which rank 1 cannot, and the others wait for it."""

    def communicator(self) -> FakeCommunicator:
        if self.world.rank != 1:
            threading.Event().wait()
        return super().communicator()


def with_communicator(kind: type[FakeCommunicator]) -> FakeNccl:
    """A module whose communicators are of another kind."""
    library = FakeNccl()
    library.communicator = lambda: kind(library)  # type: ignore[method-assign]
    return library
