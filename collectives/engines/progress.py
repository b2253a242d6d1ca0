"""A thread that advances started calls while the program computes.

MPI transfers large messages only inside calls of MPI, and reductions continue only inside calls of
this library.  Without the thread, calls continue only in the program's own `test` and `wait`.  The
thread needs a processor: if all are busy, it takes time from the computation.  A program that waits
for a call takes it over from the thread, so the two never compete for the interpreter lock.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from functools import cache

from collectives.arrays import jit
from collectives.engines.transport import PendingCall, back_off

_log = logging.getLogger(__name__)

_LONG = 0.1  # seconds that a call may wait in compiled code at a time, if it is the only one
_SHORT = 1e-4  # the same if there are others
_LINGER = 0.5  # seconds without work after which the thread sleeps until it is woken
# Seconds between two looks for work.  A look takes the interpreter lock from the program, so the
# intervals grow while the program waits for all its calls before they are due.
_SHORTEST_NAP, _LONGEST_NAP = 1e-3, 16e-3


class _Entry:
    """A call, None once it is forgotten, and the time from which to advance it."""

    __slots__ = ("call", "since")

    def __init__(self, call: PendingCall, since: float) -> None:
        self.call: PendingCall | None = call
        self.since = since


class ProgressThread:
    """A thread that advances calls until each is done, or until the program waits for it.

    It sleeps when it has no calls.
    """

    def __init__(self) -> None:
        self._woken = threading.Event()
        self._calls: list[_Entry] = []
        self._is_stopped = False
        self._is_asleep = False
        self._thread = threading.Thread(target=self._work, name="collectives", daemon=True)
        if jit.is_at_exit():  # nobody would stop it before MPI is finalized
            self._is_stopped = True
        else:
            self._thread.start()
            atexit.register(self.stop)  # before MPI is finalized

    def adopt(self, call: PendingCall, delay: float = 0.0) -> None:
        """Advance a call, unless the program waits for it within `delay` seconds."""
        self._calls.append(_Entry(call, time.monotonic() + delay if delay else 0.0))
        if self._is_asleep or not delay:
            self._woken.set()

    def hasten(self, call: PendingCall) -> None:
        """Advance a call that was adopted from now on, without its delay."""
        for entry in list(self._calls):
            if entry.call is call:
                entry.since = 0.0
        self._woken.set()

    @property
    def is_stopped(self) -> bool:
        """Whether the thread has ended, so that calls make progress only while they are awaited."""
        return self._is_stopped

    @property
    def calls(self) -> list[PendingCall]:
        """The calls that the thread advances."""
        calls = [entry.call for entry in list(self._calls)]  # `forget` may change an entry
        return [call for call in calls if call is not None]

    def forget(self, call: PendingCall) -> None:
        """Drop the references to a call that is done, so that its arrays can be freed."""
        for entry in list(self._calls):
            if entry.call is call:
                entry.call = None

    def stop(self) -> None:
        """End the thread.  The program can still wait for calls that are not done."""
        self._is_stopped = True
        for call in self.calls:
            call.is_awaited = True
        self._woken.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _work(self) -> None:
        num_tries, idle_since, nap = 0, time.monotonic(), _SHORTEST_NAP
        while not self._is_stopped:
            self._woken.clear()  # a call that is adopted from now on sets it again
            if self._calls:
                idle_since = time.monotonic()
            if due := self._due():
                nap = _SHORTEST_NAP
                num_tries = 0 if self._progressed(due) else num_tries + 1
                if num_tries:
                    back_off(num_tries)
            else:
                self._sleep(time.monotonic() - idle_since, nap)
                nap = min(2 * nap, _LONGEST_NAP)

    def _due(self) -> list[_Entry]:
        """Return the calls to advance now; drop those that are done, awaited or listed twice."""
        seen = set[int]()
        for entry in list(self._calls):
            if not _is_wanted(entry.call) or id(entry.call) in seen:
                self._calls.remove(entry)
            seen.add(id(entry.call))
        now = time.monotonic()
        return [entry for entry in list(self._calls) if entry.since <= now]

    def _progressed(self, entries: list[_Entry]) -> bool:
        """Advance each call; return whether any moved."""
        seconds = _LONG if len(entries) == 1 else _SHORT
        return sum(_advanced(entry, seconds) for entry in entries) > 0

    def _sleep(self, idle: float, nap: float) -> None:
        """Sleep for `nap` seconds; after a long time without work, until `adopt` wakes the thread.

        Waking the thread takes longer than a short call, so it first only naps.  `adopt` appends
        its call before it reads `_is_asleep`, and this method sets `_is_asleep` before it reads the
        list, so no call is missed.
        """
        self._is_asleep = idle > _LINGER
        if not (self._is_asleep and self._calls):
            self._woken.wait(None if self._is_asleep else nap)
        self._is_asleep = False


def _is_wanted(call: PendingCall | None) -> bool:
    return call is not None and not call.is_done and not call.is_awaited


def _advanced(entry: _Entry, seconds: float) -> bool:
    """Advance a call; return whether it moved.

    No error may end the thread, which serves all communicators.  A call keeps its own error for
    the wait; after any other, only the waits of the program advance it.
    """
    try:
        return entry.call is not None and entry.call.progress(seconds)
    except KeyboardInterrupt:  # an operator raised it, and the call keeps it
        return False
    except BaseException:  # noqa: BLE001 - see above
        _log.exception("the thread no longer advances a call, because of an unexpected error")
        entry.call = None
        return False


def calls_in_progress() -> list[PendingCall]:
    """Return the calls that the thread of this process, if there is one, has not completed."""
    return shared_progress_thread().calls if shared_progress_thread.cache_info().currsize else []


@cache
def shared_progress_thread() -> ProgressThread:
    """Return the thread of this process, which all communicators share."""
    return ProgressThread()
