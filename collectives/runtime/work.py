"""A call under way: runs one after the other, and whoever waits for it makes it go on."""

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
"""The runs of a call, in their order; what it returns is what the call returns.

What is done between them is done when the one before is complete: so a header is read, and the rest
of the call follows from it.
"""


class Owner(Protocol):
    """Whose calls these are: a session."""

    transport: Transport

    def gave_up(self, work: Work[Any], error: BaseException) -> None:
        """A call has failed with this."""

    def is_late(self, work: Work[Any]) -> None:
        """A call has outlasted its time limit and is still under way."""


class Work(Generic[Result]):
    """A collective under way, returned by `async_op=True`.

    Only one thread at a time makes it go on, which holds `_lock`.  What most calls never change
    stands in the class.
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
        """`timeout`: the time limit where `wait` is given none."""
        self.owner, self._steps, self._timeout = owner, steps, timeout
        self._in_flight = owner.transport.in_flight
        self._lock = threading.Lock()
        self._at_the_end: list[Action] = []

    @classmethod
    def blocking(cls, owner: Owner, steps: Steps) -> Work[Any]:
        """That of a blocking call."""
        work = cls(owner, steps)
        work.is_blocking = True
        return work

    @classmethod
    def of(
        cls, owner: Owner, run: Run, x: Any, result: Any, *, timeout: float | None = None
    ) -> Work[Any]:
        """That of a call which is this run alone, begun by compiled code.  It keeps the arrays."""
        work = cls(owner, None, timeout)
        work._run, work._x, work._result = run, x, result
        return work

    @classmethod
    def done(cls, owner: Owner, result: Any) -> Work[Any]:
        """That of a call which was complete at once."""
        work = cls(owner, None)
        work._result, work.is_over = result, True
        return work

    @property
    def title(self) -> str:
        """What is under way: collective, algorithm and number of the call."""
        return self._title if self._run is None else self._run.title

    @property
    def has_failed(self) -> bool:
        """Whether it is over, and with an error."""
        return self._error is not None

    @property
    def was_ahead(self) -> bool:
        """Whether the other ranks are in the midst of the call."""
        return self._run is not None and self._run.is_ahead

    def start(self, thread: ProgressThread | None = None, delay: float = 0.0) -> Work[Any]:
        """Begin.  What is refused is raised here, before anything is sent.

        `thread`: makes it go on beside the program, after a `delay` in seconds.  Without one it is
        among those that whoever waits for anything keeps going.
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
        """From now on it is among those that go on with others, unless a thread sees to it."""
        if self._thread is None and not self._is_listed:
            self._is_listed = True
            self._in_flight.append(self)

    def run(self, timeout: float | None) -> Any:
        """Begin, and wait to the end."""
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
        """Go as far as possible without waiting; whether the collective is complete.

        All else that is under way goes on too, so ranks may ask for the same calls in different
        orders.  Raises what the call failed with.
        """
        if not self.is_over:
            self.progress()
        if not self.is_over:
            self._carry_others()
        if self._error is not None:
            raise self._error
        return self.is_over

    def wait(self, timeout: float | None = None) -> Result:
        """Wait until complete, and return what the blocking call would have returned.

        Raises CollectiveTimeout, which says whom it waited for, after `timeout` seconds; the call
        is then still under way, and `wait` may be called again.
        """
        limit = self._timeout if timeout is None else validation.seconds(timeout)
        if not self.is_over:
            self._wait(limit)
        if self._error is not None:
            raise self._error
        result: Result = self._result
        return result

    def when_over(self, action: Action) -> None:
        """Do this when the call is complete or has failed; now if that has happened.

        Whoever makes the call go on to its end does it.
        """
        self._at_the_end.append(action)
        if self.is_over:
            self._do_at_the_end()

    def _do_at_the_end(self) -> None:
        """What was asked for, each once, whoever else does it at the same time."""
        while self._at_the_end:
            try:
                action = self._at_the_end.pop(0)
            except IndexError:  # another has taken it
                return
            action()

    def progress(self, seconds: float = 0.0) -> bool:
        """Go on unless somebody else does, waiting so long at most; whether anything moved.

        Raises only KeyboardInterrupt, for whoever waits: a failure is for those who wait for this
        call, and others call this too.
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
        """Where it stands, to be compared."""
        return self._run, -1 if self._run is None else self._run.execution.row

    def give_up(self, error: BaseException) -> None:
        """End it with this error, wherever it stands."""
        with self._lock:
            if not self.is_over:
                self._fail(error)

    # By whoever holds the lock, or before anybody else knows of it

    def _begin_next(self) -> None:
        """Let the next run begin; the call is over if there is none."""
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
        """Go on; whether the call is over.  Keeps what it fails with."""
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
        """Give up; what is raised is the error, or what it means."""
        failure = self.owner.transport.meaning(error)
        if failure is not error:
            failure.__cause__ = error
        self._error = failure
        try:
            if self._run is not None and self._run.is_under_way and not self._run.fail():
                # The steps stay where they stand, for they keep arrays that MPI may yet touch.
                self.owner.transport.failed.append((self._x, self._result, self._steps))
                self._steps = None
        finally:
            self.owner.gave_up(self, failure)
            self._end()

    def _end(self) -> None:
        """It is over: nothing is kept of it but the result."""
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
                self.owner.is_late(self)
                raise run.timed_out(timeout, self)
        finally:
            self.is_awaited = False
            if self._thread is not None and not self.is_over:
                self._thread.adopt(self)

    def _take_over(self, timeout: float | None) -> bool:
        """Let whoever makes it go on let go of it, and wait; False if it takes too long."""
        run = self._run
        if run is not None:
            run.execution.interrupt(True)
        try:
            return self._lock.acquire(timeout=-1 if timeout is None else timeout)
        finally:
            if run is not None:
                run.execution.interrupt(False)

    def _advance_until(self, deadline: float | None) -> None:
        """Make it go on, and all else that is under way, until it is over or the time is up.

        If we waited for our own messages only, two ranks that wait for the same calls in different
        orders would wait for ever.
        """
        num_tries = 0
        while not self._advance(self._patience(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                return
            if not self._carry_others():
                self._pause(deadline, num_tries)
                num_tries += 1

    def _carry_others(self) -> bool:
        """Let all else that is under way go on; whether anything moved."""
        has_moved = False
        for other in tuple(self._in_flight):
            has_moved |= other is not self and other.progress()
        return has_moved

    def _pause(self, deadline: float | None, num_tries: int) -> None:
        """Let time pass; Ctrl-C and the end of other ranks end the call."""
        try:
            self.owner.transport.pause(deadline, num_tries)
        except BaseException as error:
            self._fail(error)
            raise

    def _patience(self, deadline: float | None) -> float:
        """How long the execution may wait by itself."""
        if len(self._in_flight) > self._is_listed:  # others need us meanwhile
            return 0.0
        patience = self.owner.transport.patience
        return (
            patience if deadline is None else min(patience, max(deadline - time.monotonic(), 0.0))
        )


def break_off(work: Work[Any], run: Run, error: BaseException) -> None:
    """End a call of this run that a signal has interrupted between compiled code and Python.

    Its messages would otherwise go on with nobody to know of them.
    """
    if isinstance(error, CollectiveTimeout):
        return  # it goes on
    if run.reusable.is_begun and not run.is_under_way:
        run.has_begun()
    if run.is_under_way:
        work.give_up(error)
