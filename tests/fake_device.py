"""An array that behaves like device memory: nobody on the host can look into it.

It holds NumPy memory and refuses every way in (buffer protocol, array interface, DLPack,
iteration), so a test that passes with it has handed no device buffer to the host's MPI.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives.arrays.backends import HOST, BinaryFunction, Bytes, register_backend


class FakeDeviceArray:
    """Device memory, seen from the host: shape, dtype, views; no contents."""

    __array__ = __array_interface__ = __cuda_array_interface__ = __dlpack__ = property(
        lambda self: _refuse()
    )
    __iter__ = None

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory

    shape = property(lambda self: self._memory.shape)
    dtype = property(lambda self: self._memory.dtype)
    size = property(lambda self: self._memory.size)
    ndim = property(lambda self: self._memory.ndim)
    nbytes = property(lambda self: self._memory.nbytes)

    def reshape(self, *shape: int) -> FakeDeviceArray:
        return FakeDeviceArray(self._memory.reshape(*shape))

    def fill(self, value: float) -> None:
        self._memory.fill(value)

    def __getitem__(self, index: slice) -> FakeDeviceArray:
        return FakeDeviceArray(self._memory[index])


def _refuse() -> Any:
    raise AttributeError("device memory cannot be read on the host")


class FakeStream:
    """Work in order; it may read host memory until somebody waits for it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._reading: list[tuple[Bytes, bytes]] = []

    def read(self, host: Bytes) -> None:
        self._reading.append((host, host.tobytes()))

    def synchronize(self) -> None:
        for host, contents in self._reading:
            assert host.tobytes() == contents, "host memory has changed while it was being copied"
        self._reading.clear()


class FakeBackend:
    """Counts what crosses between host and device; combines on the device."""

    name = kind = "fake"
    is_host = False

    def __init__(self) -> None:
        self._thread = threading.local()
        self.reset()

    def reset(self) -> None:
        self.bytes_to_host = self.bytes_to_device = self.num_combined = 0
        self.streams_used: set[str] = set()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeDeviceArray:
        return FakeDeviceArray(np.empty(shape, dtype))

    def contiguous(self, x: FakeDeviceArray) -> FakeDeviceArray:
        same = HOST.contiguous(x._memory)
        return x if same is x._memory else FakeDeviceArray(same)

    def extent(self, x: FakeDeviceArray) -> tuple[int, int]:
        return HOST.extent(x._memory)

    def is_writable(self, x: FakeDeviceArray) -> bool:
        return HOST.is_writable(x._memory)

    def copy(self, src: FakeDeviceArray, dst: FakeDeviceArray) -> None:
        dst._memory[...] = src._memory

    def binary(self, function: str | BinaryFunction, dtype: np.dtype[Any]) -> Any:
        is_name = isinstance(function, str)
        on_memory = HOST.binary(function, dtype) if is_name else function

        def combine(left: FakeDeviceArray, right: FakeDeviceArray, out: FakeDeviceArray) -> None:
            self.num_combined += 1
            self.streams_used.add(self.current_stream().name)
            if not is_name:
                left, right = self.protected(left), self.protected(right)
            on_memory(left._memory, right._memory, out._memory)

        return combine

    def protected(self, x: FakeDeviceArray) -> FakeDeviceArray:
        return on_device(x._memory)  # as CuPy, it has no read-only arrays

    def divide(self, x: FakeDeviceArray, divisor: int) -> None:
        HOST.divide(x._memory, divisor)

    def first_not_finite(self, x: FakeDeviceArray) -> tuple[int, str] | None:
        return HOST.first_not_finite(x._memory)

    def host_buffer(self, x: FakeDeviceArray) -> Bytes:
        return np.empty(x._memory.nbytes, np.uint8)

    def to_host(self, pairs: Sequence[tuple[FakeDeviceArray, Bytes]]) -> None:
        for device, host in pairs:
            host[...] = device._memory.view(np.uint8)
            self.bytes_to_host += host.size
        self.streams_used.add(self.current_stream().name)
        self.synchronize()

    def to_device(self, pairs: Sequence[tuple[FakeDeviceArray, Bytes]]) -> None:
        for device, host in pairs:
            device._memory.view(np.uint8)[...] = host
            self.bytes_to_device += host.size
            self.current_stream().read(host)
        self.streams_used.add(self.current_stream().name)

    def synchronize(self) -> None:
        self.current_stream().synchronize()

    def current_stream(self) -> FakeStream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = FakeStream("default")
        return self._thread.stream

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._thread.stream = self.current_stream(), stream
        yield
        self._thread.stream = before


BACKEND = FakeBackend()
register_backend(FakeDeviceArray, BACKEND)


def on_device(x: np.ndarray) -> FakeDeviceArray:
    """A copy of a host array in fake device memory."""
    return FakeDeviceArray(x.copy())


def on_host(x: FakeDeviceArray | np.ndarray | None) -> np.ndarray | None:
    """The contents, which only a test may look at."""
    return x._memory if isinstance(x, FakeDeviceArray) else x
