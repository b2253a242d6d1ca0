"""MPI requests for calls of the library, which can be used together with MPI's own requests.

A call in progress is a generalized request of MPI.  `Wait` and `Test` of these requests advance the
call; the library's thread advances calls that wait in MPI's own functions.  When the result is in
the caller's buffer, the request is marked complete in MPI.  A call that failed is completed too,
and waiting for it raises.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol

from mpi4py import MPI

from collectives.engines import Action, ProgressThread, call_all, shared_progress_thread
from collectives.errors import CollectiveTimeout
from collectives.runtime import Plan

THREAD_DELAY = 2e-4  # seconds before the thread advances a call: most are waited for at once
_wait = MPI.Request.Wait
_is_active = MPI.Request.__bool__  # whether a request was started and not waited for
_HANDLE = ctypes.c_uint64 if MPI._sizeof(MPI.Request) == 8 else ctypes.c_uint32


def progress_thread() -> ProgressThread | None:
    """Return the thread that advances requests; None if MPI does not support threads."""
    return shared_progress_thread() if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None


def require_thread() -> ProgressThread:
    """Return the thread that advances requests.

    Raises RuntimeError if MPI does not support threads.
    """
    thread = progress_thread()
    if thread is None:
        raise RuntimeError(
            "non-blocking and persistent collectives need a thread and MPI_THREAD_MULTIPLE; "
            "this MPI was started without it"
        )
    return thread


class Started(Protocol):
    """A Work or a Plan that was started."""

    def test(self) -> bool:
        """Advance it without waiting, and return whether it is complete.  Raises its error."""

    def wait(self) -> object:
        """Wait until it is complete.  Raises its error."""

    def add_done_callback(self, action: Action) -> None:
        """Call `action` when it is complete or has failed; at once if it already is."""


class Operation:
    """A call in progress, and its generalized request of MPI.

    Parameters
    ----------
    started : Started
        What was started.
    store : sequence of Action
        Actions that copy the result to the caller's buffer.
    release : sequence of Action
        Actions at the end.
    pending_operations : set of Operation
        The set that contains the operation until it is complete.

    Attributes
    ----------
    request : MPI.Grequest
        The request of MPI.
    """

    error: BaseException | None = None
    is_asked = False  # by a request of this module, which raises the error itself

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
        if require_thread().is_stopped:  # MPI's own waits would wait for ever
            self.wait()

    def _complete(self) -> None:
        """Store the result of a call that is done, and complete the request.

        The thread that completes the call runs this.
        """
        assert self._started is not None, "a call is completed once"
        try:
            self._started.test()
            for action in self._store:
                action()
        except BaseException as error:  # noqa: BLE001 - the wait raises it
            self.error = error
        # Avoid a reference cycle: what was started refers to this operation.
        self._started, self._store = None, ()
        self._pending_operations.discard(self)
        if self._release:
            self._run_done_callbacks()
        self.request.Complete()

    def add_done_callback(self, action: Action) -> None:
        """Call `action` when the call is complete; at once if it already is."""
        self._release.append(action)
        if self._started is None:
            self._run_done_callbacks()

    def _run_done_callbacks(self) -> None:
        """Call each action once, even if several threads get here."""
        with suppress(IndexError):  # another thread has taken the last one
            while self._release:
                action = self._release.pop(0)
                try:
                    action()
                except BaseException as error:  # noqa: BLE001 - the wait raises it
                    self.error = self.error or error

    def wait(self) -> None:
        """Wait until the call is done.  An error is kept for `_query`.

        Raises CollectiveTimeout after the time limit; then the call continues.
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
        """Advance the call without waiting."""
        if (started := self._started) is not None:
            with suppress(Exception):
                started.test()

    def _query(self, status: MPI.Status) -> None:
        """Raise the error of the call.  MPI calls this in a wait for the complete request."""
        if self.error is not None and not self.is_asked:
            raise MPI.Exception(_error_code(self.error))


def when_all_done(operations: Sequence[Operation], action: Action) -> None:
    """Call `action` when all operations are complete; at once if they already are."""
    if operations:
        first, *others = operations
        first.add_done_callback(partial(when_all_done, others, action))
    else:
        action()


class _LibraryRequest:
    """The waits and tests of both kinds of requests.

    It is a mix-in for a request class of MPI.  It cannot derive from MPI.Request itself, because
    then Python cannot construct a PersistentRequest.
    """

    _operation: Operation | None = None

    def Wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until the call, if there is one, is complete.  Raises its error."""
        if self._operation is not None:
            self._operation.wait()
        return self._ask(_wait, status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the call, if there is one, is complete.  Raises its error."""
        if self._operation is not None:
            self._operation.test()
        return bool(self._ask(MPI.Request.Test, status))

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Call `Wait`, under the name of mpi4py's pickled calls.  Returns None."""
        self.Wait(status)

    def _ask(self, question: Callable[..., Any], status: MPI.Status | None) -> Any:
        """Call a function of MPI; if the call is complete and has failed, raise its error."""
        operation = self._operation
        if operation is None:
            return question(self, status)
        operation.is_asked = True
        try:
            answer = question(self, status)
        finally:
            operation.is_asked = False
        if answer and operation.error is not None:
            reason, operation.error = operation.error, None
            raise reason
        return answer


class Request(_LibraryRequest, MPI.Grequest):
    """The request of a non-blocking collective."""

    @classmethod
    def of(cls, operation: Operation) -> Request:
        """Return the request of an operation."""
        request = cls(operation.request)
        request._operation = operation
        return request


class PersistentRequest(_LibraryRequest, MPI.Prequest):
    """The request of a persistent collective, which can be started many times.

    `Start` starts it, and `PersistentRequest.Startall` starts several, including MPI's own.
    `MPI.Prequest.Startall` cannot start it, because MPI knows only the runs and not the plan.
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
        """Start a run, which reads the buffers anew.  Raises MPI.Exception during a run."""
        if self._plan is None or _is_active(self):
            raise MPI.Exception(MPI.ERR_REQUEST)
        if self._load:
            call_all(self._load)
        self._plan.start()
        self._operation = Operation(self._plan, self._store, (), self._pending_operations)
        # MPI makes a new request for every run; this object takes over its handle.
        self._handle.value = self._operation.request.handle

    @classmethod
    def Startall(cls, requests: Sequence[MPI.Prequest]) -> None:
        """Start all requests, including MPI's own."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Free the plan, after the current run if there is one."""
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
        """Call `Free` unless it was called before."""
        if self._plan is not None:
            self.Free()


def _error_code(error: BaseException) -> int:
    """Return an error code of MPI with the text of the error, until the next error of its type."""
    if isinstance(error, MPI.Exception):
        return error.Get_error_code()
    code = _code_of(type(error).__name__)
    MPI.Add_error_string(code, f"{type(error).__name__}: {error}"[: MPI.MAX_ERROR_STRING - 1])
    return code


@cache
def _code_of(_: str) -> int:
    """Return a new error code for errors of this name; MPI has few, and they cannot be freed."""
    return MPI.Add_error_code(MPI.ERR_OTHER)
