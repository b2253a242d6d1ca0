"""Two computations of a rank take turns: where one waits for a message, the other goes on.

DeepSeek-AI 2024 (DualPipe): while one micro-batch goes forward, another goes backward, and each
hides what the other sends.  Each of the two runs in a thread of its own, so that no layer has to be
written for this; but only one of them runs at a time, and the only places where it hands over are
those that the program names.  So all ranks with the same layers make their calls in the same order.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial

from parallel.accounts.monitor import PhaseFunction
from parallel.actions import Action


class Ended(BaseException):
    """Raised in a coroutine that nobody will resume, so that its thread ends."""


class Coroutine:
    """A function that runs in a thread of its own, while another thread waits in `resume`.

    It runs in a copy of the context (`contextvars`) in which it is resumed first.  MPI is called in
    that thread, which `may_change_threads` must allow.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self.is_done = False
        self._function = function
        self._resumed, self._suspended = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._must_end = self._is_running = False

    def resume(self) -> None:
        """Let the function go on until it ends or calls `suspend`.  Raises the error of it."""
        if self._thread is None:
            run = partial(copy_context().run, self._run)
            self._thread = threading.Thread(target=run, name="turn", daemon=True)
            self._thread.start()
        else:
            self._resumed.release()
        self._is_running = True
        self._suspended.acquire()  # a signal may end this early
        self._is_running = False
        if (error := self._error) is not None:
            self._error = None
            raise error

    def suspend(self) -> None:
        """Wait until `resume` is called again; the function itself calls this."""
        self._suspended.release()
        self._resumed.acquire()
        if self._must_end:
            raise Ended

    def close(self) -> None:
        """End the function where it is suspended.  If it is not, it ends when it suspends."""
        self._must_end = True
        self._resumed.release()
        if self._thread is not None and not self._is_running:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._function()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again by `resume`
            self._error = error
        finally:
            self.is_done = True
            self._suspended.release()


class Side:
    """The actions of one computation, each with its place among those of both."""

    def __init__(self, actions: Sequence[tuple[int, Action]], run: Callable[[Side], object]):
        self.actions = actions
        self.place, self.action = actions[0]
        self.began = 0.0  # when it began this action, or went on with it
        self.is_blocked = False  # until all actions before this one are done
        self.coroutine = Coroutine(partial(run, self))

    def can_go_on(self, num_done: int) -> bool:
        """Return whether it has something to do once so many actions of both are done."""
        return not self.coroutine.is_done and (not self.is_blocked or self.place <= num_done)


class Turns:
    """The two sides of a slot in which a forward and a backward overlap.

    Outside of a slot, `pass_on` and `in_order` do nothing.

    Parameters
    ----------
    record : function
        Called with an action, and when this rank began and ended to do it, or a part of it.
    """

    def __init__(self, record: Callable[[Action, float, float], object]) -> None:
        self._record = record
        self._sides: list[Side] = []
        self._running: Side | None = None
        self._num_done = 0

    @property
    def is_in_slot(self) -> bool:
        """Whether a side is running."""
        return self._running is not None

    def run(
        self, actions: Sequence[Action], do: Callable[[Action], object], phase: PhaseFunction
    ) -> None:
        """Call `do` with all `actions`: those of each phase in order, those of two by turns.

        Each turn is in the phase of its actions, which `phase` marks.  If an action fails, the
        other side ends where it waits, and the error is raised.
        """
        by_phase: dict[str, list[tuple[int, Action]]] = {}
        for place, action in enumerate(actions):
            by_phase.setdefault(action.phase, []).append((place, action))
        self._num_done = 0
        self._sides = [Side(each, partial(self._do_all, do)) for each in by_phase.values()]
        try:
            while not all(side.coroutine.is_done for side in self._sides):
                for side in self._sides:
                    if side.can_go_on(self._num_done):
                        self._running = side
                        with phase(side.action.phase):
                            side.coroutine.resume()
        finally:
            for side in self._sides:
                side.coroutine.close()
            self._sides, self._running = [], None

    def _do_all(self, do: Callable[[Action], object], side: Side) -> None:
        for place, action in side.actions:
            side.place, side.action = place, action
            side.began = time.perf_counter()
            do(action)
            self.in_order()
            self._record(action, side.began, time.perf_counter())
            self._num_done += 1

    def pass_on(self) -> None:
        """Let the other side go on if it can, until it waits itself."""
        side = self._running
        if side is not None and any(
            other is not side and other.can_go_on(self._num_done) for other in self._sides
        ):
            self._suspend(side)

    def in_order(self) -> None:
        """Let the other side go on until all actions before this one are done.

        Then what a rank keeps changes in the order of the actions, although these overlap.
        """
        if (side := self._running) is not None:
            side.is_blocked = True
            while self._num_done < side.place:
                self._suspend(side)
            side.is_blocked = False

    def _suspend(self, side: Side) -> None:
        self._record(side.action, side.began, time.perf_counter())
        side.coroutine.suspend()
        side.began = time.perf_counter()


def may_change_threads() -> bool:
    """Return whether MPI, if it is used, can be called by one thread after another."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is None or mpi.Query_thread() >= mpi.THREAD_SERIALIZED
