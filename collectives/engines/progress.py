"""A thread that lets what was started go on while the program computes.

MPI moves large messages, and we combine what they bring, only while somebody calls it.  With this
thread that is not left to the program's own calls of `test` and `wait`.  It needs a processor to
run on: where every one is busy computing, it takes its share from them.  Whoever waits for a call
takes it from the thread, so the two never compete for the interpreter.
"""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from functools import cache

from collectives.engines.transport import CallUnderWay, back_off

_LONG = 0.1  # seconds that a call may wait in compiled code in one go, if it is the only one
_SHORT = 1e-4  # the same if there are others
_LINGER = 0.5  # seconds without work after which the thread sleeps until it is woken
# Seconds between two looks for work that nobody woke it for.  A look takes the interpreter from the
# program, so there are fewer as long as all is waited for before it is due.
_SHORTEST_NAP, _LONGEST_NAP = 1e-3, 16e-3


class ProgressThread:
    """Makes go on what it is given until that is over, or somebody waits for it.

    It sleeps when it has nothing to do.
    """

    def __init__(self) -> None:
        self._woken = threading.Event()
        self._calls: list[tuple[CallUnderWay, float]] = []  # and from when on
        self._is_stopped = False
        self._is_asleep = False
        self._thread = threading.Thread(target=self._work, name="collectives", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before MPI is finalized

    def adopt(self, call: CallUnderWay, delay: float = 0.0) -> None:
        """Make a call go on, if after `delay` seconds nobody waits for it."""
        self._calls.append((call, time.monotonic() + delay if delay else 0.0))
        if self._is_asleep or not delay:
            self._woken.set()

    @property
    def calls(self) -> list[CallUnderWay]:
        """What it makes go on."""
        return [call for call, _ in list(self._calls)]

    def stop(self) -> None:
        """End the thread, also if something is still under way; others may still wait for that."""
        self._is_stopped = True
        for call, _ in list(self._calls):
            call.is_awaited = True
        self._woken.set()
        self._thread.join()
        atexit.unregister(self.stop)

    def _work(self) -> None:
        num_tries, idle_since, nap = 0, time.monotonic(), _SHORTEST_NAP
        while not self._is_stopped:
            self._woken.clear()  # whoever gives us a call from now on wakes us
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

    def _due(self) -> list[CallUnderWay]:
        """What is to go on now; what is over, awaited or given twice is forgotten."""
        seen = set[int]()
        for entry in list(self._calls):
            if entry[0].is_over or entry[0].is_awaited or id(entry[0]) in seen:
                self._calls.remove(entry)
            seen.add(id(entry[0]))
        now = time.monotonic()
        return [call for call, since in list(self._calls) if since <= now]

    def _progressed(self, calls: list[CallUnderWay]) -> bool:
        """Let each go on; whether anything moved."""
        seconds, has_moved = _LONG if len(calls) == 1 else _SHORT, False
        for call in calls:
            with suppress(KeyboardInterrupt):  # raised by an operator: the call has kept it
                has_moved |= call.progress(seconds)
        return has_moved

    def _sleep(self, idle: float, nap: float) -> None:
        """A nap, or without work for long until somebody wakes us: waking takes longer than a call.

        Whoever gives us a call looks whether we sleep after it is in the list, and we look into the
        list after we have said that we sleep.
        """
        self._is_asleep = idle > _LINGER
        if not (self._is_asleep and self._calls):
            self._woken.wait(None if self._is_asleep else nap)
        self._is_asleep = False


def under_way() -> list[CallUnderWay]:
    """What the thread of this process, if there is one, has not come to the end of."""
    return the_thread().calls if the_thread.cache_info().currsize else []


@cache
def the_thread() -> ProgressThread:
    """The one of this process, which all its communicators share."""
    return ProgressThread()
