"""Backends: the operations on one kind of array that the library needs.

A `Backend` allocates, views and combines arrays, and copies bytes to and from the host.  NumPy's
backend always exists; CuPy's is made, and CuPy imported, when the first CuPy array is seen.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import array_api_compat
import numpy as np

from collectives.arrays import half_precision
from collectives.arrays.allocator import LARGE, Bytes, empty

Array = Any  # a NumPy or CuPy array; the two share no base class
Stream = Any  # of CUDA; None for host memory


class Event(Protocol):
    """A place on a stream, which the device comes to."""

    @property
    def is_complete(self) -> bool:
        """Whether the device has come so far.

        Raises RuntimeError if the device has failed.
        """

    def join(self) -> None:
        """Let the current stream go on only when the device has come so far."""


_BLOCK = 1 << 16  # elements that are checked together
_NOT_READY = 600  # what CUDA says of an event to which the device has not come


class BinaryFunction(Protocol):
    """An element-wise function of two flat arrays, such as `numpy.add`.

    `out` is one of the two, or shares no memory with them.
    """

    def __call__(self, left: Array, right: Array, out: Array, /) -> object: ...


class Backend(Protocol):
    """The operations on one kind of array.  "Flat" arrays are one-dimensional and contiguous.

    Attributes
    ----------
    name : str
        The memory, such as "cupy:3".
    kind : str
        The kind, such as "cupy".  A header contains the kind, and the receiving rank uses its own
        GPU.
    is_host : bool
        Whether the memory is the host's.
    """

    name: str
    kind: str
    is_host: bool

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new array, C-ordered, with arbitrary contents."""

    def contiguous(self, x: Array) -> Array:
        """Return `x` itself if it is C-contiguous, else a C-ordered copy."""

    def extent(self, x: Array) -> tuple[int, int]:
        """Return the addresses of a contiguous array's first byte and of the byte behind it."""

    def is_writable(self, x: Array) -> bool:
        """Return whether the array may be written to."""

    def copy(self, src: Array, dst: Array) -> None:
        """Copy one flat array to another of the same length."""

    def binary(self, function: str | BinaryFunction, dtype: np.dtype[Any]) -> BinaryFunction:
        """Return a function that combines flat arrays of this dtype.

        Each result is rounded to the dtype.  `function` is a function, or the name of one of
        NumPy's.  A function gets `protected` operands, because they may be the caller's own arrays.
        """

    def protected(self, x: Array) -> Array:
        """Return a read-only view of a flat array; a copy where arrays cannot be read-only."""

    def divide(self, x: Array, divisor: int) -> None:
        """Divide a flat array by an integer, in place."""

    def first_not_finite(self, x: Array) -> tuple[int, str] | None:
        """Return the index and text of a flat array's first NaN or infinity; None without one."""

    def host_buffer(self, x: Array) -> Bytes:
        """Return host memory for the bytes of a flat array: its own memory if it is on the host."""

    def to_host(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        """Let the current stream copy flat arrays to page-locked host buffers.

        Neither may be changed or given up before the stream has done it.
        """

    def to_device(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        """Let the current stream copy page-locked host buffers to flat arrays.

        Neither may be changed or given up before the stream has done it.
        """

    def synchronize(self) -> None:
        """Wait until all work on the current stream is done."""

    @property
    def is_current(self) -> bool:
        """Whether the device of the arrays is the current one of this thread."""

    def current_stream(self) -> Stream:
        """Return the current stream of this thread.

        All operations are in order with it.
        """

    def new_stream(self) -> Stream:
        """Return a new stream, which waits for no other one by itself."""

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which a stream, of this thread or of another, is the current one."""

    def record(self) -> Event:
        """Return the end of what is on the current stream.

        Raises RuntimeError if the stream is captured.
        """


class NumpyBackend:
    """Arrays in host memory."""

    name = kind = "numpy"
    is_host = is_current = True

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if num_elements(shape) * dtype.itemsize < LARGE:
            return np.empty(shape, dtype)
        return empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        # `ascontiguousarray` would turn a 0-d array into a 1-d one.
        return x if x.flags.c_contiguous else np.ascontiguousarray(x)

    def extent(self, x: Array) -> tuple[int, int]:
        start = x.__array_interface__["data"][0]
        return start, start + x.nbytes

    def is_writable(self, x: Array) -> bool:
        return bool(x.flags.writeable)

    def copy(self, src: Array, dst: Array) -> None:
        dst[...] = src

    def binary(self, function: str | BinaryFunction, dtype: np.dtype[Any]) -> BinaryFunction:
        if isinstance(function, str):
            return half_precision.binary(function, dtype)
        return _protecting(self, function)

    def protected(self, x: Array) -> Array:
        view = x.view()
        view.flags.writeable = False
        return view

    def divide(self, x: Array, divisor: int) -> None:
        if x.dtype.itemsize == 2:
            half_precision.divide(x, divisor)
        else:
            np.divide(x, divisor, out=x)

    def first_not_finite(self, x: Array) -> tuple[int, str] | None:
        for start in range(0, x.size, _BLOCK):  # keeps the array of flags small
            is_finite = np.isfinite(x[start : start + _BLOCK])
            if not is_finite.all():
                index = start + int(is_finite.argmin())
                return index, str(x[index])
        return None

    def host_buffer(self, x: Array) -> Bytes:
        return x.view(np.uint8)  # type: ignore[no-any-return]

    def to_host(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        assert not pairs, "host memory needs no staging"

    to_device = to_host

    def synchronize(self) -> None:
        """Do nothing: operations on the host are complete on return."""

    def current_stream(self) -> Stream:
        return None

    new_stream = current_stream

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self) -> Event:
        return _Now()


class _Now:
    """The present: operations on the host are complete on return."""

    is_complete = True

    def join(self) -> None:
        """Do nothing."""


class CupyBackend:
    """Arrays in the memory of one GPU."""

    kind = "cupy"
    is_host = False

    def __init__(self, device: int) -> None:
        import cupy  # noqa: PLC0415 - only when a CuPy array has been seen
        import cupyx  # noqa: PLC0415

        self.cupy, self.cupyx = cupy, cupyx
        self.name = f"{self.kind}:{device}"
        self.device = cupy.cuda.Device(device)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        with self.device:
            return self.cupy.empty(shape, dtype)

    def contiguous(self, x: Array) -> Array:
        with self.device:
            return x if x.flags.c_contiguous else self.cupy.ascontiguousarray(x)

    def extent(self, x: Array) -> tuple[int, int]:
        return x.data.ptr, x.data.ptr + x.nbytes

    def is_writable(self, x: Array) -> bool:
        return True

    def copy(self, src: Array, dst: Array) -> None:
        with self.device:
            dst[...] = src

    def binary(self, function: str | BinaryFunction, dtype: np.dtype[Any]) -> BinaryFunction:
        if isinstance(function, str):
            combine = getattr(self.cupy, function)
        else:
            combine = _protecting(self, function)

        def on_device(left: Array, right: Array, out: Array, /) -> None:
            with self.device:
                combine(left, right, out)

        return on_device

    def protected(self, x: Array) -> Array:
        with self.device:
            return x.copy()  # CuPy has no read-only arrays

    def divide(self, x: Array, divisor: int) -> None:
        with self.device:
            if x.dtype.itemsize == 2:  # through float32, in which the divisor is exact
                x[...] = (x.astype(np.float32) / divisor).astype(x.dtype)
            else:
                self.cupy.divide(x, divisor, out=x)

    def first_not_finite(self, x: Array) -> tuple[int, str] | None:
        with self.device:
            is_finite = self.cupy.isfinite(x)
            if bool(is_finite.all()):
                return None
            index = int(is_finite.argmin())
            return index, str(x[index].item())

    def host_buffer(self, x: Array) -> Bytes:
        # Page-locked memory cannot have a length of 0.
        buffer: Bytes = self.cupyx.empty_pinned((max(x.nbytes, 1),), np.uint8)
        return buffer[: x.nbytes]

    def to_host(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        with self.device:
            stream = self.cupy.cuda.get_current_stream()
            for device, host in pairs:
                if host.size:
                    device.view(np.uint8).get(stream=stream, out=host, blocking=False)

    def to_device(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        with self.device:
            stream = self.cupy.cuda.get_current_stream()
            for device, host in pairs:
                if host.size:
                    device.view(np.uint8).set(host, stream=stream)

    def synchronize(self) -> None:
        self.current_stream().synchronize()

    @property
    def is_current(self) -> bool:
        return bool(self.cupy.cuda.runtime.getDevice() == self.device.id)

    def current_stream(self) -> Stream:
        with self.device:
            return self.cupy.cuda.get_current_stream()

    def new_stream(self) -> Stream:
        with self.device:
            return self.cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        with self.device, stream:
            # In a new thread whose device this is already, `with` makes no context current.
            self.cupy.cuda.runtime.setDevice(self.device.id)
            yield

    def record(self) -> Event:
        return _CupyEvent(self)


class _CupyEvent:
    """The end of what is on the current stream."""

    def __init__(self, backend: CupyBackend) -> None:
        self._backend, stream = backend, backend.current_stream()
        if stream.is_capturing():
            raise RuntimeError("the current stream is being captured, so no message can be sent")
        with backend.device:
            self._event = backend.cupy.cuda.Event(disable_timing=True)
            self._event.record(stream)

    @property
    def is_complete(self) -> bool:
        """See `Event.is_complete`."""
        runtime = self._backend.cupy.cuda.runtime
        code = runtime.eventQuery(self._event.ptr)  # `Event.done` takes an error for "not yet"
        if code not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(code)
        return bool(code == 0)

    def join(self) -> None:
        """See `Event.join`."""
        self._backend.current_stream().wait_event(self._event)


def _protecting(backend: Backend, function: BinaryFunction) -> BinaryFunction:
    """Return a function of a caller, which cannot change its operands."""

    def combine(left: Array, right: Array, out: Array, /) -> None:
        function(backend.protected(left), backend.protected(right), out)

    return combine


class Arrays(NamedTuple):
    """The checked arrays of a call: the input and the output of this rank, if it has them."""

    backend: Backend
    source: Array | None
    target: Array | None

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of both."""
        like = self.target if self.source is None else self.source
        return np.dtype(np.uint8) if like is None else like.dtype


HOST = NumpyBackend()
_backends: dict[str, Backend] = {}
_kinds: dict[type, str] = {}


def register_backend(array_type: type, backend: Backend) -> None:
    """Let `backend` serve every instance of `array_type`, another kind of array."""
    _kinds[array_type] = backend.name
    _backends[backend.name] = backend


register_backend(np.ndarray, HOST)
register_backend(np.memmap, HOST)


def backend_of_kind(kind: str) -> Backend:
    """Return the backend for new arrays of this kind; for a GPU, that of the current device."""
    if kind == CupyBackend.kind:
        import cupy  # noqa: PLC0415 - only when a rank has sent a CuPy array

        return _on_gpu(cupy.cuda.Device().id)
    if kind not in _backends:
        raise TypeError(f"another rank sends an array of kind {kind!r}, which is unknown here")
    return _backends[kind]


def _on_gpu(device: int) -> Backend:
    name = f"{CupyBackend.kind}:{device}"
    if name not in _backends:
        _backends[name] = CupyBackend(device)
    return _backends[name]


def backend_of(x: object, what: str = "x") -> Backend:
    """Return the backend that serves `x`.

    Raises TypeError if `x` is not an array that can be sent.
    """
    if type(x) is np.ndarray:  # a shortcut for most calls
        return HOST
    if type(x) in _kinds:
        return _backends[_kinds[type(x)]]
    if "cupy" in sys.modules and array_api_compat.is_cupy_array(x):
        return _on_gpu(x.device.id)  # type: ignore[attr-defined]
    if isinstance(x, np.ndarray):
        raise TypeError(
            f"{what} is a {type(x).__name__}, which is more than its bytes; "
            "pass a plain numpy.ndarray"
        )
    raise TypeError(
        f"{what} must be a NumPy or CuPy array, not {type(x).__name__}; numpy.asarray makes one"
    )


def is_device_array(x: object) -> bool:
    """Return whether `x` is an array in the memory of a device."""
    if type(x) in _kinds:
        return not _backends[_kinds[type(x)]].is_host
    return "cupy" in sys.modules and bool(array_api_compat.is_cupy_array(x))


def check_dtype(dtype: np.dtype[Any], what: str = "x") -> None:
    """Raise TypeError for elements of size 0, and for Python objects."""
    if dtype.hasobject:
        raise TypeError(f"{what} holds Python objects (dtype {dtype}), which are not plain bytes")
    if dtype.itemsize == 0:
        raise TypeError(f"{what} has elements of no size (dtype {dtype})")


def num_elements(shape: Sequence[int]) -> int:
    """Return the product of the dimensions; 1 for a 0-d array."""
    return math.prod(shape)
