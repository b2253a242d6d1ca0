"""The executions of a communicator that can run again without a meeting of the ranks."""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakValueDictionary

MOST_CALLS = 8  # that are kept: each has a slot of the memory in which the ranks meet


class Keepable(Protocol):
    """An execution that can run again without a meeting."""

    def forget(self) -> None:
        """Give its slot back; before the next run the ranks meet."""

    def detach(self) -> None:
        """Release the arrays."""


class Kept:
    """The executions that are kept and do not run: those of plans, and of calls of late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[Keepable, None] = {}  # in the order of their use
        self._plans = WeakValueDictionary[int, Keepable]()  # not to keep what a program drops

    def add_plan(self, number: int, execution: Keepable) -> None:
        """Keep the execution of a plan, until it is freed."""
        with self._lock:
            self._plans[number] = execution

    def add_call(self, execution: Keepable) -> None:
        """Keep the execution of a call that is complete; forget the oldest one if needed."""
        with self._lock:
            self._calls[execution] = None
            if len(self._calls) > MOST_CALLS:
                oldest = next(iter(self._calls))
                del self._calls[oldest]
                oldest.forget()

    def take_call(self, execution: Keepable) -> bool:
        """Return whether the execution of a call is kept; then it no longer is, since it begins."""
        with self._lock:
            return self._calls.pop(execution, self) is None

    def free_plan(self, number: int) -> None:
        """Forget a plan."""
        with self._lock:
            execution = self._plans.pop(number, None)
            if execution is not None:
                execution.forget()
                execution.detach()

    def forget_calls(self) -> None:
        """Forget all calls that do not run."""
        with self._lock:
            for execution in self._calls:
                execution.forget()
            self._calls.clear()

    def free(self) -> None:
        """Forget all."""
        self.forget_calls()
        with self._lock:
            for execution in list(self._plans.values()):
                execution.forget()
            self._plans.clear()
