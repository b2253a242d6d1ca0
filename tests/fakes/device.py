"""An array that behaves like device memory: nobody on the host can look into it.

It lies in the memory of the fake GPU (`driver.py`) and refuses every way in (buffer protocol,
array interface, DLPack, iteration), so a test that passes with it has handed no device buffer to
the host's MPI.  What is done with it is put on a stream, and is done when that pleases the GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.backends import HOST, BinaryFunction, Bytes, register_backend
from tests.fakes.driver import gpu


class FakeDeviceArray:
    """Device memory, seen from the host: shape, dtype, views; no contents.

    `memory`: for the fake GPU, and for tests that look where an array lies.
    """

    __array__ = __array_interface__ = __cuda_array_interface__ = __dlpack__ = property(
        lambda self: _refuse()
    )
    __iter__ = None

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory

    shape = property(lambda self: self.memory.shape)
    dtype = property(lambda self: self.memory.dtype)
    size = property(lambda self: self.memory.size)
    ndim = property(lambda self: self.memory.ndim)
    nbytes = property(lambda self: self.memory.nbytes)

    def reshape(self, *shape: int) -> FakeDeviceArray:
        return FakeDeviceArray(self.memory.reshape(*shape))

    def view(self, dtype: Any) -> FakeDeviceArray:
        return FakeDeviceArray(self.memory.view(dtype))

    def fill(self, value: float) -> None:
        BACKEND.enqueue(lambda: self.memory.fill(value), writes=[self])

    def __getitem__(self, index: slice) -> FakeDeviceArray:
        return FakeDeviceArray(self.memory[index])


def _refuse() -> Any:
    raise AttributeError("device memory cannot be read on the host")


class FakeStream:
    """Work in order.  `ptr`: the driver's handle."""

    def __init__(self, name: str) -> None:
        self.name, self.ptr = name, gpu().new_stream()

    def synchronize(self) -> None:
        gpu().synchronize(self.ptr)


