"""A thread that lets what was started go on while the program computes.

MPI moves large messages, and we combine what they bring, only while somebody calls it.  With this
thread that is not left to the program's own calls of `test` and `wait`.  It needs a processor to
run on: where every one is busy computing, it takes its share from them.
"""

from __future__ import annotations

import atexit
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from collectives.transport import back_off


class Progressing(Protocol):
    """What the thread needs to know of a plan."""

    @property
    def is_active(self) -> bool:
        """Whether there is something left to do."""

    def progress(self) -> bool:
        """Go as far as possible without waiting; whether anything moved.

        Raises nothing but KeyboardInterrupt.
        """


class Adopted(NamedTuple):
    """A plan that the thread carries on, and what is done when it is over."""

    plan: Progressing
    over: Future[None]


class ProgressThread:
    """Progresses what it is given until that is complete.  It sleeps when it has nothing to do.

    `lock` is held while it works on a plan.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._arrivals: SimpleQueue[Adopted | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="collectives", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before MPI is finalized

    def adopt(self, plan: Progressing) -> Future[None]:
        """Let a plan go on; the future is done when the plan is complete or has failed."""
        adopted = Adopted(plan, Future())
        self._arrivals.put(adopted)
        return adopted.over

    def stop(self) -> None:
        """End the thread, also if something is still under way."""
        self._arrivals.put(None)
        self._thread.join()
        atexit.unregister(self.stop)

    def _work(self) -> None:
        under_way: list[Adopted] = []
        num_tries = 0
        while True:
            try:
                arrival = self._arrivals.get(block=not under_way)
                if arrival is None:
                    return
                under_way.append(arrival)
                del arrival  # or it would be kept for as long as the thread then sleeps
            except Empty:
                pass
            under_way, has_moved = self._progressed(under_way)
            num_tries = 0 if has_moved else num_tries + 1
            if under_way and not has_moved:
                back_off(num_tries)

    def _progressed(self, under_way: list[Adopted]) -> tuple[list[Adopted], bool]:
        """Let each go on; those that are not complete, and whether anything moved."""
        left, has_moved = [], False
        for adopted in under_way:
            with self.lock:
                with suppress(KeyboardInterrupt):  # raised by an operator: the plan has kept it
                    has_moved |= adopted.plan.progress()
                is_active = adopted.plan.is_active  # before anybody can start it again
            if is_active:
                left.append(adopted)
            else:
                adopted.over.set_result(None)
        return left, has_moved


@cache
def the_thread() -> ProgressThread:
    """The one of this process, which all its communicators share."""
    return ProgressThread()
