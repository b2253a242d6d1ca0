"""A call in progress, as PyTorch expects it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn
from weakref import ref

import torch
from torch.distributed import DistBackendError, Work

import collectives
from collectives.arrays import Event, jit
from collectives.torch.deadlines import Limit, watch
from collectives.torch.tensors import HOST_MEMORY, Finish, Memory, Tensor
from collectives.torch.versions import untraced

NO_LIMIT = timedelta(0)  # PyTorch's way to say so in `wait`


def seconds(timeout: timedelta) -> float | None:
    """Return a time limit in seconds; None if PyTorch gives none."""
    return timeout.total_seconds() if timeout > NO_LIMIT else None


def fail(error: collectives.CollectiveError) -> NoReturn:
    """Raise PyTorch's kind of error."""
    raise DistBackendError(str(error)) from error


class Result(list[Tensor]):
    """The tensors of a work as the value of its future, by which the work can be asked.

    Attributes
    ----------
    work : weak reference to Work
        Weak, since the work keeps its future.
    """

    def __init__(self, tensors: list[Tensor], work: Work) -> None:
        super().__init__(tensors)
        self.work = ref(work)

    def __reduce__(self) -> Any:
        """Return a list of the tensors: PyTorch pickles a value to find its tensors."""
        return list, (list(self),)


class _Completing(threading.local):
    """Whether this thread completes a future, and runs the functions that follow it."""

    is_true = False


_completing = _Completing()


@untraced
class InProgress(Work):  # type: ignore[misc]
    """A call in progress.

    On a device, `wait` without a time limit returns when the call is enqueued, and the current
    stream waits for the call.

    Parameters
    ----------
    memory : Memory
        The memory of its arrays.
    call : collectives.Work
        The call of the library.
    tensors : list of Tensor
        Its result.
    finish : function, optional
        What is done once when the call is complete, before anyone learns of that.
    limit : float, optional
        The seconds after which its future fails.
    """

    def __init__(
        self,
        memory: Memory,
        call: collectives.Work[Any],
        tensors: list[Tensor],
        finish: Finish | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.memory, self._call, self._tensors, self._to_finish = memory, call, tensors, finish
        self._is_direct = finish is None
        self._end: Event | None = None  # of what was done to finish
        self._limit, self._began = limit, time.monotonic()
        self._lock = threading.Lock()
        self._outcome: Any = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        limit = seconds(timeout)
        with self.memory.in_order():
            try:
                self._call.wait(limit, host=limit is not None)  # as with NCCL
            except collectives.CollectiveError as error:
                fail(error)
            self._finish()
        return True

    def _finish(self) -> None:
        """Do once what is left to do; other threads, and their streams, wait until it is done."""
        if self._is_direct:
            return
        with self._lock:
            finish, self._to_finish = self._to_finish, None
            if finish is not None:
                finish()
                self._end = self.memory.backend.record()
        if self._end is not None:
            self._end.join()

    def is_completed(self) -> bool:
        with suppress(collectives.CollectiveError):  # a call that has failed is complete
            if not self._call.test():
                return False
            with self.memory.in_order():
                self._finish()
        return self._end is None or self._end.is_complete

    def exception(self) -> BaseException | None:
        try:
            self._call.test()
        except Exception as error:  # noqa: BLE001 - it is the result
            return error
        return None

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        if self._future is None:
            self._outcome = self.memory.new_future()
            self._future = unwrapped(self._outcome)
            if jit.is_at_exit():  # no thread advances the call while the future is waited for
                self._complete_future()
                return self._future
            if self._limit is not None and not self._call.is_done:
                watch().add(Limit(self._began + self._limit, self._limit, self._call))
            if _completing.is_true:  # its caller may wait, and nothing would advance this call
                threading.Thread(target=self._complete_future, daemon=True).start()
            else:
                self._call.add_done_callback(self._complete_future)
                self._call.hasten()
        return self._future

    def _complete_future(self) -> None:
        """Complete the future, and run what was added by `then`, on this thread.

        On a device the future notes the end of the current stream.  The streams of those who wait
        for the future wait for that end.
        """
        outcome: Any = Result(self._tensors, self)
        with self.memory.beside():
            try:
                self._call.wait()
                self._finish()
            except Exception as error:  # noqa: BLE001 - whoever waits for the future raises it
                outcome = DistBackendError(str(error))
            was_completing, _completing.is_true = _completing.is_true, True
            try:
                self._outcome.set_result(outcome)
            finally:
                _completing.is_true = was_completing


def unwrapped(outcome: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    """Return the future of a result, from the future of a result or an error.

    `Future.set_exception` would hide the error from those who get the future from C++.
    """
    return outcome.then(_result_of)


def _result_of(done: torch.futures.Future[Any]) -> Any:
    outcome = done.value()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class Batch:
    """The works of a block of several calls.  Its messages start together, in their order."""

    def __init__(self) -> None:
        self.works: list[Any] = []

    def start(self) -> None:
        """Start the messages that have not started."""
        for work in self.works:
            if isinstance(work, Postponed):
                work.start()


@untraced
class Postponed(Work):  # type: ignore[misc]
    """A message of a batch, which starts when the block ends, or when it is asked for.

    Parameters
    ----------
    memory : Memory
        The memory of its array.
    begin : function
        Starts the message.
    batch : Batch
        The batch to which it belongs.
    """

    def __init__(self, memory: Memory, begin: Callable[[], InProgress], batch: Batch) -> None:
        super().__init__()
        self._begin, self._batch, self._lock = begin, batch, threading.Lock()
        self.memory = memory
        self._work: InProgress | None = None

    def start(self) -> None:
        """Start the message unless it has started."""
        with self._lock:
            if self._work is None:
                self._work = self._begin()

    def _started(self) -> InProgress:
        """Return the work of the message, after the whole batch has started."""
        self._batch.start()
        assert self._work is not None, "it is in the batch"
        return self._work

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return self._started().wait(timeout)

    def is_completed(self) -> bool:
        return self._started().is_completed()

    def is_success(self) -> bool:
        return self._started().is_success()

    def exception(self) -> BaseException | None:
        return self._started().exception()

    def result(self) -> list[Tensor]:
        return self._started().result()

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._started().get_future()


@untraced
class Joined(Work):  # type: ignore[misc]
    """Several calls as one; None for those that are complete."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception())), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        futures = [work.get_future() for work in self._works]
        memory = self._works[0].memory if self._works else HOST_MEMORY
        outcome = memory.new_future()

        def complete(_: object) -> None:
            with memory.beside():
                outcome.set_result(_value(futures, self))

        torch.futures.collect_all(futures).then(complete)
        return unwrapped(outcome)


def _value(futures: list[torch.futures.Future[list[Tensor]]], work: Joined) -> Result | Exception:
    """Return the values of futures that are done as one result, or an error.

    The current stream waits for the values.
    """
    try:
        return Result([tensor for future in futures for tensor in future.wait()], work)
    except Exception as error:  # noqa: BLE001 - whoever waits for the future raises it
        return error
