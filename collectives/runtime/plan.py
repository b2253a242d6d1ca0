"""Plans: calls with their arrays, made once and run many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collectives.arrays import Array, Arrays, validation
from collectives.engines import Action, Enqueued, Reusable
from collectives.runtime.prepared import Prepared
from collectives.runtime.work import Owner, Steps, Work, end_interrupted


def _no_steps() -> Steps:
    """Yield the steps of a plan that was freed: none."""
    yield from ()


class Plan:
    """A call with its arrays, to be run many times.  `Communicator.plan` makes one.

    A plan may be run again as soon as it is complete; every run reads the input afresh.

    Attributes
    ----------
    result : array or None
        What `run` and `wait` return: the output array, or None on a rank that gets none.
    timeout : float or None
        The time limit in seconds of `run` and `wait` where they are given none.

    Examples
    --------
        plan = comm.plan.all_reduce(x, out=y)
        plan.run()                              # or start(), then test() or wait()
    """

    def __init__(
        self,
        owner: Owner,
        prepared: Prepared,
        steps: Callable[[], Steps],
        result: Array | None,
        give: Callable[[Prepared], object] | None = None,
    ) -> None:
        """Make the plan that holds a prepared call.

        `steps` makes the steps of a run, with the comparisons of checked mode.  `give` takes the
        prepared call back when the plan is freed.
        """
        self._owner, self._prepared, self._steps, self._give = owner, prepared, steps, give
        self.result, self.timeout = result, owner.timeout
        self.num_runs = np.zeros(1, np.int64)  # compiled code increments it too
        self._in_flight = owner.transport.in_flight
        self._max_wait = int(owner.transport.max_wait * 1e9)
        self._execution: Reusable | None = None  # set if compiled code may start it
        self._arrays: tuple[Array | None, Array | None] = None, None
        self._work: Work[Any] | None = None
        self._enqueued: Enqueued | None = None  # by a start that compiled code has completed
        self._is_busy = False
        self._last_title = ""  # set when the plan is freed
        self._unfreed = [None]  # a token that `free` takes, so that only one thread frees it

    def let_code_start(self, arrays: Arrays, tag: int) -> None:
        """Let compiled code start runs on these arrays, all with this tag."""
        prepared, (_, source, target) = self._prepared, arrays
        self._execution = execution = prepared.reusable
        if prepared.is_reusable:
            execution.reuse_for_plan(prepared.key, self.num_runs, tag)
            execution.update_dtypes(source, target)
        else:
            prepared.let_code_start(self.num_runs, arrays)
        self._arrays = source, target
        self._compiled, self._at = execution.loop.run, execution.state_address
        self._start_compiled = execution.loop.start
        self._x, self._out = id(source), id(target)

    @property
    def title(self) -> str:
        """What is run, as error messages name it: collective, algorithm, number of the call."""
        if self._last_title:
            return self._last_title
        if not self._prepared.is_running:
            self._prepared.number = max(int(self.num_runs[0]), 1)
        return self._prepared.title

    def run(self, timeout: float | None = None) -> Array | None:
        """Start a run, wait for it, and return the result.

        Parameters
        ----------
        timeout : float, optional
            The time limit in seconds.  None: the plan's `timeout`.

        Returns
        -------
        array or None
            The plan's `result`.

        Raises
        ------
        RuntimeError
            During a run, after a failure, and after `free`.
        CollectiveTimeout
            After `timeout` seconds.  The message names the ranks that the run waits for.  The run
            continues, and `wait` may be called.
        """
        if timeout is not None:
            timeout = validation.seconds(timeout)
        if (work := self._work) is not None and work.is_done and not work.has_failed:
            self._work = work = None
        is_free = work is None and not self._is_busy
        if self._execution is None or not is_free or not self._owner.has_fast_path:
            return self._new_work().run(self._limit(timeout))
        self._is_busy = True
        try:
            max_wait = 0 if self._in_flight else self._max_wait
            answer = self._compiled(self._at, self._x, self._out, max_wait)
            if answer and self._execution.started(answer, *self._arrays):
                self._is_busy = False
                return self._started_work().run(self._limit(timeout))
        except BaseException as error:
            self._end_interrupted(error)
            raise
        finally:
            self._is_busy = False
        if answer:  # compiled code does not start if an array has changed, e.g. to read-only
            return self._new_work().run(self._limit(timeout))
        if (limit := self._limit(timeout)) is not None:
            self._execution.limit = limit
        return self.result

    def start(self) -> None:
        """Start a run.

        Raises
        ------
        RuntimeError
            During a run, after a failure, and after `free`.
        """
        work, owner = self._work, self._owner
        is_free = not self._is_busy and (work is None or (work.is_done and not work.has_failed))
        if self._execution is None or not is_free or not owner.has_fast_path:
            self._new_work().start(owner.thread, owner.thread_delay)
            return
        self._work = None
        try:
            answer = self._start_compiled(self._at, self._x, self._out, 0)
            if answer and self._execution.started(answer, *self._arrays):
                self._started_work().start(owner.thread, owner.thread_delay)
                return
        except BaseException as error:
            self._end_interrupted(error)
            raise
        if answer:
            self._new_work().start(owner.thread, owner.thread_delay)
        else:
            self._enqueued, self._execution.limit = self._execution.enqueued, self.timeout

    def _started_work(self) -> Work[Any]:
        """Return the work of a run that compiled code has started."""
        self._prepared.started_by_code()
        self._prepared.execution.limit = self.timeout
        work = Work.of(self._owner, self._prepared, self._arrays, self.result, timeout=self.timeout)
        self._work = work
        return work

    def _end_interrupted(self, error: BaseException) -> None:
        """End a run that a signal interrupted just after it started."""
        work = self._work or Work.of(self._owner, self._prepared, self._arrays, self.result)
        end_interrupted(work, self._prepared, error)
        if work.is_done:
            self._work = work

    def _new_work(self) -> Work[Any]:
        """Return the work of a new run."""
        if self.is_active:
            self._refuse("is already running; wait for it first")
        if self._work is not None and self._work.has_failed:
            self._refuse("has failed")
        if self._last_title:
            self._refuse("was freed")
        self._owner.check()
        self.num_runs[0] += 1
        self._prepared.number = int(self.num_runs[0])
        self._work = Work(self._owner, self._all_steps, self.timeout)
        return self._work

    def _all_steps(self, _: Work[Any]) -> Steps:
        yield from self._steps()
        return self.result

    def _refuse(self, why: str) -> None:
        raise RuntimeError(f"{self.title} {why}")

    @property
    def is_active(self) -> bool:
        """Whether the plan has started and is not complete."""
        return self._is_busy or (self._work is not None and not self._work.is_done)

    def test(self) -> bool:
        """Advance the run as far as possible without waiting; return whether it is complete.

        Raises
        ------
        Exception
            The error of a run that has failed.
        """
        if self._work is not None:
            return self._work.test()
        enqueued = self._enqueued
        return enqueued is None or self._owner.is_done_by_device(enqueued)

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Array | None:
        """Wait until the run is complete, and return the result.

        Parameters
        ----------
        timeout : float, optional
            The time limit in seconds.  None: the plan's `timeout`.
        host : bool
            Whether to wait for the device too; see `Work.wait`.

        Returns
        -------
        array or None
            The plan's `result`.

        Raises
        ------
        CollectiveTimeout
            After `timeout` seconds.  The message names the ranks that the run waits for.  The run
            continues, and `wait` may be called again.
        Exception
            The error of a run that has failed.
        """
        if self._work is not None:
            self._work.wait(timeout, host=host)
        elif (enqueued := self._enqueued) is not None:
            enqueued.join()
            if host:
                seconds = validation.seconds(timeout)
                self._owner.wait_for_device(enqueued, self.title, seconds)
        return self.result

    def _limit(self, timeout: float | None) -> float | None:
        limit = validation.seconds(timeout)
        return self.timeout if limit is None else limit

    def add_done_callback(self, action: Action) -> None:
        """Call `action` when the current run is complete or has failed; at once without a run."""
        if self._work is None:
            action()
        else:
            self._work.add_done_callback(action)

    def free(self) -> None:
        """Release the arrays.  The plan cannot be run after that.

        Raises
        ------
        RuntimeError
            During a run.
        """
        if self.is_active:
            self._refuse("is already running; wait for it first")
        try:
            self._unfreed.pop()
        except IndexError:
            return  # it was freed before
        self._last_title = self.title
        self._execution, self._arrays, self._steps = None, (None, None), _no_steps
        give, self._give = self._give, None
        if give is None or (self._work is not None and self._work.has_failed):
            self._prepared.detach()
        else:
            give(self._prepared)
