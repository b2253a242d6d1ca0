"""Calls that came before go straight to their executions.

What a call is follows from how it looks: the shape and dtype of `x`, and all other arguments.  A
call that was made once leaves its execution here; the next one that looks alike hands its arrays to
compiled code, which sees whether they fit, and runs.  A plan is made likewise, with the execution
of one that was freed.  Nothing of a caller's is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import Array
from collectives.runtime.call_cache import MISFIT
from collectives.runtime.checked import CheckedSteps
from collectives.runtime.plan import Plan
from collectives.runtime.run import Run
from collectives.runtime.session import Session
from collectives.runtime.turns import NotYourTurn
from collectives.runtime.work import Steps, Work, break_off

_MOST_IDLE, _MOST_IDLE_BYTES = 32, 2**20  # executions of one call that wait


Likeness = tuple[tuple[int, ...], "np.dtype[Any]"]

_MISFIT = 5  # `executor.MISFIT`
_empty = np.empty
_ndarray = np.ndarray


class Cached:
    """A call that is ready to run on any arrays that fit.

    `likeness`: shape and dtype of the result, if this rank gets one.
    """

    def __init__(self, session: Session, run: Run, likeness: Likeness | None) -> None:
        self._session, self._run, self._likeness = session, run, likeness
        self._execution = run.reusable
        self._in_flight = session.transport.in_flight
        self._reads = self._execution.reads
        self._patience = int(session.transport.patience * 1e9)
        self._turn = session.turn
        self._compiled, self._at = self._execution.loop.run, self._execution.at
        self.num_bytes = self._execution.num_bytes

    def make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call; MISFIT if the arrays are others, and nothing has been done."""
        if out is None:
            if self._likeness is not None:
                out = _empty(*self._likeness)
        elif type(out) is not _ndarray:
            return MISFIT
        if self._reads and type(x) is not _ndarray:
            return MISFIT
        try:
            token = self._turn.pop()
        except IndexError:
            raise NotYourTurn from None
        try:
            return self._in_our_turn(x, out, timeout)
        finally:
            self._turn.append(token)

    def _in_our_turn(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call on arrays that may fit."""
        raise NotImplementedError

    def _result(self, out: Array | None) -> Array | None:
        """What the call returns."""
        return None if self._likeness is None else out


class CachedCall(Cached):
    """A blocking call.

    All of it stands in one function, since that takes a small call less time.
    """

    def make(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call; MISFIT if the arrays are others, and nothing has been done."""
        if out is None:
            if self._likeness is not None:
                out = _empty(*self._likeness)
        elif type(out) is not _ndarray:
            return MISFIT
        if self._reads and type(x) is not _ndarray:
            return MISFIT
        try:
            token = self._turn.pop()
        except IndexError:
            raise NotYourTurn from None
        try:
            if self._session.is_recorded:
                return self._recorded(x, out, timeout)
            patience = 0 if self._in_flight else self._patience
            answer = self._compiled(self._at, id(x), id(out), patience)
            if answer == _MISFIT and self._execution.accepts_now(x, out):
                answer = self._compiled(self._at, id(x), id(out), patience)
            if answer:
                return self._go_on(answer, x, out, timeout)
        except BaseException as error:
            self._break_off(x, out, error)
            raise
        finally:
            self._turn.append(token)
        return None if self._likeness is None else out

    def _recorded(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make the call from Python, which enters it into the ledgers."""
        session, run = self._session, self._run
        if not self._execution.loop.fits(self._at, id(x), id(out)):
            return MISFIT
        run.number = session.numbering.next_number()
        work = Work.blocking(session, _whole(run, x, self._result(out)))
        return work.run(session.limit(timeout))

    def _break_off(self, x: Array | None, out: Array | None, error: BaseException) -> None:
        """A signal may have come before anybody knew that the run is under way."""
        break_off(self._going_on(x, out), self._run, error)

    def _go_on(self, answer: int, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Wait for the rest of the run, or fail with what it failed with."""
        if not self._execution.began(answer):
            return MISFIT
        self._run.has_begun()
        return self._going_on(x, self._result(out)).run(self._session.limit(timeout))

    def _going_on(self, x: Array | None, result: Array | None) -> Work[Any]:
        """The work of a call that compiled code has begun."""
        work = Work.of(self._session, self._run, x, result)
        work.is_blocking = True
        return work


def _whole(run: Run, x: Any, result: Array | None) -> Steps:
    """The run of a call, whose arrays live until it is complete."""
    yield run
    return result


class CachedRuns(Cached):
    """A call that may be under way several times, with an execution each; boundedly many wait."""

    def __init__(
        self, session: Session, run: Run, likeness: Likeness | None, another: Callable[[], Run]
    ) -> None:
        super().__init__(session, run, likeness)
        self._another = another
        most = min(_MOST_IDLE, _MOST_IDLE_BYTES // self.num_bytes)
        self.idle: deque[Run] = deque(maxlen=max(most, 1))


class CachedStart(CachedRuns):
    """An asynchronous call."""

    def _in_our_turn(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        session, run = self._session, self.idle.pop() if self.idle else self._another()
        execution, result = run.reusable, self._result(out)
        if session.is_recorded:
            return self._recorded(run, x, out, timeout)
        work = None
        try:
            answer = self._compiled(execution.at, id(x), id(out), 0)
            if answer and execution.began(answer):
                run.has_begun()
                run.release = self.idle.append
                limit = session.timeout if timeout is None else timeout
                work = Work.of(session, run, x, result, timeout=limit)
                return work.start(session.thread, session.thread_delay)
        except BaseException as error:
            break_off(work or Work.of(session, run, x, result), run, error)
            raise
        self.idle.append(run)
        return MISFIT if answer else Work.done(session, result)

    def _recorded(self, run: Run, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Start the call from Python, which enters it into the ledgers."""
        session, execution = self._session, run.reusable
        if not execution.loop.fits(execution.at, id(x), id(out)):
            self.idle.append(run)
            return MISFIT
        run.number, run.release = session.numbering.next_number(), self.idle.append
        execution.take_tag(run.number)
        limit = session.timeout if timeout is None else timeout
        work: Work[Any] = Work(session, _whole(run, x, self._result(out)), limit)
        return work.start(session.thread, session.thread_delay)


class CachedPlan(CachedRuns):
    """A plan.  It takes the execution of one that was freed, if there is any."""

    def _in_our_turn(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        session, run = self._session, self.idle.pop() if self.idle else self._another()
        execution = run.reusable
        if timeout is not None or not execution.loop.fits(execution.at, id(x), id(out)):
            self.idle.append(run)
            return MISFIT
        number, result = session.numbering.next_number(), self._result(out)
        session.runs.renumber_plan(run, number)
        plan = Plan(session, run, partial(_whole, run, (x, out), result), result)
        execution.accept_plan(run.key, plan.num_runs, session.numbering.async_tag(number))
        plan.begin_by_code(x, out, self.idle.append)
        return plan


class CheckedCall(CachedCall):
    """A blocking call that the ranks compare before."""

    def __init__(
        self, session: Session, run: Run, likeness: Likeness | None, checked: CheckedSteps
    ) -> None:
        super().__init__(session, run, likeness)
        self._checked = checked

    make = Cached.make

    def _in_our_turn(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        if not self._execution.loop.fits(self._at, id(x), id(out)):
            return MISFIT
        session, patience = self._session, 0 if self._in_flight else self._patience
        if not self._checked.are_alike(session.numbering.num_calls + 1, patience):
            steps = self._checked.steps(self._run, x, out)
            return Work.blocking(session, steps).run(session.limit(timeout))
        try:
            answer = self._compiled(self._at, id(x), id(out), patience)
            return self._go_on(answer, x, out, timeout) if answer else self._result(out)
        except BaseException as error:
            self._break_off(x, out, error)
            raise
