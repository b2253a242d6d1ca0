"""Calls under way: each is a sequence of runs, and whoever waits for it advances it."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any, Generic, Protocol, TypeVar

from collectives.arrays import validation
from collectives.engines import Action, ProgressThread, Transport, deadline_in
from collectives.errors import CollectiveTimeout
from collectives.runtime.run import Run

Result = TypeVar("Result")
Steps = Generator[Run, None, Any]
"""The runs of a call, in order; what the generator returns is what the call returns.

The code between two `yield`s runs when the run before is complete.  There a header is read, from
which the rest of the call follows.
"""


class Owner(Protocol):
    """What makes calls: a session."""

    transport: Transport

    def when_failed(self, work: Work[Any], error: BaseException) -> None:
        """`work` has failed with `error`."""

    def when_timed_out(self, work: Work[Any]) -> None:
        """`work` has reached its time limit and is still under way."""


class Work(Generic[Result]):
    """A call under way, returned by `async_op=True`.

        work = comm.all_reduce(x, async_op=True)
        ...
        total = work.wait()

    `is_over` says whether it is complete or has failed.  Only the thread that holds `_lock`
    advances it.  Attributes that most calls never change are attributes of the class.
    """

    _run: Run | None = None
    _error: BaseException | None = None
    _x: Any = None
    _result: Any = None
    _title = ""
    _thread: ProgressThread | None = None
    is_blocking = False
    is_over = False
    is_awaited = False  # so that the thread leaves it to whoever waits
    _is_listed = False  # among the calls that whoever waits keeps going

    def __init__(self, owner: Owner, steps: Steps | None, timeout: float | None = None) -> None:
        """`timeout`: the time limit of a `wait` that is given none."""
        self.owner, self._steps, self._timeout = owner, steps, timeout
        self._in_flight = owner.transport.in_flight
        self._lock = threading.Lock()
        self._at_the_end: list[Action] = []

    @classmethod
    def blocking(cls, owner: Owner, steps: Steps) -> Work[Any]:
        """Return the work of a blocking call of `owner` with these `steps`."""
        work = cls(owner, steps)
        work.is_blocking = True
        return work

    @classmethod
    def of(
        cls, owner: Owner, run: Run, x: Any, result: Any, *, timeout: float | None = None
    ) -> Work[Any]:
        """Return the work of a call of `owner` that consists of one `run`, begun by compiled code.

        It keeps the arrays `x` and `result`.  `timeout`: see `wait`.
        """
        work = cls(owner, None, timeout)
        work._run, work._x, work._result = run, x, result
        return work

    @classmethod
    def done(cls, owner: Owner, result: Any) -> Work[Any]:
        """Return the work of a call of `owner` that was complete at once, with this `result`."""
        work = cls(owner, None)
        work._result, work.is_over = result, True
        return work

    @property
    def title(self) -> str:
        """What is under way, as error messages name it: collective, algorithm, number."""
        return self._title if self._run is None else self._run.title

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    @property
    def was_ahead(self) -> bool:
        """Whether it stands in a run ahead of the call itself, which others may have begun."""
        return self._run is not None and self._run.is_ahead

    def start(self, thread: ProgressThread | None = None, delay: float = 0.0) -> Work[Any]:
        """Begin, and return this object.  Refusals are raised here, before anything is sent.

        `thread`: advances it beside the program, after a `delay` in seconds.  Without a thread it
        is advanced by whatever waits or tests on this rank.
        """
        self._thread = thread
        if self._run is None:
            self._begin_next()
            self._advance(0.0)
        if not self.is_over:
            self.list()
            if thread is not None:
                thread.adopt(self, delay)
        return self

    def list(self) -> None:
        """Enter it among the calls that every wait of this rank advances, unless a thread does."""
        if self._thread is None and not self._is_listed:
            self._is_listed = True
            self._in_flight.append(self)

    def run(self, timeout: float | None) -> Any:
        """Begin, wait for at most `timeout` seconds, and return the result."""
        if self._run is None:
            self._begin_next()
        try:
            return self.wait(timeout)
        except CollectiveTimeout:
            raise
        except BaseException as error:  # a signal may come wherever Python runs
            self.give_up(error)
            raise

    def test(self) -> bool:
        """Advance it as far as possible without waiting; return whether it is complete.

        Everything else that is under way on this rank is advanced too, so ranks may test their
        calls in different orders.  Raises what the call failed with.
        """
        if not self.is_over:
            self.progress()
        if not self.is_over:
            self._carry_others()
        if self._error is not None:
            raise self._error
        return self.is_over

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until it is complete, and return what the blocking call would have returned.

        `timeout`: seconds; None: the time limit of the call.  Raises `CollectiveTimeout`, which
        says who is waited for, after that; the call is then still under way, and `wait` may be
        called again.  Raises what the call failed with.
        """
        limit = self._timeout if timeout is None else validation.seconds(timeout)
        if not self.is_over:
            self._wait(limit)
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    def when_over(self, action: Action) -> None:
        """Call `action` when the call is complete or has failed; now if it is over.

        The thread that advances the call to its end calls it.
        """
        self._at_the_end.append(action)
        if self.is_over:
            self._do_at_the_end()

    def _do_at_the_end(self) -> None:
        """Call each action of `when_over` once, also if several threads do so at the same time."""
        while self._at_the_end:
            try:
                action = self._at_the_end.pop(0)
            except IndexError:  # another has taken it
                return
            action()

    def progress(self, seconds: float = 0.0) -> bool:
        """Advance it for at most `seconds`, unless another thread does; return whether it moved.

        Raises only KeyboardInterrupt.  A failure is kept for those who wait for this call, because
        those who wait for others call this too.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._place()
            self._advance(seconds)
            return self._place() != before
        finally:
            self._lock.release()

    def _place(self) -> tuple[Run | None, int]:
        """The place where it stands, for comparison."""
        return self._run, -1 if self._run is None else self._run.execution.row

    def give_up(self, error: BaseException) -> None:
        """End it with this `error`, wherever it stands."""
        with self._lock:
            if not self.is_over:
                self._fail(error)

    # For the thread that holds the lock, or before another thread knows of the call

    def _begin_next(self) -> None:
        """Begin the next run; end the call if there is none."""
        if self._steps is None:
            self._end()
            return
        try:
            self._run = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._end()
        else:
            self._run.begin()

    def _advance(self, seconds: float) -> bool:
        """Advance it for at most `seconds`; return whether it is over.  A failure is kept."""
        try:
            while self._run is not None:
                if not self._run.execution.advance(seconds):
                    return False
                run = self._run
                run.complete()
                self._begin_next()
                run.give_back()
        except BaseException as error:
            self._fail(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        return self.is_over

    def _fail(self, error: BaseException) -> None:
        """End the call with the error, or with what the engine says that it means."""
        failure = self.owner.transport.translate_error(error)
        if failure is not error:
            failure.__cause__ = error
        self._error = failure
        try:
            if self._run is not None and self._run.is_under_way and not self._run.fail():
                # The steps stay where they stand, for they keep arrays that MPI may yet touch.
                self.owner.transport.failed.append((self._x, self._result, self._steps))
                self._steps = None
        finally:
            self.owner.when_failed(self, failure)
            self._end()

    def _end(self) -> None:
        """The call is over: keep nothing of it but the result."""
        if self._error is not None and self._run is not None:
            self._title = self._run.title
        self._run = self._x = None
        if self._steps is not None:
            self._steps.close()
        if self._is_listed:
            self._in_flight.remove(self)
        self.is_over = True
        if self._at_the_end:
            self._do_at_the_end()

    # Waiting

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else deadline_in(timeout)
        self.is_awaited = self._thread is not None
        try:
            if self._lock.acquire(False) or self._take_over(timeout):
                try:
                    self._advance_until(deadline)
                finally:
                    self._lock.release()
            run = self._run  # None if the thread is just bringing it to its end
            if run is not None and not self.is_over:
                self.owner.when_timed_out(self)
                raise run.timed_out(timeout, self)
        finally:
            self.is_awaited = False
            if self._thread is not None and not self.is_over:
                self._thread.adopt(self)

    def _take_over(self, timeout: float | None) -> bool:
        """Take the call over from the thread that advances it; False if that takes too long."""
        run = self._run
        if run is not None:
            run.execution.interrupt(True)
        try:
            return self._lock.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            if run is not None:
                run.execution.interrupt(False)

    def _advance_until(self, deadline: float | None) -> None:
        """Advance it, and all else that is under way, until it is over or the time is up.

        If a rank advanced only the call that it waits for, two ranks that wait for the same calls
        in different orders would wait for ever.
        """
        num_tries = 0
        while not self._advance(self._patience(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                return
            if not self._carry_others():
                self._pause(deadline, num_tries)
                num_tries += 1

    def _carry_others(self) -> bool:
        """Advance all other calls that are under way; return whether any moved."""
        has_moved = False
        for other in tuple(self._in_flight):
            has_moved |= other is not self and other.progress()
        return has_moved

    def _pause(self, deadline: float | None, num_tries: int) -> None:
        """Let time pass.  Ctrl-C, and the failure of other ranks, end the call."""
        try:
            self.owner.transport.pause(deadline, num_tries)
        except BaseException as error:
            self._fail(error)
            raise

    def _patience(self, deadline: float | None) -> float:
        """The seconds that the execution may wait without coming back to Python."""
        if len(self._in_flight) > self._is_listed:  # others need us meanwhile
            return 0.0
        patience = self.owner.transport.patience
        return (
            patience if deadline is None else min(patience, max(deadline - time.monotonic(), 0.0))
        )


def break_off(work: Work[Any], run: Run, error: BaseException) -> None:
    """End a call of this run that a signal has interrupted between compiled code and Python.

    Otherwise its messages would be under way without anything that knows of them.
    """
    if isinstance(error, CollectiveTimeout):
        return  # it goes on
    if run.reusable.is_begun and not run.is_under_way:
        run.has_begun()
    if run.is_under_way:
        work.give_up(error)
