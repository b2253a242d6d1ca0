"""Streams for calls, and the events that order the streams of threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NamedTuple, Protocol
from weakref import WeakSet

from collectives.devices.driver import NOT_READY, Driver, DriverError


class Stream(NamedTuple):
    """A stream of the driver, and an event to wait for it with."""

    handle: int
    event: int


class User(Protocol):
    """An object that puts work on streams."""

    @property
    def is_busy(self) -> bool:
        """Whether something of it may be on a stream."""


class Streams:
    """The streams that the library has made: one for each communicator and plan that uses any."""

    def __init__(self) -> None:
        self._idle = defaultdict[Driver, list[Stream]](list)
        self._events = defaultdict[tuple[Driver, bool], list[int]](list)
        self._waiting = defaultdict[Driver, set[Stream]](set)
        self._users = defaultdict[Driver, WeakSet[User]](WeakSet)
        self._lock = threading.Lock()
        self._abandoned = defaultdict[Driver, list[Stream]](list)

    def borrow(self, driver: Driver) -> Stream:
        """Return a stream on which nothing is."""
        self._sweep(driver)
        try:
            return self._idle[driver].pop()
        except IndexError:
            return Stream(driver.new_stream(), driver.new_event())

    def borrow_event(self, driver: Driver, *, is_timed: bool = False) -> int:
        """Return an event that nothing else records."""
        try:
            return self._events[driver, is_timed].pop()
        except IndexError:
            return driver.new_event(is_timed=is_timed)

    def give_back_event(self, driver: Driver, event: int, *, is_timed: bool = False) -> None:
        """Give an event back, for which a stream may still wait."""
        self._events[driver, is_timed].append(event)

    def give_back(self, driver: Driver, stream: Stream) -> None:
        """Give a stream back on which nothing is left."""
        self._waiting[driver].discard(stream)
        self._idle[driver].append(stream)

    def abandon(self, driver: Driver, stream: Stream) -> bool:
        """Give a stream back as soon as nothing is left on it; return whether that is now."""
        try:
            driver.call("cuEventRecord", stream.event, stream.handle)
        except DriverError:  # the driver has failed for good
            self._waiting[driver].discard(stream)
            return True
        self.drop(driver, stream)
        self._sweep(driver)
        return stream not in self._abandoned[driver]

    def drop(self, driver: Driver, stream: Stream) -> None:
        """Give a stream back some time after the device has come to its event."""
        self._abandoned[driver].append(stream)

    def add_user(self, driver: Driver, user: User) -> None:
        """Note an object that uses streams without a call of `note_waiting`."""
        with self._lock:
            self._users[driver].add(user)

    def note_waiting(self, driver: Driver, stream: Stream) -> None:
        """Note that a stream may wait for other ranks, until it is given back."""
        self._waiting[driver].add(stream)

    def may_block(self, driver: Driver) -> bool:
        """Return whether the host may make calls that wait for all streams of the process.

        If streams then waited for ranks whose hosts make such calls too, all would wait for ever.
        """
        self._sweep(driver)
        with self._lock:
            is_busy = any(user.is_busy for user in self._users[driver])
        return not is_busy and not self._waiting[driver] and not self._abandoned[driver]

    def _sweep(self, driver: Driver) -> None:
        """Give back the abandoned streams on which nothing is left."""
        for stream in list(self._abandoned[driver]):
            if (code := driver.try_call("cuEventQuery", stream.event)) == NOT_READY:
                continue
            try:
                self._abandoned[driver].remove(stream)
            except ValueError:  # another thread was faster
                continue
            if code:
                self._waiting[driver].discard(stream)  # the driver has failed for good
            else:
                self.give_back(driver, stream)


class Events:
    """The events that order the streams of threads, by the address of a counter and its value."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[Driver, int, int], int] = {}

    def of(self, driver: Driver, counter: int, value: int) -> int:
        """Return the event that stands for a value of a counter."""
        with self._lock:
            key = driver, counter, value
            if key not in self._known:
                self._known[key] = driver.new_event()
            return self._known[key]


STREAMS = Streams()
EVENTS = Events()  # a counter belongs to one rank, and a slot of it to one call at a time
