"""The order of runs on a device: of the calls of a communicator, or of the runs of a plan.

Each run begins on the device when the one before it has ended, whatever their streams are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol
from weakref import finalize

import numpy as np

from collectives.arrays import Backend
from collectives.devices.driver import CAPTURING, NOT_READY, Driver, DriverError
from collectives.devices.streams import STREAMS
from collectives.engines import poll_until

Action = Callable[[], object]


class Enqueued:
    """What an asynchronous run has put on a stream, up to an event."""

    def __init__(self, driver: Driver, backend: Backend) -> None:
        self._driver, self._backend = driver, backend
        self.event = STREAMS.borrow_event(driver)
        finalize(self, STREAMS.give_back_event, driver, self.event).atexit = False

    def join(self) -> None:
        """Let the stream that is current in this thread wait for it."""
        stream = self._backend.current_stream()
        with self._backend.on_stream(stream):
            self._driver.call("cuStreamWaitEvent", int(stream.ptr), self.event, 0)

    @property
    def is_complete(self) -> bool:
        """Whether the device has done it."""
        return self._driver.try_call("cuEventQuery", self.event) == 0


class Mark(Protocol):
    """A place on a stream."""

    @property
    def is_complete(self) -> bool:
        """Whether the device has come so far."""


class Marks:
    """The ends of messages that were left to the device, each on some stream.

    Attributes
    ----------
    error : int
        The error code with which the driver has ended some of them; 0 if it has not.
    """

    error = 0

    def __init__(self, driver: Driver) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._marks: list[Enqueued] = []
        STREAMS.add_user(driver, self)

    def add(self, mark: Enqueued) -> None:
        """Note what was enqueued."""
        with self._lock:
            self._marks.append(mark)

    @property
    def is_busy(self) -> bool:
        """Whether any is not known to have ended."""
        with self._lock:
            self._marks = [mark for mark in self._marks if not self._has_ended(mark)]
            return bool(self._marks)

    def _has_ended(self, mark: Enqueued) -> bool:
        """Return whether the device has done it, or its driver has failed."""
        code = self._driver.try_call("cuEventQuery", mark.event)
        if code == NOT_READY or code in CAPTURING:
            return False
        self.error = self.error or code
        return True


class Turns:
    """The calls of a communicator that are under way, and not all enqueued: the first comes first.

    Attributes
    ----------
    words : array
        The number of the first call, or 0; compiled code reads it.
    """

    def __init__(self) -> None:
        self.words = np.zeros(1, np.int64)
        self._calls: set[int] = set()
        self._lock = threading.Lock()

    def begin(self, call: int) -> None:
        """Let later calls wait for this one."""
        with self._lock:
            self._calls.add(call)
            self.words[0] = min(self._calls)

    def end(self, call: int) -> None:
        """Let later calls be enqueued."""
        with self._lock:
            self._calls.discard(call)
            self.words[0] = min(self._calls, default=0)

    @property
    def is_free(self) -> bool:
        """Whether no call is under way."""
        return not self._calls

    def has_come_to(self, call: int) -> bool:
        """Return whether no earlier call is under way."""
        return bool(self.words[0] in (0, call))


class Held:
    """What must not be given up before the device has come to some event."""

    def __init__(self) -> None:
        self._lock, self._entries = threading.Lock(), list[tuple[Mark, Action]]()
        self._num_releasing = 0  # threads that are in `release`

    def add(self, mark: Mark, then: Action) -> None:
        """Call a function some time after the device has come so far."""
        with self._lock:
            self._entries.append((mark, then))

    def release(self) -> None:
        """Call the functions of the marks to which the device has come."""
        if not self._entries:
            return
        due, entries = list[Action](), list[tuple[Mark, Action]]()
        with self._lock:
            self._num_releasing += 1
            for mark, then in self._entries:
                if mark.is_complete:
                    due.append(then)
                else:
                    entries.append((mark, then))
            self._entries = entries
        try:
            for then in due:
                then()
        finally:
            with self._lock:
                self._num_releasing -= 1

    def release_by(self, deadline: float | None) -> None:
        """Release what is held now, when the device has come there, or at the deadline.

        The device has done all runs, and the marks come just behind them.
        """
        with self._lock:
            marks = [mark for mark, _ in self._entries]
        poll_until(lambda: all(mark.is_complete for mark in marks), deadline)
        self.release()
        poll_until(lambda: not self._num_releasing, deadline)  # by another thread

    def __len__(self) -> int:
        return len(self._entries)


class Order:
    """Runs that follow each other on a device.

    Attributes
    ----------
    stream : Stream
        The stream of runs whose caller goes on meanwhile.  Its event is recorded at the end of each
        run.
    error : int
        The error code with which the driver has ended runs; 0 if it has not.
    """

    error = 0

    def __init__(self, driver: Driver, backend: Backend, held: Held) -> None:
        from collectives.devices import enqueue  # noqa: PLC0415 - it imports numba

        self._driver, self._backend, self._held = driver, backend, held
        self.stream = STREAMS.borrow(driver)
        self.words, self._names = np.zeros(enqueue.NUM_ORDER_WORDS, np.int64), enqueue
        self.words[enqueue.LAST_EVENT] = self.stream.event
        self._num_ended = 0  # runs that are known to have
        self._last_mark: tuple[int, Enqueued | None] = 0, None  # and behind how many runs it is
        STREAMS.add_user(driver, self)
        finalize(self, STREAMS.drop, driver, self.stream).atexit = False

    def new_mark(self) -> Enqueued:
        """Return a new mark, whose event is to be recorded behind what is enqueued next."""
        return Enqueued(self._driver, self._backend)

    @property
    def is_busy(self) -> bool:
        """Whether a run is being enqueued, or is not known to have ended."""
        num_runs = int(self.words[self._names.NUM_RUNS])  # first: more may follow
        if self.words[self._names.IS_OPEN]:
            return True
        if num_runs != self._num_ended and self.has_ended:
            self._num_ended = num_runs
        return num_runs != self._num_ended

    @property
    def has_ended(self) -> bool:
        """Whether the device has done what was recorded last, or its driver has failed."""
        code = self._driver.try_call("cuEventQuery", self.stream.event)
        if code == NOT_READY or code in CAPTURING:
            return False
        self.error = self.error or code
        return True

    def count(self, num_operations: int) -> None:
        """Count operations that Python is about to enqueue."""
        self.words[self._names.NUM_OUTSTANDING] += num_operations

    def count_none(self) -> None:
        """Note that the device has done all."""
        self.words[self._names.NUM_OUTSTANDING] = 0

    def after_all(self, then: Action) -> None:
        """Call a function when the device has done all runs so far: now, or some time later.

        If the driver has failed, it is never called.
        """
        if not self.is_busy:
            then()
            return
        try:
            self._held.add(self._end_of_runs(), then)
        except DriverError:
            _lost.append(then)

    def _end_of_runs(self) -> Enqueued:
        """Return a mark behind all runs so far, the same one as long as no run follows."""
        num_runs, (stream, event) = int(self.words[self._names.NUM_RUNS]), self.stream
        known_for, mark = self._last_mark
        if mark is None or known_for != num_runs:
            mark = self.new_mark()
            self._driver.call("cuStreamWaitEvent", stream, event, 0)
            self._driver.call("cuEventRecord", mark.event, stream)
            self._last_mark = 0 if self.words[self._names.IS_OPEN] else num_runs, mark
        return mark

    def keep(self, something: object) -> None:
        """Keep an object until the device has done all runs so far."""
        self.after_all(partial(drop, something))

    def keep_until(self, enqueued: Enqueued, something: object) -> None:
        """Keep an object until the device has come to an event."""
        self._held.add(enqueued, partial(drop, something))

    def break_off(self, stream: int) -> None:
        """End a run of which only a part is enqueued, on a stream."""
        self._driver.try_call("cuEventRecord", self.stream.event, stream)
        self.words[self._names.IS_OPEN] = 0


_lost: list[Action] = []  # of devices whose driver has failed


def drop(_: object) -> None:
    """Do nothing; what was kept as an argument is given up."""
