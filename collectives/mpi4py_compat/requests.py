"""MPI requests of what the library does: they stand beside MPI's own in every list.

A call under way is a generalised request of MPI.  `Wait` and `Test` of our requests make the call
go on themselves; the library's thread does so for those who wait through MPI's own functions.  When
the result is in its place MPI is told that the request is complete.  A call that failed completes
too, and waiting for it raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from mpi4py import MPI

from collectives.engines import Action, ProgressThread, call_all, shared_progress_thread
from collectives.errors import CollectiveTimeout
from collectives.runtime import Plan

THREAD_DELAY = 2e-4  # seconds before the thread makes a call go on: most are waited for at once
_wait = MPI.Request.Wait
_is_active = MPI.Request.__bool__  # a request that was started, and for which nobody has waited
_HANDLE = ctypes.c_uint64 if MPI._sizeof(MPI.Request) == 8 else ctypes.c_uint32


def progress_thread() -> ProgressThread | None:
    """What carries requests on; None where MPI does not allow a thread."""
    return shared_progress_thread() if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None


def require_thread() -> ProgressThread:
    """The thread.  Raises RuntimeError where there can be none."""
    thread = progress_thread()
    if thread is None:
        raise RuntimeError(
            "non-blocking and persistent collectives are carried on by a thread, which needs "
            "MPI_THREAD_MULTIPLE; this MPI started without"
        )
    return thread


class Started(Protocol):
    """What was started: a Work, or a Plan."""

    def test(self) -> bool:
        """Go on without waiting; whether it is complete.  Raises what it failed with."""

    def wait(self) -> object:
        """Make it go on until it is complete.  Raises what it failed with."""

    def add_done_callback(self, action: Action) -> None:
        """Do this when it is complete or has failed; now if that has happened."""


class Operation:
    """One call under way, and the request that MPI knows it by.

    `store`: what brings the result to its place.  `release`: what is done at the very end.
    `pending_operations`: it is among these until it is over.
    """

    error: BaseException | None = None

    def __init__(
        self,
        started: Started,
        store: Sequence[Action],
        release: Sequence[Action],
        pending_operations: set[Operation],
    ) -> None:
        self._started: Started | None = started
        self._store, self._release, self._pending_operations = store, [*release], pending_operations
        self.request = MPI.Grequest.Start(self._query)
        pending_operations.add(self)
        started.add_done_callback(self._complete)

    def _complete(self) -> None:
        """The call is over: bring its result to its place, and complete the request.

        Done by whoever has made the call go on to its end: the thread, or who waits.
        """
        assert self._started is not None, "it is over once"
        try:
            self._started.test()
            for action in self._store:
                action()
        except BaseException as error:  # noqa: BLE001 - kept for whoever waits
            self.error = error
        # What was started knows this operation; if that were mutual, both would stay a while.
        self._started, self._store = None, ()
        self._pending_operations.discard(self)
        if self._release:
            self._run_done_callbacks()
        self.request.Complete()

    def add_done_callback(self, action: Action) -> None:
        """Do this when the call is complete; now if it is."""
        self._release.append(action)
        if self._started is None:
            self._run_done_callbacks()

    def _run_done_callbacks(self) -> None:
        """What was asked for, each once, whoever else does it at the same time."""
        with suppress(IndexError):  # another has taken the last
            while self._release:
                action = self._release.pop(0)
                try:
                    action()
                except BaseException as error:  # noqa: BLE001 - kept for whoever waits
                    self.error = self.error or error

    def wait(self) -> None:
        """Make the call go on to its end.  What it fails with is kept for whoever asks MPI.

        Raises CollectiveTimeout if it goes on, and may be waited for again.
        """
        if (started := self._started) is not None:
            try:
                started.wait()
            except CollectiveTimeout:
                if self._started is not None:
                    raise
            except Exception:  # noqa: BLE001 - see above
                pass

    def test(self) -> None:
        """Make the call go on without waiting."""
        if (started := self._started) is not None:
            with suppress(Exception):
                started.test()

    def _query(self, status: MPI.Status) -> None:
        """Called by MPI when somebody waits for the complete request."""
        if self.error is not None:
            raise MPI.Exception(_error_code(self.error))


def when_all_done(operations: Sequence[Operation], action: Action) -> None:
    """Do this when all of them are complete; now if they are."""
    if operations:
        first, *others = operations
        first.add_done_callback(partial(when_all_done, others, action))
    else:
        action()


class _LibraryRequest:
    """What both kinds of request do when somebody waits for their operation.

    It stands before a request of MPI.  Deriving it from MPI.Request would tell mypy, but then
    Python refuses to make a PersistentRequest.
    """

    _operation: Operation | None = None

    def Wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until the call is complete, if one is under way; raises what it failed with."""
        if self._operation is not None:
            self._operation.wait()
        return self._ask(_wait, status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether no call is under way any more; raises what it failed with."""
        if self._operation is not None:
            self._operation.test()
        return bool(self._ask(MPI.Request.Test, status))

    def wait(self, status: MPI.Status | None = None) -> Any:
        """The same, in the spelling of mpi4py's pickled calls; returns None."""
        self.Wait(status)

    def _ask(self, question: Callable[..., Any], status: MPI.Status | None) -> Any:
        """Ask MPI, and raise in the library's own words what it knows as a failure."""
        try:
            return question(self, status)
        except MPI.Exception as error:
            if self._operation is None or self._operation.error is None:
                raise
            reason, self._operation.error = self._operation.error, None
            raise reason from error


class Request(_LibraryRequest, MPI.Grequest):
    """A collective call under way."""

    @classmethod
    def of(cls, operation: Operation) -> Request:
        """The request to hand out."""
        request = cls(operation.request)
        request._operation = operation
        return request


class PersistentRequest(_LibraryRequest, MPI.Prequest):
    """A collective call to be started many times.

    `Start` it, or `PersistentRequest.Startall` some, MPI's own among them; `MPI.Prequest.Startall`
    cannot start it, for MPI knows only the runs and not the plan.
    """

    _plan: Plan | None

    def __new__(cls, *_: object) -> PersistentRequest:
        return super().__new__(cls)

    def __init__(
        self,
        plan: Plan,
        load: Sequence[Action],
        store: Sequence[Action],
        release: Sequence[Action],
        pending_operations: set[Operation],
    ) -> None:
        self._plan, self._load, self._store, self._release = plan, load, store, release
        self._pending_operations = pending_operations
        self._handle = _HANDLE.from_address(MPI._addressof(self))

    def __bool__(self) -> bool:
        return self._plan is not None

    def __eq__(self, other: object) -> bool:
        return self is other or (self._plan is None and bool(other == MPI.REQUEST_NULL))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def Start(self) -> None:
        """Begin a run, which reads the buffers afresh.  MPI.Exception while one is active."""
        if self._plan is None or _is_active(self):
            raise MPI.Exception(MPI.ERR_REQUEST)
        if self._load:
            call_all(self._load)
        self._plan.start()
        self._operation = Operation(self._plan, self._store, (), self._pending_operations)
        # MPI makes a new request for every run; this object stands for each in its turn.
        self._handle.value = self._operation.request.handle

    @classmethod
    def Startall(cls, requests: Sequence[MPI.Prequest]) -> None:
        """Start all of them, MPI's own as well."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Give the plan back, as soon as a run under way is complete."""
        if self._plan is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        if _is_active(self):
            super().Free()
        actions, self._plan = (self._plan.free, *self._release), None
        if self._operation is None:
            call_all(actions)
        else:
            for action in actions:
                self._operation.add_done_callback(action)

    def free(self) -> None:
        """Call `Free` unless that has been done."""
        if self._plan is not None:
            self.Free()


def _error_code(error: BaseException) -> int:
    """An error code of MPI whose text is that of the failure."""
    if isinstance(error, MPI.Exception):
        return error.Get_error_code()
    code = MPI.Add_error_code(MPI.ERR_OTHER)
    MPI.Add_error_string(code, f"{type(error).__name__}: {error}"[: MPI.MAX_ERROR_STRING - 1])
    return code
