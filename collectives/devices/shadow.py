"""Memory that other processes can open, in the place of arrays that they cannot.

Arrays of an allocator such as cudaMallocAsync's have no handle.  A call copies them into a shadow
on its stream, uses the shadow, and copies the result back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple
from weakref import finalize

from collectives.devices.driver import Driver
from collectives.devices.row_format import Words, copy_row

_ALIGNMENT = 512  # of each part of a shadow, in bytes, as of allocations


class Extent(NamedTuple):
    """The addresses of the first byte of an array, and of the byte after the last."""

    start: int
    stop: int


class Allocation:
    """Memory of the driver, which ends with this object.

    When Python exits it stays, and ends with the process: the driver may be gone before it is
    freed, and to free it would wait for all streams.
    """

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address = driver.allocate(num_bytes)
        finalize(self, driver.try_call, "cuMemFree_v2", self.address).atexit = False


# All are kept: peers may have them open, and to free them would wait for all streams.
IDLE: dict[Driver, list[Allocation]] = {}
_used = set[Allocation]()

_LOCK = threading.RLock()  # memory may be given back when Python frees objects


class Shadow:
    """The shadow of the arrays of a call."""

    def __init__(self, driver: Driver, source: Extent, target: Extent, scratch: Extent) -> None:
        self._driver, self._target, self._scratch = driver, target, scratch
        self._parts = [*_merged((source, target, scratch))]
        self._offsets: list[int] = []
        size = _ALIGNMENT
        for part in self._parts:
            self._offsets.append(size)
            size += -(-(part.stop - part.start) // _ALIGNMENT) * _ALIGNMENT
        self.memory = taken(driver, size)

    def address(self, extent: Extent) -> int:
        """Return where the shadow of an array begins."""
        for part, offset in zip(self._parts, self._offsets, strict=True):
            if part.start <= extent.start and extent.stop <= part.stop:
                return self.memory.address + offset + extent.start - part.start
        return 0  # of an empty array

    def rows_before(self) -> list[Words]:
        """Return the rows that copy the input and the output to their shadows."""
        return [
            copy_row(self.address(part), part.start, part.stop - part.start)
            for part in self._parts
            if part != self._scratch
        ]

    def rows_after(self) -> list[Words]:
        """Return the rows that copy the shadow of the output back."""
        target = self._target
        size = target.stop - target.start
        return [copy_row(target.start, self.address(target), size)] if size else []

    def give_back(self) -> None:
        """Let other calls have the memory."""
        give_back(self._driver, self.memory)


def taken(driver: Driver, num_bytes: int) -> Allocation:
    """Return an allocation of at least this size that nothing uses.

    If there is none, a new one is made, which may wait for all streams.  Raises DriverError.
    """
    with _LOCK:
        idle = IDLE.setdefault(driver, [])
        fitting = [allocation for allocation in idle if allocation.num_bytes >= num_bytes]
        if fitting:
            smallest = min(fitting, key=lambda allocation: allocation.num_bytes)
            idle.remove(smallest)
            _used.add(smallest)
            return smallest
    allocation = Allocation(driver, 1 << (num_bytes - 1).bit_length())
    with _LOCK:
        _used.add(allocation)
    return allocation


def give_back(driver: Driver, allocation: Allocation) -> None:
    """Let others have the memory."""
    with _LOCK:
        _used.discard(allocation)
        IDLE.setdefault(driver, []).append(allocation)


def _merged(extents: Iterable[Extent]) -> list[Extent]:
    """Return the extents of arrays, in which arrays that overlap have one extent."""
    merged: list[Extent] = []
    for extent in sorted(extent for extent in extents if extent.stop > extent.start):
        if merged and extent.start < merged[-1].stop:
            merged[-1] = Extent(merged[-1].start, max(merged[-1].stop, extent.stop))
        else:
            merged.append(extent)
    return merged
