"""A call in progress, as PyTorch expects it, and the time limit of calls that nobody waits for."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed import DistBackendError, Work

import collectives
from collectives.torch.tensors import Tensor

NO_LIMIT = timedelta(0)  # PyTorch's way to say so in `wait`
Finish = Callable[[], None]


def seconds(timeout: timedelta) -> float | None:
    """A time limit in seconds; None if PyTorch gives none."""
    return timeout.total_seconds() if timeout > NO_LIMIT else None


def fail(error: collectives.CollectiveError) -> NoReturn:
    """Raise PyTorch's kind of error."""
    raise DistBackendError(str(error)) from error


class _Completing(threading.local):
    """Whether this thread completes a future, and runs the functions that follow it."""

    is_true = False


_completing = _Completing()


class InProgress(Work):  # type: ignore[misc]
    """A call in progress.

    `call`: the call of the library.  `tensors`: its result.  `finish`: what is done once when it is
    complete, before anyone learns of that.  `limit`: the seconds after which its future fails.
    """

    def __init__(
        self,
        call: collectives.Work[Any],
        tensors: list[Tensor],
        finish: Finish | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self._call, self._tensors, self._to_finish = call, tensors, finish
        self._deadline = None if limit is None else time.monotonic() + limit
        self._lock = threading.Lock()
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        try:
            self._call.wait(seconds(timeout))
        except collectives.CollectiveError as error:
            fail(error)
        self._finish()
        return True

    def _finish(self) -> None:
        """Do once what is left to do; other threads wait until it is done."""
        if self._to_finish is not None:
            with self._lock:
                finish, self._to_finish = self._to_finish, None
                if finish is not None:
                    finish()

    def is_completed(self) -> bool:
        with suppress(Exception):
            if not self._call.test():
                return False
            self._finish()
        return True

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
            self._future = torch.futures.Future()
            if self._deadline is not None and not self._call.is_done:
                _watch().add(self._deadline, self._call)
            if _completing.is_true:  # its caller may wait, and nothing would advance this call
                threading.Thread(target=self._complete_future, daemon=True).start()
            else:
                self._call.add_done_callback(self._complete_future)
                self._call.hasten()
        return self._future

    def _complete_future(self) -> None:
        """Complete the future, and run what was added by `then`, on this thread."""
        assert self._future is not None
        try:
            self._call.wait()
            self._finish()
        except Exception as error:  # noqa: BLE001 - whoever waits for the future raises it
            self._future.set_exception(DistBackendError(str(error)))
            return
        was_completing, _completing.is_true = _completing.is_true, True
        try:
            self._future.set_result(self._tensors)
        finally:
            _completing.is_true = was_completing


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
        return torch.futures.collect_all(futures).then(_values)


def _values(done: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[Tensor]:
    return [tensor for future in done.value() for tensor in future.value()]


class _Watch:
    """Ends calls at their deadlines, so that those who wait for their futures learn of it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: list[tuple[float, int, collectives.Work[Any]]] = []
        threading.Thread(target=self._work, name="collectives deadlines", daemon=True).start()

    def add(self, deadline: float, call: collectives.Work[Any]) -> None:
        """End `call` at `deadline` if it is not done."""
        with self._changed:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].is_done]
            heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (deadline, id(call), call))
            if self._deadlines[0][2] is call:
                self._changed.notify()

    def _work(self) -> None:
        with self._changed:
            while True:
                if not self._deadlines:
                    self._changed.wait()
                elif (rest := self._deadlines[0][0] - time.monotonic()) > 0:
                    self._changed.wait(rest)
                else:
                    self._end(heapq.heappop(self._deadlines)[2])

    @staticmethod
    def _end(call: collectives.Work[Any]) -> None:
        try:
            call.wait(0.0)
        except collectives.CollectiveTimeout as error:
            call.give_up(error)
        except Exception:  # noqa: BLE001 - the call has failed, and its future says so
            return


@cache
def _watch() -> _Watch:
    """The thread of this process that ends calls."""
    return _Watch()