class FakeEvent:
    """The end of what is on a stream."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend, self._mark = backend, gpu().mark(backend.current_stream().ptr)

    @property
    def is_complete(self) -> bool:
        gpu().begin("cuEventQuery", budget=24)
        return gpu().see(self._mark)

    def join(self) -> None:
        gpu().wait_for_mark(self._backend.current_stream().ptr, self._mark)


class FakeBackend:
    """Counts what crosses between host and device; combines on the device."""

    name = kind = "fake"
    is_host, is_current = False, True

    def __init__(self) -> None:
        self._thread = threading.local()
        self.reset()

    @property
    def driver(self) -> Any:
        """The driver of the fake GPU."""
        return gpu().driver

    def reset(self) -> None:
        self.bytes_to_host = self.bytes_to_device = self.num_combined = 0
        self.streams_used: set[str] = set()

    def enqueue(
        self,
        function: Callable[[], object],
        reads: Iterable[FakeDeviceArray] = (),
        writes: Iterable[FakeDeviceArray] = (),
    ) -> None:
        """Put work on the current stream, which reads and writes these arrays."""
        self.streams_used.add(self.current_stream().name)
        arrays = [*((x, False) for x in reads), *((x, True) for x in writes)]
        extents = [(*self.extent(x), is_written) for x, is_written in arrays]
        with gpu().lock:  # other backends of the tests have arrays that are in none of its memory
            ranges = [
                (start, end - start, is_written)
                for start, end, is_written in extents
                if gpu().memory.find(start) is not None
            ]
        gpu().enqueue(self.current_stream().ptr, function, ranges)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> FakeDeviceArray:
        return FakeDeviceArray(gpu().array(shape, dtype))

    def contiguous(self, x: FakeDeviceArray) -> FakeDeviceArray:
        if x.memory.flags.c_contiguous:
            return x
        new = self.empty(x.memory.shape, x.memory.dtype)
        self.copy(x, new)
        return new

    def extent(self, x: FakeDeviceArray) -> tuple[int, int]:
        return HOST.extent(x.memory)

    def owner(self, x: FakeDeviceArray) -> object:
        """What keeps the allocation of an array from being freed."""
        return x.memory

    def is_writable(self, x: FakeDeviceArray) -> bool:
        return HOST.is_writable(x.memory)

    def copy(self, src: FakeDeviceArray, dst: FakeDeviceArray) -> None:
        def execute() -> None:
            dst.memory[...] = src.memory

        self.enqueue(execute, [src], [dst])

    def binary(self, function: str | BinaryFunction, dtype: np.dtype[Any]) -> Any:
        is_name = isinstance(function, str)
        on_memory = HOST.binary(function, dtype) if is_name else function

        def combine(left: FakeDeviceArray, right: FakeDeviceArray, out: FakeDeviceArray) -> None:
            self.num_combined += 1
            if is_name:
                memories = left.memory, right.memory, out.memory
                self.enqueue(lambda: on_memory(*memories), [left, right], [out])
                return
            self.synchronize()  # a function of Python's works at once
            left, right = self.protected(left), self.protected(right)
            self.synchronize()
            on_memory(left.memory, right.memory, out.memory)

        return combine

    def protected(self, x: FakeDeviceArray) -> FakeDeviceArray:
        new = self.empty(x.memory.shape, x.memory.dtype)  # as CuPy, it has no read-only arrays
        self.copy(x, new)
        return new

    def divide(self, x: FakeDeviceArray, divisor: int) -> None:
        self.enqueue(lambda: HOST.divide(x.memory, divisor), writes=[x])

    def first_not_finite(self, x: FakeDeviceArray) -> tuple[int, str] | None:
        self.synchronize()
        return HOST.first_not_finite(x.memory)

    def host_buffer(self, x: FakeDeviceArray) -> Bytes:
        return np.empty(x.nbytes, np.uint8)

    def to_host(self, pairs: Sequence[tuple[FakeDeviceArray, Bytes]]) -> None:
        for device, host in pairs:
            self.enqueue(partial(_copy, _bytes(device), host), reads=[device])
            self.bytes_to_host += host.size

    def to_device(self, pairs: Sequence[tuple[FakeDeviceArray, Bytes]]) -> None:
        for device, host in pairs:
            self.enqueue(partial(_copy, host, _bytes(device)), writes=[device])
            self.bytes_to_device += host.size

    def synchronize(self) -> None:
        self.current_stream().synchronize()

    def current_stream(self) -> FakeStream:
        if not hasattr(self._thread, "stream"):
            self._thread.stream = FakeStream("default")
        return self._thread.stream

    def new_stream(self) -> FakeStream:
        return FakeStream("the library's")

    def record(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        gpu().make_current()
        before, self._thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._thread.stream = before


def _bytes(x: FakeDeviceArray) -> Bytes:
    return x.memory.reshape(-1).view(np.uint8)


def _copy(source: Bytes, target: Bytes) -> None:
    target[...] = source


BACKEND = FakeBackend()
register_backend(FakeDeviceArray, BACKEND)


def on_device(x: np.ndarray, exportable: bool = True) -> FakeDeviceArray:
    """A copy of a host array in fake device memory, as it is now."""
    memory = gpu().array(x.shape, x.dtype, exportable)
    memory[...] = x
    return FakeDeviceArray(memory)


def on_host(x: FakeDeviceArray | np.ndarray | None) -> np.ndarray | None:
    """The contents, which only a test may look at."""
    if not isinstance(x, FakeDeviceArray):
        return x
    BACKEND.synchronize()
    return x.memory


def fill(x: FakeDeviceArray, value: float) -> None:
    """In the order of the current stream."""
    BACKEND.copy(on_device(np.full(x.shape, value)), x)


def contents(x: FakeDeviceArray) -> FakeDeviceArray:
    """A copy, in the order of the current stream."""
    y = BACKEND.empty(x.shape, x.dtype)
    BACKEND.copy(x, y)
    return y
