"""The functions of a GPU's driver, called by address; no compiler and no other package is needed.

All pointers, handles and sizes are 64-bit integers.  The fake device of the tests supplies the same
functions over host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from collectives.errors import CollectiveError

_WORD, _UNSIGNED, _POINTER = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p


class IpcHandle(ctypes.Structure):
    """The handle by which other processes open an allocation."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetDevice": (_POINTER,),
    "cuDeviceGetAttribute": (_POINTER, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetCount": (_POINTER,),
    "cuDeviceGetUuid_v2": (_POINTER, ctypes.c_int),
    "cuEventCreate": (_POINTER, _UNSIGNED),
    "cuEventDestroy_v2": (_WORD,),
    "cuEventElapsedTime": (_POINTER, _WORD, _WORD),
    "cuEventQuery": (_WORD,),
    "cuEventRecord": (_WORD, _WORD),
    "cuIpcCloseMemHandle": (_WORD,),
    "cuIpcGetMemHandle": (_POINTER, _WORD),
    "cuIpcOpenMemHandle_v2": (_POINTER, IpcHandle, _UNSIGNED),
    "cuLaunchCooperativeKernel": (_WORD, *[_UNSIGNED] * 7, _WORD, _POINTER),
    "cuLaunchKernel": (_WORD, *[_UNSIGNED] * 7, _WORD, _POINTER, _POINTER),
    "cuMemAlloc_v2": (_POINTER, _WORD),
    "cuMemFree_v2": (_WORD,),
    "cuMemGetAddressRange_v2": (_POINTER, _POINTER, _WORD),
    "cuMemHostRegister_v2": (_WORD, _WORD, _UNSIGNED),
    "cuMemHostUnregister": (_WORD,),
    "cuMemcpyDtoDAsync_v2": (_WORD, _WORD, _WORD, _WORD),
    "cuMemcpyDtoHAsync_v2": (_WORD, _WORD, _WORD, _WORD),
    "cuMemcpyHtoDAsync_v2": (_WORD, _WORD, _WORD, _WORD),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (_POINTER, _WORD, ctypes.c_int, _WORD),
    "cuPointerGetAttribute": (_POINTER, ctypes.c_int, _WORD),
    "cuStreamBatchMemOp_v2": (_WORD, _UNSIGNED, _POINTER, _UNSIGNED),
    "cuStreamCreate": (_POINTER, _UNSIGNED),
    "cuStreamIsCapturing": (_WORD, _POINTER),
    "cuStreamSynchronize": (_WORD,),
    "cuStreamWaitEvent": (_WORD, _WORD, _UNSIGNED),
    "cuThreadExchangeStreamCaptureMode": (_POINTER,),
}
"""The argument types of each function; it returns an error code of 32 bits, 0 for success."""

NOT_READY = 600  # what `cuEventQuery` returns while the event is not complete
CAPTURING = range(900, 910)  # what functions return that a stream which is captured forbids
RELAXED = 2  # a way in which a thread lets others capture their streams
NUM_MULTIPROCESSORS = 16  # an attribute of a device
BUFFER_ID = 7  # an attribute of a pointer: a number that no other allocation of the process has
DISABLE_TIMING = 2  # of an event
NON_BLOCKING = 1  # of a stream, which does not wait for the null stream
LAZY_PEER_ACCESS = 1  # of an opened handle
PORTABLE, MAPPED = 1, 2  # of page-locked memory
WAIT_VALUE, WRITE_VALUE = 1, 2  # operations on memory; a wait is for at least the value
MEMORY_OPERATION_WORDS = 6  # kind, address, value, flags, and two words that are not used here


