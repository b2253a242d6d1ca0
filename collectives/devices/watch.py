"""Watches what a communicator has left to its device: whether that ends, and how.

The host does not wait for the device, so a thread of the process looks at the counters now and
then.  If a device has waited too long for a peer, or for one that has died, the rank lets all ranks
of the host know, and only then lets its device go on: what that computes is void.

The thread also advances asynchronous calls that are not enqueued yet: the program may wait for a
stream, in a call of CUDA, on which it waits for a rank that waits for them.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from collectives.arrays import jit
from collectives.devices.driver import Driver
from collectives.devices.links import Links
from collectives.devices.order import Held, Marks, Order
from collectives.devices.watched import Awaited, Watched, WatchedMessage
from collectives.diagnostics import COMPLETE, ENQUEUED, FAILED
from collectives.engines import (
    GAVE_UP,
    RANK_DIED,
    RUN_FAILED,
    Failure,
    Transport,
    deadline_in,
    poll_until,
)
from collectives.errors import CollectiveError, CollectiveTimeout, PeerFailed

_log = logging.getLogger(__name__)

OFTEN, SELDOM = 0.01, 0.1  # seconds between two looks of the thread
_SECONDS_OF_MARKS = 1.0  # in which the device comes to them, unless more is enqueued before
_SECONDS_TO_END = 5.0  # that a device has after it was let go


class Watch:
    """What one rank of a communicator has left to its device.

    Parameters
    ----------
    transport : Transport
        The transport of the communicator.
    when_failed : function
        Called with the error when the communicator has failed.
    limit : function
        Returns the seconds that a run may take on the device; None for any number.

    Attributes
    ----------
    failure : CollectiveError or None
        The error of all calls after a failure.
    held : Held
        What must not be given up yet.
    """

    failure: CollectiveError | None = None
    driver: Driver | None = None

    def __init__(
        self,
        transport: Transport,
        when_failed: Callable[[CollectiveError], object],
        limit: Callable[[], float | None],
    ) -> None:
        self._board, self._when_failed, self._limit = transport.board, when_failed, limit
        self._in_flight = transport.in_flight if transport.can_use_threads else []
        self.held, self._orders = Held(), WeakSet[Order | Marks]()
        self._watched: set[Watched | WatchedMessage] = set()
        self._lock, self._failing = threading.Lock(), threading.Lock()
        _thread().add(self)

    def new_order(self, links: Links) -> Order:
        """Return an order of runs that are watched.  Raises DriverError."""
        self.driver = links.driver
        order = Order(links.driver, links.backend, self.held)
        with self._lock:
            self._orders.add(order)
        return order

    def add_messages(self, marks: Marks) -> None:
        """Watch the messages that are left to the device."""
        with self._lock:
            self._orders.add(marks)

    def begin(self, watched: Watched | WatchedMessage) -> None:
        """Watch rows that are about to be enqueued."""
        with self._lock:
            self._watched.add(watched)
        self.hold()

    def hold(self) -> None:
        """Keep this object until the device is done, also if the program drops it."""
        _thread().hold(self)

    def end(self, watched: Watched | WatchedMessage) -> None:
        """Forget rows that the device has run, and let others use the memory of their meeting."""
        with self._lock:
            self._watched.discard(watched)
        watched.leave()

    def release(self) -> None:
        """Give up what the device does not use any more, unless the communicator has failed."""
        if len(self.held):
            self.look()
            if self.failure is None:
                self.held.release()

    @property
    def limit(self) -> float | None:
        """The seconds that a run may take on the device; None for any number."""
        return self._limit()

    @property
    def state(self) -> int:
        """The state of the runs that were left to the device, for the flight recorder."""
        if self.failure is not None:
            return FAILED
        return ENQUEUED if self.is_busy else COMPLETE

    @property
    def is_busy(self) -> bool:
        """Whether the device may have something to do."""
        return sum(order.is_busy for order in self._all_orders()) > 0  # each is looked at

    def _all_orders(self) -> list[Order | Marks]:
        with self._lock:
            return list(self._orders)

    def advance_calls(self) -> bool:
        """Advance the calls on devices that are not enqueued; return whether there are any."""
        calls = [call for call in list(self._in_flight) if call.is_on_device]
        for call in calls:
            call.progress()
        return bool(calls)

    def look(self, limit: float | None = None) -> None:
        """Notice a failure, and let the device end then.

        A run may take `limit` seconds on the device, by default its own limit.
        """
        if self.failure is None and (failure := self._board.failure) is not None:
            self._fail(failure)
        is_busy = self.is_busy
        self._find_error()
        if not is_busy:
            return
        with self._lock:
            all_watched = list(self._watched)
        if self.failure is None:
            self._find_failure(all_watched, limit)
        if self.failure is not None:
            for watched in all_watched:
                watched.let_go()

    def _find_error(self) -> None:
        """Note a failure if the driver has failed."""
        code = next(filter(None, (order.error for order in self._all_orders())), 0)
        if code and self.failure is None:
            what = f"the driver of the GPU of rank {self._board.rank} has failed with error {code}"
            self.note(RUN_FAILED, what)

    def _find_failure(
        self, all_watched: list[Watched | WatchedMessage], limit: float | None
    ) -> None:
        """Note a failure if the device waits too long, or for a rank that has died."""
        for watched in all_watched:
            seconds, awaited = watched.standing()
            most = next((x for x in (limit, watched.limit, self.limit) if x is not None), None)
            awaited = [one for one in awaited if not one.is_by_host]
            dead = [one for one in awaited if self._board.is_dead(one.writer)]
            if dead:
                writer = dead[0].writer
                why = f"rank {writer} has died; {self._waits(watched, dead)}"
                self.note(RANK_DIED, why, writer)
            elif awaited and most is not None and seconds > most:
                self.note(GAVE_UP, f"{self._waits(watched, awaited)} more than {most} s")

    def _find_death(self) -> None:
        """Note a failure if a rank has died: the device may have read its memory after that."""
        if dead := [rank for rank in self._board.local_ranks if self._board.is_dead(rank)]:
            self.note(RANK_DIED, f"rank {dead[0]} has died", dead[0])

    def _waits(self, watched: Watched | WatchedMessage, awaited: list[Awaited]) -> str:
        """Return the sentence that says where the device is."""
        first = awaited[0]  # the later ones may also wait for this one
        operation = " ".join(str(first.operation).split())
        place = f"row {first.row} of {len(watched.operations)} ({operation})"
        who = f"the device of rank {self._board.rank} waits for rank {first.writer}"
        return f"{watched.text}: {who} at {place}"

    def note(self, kind: int, why: str, dead: int = -1) -> None:
        """Let the communicator fail, for all ranks of this host, unless it has already."""
        if self.failure is None:  # or ranks would take what follows from a failure for its cause
            self._board.note_failure(kind, why, dead)  # before any device is let go
            self._fail(Failure(self._board.rank, kind, why, dead))

    def _fail(self, failure: Failure) -> None:
        """Let calls fail from now on; whoever sees `self.failure` can rely on that."""
        error = _error(failure, self._board.rank)
        with self._failing:
            if self.failure is None:
                self._when_failed(error)
                self.failure = error

    def check(self) -> None:
        """Raise the failure after which what the device has done is void."""
        self.look()
        if self.failure is None:
            self._find_death()
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    def synchronize(self, limit: float | None) -> None:
        """Wait until the device has done all that is enqueued, and raise what went wrong.

        A run may take `limit` seconds on the device, by default its own limit.
        """
        self.wait_until(lambda: not self.is_busy, limit)
        self.held.release_by(deadline_in(_SECONDS_OF_MARKS))

    def wait_until(
        self, is_over: Callable[[], bool], limit: float | None = None, deadline: float | None = None
    ) -> bool:
        """Wait for the device; return False if the deadline comes first.

        The limit is as for `synchronize`.  Raises what went wrong.
        """

        def has_ended() -> bool:
            has_ended = is_over()
            self.look(limit)  # after that: what the device has done must not be void
            return has_ended or self.failure is not None

        if not poll_until(has_ended, deadline):
            return False
        if self.failure is not None:
            self._let_end()
        self.check()
        return True

    def give_up(self) -> bool:
        """Let the device end, though not all is done; return whether it has."""
        if self.is_busy and self.failure is None:
            self.note(RUN_FAILED, "the communicator was freed after a failure")
        return self._let_end()

    def _let_end(self) -> bool:
        """Let the device end after a failure; return whether it has ended."""

        def has_ended() -> bool:
            self.look()
            return not self.is_busy

        return poll_until(has_ended, time.monotonic() + _SECONDS_TO_END)


def _error(failure: Failure, rank: int) -> CollectiveError:
    """Return the error of a failure, for a rank."""
    is_own = failure.rank == rank
    why = failure.why if is_own else f"rank {failure.rank} says: {failure.why}"
    if failure.kind == RANK_DIED:
        return PeerFailed(why, (failure.dead,))
    return CollectiveTimeout(why) if failure.kind == GAVE_UP else CollectiveError(why)


class _Thread:
    """The thread of this process that looks at all communicators with devices.

    It keeps communicators whose device is busy, also if the program has dropped them.
    """

    def __init__(self) -> None:
        self._watches, self._busy, self._lock = WeakSet[Watch](), set[Watch](), threading.Lock()
        self._process, self._is_over = os.getpid(), threading.Event()
        self._relaxed = set[Driver]()
        self._thread = threading.Thread(target=self._work, daemon=True, name="collectives watch")
        if not jit.is_at_exit():
            atexit.register(self._end)
            self._thread.start()

    def add(self, watch: Watch) -> None:
        """Look at what a communicator leaves to its device."""
        with self._lock:
            self._watches.add(watch)

    def hold(self, watch: Watch) -> None:
        """Keep a communicator until its device is done."""
        with self._lock:
            self._busy.add(watch)

    def _all(self) -> list[Watch]:
        with self._lock:
            return list(self._watches)

    def _work(self) -> None:
        seconds = SELDOM
        while not self._is_over.wait(seconds):
            is_busy = [self._look(watch) for watch in self._all()]
            seconds = OFTEN if any(is_busy) else SELDOM

    def _look(self, watch: Watch) -> bool:
        """Look at one communicator; return whether to do so again soon.

        No error ends the thread.
        """
        try:
            if watch.driver not in self._relaxed and watch.driver is not None:
                self._relaxed.add(watch.driver)
                watch.driver.relax_thread()
            watch.look()
            is_busy = watch.advance_calls() or watch.is_busy
            with self._lock:
                (self._busy.add if is_busy or len(watch.held) else self._busy.discard)(watch)
            if not is_busy:
                watch.release()
        except BaseException:  # noqa: BLE001 - see above
            _log.exception("what a device does cannot be watched")
            return False
        return is_busy

    def _end(self) -> None:
        """Let the devices end before MPI does; a process that was forked has no device."""
        if os.getpid() != self._process:
            return
        for watch in self._all():
            is_known = watch.failure is not None
            try:
                watch.synchronize(None)
            except CollectiveError as error:
                if not is_known:
                    _log.warning("a call was not complete on the device: %s", error)
        self._is_over.set()
        self._thread.join(_SECONDS_TO_END)


_threads: list[_Thread] = []
_making = threading.Lock()


def _thread() -> _Thread:
    with _making:
        if not _threads:
            _threads.append(_Thread())
        return _threads[0]


def _forget() -> None:
    """Forget the thread in a process that was forked, where it does not exist."""
    global _making
    _making = threading.Lock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
