"""A `Work` is a call in progress: a sequence of runs that its waits and tests advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeVar

from collectives.arrays import validation
from collectives.diagnostics import ENQUEUED
from collectives.engines import Action, Enqueued, ProgressThread, Transport, deadline_in
from collectives.errors import CollectiveTimeout
from collectives.runtime.numbering import Numbering
from collectives.runtime.prepared import Prepared

Result = TypeVar("Result")

_NOTE_SECONDS = 0.02  # between two looks at what a call waits for, see `_note_completed`
_GRACE = 2e-3  # seconds that another thread has at least to hand a call over to a wait
Steps = Generator[Prepared, None, Any]
"""What a call runs, in order; what the generator returns is what the call returns.

The code between two `yield`s runs when the previous run is complete.  For example, it reads a
header, which determines the rest of the call.
"""
MakeSteps = Callable[["Work[Any]"], Steps]
"""Makes the steps of a call, which may ask the `Work` for the number of the call and its tags."""


class Owner(Protocol):
    """What makes calls, as `Work`, plans and kinds see it: a session.

    Attributes
    ----------
    phase_of_call, site_of_call
        Return the phase under which a call that begins now is recorded, and the line of the program
        that makes it, "" if that is not recorded.
    call_token : list
        A thread takes the only entry of the list to make a call, and puts it back.
    is_recorded, is_watched : bool
        Whether calls are recorded; and whether they are recorded or compared.
    has_fast_path : bool
        Whether compiled code may start the runs of plans.
    timeout, thread, thread_delay
        See `collectives.wrap`.
    """

    transport: Transport
    numbering: Numbering
    phase_of_call: Callable[[], str]
    site_of_call: Callable[[], str]
    call_token: list[None]
    is_recorded: bool
    is_watched: bool
    has_fast_path: bool
    timeout: float | None
    thread: ProgressThread | None
    thread_delay: float

    def check(self) -> None:
        """Raise CollectiveError if nothing can be called any more."""

    def limit(self, timeout: object) -> float | None:
        """Return the time limit of a call in seconds: its own, or the default of all calls."""

    def when_failed(self, work: Work[Any], error: BaseException) -> None:
        """Note that `work` has failed with `error`."""

    def when_timed_out(self, work: Work[Any]) -> None:
        """Note that `work` has reached its time limit and is not done."""

    def is_done_by_device(self, enqueued: Enqueued) -> bool:
        """Return whether the device has done what a call has put on a stream."""

    def wait_for_device(self, enqueued: Enqueued, title: str, seconds: float | None) -> None:
        """Wait on the host for what a call has put on a stream."""


class Work(Generic[Result]):
    """A call in progress, returned by `async_op=True`.

    Attributes
    ----------
    is_done : bool
        Whether it is complete or has failed; on devices, whether all of it is enqueued.
    scratch_bytes : int
        The scratch memory that this rank needs for it, without the comparisons of checked mode.

    Examples
    --------
        work = comm.all_reduce(x, async_op=True)
        ...
        total = work.wait()
    """

    # Only the thread that holds `_lock` advances the call and asks the engine about its messages.
    # Others may read where it stands from plain memory (`Prepared.position`), as all reports do.
    # `_run` is another object as soon as the run belongs to another call.

    # Attributes that most calls never change are attributes of the class.
    _run: Prepared | None = None
    _error: BaseException | None = None
    _x: Any = None
    _result: Any = None
    _title = ""
    _thread: ProgressThread | None = None
    _enqueued: Enqueued | None = None  # what is left to a device when it is done
    has_turn = False  # whether later calls on devices wait for it
    _number: int | None = None
    _check: int | None = None
    is_async = True  # its caller goes on meanwhile
    is_done = False
    scratch_bytes = 0
    is_awaited = False  # then the progress thread does not advance it
    _is_listed = False  # in the list of calls that every wait advances
    _noted_at = 0.0  # when it was noted what it waits for

    def __init__(
        self,
        owner: Owner,
        make_steps: MakeSteps | None,
        timeout: float | None = None,
        *,
        is_blocking: bool = False,
    ) -> None:
        """Make a call of `owner`; `timeout` is the time limit of a `wait` that is given none."""
        self.owner, self._timeout, self.is_blocking = owner, timeout, is_blocking
        self._steps = None if make_steps is None else make_steps(self)
        self._limit = timeout  # on a device
        self._in_flight = owner.transport.in_flight
        self._lock = threading.Lock()
        self._done_callbacks: list[Action] = []
        # Of all its runs, whoever advances it, and where.
        self._phase, self._site = owner.phase_of_call(), owner.site_of_call()

    @classmethod
    def of(
        cls,
        owner: Owner,
        run: Prepared,
        x: Any,
        result: Any,
        *,
        timeout: float | None = None,
        is_blocking: bool = False,
    ) -> Work[Any]:
        """Return the work of a call of `owner` that consists of one `run`, begun by compiled code.

        It keeps the arrays `x` and `result`.  `timeout` is as in `wait`; `is_blocking` says whether
        it is a blocking call.
        """
        work = cls(owner, None, timeout, is_blocking=is_blocking)
        work._run, work._x, work._result = run, x, result
        work.scratch_bytes = run.scratch_bytes
        return work

    @classmethod
    def done(cls, owner: Owner, result: Any) -> Work[Any]:
        """Return the work of a call of `owner` that was complete at once, with this `result`."""
        work = cls(owner, None)
        work._result, work.is_done = result, True
        return work

    @property
    def number(self) -> int:
        """The number of the call.

        It is assigned when it is first needed, so a call that is refused has no number.
        """
        if self._number is None:
            self._number = self.owner.numbering.next_number()
        return self._number

    @property
    def check_number(self) -> int:
        """The number of the comparison of the call in checked mode."""
        if self._check is None:
            self._check = self.owner.numbering.next_check()
        return self._check

    @property
    def title(self) -> str:
        """The call, as error messages name it: collective, algorithm, number."""
        run = self._run
        return self._title if run is None else run.title

    @property
    def is_on_device(self) -> bool:
        """Whether it is a call on a device that is not enqueued yet."""
        run = self._run
        return run is not None and run.execution.final_state == ENQUEUED

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    @property
    def was_ahead(self) -> bool:
        """Whether it is still in a header exchange, while other ranks may be in the call itself."""
        run = self._run
        return run is not None and run.is_ahead

    def start(self, thread: ProgressThread | None = None, delay: float = 0.0) -> Work[Any]:
        """Begin, and return this object.  Refusals are raised here, before anything is sent.

        Parameters
        ----------
        thread : ProgressThread, optional
            Advances it while the program computes.  None: every wait and test on this rank advances
            it.
        delay : float
            The seconds after which the thread does so.
        """
        self._thread = thread
        if self._run is None:
            try:
                self._begin_next()
            except BaseException:  # it was refused
                self._end()
                raise
            self._advance(0.0)
        if not self.is_done:
            self.list()
            if thread is not None:
                thread.adopt(self, delay)
        return self

    def list(self) -> None:
        """List it among the calls that every wait of this rank advances, unless a thread does."""
        if self._thread is None and not self._is_listed:
            self._is_listed = True
            self._in_flight.append(self)

    def run(self, timeout: float | None) -> Any:
        """Begin, wait for at most `timeout` seconds, and return the result."""
        self.is_async, self._limit = False, timeout
        if self._run is None:
            try:
                self._begin_next()
            except BaseException:  # it was refused
                self._end()
                raise
        try:
            return self.wait(timeout)
        except CollectiveTimeout:
            raise
        except BaseException as error:  # a signal may interrupt Python anywhere
            self.give_up(error)
            raise

    def test(self) -> bool:
        """Advance it as far as possible without waiting; return whether it is complete.

        All other calls in progress on this rank are advanced too, so ranks may test their calls in
        different orders.  On a device, it is complete when the device has done it.

        Raises
        ------
        Exception
            The error of a call that has failed.
        """
        if not self.is_done:
            self.progress()
        if not self.is_done:
            self._advance_others()
        if self._error is not None:
            raise self._error
        enqueued = self._enqueued
        return self.is_done and (enqueued is None or self.owner.is_done_by_device(enqueued))

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Result:
        """Wait until it is complete, and return what the blocking call would have returned.

        On a device, wait until it is enqueued, and let the current stream wait for it.

        Parameters
        ----------
        timeout : float, optional
            The time limit in seconds.  None: the time limit of the call.
        host : bool
            Whether to wait until the device has done it, and not more than `timeout` seconds for
            that if they are given.

        Returns
        -------
        array or None
            The result of the call.

        Raises
        ------
        CollectiveTimeout
            After `timeout` seconds.  The message names the ranks that the call waits for.  The call
            continues, and `wait` may be called again.
        Exception
            The error of a call that has failed.
        """
        seconds = validation.seconds(timeout)
        if not self.is_done:
            self._wait(self._timeout if seconds is None else seconds)
        if self._thread is not None:
            self._thread.forget(self)
        if self._error is not None:
            raise self._error
        if (enqueued := self._enqueued) is not None:
            enqueued.join()
            if host:
                self.owner.wait_for_device(enqueued, self.title, seconds)
        result: Result = self._result
        return result

    def hasten(self) -> None:
        """Let the progress thread advance it at once, because nobody is going to wait for it."""
        if self._thread is not None and not self.is_done:
            self._thread.hasten(self)

    def add_done_callback(self, action: Action) -> None:
        """Call `action` when the call is complete or has failed; at once if it already is.

        The thread that completes the call calls `action()`, without arguments.
        """
        self._done_callbacks.append(action)
        if self.is_done:
            self._run_done_callbacks()

    def _run_done_callbacks(self) -> None:
        """Call each action of `add_done_callback` once, even if several threads get here."""
        while self._done_callbacks:
            try:
                action = self._done_callbacks.pop(0)
            except IndexError:  # another thread has taken it
                return
            action()

    def progress(self, seconds: float = 0.0) -> bool:
        """Advance it for at most `seconds`, unless another thread does; return whether it moved.

        Raises only KeyboardInterrupt.  Waits for other calls advance this one too, so a failure is
        kept for its own wait.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            before = self._place()
            self._advance(seconds)
            return self._place() != before
        finally:
            self._lock.release()

    def _place(self) -> tuple[Prepared | None, int]:
        """Return the current run and row, to notice progress."""
        return self._run, -1 if self._run is None else self._run.execution.row

    def give_up(self, error: BaseException) -> None:
        """End the call with `error`."""
        with self._lock:
            if not self.is_done:
                self._fail(error)

    def expire(self, limit: float) -> None:
        """End the call with `CollectiveTimeout`, because it has taken `limit` seconds."""
        with self._lock:
            if self._run is not None and not self.is_done:
                self._run.note_completed()
                self._fail(CollectiveTimeout(self._run.time_out_report(limit), self))

    # Called while this thread holds the lock, or before other threads know of the call

    def _begin_next(self) -> None:
        """Start the next run; end the call if there is none."""
        if self._steps is None:
            self._end()
            return
        try:
            self._run = next(self._steps)
        except StopIteration as end:
            self._result = end.value
            self._end()
        else:
            self.scratch_bytes = max(self.scratch_bytes, self._run.scratch_bytes)
            self._run.begin(self._phase, self._site, is_async=self.is_async, limit=self._limit)

    def _advance(self, seconds: float) -> bool:
        """Advance it for at most `seconds`; return whether it is done.  A failure is kept."""
        try:
            while self._run is not None:
                if not self._run.execution.advance(seconds):
                    self._note_completed(self._run)
                    return False
                run = self._run
                self._enqueued = run.execution.enqueued or self._enqueued
                run.complete()
                if self._steps is None:
                    self._end()
                else:
                    self._begin_next()
                run.give_back()
        except BaseException as error:
            self._fail(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        return self.is_done

    def _note_completed(self, run: Prepared) -> None:
        """Now and then note what the call waits for, so that other threads can report it."""
        now = time.monotonic()
        if now >= self._noted_at + _NOTE_SECONDS:
            if self._noted_at:  # most calls are complete before the first look
                run.note_completed()
            self._noted_at = now

    def _fail(self, error: BaseException) -> None:
        """End the call with the error, or with the engine's translation of it."""
        failure = self.owner.transport.translate_error(error)
        if failure is not error:
            failure.__cause__ = error
        self._error = failure
        are_free = False  # whether MPI no longer uses the arrays
        try:
            are_free = self._run is None or not self._run.is_running or self._run.fail()
        finally:
            if not are_free:
                self.owner.transport.failed.append((self._x, self._result, self._steps))
                self._steps = None  # the suspended steps keep arrays
            self.owner.when_failed(self, failure)
            self._end()

    def _end(self) -> None:
        """End the call, and release everything but the result."""
        if self._error is not None and self._run is not None:
            self._title = self._run.title
        self._run = self._x = None
        if self._steps is not None:
            self._steps.close()
        if self._is_listed:
            self._is_listed = False
            self._in_flight.remove(self)
        self.is_done = True
        if self._done_callbacks:
            self._run_done_callbacks()

    # Waiting

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else deadline_in(timeout)
        self.is_awaited = self._thread is not None
        try:
            if self._lock.acquire(False) or self._take_over(timeout):
                try:
                    self._advance_until(deadline)
                    if not self.is_done:
                        self._time_out(timeout, is_ours=True)
                finally:
                    self._lock.release()
            elif not self.is_done:
                self._time_out(timeout, is_ours=False)
        finally:
            self.is_awaited = False
            if self._thread is not None and not self.is_done:
                self._thread.adopt(self)

    def _time_out(self, timeout: float | None, *, is_ours: bool) -> None:
        """Raise CollectiveTimeout, unless another thread completes the call meanwhile.

        `is_ours` says whether this thread holds the lock.
        """
        while (run := self._run) is not None:
            if is_ours:
                run.note_completed()
            report = run.time_out_report(timeout)
            if self._run is run:  # otherwise the report may be of another call
                if is_ours and not self.is_async:
                    self.is_async = True
                    run.execution.leave_callers_stream()
                self.owner.when_timed_out(self)
                raise CollectiveTimeout(report, self)

    def _take_over(self, timeout: float | None) -> bool:
        """Take the call over from another thread; return False if that takes too long."""
        run = self._run
        if run is not None:
            run.execution.interrupt(True)
        try:
            return self._lock.acquire(timeout=-1 if timeout is None else max(timeout, _GRACE))
        finally:
            if run is not None:
                run.execution.interrupt(False)

    def _advance_until(self, deadline: float | None) -> None:
        """Advance all calls in progress until this one is done or the time is up.

        If a rank advanced only the call that it waits for, two ranks that wait for the same calls
        in different orders would deadlock.
        """
        num_tries, before = 0, None
        while not self._advance(self._max_wait(deadline)):
            if deadline is not None and time.monotonic() >= deadline:
                return
            has_moved, place = self._advance_others(), self._place()
            if has_moved or place != before:
                num_tries, before = 0, place
            else:
                self._pause(deadline, num_tries)
                num_tries += 1

    def _advance_others(self) -> bool:
        """Advance all other calls in progress; return whether any moved."""
        has_moved = False
        for other in tuple(self._in_flight):
            has_moved |= other is not self and other.progress()
        return has_moved

    def _pause(self, deadline: float | None, num_tries: int) -> None:
        """Let time pass.  Ctrl-C and failures of other ranks end the call."""
        try:
            self.owner.transport.pause(deadline, num_tries)
        except BaseException as error:
            self._fail(error)
            raise

    def _max_wait(self, deadline: float | None) -> float:
        """Return the seconds that the execution may wait without returning to Python."""
        if len(self._in_flight) > self._is_listed:  # other calls must be advanced meanwhile
            return 0.0
        max_wait = self.owner.transport.max_wait
        return (
            max_wait if deadline is None else min(max_wait, max(deadline - time.monotonic(), 0.0))
        )


def end_interrupted(work: Work[Any], run: Prepared, error: BaseException) -> None:
    """End a call of `run` that a signal interrupted between compiled code and Python.

    Otherwise its messages would be in flight, and nothing would wait for them.
    """
    if isinstance(error, CollectiveTimeout) and error.work is not None:
        return  # the call continues
    if run.reusable.is_running and not run.is_running:
        run.started_by_code()
    if run.is_running:
        work.give_up(error)
