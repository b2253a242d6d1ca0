"""Repeats calls: compiled code makes a call that is like an earlier one, at once.

`Repeat.call` makes a blocking call, `Repeat.start` begins an asynchronous one, and `Repeat.plan`
makes a plan.  The first of these calls makes the `Repeat`, which keeps no arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import HOST, LARGE, Array, Arrays, empty
from collectives.runtime.checked import Comparison
from collectives.runtime.numbering import ConcurrentCall
from collectives.runtime.plan import Plan
from collectives.runtime.pool import Kind, MakeAtOnce
from collectives.runtime.prepared import Prepared
from collectives.runtime.work import Owner, Steps, Work, end_interrupted

Form = tuple[tuple[int, ...], "np.dtype[Any]"]

MISFIT = object()
"""The result of a call whose arrays do not fit; it had no effect."""

_MISFIT = 5  # `executor.MISFIT`


class Repeat:
    """Makes calls of a kind like one call, on any arrays that fit.

    Parameters
    ----------
    owner : Owner
    kind : Kind
    prepared : Prepared
        The prepared call of the first call, which compiled code may start.
    arrays : Arrays
        The arrays of the first call; results have the shape and dtype of its output.
    comparison : Comparison or None
        What compares the calls in checked mode.
    """

    # With slots, each call is some nanoseconds faster.
    __slots__ = (
        "_array_type",
        "_at",
        "_call_token",
        "_comparison",
        "_compiled",
        "_empty",
        "_execution",
        "_forms",
        "_idle",
        "_in_flight",
        "_kind",
        "_max_wait",
        "_owner",
        "_prepared",
        "_reads_input",
        "_result_form",
    )

    def __init__(
        self,
        owner: Owner,
        kind: Kind,
        prepared: Prepared,
        arrays: Arrays,
        comparison: Comparison | None = None,
    ) -> None:
        execution, target = kind.like, arrays.target
        assert execution is not None
        self._owner, self._kind, self._prepared = owner, kind, prepared
        # On the host, what compiled code starts holds no arrays and comes back without `Kind.give`.
        self._idle = kind.idle
        self._comparison, self._execution = comparison, execution
        self._in_flight, self._call_token = owner.transport.in_flight, owner.call_token
        self._compiled, self._at = execution.loop.run, execution.state_address
        self._max_wait = int(owner.transport.max_wait * 1e9)
        self._array_type = np.ndarray if arrays.backend is HOST else type(target)
        self._reads_input = execution.reads_input
        self._forms = _form(arrays.source), _form(target)
        self._result_form = self._forms[1]
        self._empty = np.empty if target is None or target.nbytes < LARGE else empty

    def call(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make a blocking call; return MISFIT, without any effect, if the arrays do not fit.

        This function is the whole way of a repeated call, because each function call costs a small
        message a noticeable part of its time.  No other thread can have taken the prepared call
        meanwhile, because blocking calls of a communicator are made one after the other.
        """
        if out is None:
            if self._result_form is not None:
                out = self._empty(*self._result_form)
        elif type(out) is not self._array_type:
            return MISFIT
        if self._reads_input and type(x) is not self._array_type:
            return MISFIT
        try:
            token = self._call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            if self._owner.is_watched:
                return self._call_watched(x, out, timeout)
            max_wait = 0 if self._in_flight else self._max_wait
            answer = self._compiled(self._at, id(x), id(out), max_wait)
            if answer == _MISFIT and self._execution.update_dtypes(x, out):
                answer = self._compiled(self._at, id(x), id(out), max_wait)
            if answer:
                return self._continue(answer, x, out, timeout)
        except BaseException as error:  # a signal may interrupt Python anywhere
            end_interrupted(self._started_work(x, out), self._prepared, error)
            raise
        finally:
            self._call_token.append(token)
        if timeout is not None:
            self._execution.limit = timeout
        return None if self._result_form is None else out

    def _continue(
        self, answer: int, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        """Wait until the call is complete, or raise its error."""
        if not self._execution.started(answer, x, out):
            return MISFIT
        prepared, self._execution.limit = self._lent(), self._owner.limit(timeout)
        prepared.started_by_code()
        return self._started_work(x, self._result(out)).run(self._execution.limit)

    def _call_watched(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make a blocking call that is recorded or compared."""
        owner, is_compared = self._owner, self._comparison is not None
        if owner.is_recorded and is_compared:
            return MISFIT
        if not self._execution.loop.fits(self._at, id(x), id(out)):
            return MISFIT
        if is_compared and self._agrees():
            answer = self._compiled(self._at, id(x), id(out), self._max_wait_now)
            return self._continue(answer, x, out, timeout) if answer else self._result(out)
        prepared = self._lent()
        if self._comparison is not None:
            steps = self._comparison.steps(prepared, x, out)
        else:
            prepared.number = owner.numbering.next_number()
            self._execution.set_tag(prepared.number)
            steps = one_run(prepared, x, self._result(out))
        work: Work[Any] = Work(owner, lambda _: steps, is_blocking=True)
        return work.run(owner.limit(timeout))

    def _agrees(self) -> bool:
        """Return whether all ranks are known to make the same call."""
        assert self._comparison is not None
        number = self._owner.numbering.num_calls + 1
        return self._comparison.all_agree(number, self._max_wait_now)

    @property
    def _max_wait_now(self) -> int:
        """The nanoseconds that compiled code may wait."""
        return 0 if self._in_flight else self._max_wait

    def _lent(self) -> Prepared:
        """Return the prepared call of blocking calls, which comes back when its run is complete."""
        self._idle.clear()
        self._prepared.give = self._kind.give
        return self._prepared

    def _started_work(self, x: Array | None, result: Array | None) -> Work[Any]:
        """Return the work of a blocking call that compiled code has started."""
        return Work.of(self._owner, self._prepared, x, result, is_blocking=True)

    def _result(self, out: Array | None) -> Array | None:
        """Return the result of a call."""
        return None if self._result_form is None else out

    @property
    def start(self) -> MakeAtOnce:
        """What begins an asynchronous call; it returns MISFIT, as `call` does."""
        return partial(self._exclusively, self._start)

    @property
    def plan(self) -> MakeAtOnce:
        """What makes a plan; it returns MISFIT, as `call` does."""
        return partial(self._exclusively, self._plan)

    def _exclusively(
        self,
        make: Callable[[Prepared, Array | None, Array | None, float | None], Any],
        x: Array | None,
        out: Array | None,
        timeout: float | None,
    ) -> Any:
        """Make something of an idle prepared call, while no other thread makes a call."""
        if out is None and self._result_form is not None:
            out = self._empty(*self._result_form)
        if not (out is None or type(out) is np.ndarray):
            return MISFIT
        if self._reads_input and type(x) is not np.ndarray:
            return MISFIT
        try:
            token = self._call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            prepared = self._idle.pop() if self._idle else self._one_more(x, out)
            return MISFIT if prepared is None else make(prepared, x, out, timeout)
        finally:
            self._call_token.append(token)

    def _one_more(self, x: Array | None, out: Array | None) -> Prepared | None:
        """One more prepared call, without arrays; None if the arrays have another form."""
        for array, form in zip((x, out), self._forms, strict=True):
            if form is not None and _form(array) != form:
                return None
        source, target = (
            None if form is None else np.broadcast_to(np.empty((), form[1]), form[0])
            for form in self._forms
        )
        prepared = self._kind.make(Arrays(HOST, source, target), 0, 0)
        prepared.let_code_start_like(self._execution)
        return prepared

    def _start(
        self, prepared: Prepared, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        owner, result = self._owner, None if self._result_form is None else out
        execution: Any = prepared.execution  # without a function call, as in `call`
        limit = owner.timeout if timeout is None else timeout
        if owner.is_watched:
            return self._start_watched(prepared, x, out, limit)
        work = None
        try:
            answer = self._compiled(execution.state_address, id(x), id(out), 0)
            if answer and execution.started(answer, x, out):
                prepared.started_by_code()
                prepared.give = self._idle.append
                work = Work.of(owner, prepared, x, result, timeout=limit)
                return work.start(owner.thread, owner.thread_delay)
        except BaseException as error:
            end_interrupted(work or Work.of(owner, prepared, x, result), prepared, error)
            raise
        self._idle.append(prepared)
        return MISFIT if answer else Work.done(owner, result)

    def _start_watched(
        self, prepared: Prepared, x: Array | None, out: Array | None, limit: float | None
    ) -> Any:
        """Begin an asynchronous call that is recorded."""
        owner, execution = self._owner, prepared.reusable
        if not execution.loop.fits(execution.state_address, id(x), id(out)):
            self._idle.append(prepared)
            return MISFIT
        prepared.number, prepared.give = owner.numbering.next_number(), self._idle.append
        execution.set_tag(prepared.number)
        work: Work[Any] = Work(owner, lambda _: one_run(prepared, x, self._result(out)), limit)
        return work.start(owner.thread, owner.thread_delay)

    def _plan(
        self, prepared: Prepared, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        owner, execution, result = self._owner, prepared.reusable, self._result(out)
        if timeout is not None or not execution.loop.fits(execution.state_address, id(x), id(out)):
            self._idle.append(prepared)
            return MISFIT
        number = owner.numbering.next_number()
        prepared.renumber(number)
        plan = Plan(owner, prepared, partial(one_run, prepared), result, give=self._idle.append)
        plan.let_code_start(Arrays(HOST, x, out), owner.numbering.async_tag(number))
        return plan


def _form(x: Array | None) -> Form | None:
    """Return the shape and dtype of an array, if there is one."""
    return None if x is None else (tuple(x.shape), x.dtype)


def one_run(prepared: Prepared, x: Array | None = None, result: Array | None = None) -> Steps:
    """Return the steps of a call that has one run; they keep `x` until it is complete."""
    yield prepared
    return result
