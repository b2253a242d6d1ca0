"""MPI requests of what the library does: they stand beside MPI's own in every list.

A call under way is a generalised request of MPI.  The library's thread carries the call on and,
when its result is in its place, tells MPI that the request is complete; whatever waits for it, in
whatever order, then finds it so.  A call that failed completes too, and waiting for it raises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from mpi4py import MPI

from collectives.plan import Plan
from collectives.progress import ProgressThread, the_thread
from collectives.transport import Action, do


def progress_thread() -> ProgressThread | None:
    """What carries requests on; None where MPI does not allow a thread."""
    return the_thread() if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None


def needed_thread() -> ProgressThread:
    """The thread.  Raises RuntimeError where there can be none."""
    thread = progress_thread()
    if thread is None:
        raise RuntimeError(
            "non-blocking and persistent collectives are carried on by a thread, which needs "
            "MPI_THREAD_MULTIPLE; this MPI started without"
        )
    return thread


class Started(Protocol):
    """What was started, and is carried on by the thread: a Work, or a Plan."""

    def test(self) -> bool:
        """Whether it is complete; raises what it failed with."""

    def when_over(self, action: Action) -> None:
        """Do this when it is complete or has failed; now if that has happened."""


class Operation:
    """One call under way, and the request that MPI knows it by.

    `store`: what brings the result to its place.  `release`: what is done at the very end.
    """

    def __init__(
        self, started: Started, store: Sequence[Action], release: Sequence[Action] = ()
    ) -> None:
        self._started: Started | None = started
        self._store, self._release = store, list(release)
        self.error: BaseException | None = None
        self.is_active = True
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.request = MPI.Grequest.Start(self._query)
        started.when_over(self._complete)

    def _complete(self) -> None:
        """The call is over: bring its result to its place, and complete the request."""
        try:
            self._bring()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by whoever waits
            self.error = error
        with self._lock:
            self.is_active = False
            release, self._release = self._release, []
        try:
            do(release)
        except BaseException as error:  # noqa: BLE001
            self.error = self.error or error
        try:
            self.request.Complete()
        finally:
            self._is_over.set()

    def _bring(self) -> None:
        """Bring the result to its place, if the call has one."""
        started, store = self._started, self._store
        # What was started knows this operation; if that were mutual, both would stay for a while.
        self._started, self._store = None, ()
        assert started is not None, "it is over once"
        started.test()
        do(store)

    def at_the_end(self, action: Action) -> None:
        """Do this when the call is complete; now if it is."""
        with self._lock:
            if self.is_active:
                self._release.append(action)
                return
        action()

    def wait(self) -> None:
        """Sleep until the request is complete, where MPI would keep a processor busy."""
        self._is_over.wait()

    def _query(self, status: MPI.Status) -> None:
        """Called by MPI when somebody waits for the complete request."""
        if self.error is not None:
            raise MPI.Exception(_error_code(self.error))


def when_all_are_over(operations: Sequence[Operation], action: Action) -> None:
    """Do this when all of them are complete; now if they are."""
    if operations:
        first, *others = operations
        first.at_the_end(partial(when_all_are_over, others, action))
    else:
        action()


class _Awaited:
    """What both kinds of request do when somebody waits for their operation.

    It stands before a request of MPI, to which `super()` leads; mypy cannot know that.  Deriving it
    from MPI.Request would tell mypy, but then Python refuses to make a PersistentRequest.
    """

    _operation: Operation | None

    def Wait(self, status: MPI.Status | None = None) -> Any:
        """Wait until the call is complete, if one is under way; raises what it failed with."""
        if self._is_active and self._operation is not None:
            self._operation.wait()
        with _explained(self._operation):
            return super().Wait(status)  # type: ignore[misc]

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Whether no call is under way any more; raises what it failed with."""
        with _explained(self._operation):
            return super().Test(status)  # type: ignore[misc, no-any-return]

    def wait(self, status: MPI.Status | None = None) -> Any:
        """The same, in the spelling of mpi4py's pickled calls; returns None."""
        self.Wait(status)

    @property
    def _is_active(self) -> bool:
        """Whether it was started and nobody has waited for it since."""
        return bool(super().__bool__())  # type: ignore[misc]


class Request(_Awaited, MPI.Grequest):
    """A collective call under way."""

    @classmethod
    def of(cls, operation: Operation) -> Request:
        """The request to hand out."""
        request = cls(operation.request)
        request._operation = operation
        return request


class PersistentRequest(_Awaited, MPI.Prequest):
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
        under_way: WeakSet[Operation],
    ) -> None:
        self._plan, self._load, self._store, self._release = plan, load, store, release
        self._under_way = under_way
        self._operation: Operation | None = None

    def __bool__(self) -> bool:
        return self._plan is not None

    def __eq__(self, other: object) -> bool:
        return self is other or (self._plan is None and bool(other == MPI.REQUEST_NULL))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = object.__hash__

    def Start(self) -> None:
        """Begin a run, which reads the buffers afresh.  MPI.Exception while one is active."""
        if self._plan is None or self._is_active:
            raise MPI.Exception(MPI.ERR_REQUEST)
        do(self._load)
        self._plan.start()
        self._operation = Operation(self._plan, self._store)
        self._under_way.add(self._operation)
        # MPI makes a new request for every run; this object stands for each in its turn.
        run = self._operation.request
        ctypes.memmove(MPI._addressof(self), MPI._addressof(run), MPI._sizeof(run))

    @classmethod
    def Startall(cls, requests: Sequence[MPI.Prequest]) -> None:
        """Start all of them, MPI's own as well."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Give the plan back, as soon as a run under way is complete."""
        if self._plan is None:
            raise MPI.Exception(MPI.ERR_REQUEST)
        if self._is_active:
            super().Free()
        actions, self._plan = (self._plan.free, *self._release), None
        if self._operation is None:
            do(actions)
        else:
            for action in actions:
                self._operation.at_the_end(action)

    def free(self) -> None:
        """Call `Free` unless that has been done."""
        if self._plan is not None:
            self.Free()


@contextmanager
def _explained(operation: Operation | None) -> Iterator[None]:
    """Raise in the library's own words what MPI knows as the failure of a request."""
    try:
        yield
    except MPI.Exception as error:
        if operation is None or operation.error is None:
            raise
        reason, operation.error = operation.error, None
        raise reason from error


def _error_code(error: BaseException) -> int:
    """An error code of MPI whose text is that of the failure."""
    if isinstance(error, MPI.Exception):
        return error.Get_error_code()
    code = MPI.Add_error_code(MPI.ERR_OTHER)
    MPI.Add_error_string(code, f"{type(error).__name__}: {error}"[: MPI.MAX_ERROR_STRING - 1])
    return code
