"""Messages between two ranks, by this library and by mpi4py, as contenders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from bench.contenders.contender import nothing
from bench.workloads.expected import Array
from collectives import Communicator, Work

OURS, THEIRS = "ours", "mpi4py"
WINDOW = 16  # messages that are on their way at the same time
KINDS = ("latency", "bandwidth", "bidirectional")

Run = Callable[[], None]


class Engine(NamedTuple):
    """Ways to send an array to a peer and to receive one: at once, or started and waited for."""

    send: Callable[[Array, int], Any]
    receive: Callable[[Array, int], Any]
    start_send: Callable[[Array, int], Any]
    start_receive: Callable[[Array, int], Any]
    wait_for_all: Callable[[list[Any]], Any]


def ours(comm: Communicator) -> Engine:
    """Return the messages of a communicator of this library."""
    start_send, start_receive = (partial(call, async_op=True) for call in (comm.send, comm.recv))
    return Engine(comm.send, comm.recv, start_send, start_receive, _wait_for_all)


def _wait_for_all(started: list[Work[Any]]) -> None:
    for work in started:
        work.wait()


def theirs() -> Engine:
    """Return the messages of mpi4py."""
    world = MPI.COMM_WORLD
    return Engine(world.Send, world.Recv, world.Isend, world.Irecv, MPI.Request.Waitall)


class Exchange(NamedTuple):
    """Messages of this rank to a peer and back."""

    engine: Engine
    x: Array  # what is sent
    y: Array  # where the messages of a window arrive, one in each row
    peer: int

    def ping(self) -> None:
        """Send a message, and receive one."""
        self.engine.send(self.x, self.peer)
        self.engine.receive(self.y[0], self.peer)

    def pong(self) -> None:
        """Receive a message, and send one."""
        self.engine.receive(self.y[0], self.peer)
        self.engine.send(self.x, self.peer)

    def send_window(self) -> None:
        """Send a window of messages, and receive one byte."""
        start = self.engine.start_send
        self.engine.wait_for_all([start(self.x, self.peer) for _ in range(WINDOW)])
        self.engine.receive(self.y[0, :1], self.peer)

    def receive_window(self) -> None:
        """Receive a window of messages, and send one byte."""
        self.engine.wait_for_all([self.engine.start_receive(row, self.peer) for row in self.y])
        self.engine.send(self.x[:1], self.peer)

    def both_windows(self) -> None:
        """Send and receive a window of messages at the same time."""
        started = [self.engine.start_receive(row, self.peer) for row in self.y]
        started += [self.engine.start_send(self.x, self.peer) for _ in range(WINDOW)]
        self.engine.wait_for_all(started)


def arrays_of(num_bytes: int) -> tuple[Array, Array]:
    """Return arrays for messages of so many bytes: what is sent, and where a window arrives."""
    return np.zeros(num_bytes, np.uint8), np.zeros((WINDOW, num_bytes), np.uint8)


def runs(
    engine: Engine, arrays: tuple[Array, Array], pair: Sequence[int], rank: int
) -> Mapping[str, Run]:
    """Return what this rank does in each kind of exchange; nothing if it is not of the pair.

    latency: a message there and one back.  bandwidth: a window of messages there, and one byte
    back.  bidirectional: a window of messages in both directions at the same time.
    """
    if rank not in pair:
        return dict.fromkeys(KINDS, nothing)
    exchange = Exchange(engine, *arrays, pair[1 - pair.index(rank)])
    is_first = rank == pair[0]
    latency = exchange.ping if is_first else exchange.pong
    bandwidth = exchange.send_window if is_first else exchange.receive_window
    return dict(zip(KINDS, (latency, bandwidth, exchange.both_windows), strict=True))


def num_wrong(run: Run, arrays: tuple[Array, Array], pair: Sequence[int], rank: int) -> int:
    """Return how many bytes of a window in both directions do not arrive as they were sent."""
    if rank not in pair:
        return 0
    x, y = arrays
    x.fill(rank % 100 + 1)
    y.fill(0)
    run()
    return int(np.count_nonzero(y != pair[1 - pair.index(rank)] % 100 + 1))
