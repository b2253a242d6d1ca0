"""When a device has come to an event, in seconds of `time.perf_counter`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from operator import itemgetter
from typing import NamedTuple
from weakref import finalize

from collectives.arrays import Backend
from collectives.devices.driver import Driver, DriverError
from collectives.devices.streams import STREAMS

SECONDS = 1.0  # in which the clocks of the host and of a device do not differ by much
_TRIES = 3
_PATIENCE = 0.02  # seconds for a try


class Reading(NamedTuple):
    """An event that was complete at a time of the host."""

    event: TimedEvent
    seconds: float


class TimedEvent:
    """The end of what is on a stream now."""

    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver, self.event = driver, STREAMS.borrow_event(driver, is_timed=True)
        give_back = STREAMS.give_back_event
        finalize(self, give_back, driver, self.event, is_timed=True).atexit = False
        driver.call("cuEventRecord", self.event, stream)

    @property
    def is_complete(self) -> bool:
        """Whether the device has come so far, without an error."""
        return self._driver.try_call("cuEventQuery", self.event) == 0


class Clock:
    """The clock of a device, which is compared with the clock of the host now and then."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._last: Reading | None = None

    def read(self) -> Reading:
        """Return a reading, of the last second if the device answers.

        Raises DriverError, and TimeoutError if the device has never answered.
        """
        with self._lock:
            if self._last is None or time.perf_counter() - self._last.seconds > SECONDS:
                self._last = min(self._tries(), key=itemgetter(0), default=(0.0, self._last))[1]
            if self._last is None:
                raise TimeoutError("the device does not come to an event on a stream of its own")
            return self._last

    def _tries(self) -> Iterator[tuple[float, Reading]]:
        """Yield some readings, each after the seconds by which it may be wrong.

        A stream may share a queue with one that waits for a rank, so its event is not waited for.
        """
        stream = STREAMS.borrow(self._driver)
        try:
            for _ in range(_TRIES):
                before = time.perf_counter()
                event = TimedEvent(self._driver, stream.handle)
                while not event.is_complete:
                    if time.perf_counter() > before + _PATIENCE:
                        return
                after = time.perf_counter()
                yield after - before, Reading(event, (before + after) / 2)
        finally:
            STREAMS.abandon(self._driver, stream)

    def seconds(self, reading: Reading, event: TimedEvent) -> float:
        """Return when the device came to an event after a reading.  Raises DriverError."""
        return reading.seconds + self._driver.seconds_between(reading.event.event, event.event)


def timed_end(
    driver: Driver, backend: Backend, stream: int, then: Callable[[float], object]
) -> tuple[TimedEvent, Callable[[], None]]:
    """Return the end of what is on a stream, and a function that tells `then` when it was.

    Raises DriverError, or TimeoutError: see `Clock.read`.
    """
    clock = _clock_of(driver)
    reading, end = clock.read(), TimedEvent(driver, stream)

    def tell() -> None:
        with backend.on_stream(backend.current_stream()), suppress(DriverError):
            then(clock.seconds(reading, end))

    return end, tell


@cache
def _clock_of(driver: Driver) -> Clock:
    """Return the clock of the device of a driver."""
    return Clock(driver)
