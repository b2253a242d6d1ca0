"""Blocking calls on the same arrays of a device as the last call of their kind."""

from __future__ import annotations

from typing import Any
from weakref import ref

from collectives.arrays import Array, Arrays
from collectives.devices import OnDevice
from collectives.programs import CallSpec
from collectives.runtime.call_cache import MISFIT
from collectives.runtime.numbering import CallId, ConcurrentCall
from collectives.runtime.run import Run
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work, end_interrupted

_DONE, _MISFIT = 0, 5  # `executor.DONE` and `executor.MISFIT`


class CachedOnDevice:
    """A call that compiled code starts if its arrays are those of the last call.

    It keeps no arrays, and shares its run with the calls on other arrays.
    """

    num_bytes = 1024

    def __init__(
        self, session: Session, run: Run, spec: CallSpec, arrays: Arrays, tag: int
    ) -> None:
        execution = run.execution
        assert isinstance(execution, OnDevice)
        self._session, self._run, self._execution = session, run, execution
        self._spec, self._backend, self._tag = spec, arrays.backend, tag
        self._idle = session.runs.idle(spec, arrays.backend)
        self._x, self._out = (_nothing if x is None else ref(x) for x in arrays[1:])
        self._shapes = [None if x is None else x.shape for x in arrays[1:]]
        self._mark = execution.mark = object()
        self._max_wait = int(session.transport.max_wait * 1e9)

    def make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call; return MISFIT, without any effect, if the arrays are others."""
        if not self._are_same(x, out) or self._session.is_recorded:
            return MISFIT
        try:
            token = self._session.call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            return self._make(x, out, timeout)
        finally:
            self._session.call_token.append(token)

    def _are_same(self, x: Array | None, out: Array | None) -> bool:
        """Whether the arrays are those of the last run, and have the same shapes."""
        if x is not self._x() or out is not self._out() or self._execution.mark is not self._mark:
            return False
        return [None if each is None else each.shape for each in (x, out)] == self._shapes

    def _make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        try:
            self._idle.remove(self._run)
        except ValueError:
            return MISFIT
        execution, answer = self._execution, _MISFIT
        try:
            if self._session.devices.turns.is_free and execution.take():
                max_wait = 0 if self._session.transport.in_flight else self._max_wait
                answer = execution.run(0, 0, 0, max_wait)
            if answer not in (_DONE, _MISFIT):
                return self._continue(answer, x, out, timeout)
        except BaseException as error:
            end_interrupted(self._started_work(x, out), self._run, error)
            if self._run.execution is execution and not self._run.is_running:
                execution.forget()  # the run was complete, or has not begun
            raise
        self._idle.append(self._run)
        if answer == _MISFIT:
            return MISFIT
        execution.note_kept()
        if timeout is not None:
            execution.limit = self._session.limit(timeout)
        return out

    def _continue(
        self, answer: int, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        """Wait until the call is complete."""
        session, run = self._session, self._run
        session.runs.attach(run, Arrays(self._backend, x, out), self._tag, self._spec)
        self._execution.mark = self._mark
        self._execution.started(answer)
        self._execution.limit = session.limit(timeout)
        run.started_by_code()
        return self._started_work(x, out).run(session.limit(timeout))

    def _started_work(self, x: Array | None, out: Array | None) -> Work[Any]:
        """The work of a call that compiled code has started."""
        work = Work.of(self._session, self._run, x, out)
        work.is_blocking = True
        return work


def _nothing() -> None:
    """What stands for a reference to no array."""


def cached_on_device(
    session: Session, key: tuple[Any, ...], spec: CallSpec, arrays: Arrays, call_id: CallId
) -> Steps:
    """The steps of a call on a device, after which a call on the same arrays starts faster."""
    run = session.runs.call(spec, arrays, call_id.tag, call_id.number)
    yield run
    if isinstance(run.execution, OnDevice):
        run.reusable.make_reusable(
            run.log, run.key, session.numbering.num_calls_made, arrays.source, arrays.target
        )
        session.call_cache.add(key, CachedOnDevice(session, run, spec, arrays, call_id.tag))


def can_cache_on_device(
    session: Session, spec: CallSpec, arrays: Arrays, result: Array | None, has_out: bool
) -> bool:
    """Whether a call may be made again on the same arrays by `CachedOnDevice`."""
    return (
        not arrays.backend.is_host
        and session.fast_calls is session.call_cache
        and session.checker is None
        and spec.blocking == "yes"
        and spec.is_recurring
        and result is arrays.target
        and (has_out or result is None)
    )