class DriverError(CollectiveError):
    """A function of the driver has failed."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} of the GPU's driver failed with error {code}")
        self.code = code


class Kernels(Protocol):
    """The kernels of a device, by the addresses that `cuLaunchKernel` takes.

    To get one for the first time may wait for all streams of the process.
    """

    def combine(self, function: str, dtype: np.dtype[Any]) -> int | None:
        """Return the kernel that combines up to 8 operands with a NumPy function, or None.

        Its parameters are 12 words: the address of the result, the operands that come on the left
        (bit k stands for operand k), the numbers of operands and of elements, and the addresses of
        8 operands.  Every combination of two is rounded to the dtype.
        """

    def divide(self, dtype: np.dtype[Any]) -> int | None:
        """Return the kernel that divides floating-point or complex numbers in place, or None.

        Its parameters are 3 words: the address, the number of elements, the divisor.
        """

    def interpret(self, function: str | None, dtype: np.dtype[Any]) -> int | None:
        """Return the kernel that runs a device program, or None; see `interpreter_source`.

        It combines with the NumPy function of this name, if there is one; else it only copies.  Its
        parameters are the words of `kernel_program`, and the number of the run.
        """


class Driver:
    """The functions of one driver.

    Attributes
    ----------
    addresses : dict of str to int
        The addresses of the functions.
    kernels : Kernels
        The kernels of the device that is current.
    most_outstanding : int
        The operations that a call has on its stream at most.  A stream has room for about a
        thousand; to enqueue more would block the host, for which other ranks may wait in another
        call.
    """

    most_outstanding = 512

    def __init__(self, addresses: Mapping[str, int], kernels: Kernels) -> None:
        self.addresses, self.kernels = dict(addresses), kernels
        self._functions = {
            name: ctypes.CFUNCTYPE(ctypes.c_int, *types)(self.addresses[name])
            for name, types in FUNCTIONS.items()
        }

    def try_call(self, name: str, *arguments: Any) -> int:
        """Call a function; return its error code."""
        return int(self._functions[name](*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.  Raises DriverError if it fails."""
        if code := self.try_call(name, *arguments):
            raise DriverError(name, code)

    def new_event(self, *, is_timed: bool = False) -> int:
        """Return a new event."""
        event = _WORD()
        self.call("cuEventCreate", ctypes.addressof(event), 0 if is_timed else DISABLE_TIMING)
        return event.value

    def seconds_between(self, start: int, end: int) -> float:
        """Return the time between two timed events that are complete."""
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.addressof(milliseconds), start, end)
        return milliseconds.value * 1e-3

    def new_stream(self) -> int:
        """Return a new stream."""
        stream = _WORD()
        self.call("cuStreamCreate", ctypes.addressof(stream), NON_BLOCKING)
        return stream.value

    def relax_thread(self) -> None:
        """Let calls of this thread end no capture of a stream by another one."""
        mode = ctypes.c_int(RELAXED)
        self.try_call("cuThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    def is_complete(self, event: int) -> bool:
        """Return whether all work before the event is done.

        Raises DriverError if the work has failed.
        """
        code = self.try_call("cuEventQuery", event)
        if code != 0 and code != NOT_READY and code not in CAPTURING:
            raise DriverError("cuEventQuery", code)
        return code == 0

    def is_capturing(self, stream: int) -> bool:
        """Return whether a stream is captured for a graph."""
        status = ctypes.c_int()
        self.call("cuStreamIsCapturing", stream, ctypes.addressof(status))
        return status.value != 0

    def allocation(self, address: int) -> tuple[int, int]:
        """Return the address and the size of the allocation that contains an address."""
        base, size = _WORD(), _WORD()
        arguments = ctypes.addressof(base), ctypes.addressof(size), address
        self.call("cuMemGetAddressRange_v2", *arguments)
        return base.value, size.value

    def buffer_id(self, address: int) -> int:
        """Return the number of an allocation, which no later allocation has."""
        number = _WORD()
        self.call("cuPointerGetAttribute", ctypes.addressof(number), BUFFER_ID, address)
        return number.value

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory that can be opened in other processes."""
        address = _WORD()
        self.call("cuMemAlloc_v2", ctypes.addressof(address), num_bytes)
        return address.value

    def handle(self, address: int) -> bytes:
        """Return the handle of an allocation.

        Raises DriverError if other processes cannot open the allocation.
        """
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.addressof(handle), address)
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        """Return the address, in this process, of an allocation of another process."""
        address, given = _WORD(), IpcHandle.from_buffer_copy(handle)
        arguments = ctypes.addressof(address), given, LAZY_PEER_ACCESS
        self.call("cuIpcOpenMemHandle_v2", *arguments)
        return address.value

    def close(self, address: int) -> None:
        """Close what `open` has opened."""
        self.call("cuIpcCloseMemHandle", address)

    def num_blocks_at_once(self, kernel: int, num_threads: int) -> int:
        """Return how many blocks of a kernel the device can run at once, if nothing else runs."""
        device, num_processors, num_blocks = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuCtxGetDevice", ctypes.addressof(device))
        where = ctypes.addressof(num_processors), NUM_MULTIPROCESSORS, device.value
        self.call("cuDeviceGetAttribute", *where)
        arguments = ctypes.addressof(num_blocks), kernel, num_threads, 0
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", *arguments)
        return num_blocks.value * num_processors.value

    def num_devices(self) -> int:
        """Return the number of devices that this process can use."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.addressof(number))
        return number.value

    def uuid(self) -> bytes:
        """Return the 16 bytes that identify the current device, in all processes."""
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self.call("cuCtxGetDevice", ctypes.addressof(device))
        self.call("cuDeviceGetUuid_v2", ctypes.addressof(uuid), device)
        return bytes(uuid)


def addresses_in_libcuda() -> dict[str, int]:
    """Return the addresses of the functions.

    Raises OSError or AttributeError if there is no driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    return {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS
    }
