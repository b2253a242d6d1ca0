"""Memory of a device that MPI sends from and receives into, where MPI takes its addresses.

The memory belongs to the library, as page-locked memory for messages does: an array is copied to it
before a message is sent, and from it when a message has arrived.  So receives are posted as early,
and arrays are in use as long, as with messages in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import finalize

import numpy as np

from collectives.arrays import Array, Backend, Bytes
from collectives.devices.driver import Driver
from collectives.devices.drivers import driver_of
from collectives.devices.shadow import give_back, taken


class DirectMemory:
    """Memory of a device for messages; see `MessageMemory`.

    The driver allocates it, because memory of a pool may be in use by a stream that used it before,
    for which MPI does not wait.
    """

    link = "direct"

    def __init__(self, backend: Backend) -> None:
        self._backend, self._driver = backend, driver_of(backend)

    def new(self, num_bytes: int) -> Bytes:
        """See `MessageMemory.new`: an array that only tells where the memory is."""
        return np.asarray(_Memory(self._driver, num_bytes))

    def copy_to(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        """See `MessageMemory.copy_to`."""
        for array, message in pairs:
            self._copy(message.ctypes.data, self._backend.extent(array)[0], message.size)

    def copy_from(self, pairs: Sequence[tuple[Array, Bytes]]) -> None:
        """See `MessageMemory.copy_from`."""
        for array, message in pairs:
            self._copy(self._backend.extent(array)[0], message.ctypes.data, message.size)

    def _copy(self, target: int, source: int, num_bytes: int) -> None:
        if num_bytes:
            stream = int(self._backend.current_stream().ptr)
            self._driver.call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)


class _Memory:
    """An allocation of the driver, as NumPy sees it; others have it when this object ends."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        allocation = taken(driver, max(num_bytes, 1))
        finalize(self, give_back, driver, allocation).atexit = False
        data = {"data": (allocation.address, False), "shape": (num_bytes,), "typestr": "|u1"}
        self.__array_interface__ = {**data, "version": 3}
