"""Measure the host time of calls on devices without that of the GPU's driver.

    python -m collectives.launch -n 2 -m tests.devices.host_time_program

All functions of the driver return at once and do nothing, so what is left is the library's own: the
median of the calls of rank 0, in microseconds.  Calls take turns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

import collectives
from collectives.arrays import jit
from collectives.arrays.backends import register_backend
from collectives.devices.driver import FUNCTIONS, Driver
from tests.fakes.device import FakeBackend, FakeDeviceArray
from tests.inside import session_of

TURNS, CALLS = 40, 25


def nothing() -> int:
    """What every function of the driver does."""
    return 0


class Kernels:
    """Every kernel is there."""

    def combine(self, function: str, dtype: np.dtype[Any]) -> int:
        return 1

    def divide(self, dtype: np.dtype[Any]) -> int:
        return 1

    def interpret(self, function: str | None, dtype: np.dtype[Any]) -> int:
        return 1


class NullDriver(Driver):
    """A driver whose device has room for one block."""

    def num_blocks_at_once(self, kernel: int, num_threads: int) -> int:
        return 1


class NullBackend(FakeBackend):
    """Arrays of a device that does nothing."""

    name = kind = "null"
    driver = NullDriver(dict.fromkeys(FUNCTIONS, jit.pointer(nothing, "int32()")), Kernels())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NullArray:
        return NullArray(np.empty(shape, dtype))

    def contiguous(self, x: FakeDeviceArray) -> FakeDeviceArray:
        return x

    def current_stream(self) -> Any:
        return SimpleNamespace(ptr=1)

    def on_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()


class NullArray(FakeDeviceArray):
    """An array of this backend."""

    def reshape(self, *shape: int) -> NullArray:
        return NullArray(self.memory.reshape(*shape))


def with_links(
    comm: collectives.Communicator, backend: NullBackend, why_no_kernels: str
) -> collectives.Communicator:
    """Let the ranks take it for granted that they read each other's memory."""
    links = session_of(comm).devices._links_for(backend)
    links.staged, links.uuids = frozenset(), dict.fromkeys(range(comm.size), bytes(16))
    links.counters, links.why_no_kernels = dict.fromkeys(range(comm.size), 0), why_no_kernels
    return comm


def contenders(world: collectives.Communicator) -> dict[str, Callable[[], object]]:
    """The calls, by name."""
    backend = NullBackend()
    register_backend(NullArray, backend)
    comm = with_links(world, backend, "not wanted")
    as_kernels = with_links(world.split(0), backend, "")
    x, y, other = (backend.empty((256,), np.dtype(np.float32)) for _ in range(3))
    host_x, host_y = np.ones(256, np.float32), np.empty(256, np.float32)
    turn = iter(range(sys.maxsize))
    return {
        "a plan": comm.plan.all_reduce(x, out=y).run,
        "a plan as a kernel": as_kernels.plan.all_reduce(x, out=y).run,
        "a call on the same arrays": lambda: comm.all_reduce(x, out=y),
        "a call on other arrays": lambda: comm.all_reduce((x, other)[next(turn) % 2], out=other),
        "a plan on the host, with its messages": comm.plan.all_reduce(host_x, out=host_y).run,
    }


def main() -> None:
    comm = collectives.world()
    named = contenders(comm)
    seconds: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(TURNS):
        for name, call in named.items():
            call()
            for _ in range(CALLS):
                began = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - began)
    if comm.rank == 0:
        for name, taken in seconds.items():
            print(f"{name}: {1e6 * float(np.median(taken)):.1f} us")


if __name__ == "__main__":
    main()
