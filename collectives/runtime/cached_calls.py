"""Cached calls: a call like an earlier one reuses its execution.

The first call with some shape, dtype and arguments leaves its execution here.  The next call with
the same shape, dtype and arguments passes its arrays to compiled code, which checks whether they
fit and runs.  A plan like one that was freed reuses the freed plan's execution.  The cache keeps no
arrays of the caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import LARGE, Array, empty, num_elements
from collectives.runtime.call_cache import MISFIT
from collectives.runtime.checked import CheckedSteps
from collectives.runtime.numbering import ConcurrentCall
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work, end_interrupted

_MAX_IDLE, _MAX_IDLE_BYTES = 32, 2**20  # idle executions of one call


ResultForm = tuple[tuple[int, ...], "np.dtype[Any]"]

_MISFIT = 5  # `executor.MISFIT`
_ndarray = np.ndarray


def _maker(form: ResultForm | None) -> Callable[..., Array]:
    """What makes results of this form: for small ones NumPy, which is faster."""
    is_small = form is None or num_elements(form[0]) * form[1].itemsize < LARGE
    return np.empty if is_small else empty


class Cached:
    """A call that is ready to run on any arrays that fit.

    `result_form`: the shape and dtype of the result, or None if this rank gets none.
    """

    def __init__(self, session: Session, run: Run, result_form: ResultForm | None) -> None:
        self._session, self._run, self._result_form = session, run, result_form
        self._empty = _maker(result_form)
        self._execution = run.reusable
        self._in_flight = session.transport.in_flight
        self._reads_input = self._execution.reads_input
        self._max_wait = int(session.transport.max_wait * 1e9)
        self._call_token = session.call_token
        self._compiled, self._at = self._execution.loop.run, self._execution.state_address
        self.num_bytes = self._execution.num_bytes

    def make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call; return MISFIT, without any effect, if the arrays do not fit."""
        if out is None:
            if self._result_form is not None:
                out = self._empty(*self._result_form)
        elif type(out) is not _ndarray:
            return MISFIT
        if self._reads_input and type(x) is not _ndarray:
            return MISFIT
        try:
            token = self._call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            return self._call_exclusively(x, out, timeout)
        finally:
            self._call_token.append(token)

    def _call_exclusively(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call, if the arrays fit, while no other thread makes one."""
        raise NotImplementedError

    def _result(self, out: Array | None) -> Array | None:
        """The result of the call."""
        return None if self._result_form is None else out


class CachedCall(Cached):
    """A blocking call.

    Its method `make` contains the whole fast path, because each function call costs a small
    message a noticeable part of its time.
    """

    def make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call; return MISFIT, without any effect, if the arrays do not fit."""
        if out is None:
            if self._result_form is not None:
                out = self._empty(*self._result_form)
        elif type(out) is not _ndarray:
            return MISFIT
        if self._reads_input and type(x) is not _ndarray:
            return MISFIT
        try:
            token = self._call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            if self._session.is_recorded:
                return self._recorded(x, out, timeout)
            max_wait = 0 if self._in_flight else self._max_wait
            answer = self._compiled(self._at, id(x), id(out), max_wait)
            if answer == _MISFIT and self._execution.update_dtypes(x, out):
                answer = self._compiled(self._at, id(x), id(out), max_wait)
            if answer:
                return self._continue(answer, x, out, timeout)
        except BaseException as error:
            self._end_interrupted(x, out, error)
            raise
        finally:
            self._call_token.append(token)
        return None if self._result_form is None else out

    def _recorded(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call from Python, which records it in the ledgers."""
        session, run = self._session, self._run
        if not self._execution.loop.fits(self._at, id(x), id(out)):
            return MISFIT
        run.number = session.numbering.next_number()
        self._execution.set_tag(run.number)
        work = Work.blocking(session, _single_run(run, x, self._result(out)))
        return work.run(session.limit(timeout))

    def _end_interrupted(self, x: Array | None, out: Array | None, error: BaseException) -> None:
        """End a call that a signal interrupted."""
        end_interrupted(self._started_work(x, out), self._run, error)

    def _continue(
        self, answer: int, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        """Wait until the run is complete, or raise its error."""
        if not self._execution.started(answer):
            return MISFIT
        self._run.started_by_code()
        return self._started_work(x, self._result(out)).run(self._session.limit(timeout))

    def _started_work(self, x: Array | None, result: Array | None) -> Work[Any]:
        """The work of a call that compiled code has started."""
        work = Work.of(self._session, self._run, x, result)
        work.is_blocking = True
        return work


def _single_run(run: Run, x: Any, result: Array | None) -> Steps:
    """The steps of a call that consists of one run; they keep `x` until it is complete."""
    yield run
    return result


class CachedRuns(Cached):
    """A call that may run several times at once, each with its own execution.

    A bounded number of idle executions is kept.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        result_form: ResultForm | None,
        make_run: Callable[[], Run],
    ) -> None:
        super().__init__(session, run, result_form)
        self._make_run = make_run
        most = min(_MAX_IDLE, _MAX_IDLE_BYTES // self.num_bytes)
        self.idle: deque[Run] = deque(maxlen=max(most, 1))


class CachedStart(CachedRuns):
    """An asynchronous call."""

    def _call_exclusively(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        session, run = self._session, self.idle.pop() if self.idle else self._make_run()
        execution, result = run.reusable, self._result(out)
        if session.is_recorded:
            return self._recorded(run, x, out, timeout)
        work = None
        try:
            answer = self._compiled(execution.state_address, id(x), id(out), 0)
            if answer and execution.started(answer):
                run.started_by_code()
                run.release = self.idle.append
                limit = session.timeout if timeout is None else timeout
                work = Work.of(session, run, x, result, timeout=limit)
                return work.start(session.thread, session.thread_delay)
        except BaseException as error:
            end_interrupted(work or Work.of(session, run, x, result), run, error)
            raise
        self.idle.append(run)
        return MISFIT if answer else Work.done(session, result)

    def _recorded(self, run: Run, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Start the call from Python, which records it in the ledgers."""
        session, execution = self._session, run.reusable
        if not execution.loop.fits(execution.state_address, id(x), id(out)):
            self.idle.append(run)
            return MISFIT
        run.number, run.release = session.numbering.next_number(), self.idle.append
        execution.set_tag(run.number)
        limit = session.timeout if timeout is None else timeout
        work: Work[Any] = Work(session, _single_run(run, x, self._result(out)), limit)
        return work.start(session.thread, session.thread_delay)


class CachedPlan(CachedRuns):
    """A plan, which reuses the execution of one that was freed, if there is any."""

    def _call_exclusively(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        session, run = self._session, self.idle.pop() if self.idle else self._make_run()
        execution = run.reusable
        if timeout is not None or not execution.loop.fits(execution.state_address, id(x), id(out)):
            self.idle.append(run)
            return MISFIT
        number, result = session.numbering.next_number(), self._result(out)
        session.runs.renumber_plan(run, number)
        plan = Plan(session, run, partial(_single_run, run, (x, out), result), result)
        execution.reuse_for_plan(run.key, plan.num_runs, session.numbering.async_tag(number))
        plan.use_compiled_start(x, out, self.idle.append)
        return plan


class CheckedCall(CachedCall):
    """A blocking call in checked mode."""

    def __init__(
        self, session: Session, run: Run, result_form: ResultForm | None, checked: CheckedSteps
    ) -> None:
        super().__init__(session, run, result_form)
        self._checked = checked

    make = Cached.make

    def _call_exclusively(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        if not self._execution.loop.fits(self._at, id(x), id(out)):
            return MISFIT
        session, max_wait = self._session, 0 if self._in_flight else self._max_wait
        if not self._checked.all_agree(session.numbering.num_calls + 1, max_wait):
            steps = self._checked.steps(self._run, x, out)
            return Work.blocking(session, steps).run(session.limit(timeout))
        try:
            answer = self._compiled(self._at, id(x), id(out), max_wait)
            return self._continue(answer, x, out, timeout) if answer else self._result(out)
        except BaseException as error:
            self._end_interrupted(x, out, error)
            raise
