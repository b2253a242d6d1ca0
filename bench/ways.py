"""Other ways to make a small all-reduce: asynchronous, checked, and by mpi4py's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpi4py import MPI

import collectives
from bench.case import ASYNC, CHECKED, DROP_IN, DROP_IN_ASYNC, DROP_IN_PERSISTENT, Buffers
from bench.oracle import Array
from bench.timing import Attempt, called
from collectives import Communicator


class Contender(NamedTuple):
    """One way to do a case.

    `result`: where this rank finds its result, None if it gets none.  `attempt`: how what may hang
    or fail is run.
    """

    run: Callable[[], Any]
    free: Callable[[], None]
    result: Array | None
    attempt: Attempt = called


def nothing() -> None:
    """For what has nothing to free."""


def _asynchronous(comm: Communicator, buffers: Buffers) -> Contender:
    call, x, y = comm.all_reduce, buffers.x, buffers.y
    return Contender(lambda: call(x, out=y, async_op=True).wait(), nothing, y)


def _checked(comm: Communicator, buffers: Buffers) -> Contender:
    checked = collectives.wrap(MPI.COMM_WORLD, check=True)
    call, x, y = checked.all_reduce, buffers.x, buffers.y
    return Contender(lambda: call(x, out=y), checked.free, y)


def _blocking_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    call, x, y = drop_in.Allreduce, buffers.x, buffers.y
    return Contender(lambda: call(x, y), drop_in.Free, y)


def _asynchronous_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    call, x, y = drop_in.Iallreduce, buffers.x, buffers.y
    return Contender(lambda: call(x, y).Wait(), drop_in.Free, y)


def _persistent_drop_in(comm: Communicator, buffers: Buffers) -> Contender:
    drop_in = collectives.Intracomm(MPI.COMM_WORLD)
    request = drop_in.Allreduce_init(buffers.x, buffers.y)

    def run() -> None:
        request.Start()
        request.Wait()

    def free() -> None:
        request.Free()
        drop_in.Free()

    return Contender(run, free, buffers.y)


WAYS: dict[str, Callable[[Communicator, Buffers], Contender]] = {
    ASYNC: _asynchronous,
    CHECKED: _checked,
    DROP_IN: _blocking_drop_in,
    DROP_IN_ASYNC: _asynchronous_drop_in,
    DROP_IN_PERSISTENT: _persistent_drop_in,
}
