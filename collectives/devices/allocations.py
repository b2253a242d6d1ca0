"""Device memory that processes show each other: what is exported, and what is opened."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from collectives.devices.driver import Driver

MOST_EXPORTED = 256  # allocations of a communicator, on each rank
NUM_CLOSING = 3  # that peers close in a call: as many as the call can export


class Exported(NamedTuple):
    """An allocation that peers may have opened; its owner keeps it from being freed."""

    base: int
    size: int
    handle: bytes
    owner: object


class Buffer(NamedTuple):
    """What the other ranks must know of a buffer, in the order of a record's fields."""

    address: int
    size: int
    offset: int = 0
    id: int = 0
    allocated: int = 0
    handle: bytes = bytes(64)


class Exports:
    """The allocations that the peers of a communicator may have opened, by their ids.

    When there are too many, the least recently used ones are closed: the record of a call names
    them, and they are held until all peers have answered it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.opened: OrderedDict[int, Exported] = OrderedDict()
        self._closing: dict[int, Exported] = {}
        self._pins, self._lock = Counter[int](), threading.Lock()  # threads may pin too

    def describe(self, address: int, size: int, owner: object) -> Buffer:
        """Return a buffer with its allocation.  Raises DriverError if it cannot be exported."""
        number = self._driver.buffer_id(address)
        with self._lock:
            if number not in self.opened:
                base, allocated = self._driver.allocation(address)
                self.opened[number] = Exported(base, allocated, self._driver.handle(base), owner)
            self.opened.move_to_end(number)
            base, allocated, handle, _ = self.opened[number]
        return Buffer(address, size, address - base, number, allocated, handle)

    @property
    def is_full(self) -> bool:
        """Whether peers must close some in a meeting."""
        return len(self.opened) > MOST_EXPORTED

    def to_close(self) -> list[int]:
        """Return the ids of allocations that peers must close now."""
        with self._lock:
            excess = min(len(self.opened) - MOST_EXPORTED, NUM_CLOSING - len(self._closing))
            unpinned = (number for number in self.opened if not self._pins[number])
            for number in list(islice(unpinned, max(excess, 0))):
                self._closing[number] = self.opened.pop(number)
            return list(self._closing)

    def pin(self, numbers: Iterable[int]) -> None:
        """Keep allocations open until `unpin`, as often as they are pinned."""
        with self._lock:
            self._pins.update(numbers)

    def unpin(self, numbers: Iterable[int]) -> None:
        """Undo `pin`."""
        with self._lock:
            self._pins.subtract(numbers)
            self._pins = +self._pins

    def closed(self, numbers: Iterable[int]) -> None:
        """Release allocations that all peers have closed."""
        for number in numbers:
            self._closing.pop(number, None)

    def free(self) -> None:
        """Release everything."""
        self.opened.clear()
        self._closing.clear()
        self._pins.clear()


class Opened(NamedTuple):
    """An allocation of another process that this process has opened.

    Attributes
    ----------
    base : int
        Its address in this process.
    place : range
        Its addresses in the other process.
    users : set of int
        The numbers of the links that use it.
    """

    base: int
    place: range
    users: set[int]


class Openings:
    """The allocations of other processes that this process has opened for one device.

    A handle can be opened only once for a device, so all communicators share them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._opened: dict[tuple[int, int], Opened] = {}

    def open(self, process: int, record: Any, user: int) -> int:
        """Return the address, in this process, of a buffer of another process.

        The buffer stays open until its `user` calls `close`.  Raises DriverError.
        """
        key = process, int(record["id"])
        with self._lock:
            if key not in self._opened:
                start = int(record["address"] - record["offset"])
                place = range(start, start + int(record["allocated"]))
                self._close_freed(process, place)
                base = self._driver.open(record["handle"].tobytes())
                self._opened[key] = Opened(base, place, set())
            opened = self._opened[key]
            opened.users.add(user)
        return opened.base + int(record["offset"])

    def _close_freed(self, process: int, place: range) -> None:
        """Close allocations in the place of a new one: the other process must have freed them."""
        for key, opened in list(self._opened.items()):
            old = opened.place
            if key[0] == process and old.start < place.stop and place.start < old.stop:
                del self._opened[key]
                self._driver.try_call("cuIpcCloseMemHandle", opened.base)

    def has(self, process: int, record: Any, user: int) -> bool:
        """Return whether this user has opened the allocation of a buffer, if it has one."""
        opened = self._opened.get((process, int(record["id"])))
        return not record["id"] or (opened is not None and user in opened.users)

    def close(self, process: int, number: int, user: int) -> None:
        """Close an allocation that this user no longer needs, if no other one does."""
        with self._lock:
            opened = self._opened.get((process, number))
            if opened is None:
                return
            opened.users.discard(user)
            if not opened.users:
                del self._opened[process, number]
                self._driver.close(opened.base)

    def free(self, user: int) -> None:
        """Close all that only this user needs."""
        for process, number in list(self._opened):
            self.close(process, number, user)

    def __len__(self) -> int:
        return len(self._opened)


@cache
def openings_of(driver: Driver) -> Openings:
    """Return the allocations that this process has opened for the device of a driver."""
    return Openings(driver)
