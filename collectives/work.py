"""What a caller holds of a call under way: something to test and to wait for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from collectives.errors import CollectiveTimeout
from collectives.transport import Action

if TYPE_CHECKING:
    from collectives.plan import Plan


class Work:
    """A collective under way, returned by `async_op=True`."""

    def __init__(self, plan: Plan, finish: Callable[[], Any] | None = None) -> None:
        self.plan, self._finish = plan, finish

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the collective is complete."""
        return self.plan.test()

    def when_over(self, action: Action) -> None:
        """See `Plan.when_over`."""
        self.plan.when_over(action)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until complete, and return what the blocking call would have returned."""
        result = self.plan.wait(timeout)
        return result if self._finish is None else self._finish()


class Rest:
    """A call that timed out in what goes ahead of it: what is left to do.

    `ahead`: what is under way.  `go_on` makes the call again, which goes on where it was, with
    another time limit.
    """

    def __init__(self, ahead: Plan, go_on: Callable[[float | None], Any]) -> None:
        self._under_way: Plan | Work | Rest = ahead
        self._next: Callable[[float | None], Any] | None = go_on
        self._result: Any = None
        self._error: BaseException | None = None

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the collective is complete."""
        while self._next is not None:
            if not self._under_way.test():
                return False
            with suppress(CollectiveTimeout):  # something else is under way now
                self.go_on(0)
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until complete, and return what the blocking call would have returned."""
        while self._next is not None:
            self.go_on(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def go_on(self, timeout: float | None) -> None:
        """Come to the end of the call that was made: of an asynchronous one to its start."""
        if self._next is None:
            return
        try:
            self._result, self._next = self._next(timeout), None
        except CollectiveTimeout as error:
            self._under_way, self._next = error.work, error.work.wait
            raise
        except BaseException as error:
            self._error, self._next = error, None
            raise
        if isinstance(self._result, Work):
            self._under_way, self._next = self._result, self._result.wait
