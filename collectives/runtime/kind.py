"""Kinds: calls that are alike use the same prepared calls, one after the other.

A prepared call belongs to its kind while it is idle, to a `Work` while it runs, or to a `Plan`
until that is freed; then its kind has it again.  A kind keeps no arrays.

A later call of a kind goes to compiled code at once, by one of three functions: `Kind.call` makes a
blocking call, `Kind.start` begins an asynchronous one, and `Kind.plan` makes a plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import HOST, LARGE, Array, Arrays, empty
from collectives.programs import Program
from collectives.runtime.checked import Comparison
from collectives.runtime.numbering import ConcurrentCall
from collectives.runtime.plan import Plan
from collectives.runtime.prepared import Prepared
from collectives.runtime.work import Owner, Steps, Work, end_interrupted

Form = tuple[tuple[int, ...], "np.dtype[Any]"]

MISFIT = object()
"""The result of a call whose arrays do not fit; it had no effect."""

Make = Callable[[Arrays, int, int], Prepared]
"""Prepares a call on some arrays, with a tag and a number."""

_MAX_IDLE, _MAX_IDLE_BYTES = 32, 2**20  # of prepared calls of a kind
_BYTES_OF_STATE = 8192  # of an execution, besides its program and its scratch

_MISFIT = 5  # `executor.MISFIT`


class Kind:
    """Calls that are alike, and their prepared calls that do not run.

    Parameters
    ----------
    owner : Owner
    make : callable
        Prepares one more call.
    program : Program
        The program of the calls, which says how much memory an idle one needs.
    """

    is_open = False  # whether compiled code may start calls
    _pattern: Prepared | None = None  # set if it is open
    _comparison: Comparison | None = None  # in checked mode

    def __init__(self, owner: Owner, make: Make, program: Program) -> None:
        self._owner, self._make = owner, make
        self.num_bytes = program.rows.nbytes + program.num_scratch + _BYTES_OF_STATE
        most_idle = max(1, min(_MAX_IDLE, _MAX_IDLE_BYTES // self.num_bytes))
        self._idle = deque[Prepared](maxlen=most_idle)

    # From Python

    def take(self, arrays: Arrays, tag: int, number: int) -> Prepared:
        """Return a prepared call on these arrays, which comes back when its run is complete."""
        try:
            prepared = self._idle.pop()
        except IndexError:  # there is none, or another thread has taken the last one
            prepared = self._make(arrays, tag, number)
        else:
            prepared.attach(arrays, tag)
            prepared.renumber(number)
        prepared.give = self.give
        return prepared

    def give(self, prepared: Prepared) -> None:
        """Take a prepared call back."""
        if self.is_open and not prepared.is_reusable:
            if not prepared.can_be_reusable:
                return
            prepared.let_code_start_like(self._execution)
        prepared.execution.detach()
        self._idle.append(prepared)

    # By compiled code

    def open(
        self, prepared: Prepared, arrays: Arrays, comparison: Comparison | None = None
    ) -> None:
        """Let compiled code start later calls as it may start those of `prepared`.

        Parameters
        ----------
        arrays : Arrays
            The arrays of that call; results have the shape and dtype of its output.
        comparison : Comparison or None
            What compares the calls in checked mode.
        """
        execution, owner, target = prepared.reusable, self._owner, arrays.target
        self._idle.clear()  # compiled code cannot start these
        self.is_open, self._pattern, self._comparison = True, prepared, comparison
        self._execution, self._in_flight = execution, owner.transport.in_flight
        self._compiled, self._at = execution.loop.run, execution.state_address
        self._max_wait = int(owner.transport.max_wait * 1e9)
        self._call_token = owner.call_token
        self._array_type = np.ndarray if arrays.backend is HOST else type(target)
        self._reads_input = execution.reads_input
        self._result_form = _form(target)
        self._empty = np.empty if target is None or target.nbytes < LARGE else empty
        self._forms = _form(arrays.source), _form(arrays.target)

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
            end_interrupted(self._started_work(x, out), self._only, error)
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
        """Whether all ranks are known to make the same call."""
        assert self._comparison is not None
        number = self._owner.numbering.num_calls + 1
        return self._comparison.all_agree(number, self._max_wait_now)

    @property
    def _max_wait_now(self) -> int:
        """The nanoseconds that compiled code may wait."""
        return 0 if self._in_flight else self._max_wait

    @property
    def _only(self) -> Prepared:
        """The prepared call of blocking calls."""
        assert self._pattern is not None
        return self._pattern

    def _lent(self) -> Prepared:
        """The prepared call of blocking calls, which comes back when its run is complete."""
        self._idle.clear()
        self._only.give = self.give
        return self._only

    def _started_work(self, x: Array | None, result: Array | None) -> Work[Any]:
        """The work of a blocking call that compiled code has started."""
        return Work.of(self._owner, self._only, x, result, is_blocking=True)

    def _result(self, out: Array | None) -> Array | None:
        """The result of a call."""
        return None if self._result_form is None else out

    def start(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Begin an asynchronous call; return MISFIT, without any effect, if arrays do not fit."""
        return self._exclusively(self._start, x, out, timeout)

    def plan(self, x: Array | None, out: Array | None, timeout: float | None) -> Any:
        """Make a plan; return MISFIT, without any effect, if the arrays do not fit."""
        return self._exclusively(self._plan, x, out, timeout)

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
        # What no prepared call can serve needs none.
        if (self._reads_input and not _has(x, self._forms[0])) or not _has(out, self._forms[1]):
            return MISFIT
        try:
            token = self._call_token.pop()
        except IndexError:
            raise ConcurrentCall from None
        try:
            return make(self._idle.pop() if self._idle else self._one_more(), x, out, timeout)
        finally:
            self._call_token.append(token)

    def _one_more(self) -> Prepared:
        """One more prepared call, which has no arrays yet."""
        source, target = (
            None if form is None else np.broadcast_to(np.empty((), form[1]), form[0])
            for form in self._forms
        )
        prepared = self._make(Arrays(HOST, source, target), 0, 0)
        prepared.let_code_start_like(self._execution)
        return prepared

    def _start(
        self, prepared: Prepared, x: Array | None, out: Array | None, timeout: float | None
    ) -> Any:
        owner, execution, result = self._owner, prepared.reusable, self._result(out)
        limit = owner.timeout if timeout is None else timeout
        if owner.is_watched:
            return self._start_watched(prepared, x, out, limit)
        work = None
        try:
            answer = self._compiled(execution.state_address, id(x), id(out), 0)
            if answer and execution.started(answer, x, out):
                prepared.started_by_code()
                prepared.give = self.give
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
        prepared.number, prepared.give = owner.numbering.next_number(), self.give
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
        plan = Plan(owner, prepared, partial(one_run, prepared), result, give=self.give)
        plan.let_code_start(Arrays(HOST, x, out), owner.numbering.async_tag(number))
        return plan


def _form(x: Array | None) -> Form | None:
    """Return the shape and dtype of an array, if there is one."""
    return None if x is None else (tuple(x.shape), x.dtype)


def _has(x: Any, form: Form | None) -> bool:
    """Return whether `x` is a NumPy array of this form; always if there is no form."""
    return form is None or (type(x) is np.ndarray and _form(x) == form)


def one_run(prepared: Prepared, x: Array | None = None, result: Array | None = None) -> Steps:
    """Return the steps of a call that has one run; they keep `x` until it is complete."""
    yield prepared
    return result
