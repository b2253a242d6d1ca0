"""Runs of contenders that may hang, or fail on some ranks: such a one is left out from then on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from mpi4py import MPI

from collectives.arrays.backends import Backend

T = TypeVar("T")
SECONDS = 20.0  # in which a function must be done
END_SECONDS = 10.0  # in which a function that was not done in time must end after an abort


def late() -> str:
    """Return what is said of a function that was not done in time."""
    return f"it was not done after {SECONDS:g} s"


class StuckError(Exception):
    """What hangs cannot be ended, so the job must be."""


class InThread:
    """A function that runs in a thread of its own, on the stream that is current here."""

    def __init__(self, backend: Backend, function: Callable[[], object]) -> None:
        self.value: object = None
        self.error: Exception | None = None
        self._backend, self._function = backend, function
        self._stream = backend.current_stream()
        self._thread = Thread(target=self._run, daemon=True, name="may hang")
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._backend.on_stream(self._stream):
                self.value = self._function()
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            self.error = error

    def has_ended(self, seconds: float) -> bool:
        """Return whether it ends within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class Guard:
    """Lets one contender run, until it fails on any rank.

    Parameters
    ----------
    name : str
        Of the contender.
    backend : Backend
        What serves its arrays.
    abort : function
        Lets what hangs on this rank end, or does nothing if nothing can.

    Attributes
    ----------
    why : str
        Why it is left out, the same on all ranks; "" while it takes part.
    """

    why = ""

    def __init__(self, name: str, backend: Backend, abort: Callable[[], object]) -> None:
        self._name, self._backend, self._abort = name, backend, abort
        self._world = MPI.COMM_WORLD.Dup()  # a call on COMM_WORLD may be what hangs

    def attempt(self, function: Callable[[], T], *, is_on_host: bool = False) -> T | None:
        """Run a function on all ranks; None if it raises, or is too slow, on any of them.

        Raises StuckError on all ranks if it is too slow and cannot be ended.  `is_on_host`: it puts
        nothing on the device, so that it may hang for ever without harm.
        """
        running = InThread(self._backend, function)
        self.leave_out(self._failure(running))
        if not self.why:
            return running.value  # type: ignore[return-value]
        if not is_on_host:
            self._end(running)
        return None

    def leave_out(self, why: str) -> None:
        """Leave it out if some rank has a reason.  All ranks call this."""
        reasons = self._world.allgather(why)
        if len(set(reasons)) == 1:
            self.why = why
            return
        # A rank that fails may be the reason why others are not done in time.
        said = next((reason for reason in reasons if reason not in ("", late())), late())
        self.why = f"rank {reasons.index(said)}: {said}"

    def free(self) -> None:
        """Free what the ranks agree by."""
        self._world.Free()

    def _failure(self, running: InThread) -> str:
        if not running.has_ended(SECONDS):
            return late()
        error = running.error
        return "" if error is None else " ".join(f"{type(error).__name__}: {error}".split())

    def _end(self, running: InThread) -> None:
        """Abort; raise StuckError if that does not end what runs on some rank."""
        aborting = InThread(self._backend, self._abort)
        is_over = aborting.has_ended(END_SECONDS) and running.has_ended(END_SECONDS)
        if not all(self._world.allgather(is_over)):
            raise StuckError(f"{self._name} hangs and cannot be ended, so the job is ({self.why})")
