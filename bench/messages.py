"""Messages between two ranks, by this library and by mpi4py, as contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from bench.oracle import Array
from bench.ways import nothing
from collectives import Communicator, Work

OURS, THEIRS = "ours", "mpi4py"
WINDOW = 16  # messages that are on their way at the same time
KINDS = ("latency", "bandwidth", "bidirectional")


class Engine(NamedTuple):
    """Ways to send an array to a peer and to receive one: at once, or started and waited for."""

    send: Callable[[Array, int], Any]
    receive: Callable[[Array, int], Any]
    start_send: Callable[[Array, int], Any]
    start_receive: Callable[[Array, int], Any]
    wait_for_all: Callable[[list[Any]], Any]


def ours(comm: Communicator) -> Engine:
    """The messages of a communicator of this library."""
    start_send, start_receive = (partial(call, async_op=True) for call in (comm.send, comm.recv))
    return Engine(comm.send, comm.recv, start_send, start_receive, _wait_for_all)


def _wait_for_all(started: list[Work[Any]]) -> None:
    for work in started:
        work.wait()


def theirs() -> Engine:
    """The messages of mpi4py."""
    world = MPI.COMM_WORLD
    return Engine(world.Send, world.Recv, world.Isend, world.Irecv, MPI.Request.Waitall)


class Arrays(NamedTuple):
    """What a rank sends, and where the messages of a window arrive, one in each row."""

    x: Array
    y: Array

    @classmethod
    def of(cls, num_bytes: int) -> Arrays:
        """Arrays for messages of so many bytes."""
        return cls(np.zeros(num_bytes, np.uint8), np.zeros((WINDOW, num_bytes), np.uint8))


Run = Callable[[], None]


def runs(engine: Engine, arrays: Arrays, pair: Sequence[int], rank: int) -> Mapping[str, Run]:
    """What this rank does in each kind of exchange; nothing if it is not one of the pair.

    latency: a message there and one back.  bandwidth: a window of messages there, and one byte
    back.  bidirectional: a window of messages in both directions at the same time.
    """
    if rank not in pair:
        return dict.fromkeys(KINDS, nothing)
    peer, is_first = pair[1 - pair.index(rank)], rank == pair[0]
    latency, bandwidth = (_ping, _send_window) if is_first else (_pong, _receive_window)
    kinds = latency, bandwidth, _both_windows
    return {
        kind: partial(exchange, engine, arrays, peer)
        for kind, exchange in zip(KINDS, kinds, strict=True)
    }


def _ping(engine: Engine, arrays: Arrays, peer: int) -> None:
    engine.send(arrays.x, peer)
    engine.receive(arrays.y[0], peer)


def _pong(engine: Engine, arrays: Arrays, peer: int) -> None:
    engine.receive(arrays.y[0], peer)
    engine.send(arrays.x, peer)


def _send_window(engine: Engine, arrays: Arrays, peer: int) -> None:
    engine.wait_for_all([engine.start_send(arrays.x, peer) for _ in range(WINDOW)])
    engine.receive(arrays.y[0, :1], peer)


def _receive_window(engine: Engine, arrays: Arrays, peer: int) -> None:
    engine.wait_for_all([engine.start_receive(row, peer) for row in arrays.y])
    engine.send(arrays.x[:1], peer)


def _both_windows(engine: Engine, arrays: Arrays, peer: int) -> None:
    started = [engine.start_receive(row, peer) for row in arrays.y]
    started += [engine.start_send(arrays.x, peer) for _ in range(WINDOW)]
    engine.wait_for_all(started)


def num_wrong(run: Run, arrays: Arrays, pair: Sequence[int], rank: int) -> int:
    """How many bytes of a window in both directions do not arrive here as they were sent."""
    if rank not in pair:
        return 0
    arrays.x.fill(rank % 100 + 1)
    arrays.y.fill(0)
    run()
    return int(np.count_nonzero(arrays.y != pair[1 - pair.index(rank)] % 100 + 1))
