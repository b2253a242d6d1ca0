"""Ends calls at their deadlines, also those that nobody waits for."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import collectives

_log = logging.getLogger(__name__)


@dataclass(order=True)
class Limit:
    """When a call ends at the latest, and after how many seconds this is."""

    deadline: float
    seconds: float
    call: collectives.Work[Any] = field(compare=False)


class _Watch:
    """A thread that ends calls at their deadlines, so that futures of these calls complete."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: list[Limit] = []
        threading.Thread(target=self._work, name="collectives deadlines", daemon=True).start()

    def add(self, limit: Limit) -> None:
        """End a call at its deadline if it is not done."""
        with self._changed:
            self._limits = [other for other in self._limits if not other.call.is_done]
            heapq.heapify(self._limits)
            heapq.heappush(self._limits, limit)
            if self._limits[0] is limit:
                self._changed.notify()

    def _work(self) -> None:
        while True:
            limit = self._next()
            try:
                limit.call.expire(limit.seconds)
            except BaseException:  # noqa: BLE001 - it may not end the thread, which serves all groups
                _log.exception("an unexpected error at the deadline of a call")

    def _next(self) -> Limit:
        """Wait for the next deadline, and return it."""
        with self._changed:
            while not self._limits or self._limits[0].deadline > time.monotonic():
                rest = self._limits[0].deadline - time.monotonic() if self._limits else None
                self._changed.wait(rest)
            return heapq.heappop(self._limits)


@cache
def watch() -> _Watch:
    """Return the thread of this process that ends calls."""
    return _Watch()
