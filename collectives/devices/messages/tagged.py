"""Runs a send, a receive, or both, in the order of messages with the same tag.

A message goes by a box if it can; else the engine sends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from collectives.devices.clock import timed_end
from collectives.devices.driver import DriverError
from collectives.devices.meeting import Wait, Waits
from collectives.devices.messages.mail import Mail
from collectives.devices.messages.passage import End, Passage
from collectives.devices.messages.receiving import Receiving
from collectives.devices.messages.sending import Sending
from collectives.devices.order import Enqueued
from collectives.diagnostics import COMPLETE, ENQUEUED, Waiting
from collectives.engines import Execution, Operands, Transport


class Tagged:
    """An execution of a send, a receive, or both, of which one may go by a box.

    It is complete when all is enqueued on the device, and what is staged is sent and received.
    """

    limit: float | None = None
    enqueued: Enqueued | None = None
    final_state = COMPLETE
    _sending: Sending | None = None
    _receiving: Receiving | None = None

    def __init__(
        self,
        transport: Transport,
        mail: Mail,
        sending: End | None,
        receiving: End | None,
        operands: Operands,
        tag: int,
    ) -> None:
        self._transport, self._mail = transport, mail
        self._ends, self._messages = (sending, receiving), transport.messages(tag)
        self._lock = threading.Lock()  # held by the thread that advances it, or looks at it
        self._steps, self._others = list[_Steps](), list[Execution]()
        self.attach(operands, tag)

    # The interface of executions

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        for end in filter(None, self._ends):
            end.program.check_arrays(operands.input, operands.output, operands.scratch)
        self._operands, self._messages.tag = operands, tag

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        del self._operands, self._passage
        self._others = []
        self._sending = self._receiving = None
        self._steps = []

    def restart(self, number: int, *, is_async: bool = False) -> None:
        """Begin, in the order of the messages of this rank."""
        (sending, receiving), mail = self._ends, self._mail
        is_data = receiving is None or mail.expect_data_only(self, receiving.peer)
        route = mail.route  # which is set if an envelope may come
        self._backend = self._operands.backend if route is None else route.links.backend
        self._callers, self.enqueued = self._backend.current_stream(), None
        try:
            with self._backend.on_stream(self._callers):
                self._passage = passage = Passage(
                    *(self._transport, mail, route, self._messages, self._operands, self.limit)
                )
                if is_async:
                    self.leave_callers_stream()
        except BaseException:
            mail.has_received(self)
            raise
        self._others = passage.others
        self.final_state = COMPLETE if passage.stream is None else ENQUEUED
        self._sending = None if sending is None else Sending(sending, passage)
        self._receiving = None
        if receiving is not None:
            self._receiving = Receiving(receiving, passage, is_data=is_data)
        both = self._receiving, self._sending  # a receive is posted at once
        self._steps = [_Steps(end.steps()) for end in both if end is not None]
        self._transport.watch(self)

    def leave_callers_stream(self) -> None:
        """See `Execution.leave_callers_stream`."""
        if self._passage.stream is not None:
            with self._backend.on_stream(self._callers):
                self._passage.stream.leave_caller()

    def advance(self, seconds: float) -> bool:
        """See `Execution.advance`; it never waits."""
        with self._lock:
            self._raise_failure()
            with self._backend.on_stream(self._callers):
                are_over = [steps.go_on() for steps in self._steps]
                if all(are_over):
                    self._end()
            return all(are_over)

    def _raise_failure(self) -> None:
        """Raise the failure after which nothing may be sent."""
        if (route := self._passage.route) is not None:
            route.watch.release()
            if route.watch.failure is not None:
                raise route.watch.failure.with_traceback(None)

    def _end(self) -> None:
        """End a run of which all is enqueued."""
        self._transport.unwatch(self)
        self._mail.has_received(self)
        route, stream = self._passage.route, self._passage.stream
        if route is not None and stream is not None and stream.is_used:
            marking = self._passage if self._receiving is None else self._receiving
            mark = marking.mark(route, stream)
            self.enqueued = mark if stream.is_own else None

    @property
    def row(self) -> int:
        """How often it has gone on, to notice progress."""
        num_steps = sum(steps.num_steps for steps in self._steps)
        return num_steps + sum(one.row for one in self._others)

    def interrupt(self, is_wanted: bool) -> None:
        """Do nothing: this execution never waits."""

    def when_complete(self, then: Callable[[float], object]) -> None:
        """See `Execution.when_complete`."""
        route, stream = self._passage.route, self._passage.stream
        if route is None or stream is None or not stream.is_used:
            then(time.perf_counter())
            return
        with suppress(RuntimeError, TimeoutError), self._backend.on_stream(self._callers):
            end = timed_end(route.links.driver, self._backend, stream.handle, then)
            route.watch.held.add(*end)

    def link(self, rank: int) -> str:
        """See `Execution.link`."""
        return "" if self._sending is None else self._sending.link

    @property
    def device_row(self) -> str:
        """See `Execution.device_row`."""
        return next(filter(None, (one.device_row for one in self._others)), "")

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        self._messages.note_completed()
        for one in self._others:
            one.note_completed()

    def position(self) -> tuple[int, list[Waiting]]:
        """See `Execution.position`."""
        waiting = self._messages.waiting_for()
        for one in self._others:
            waiting += one.position()[1]
        return 0, waiting + [Waiting(rank, is_receive=False) for rank in self.missing]

    def abandon(self) -> bool:
        """See `Execution.abandon`; what is enqueued goes on."""
        with self._lock, self._backend.on_stream(self._callers):
            self._transport.unwatch(self)
            for steps in self._steps:
                steps.close()
            for end in (self._sending, self._receiving):
                if end is not None:
                    end.abandon()
            with suppress(DriverError):
                self._end()
            are_done = [one.abandon() for one in self._others]
            return self._messages.abandon() and all(are_done)

    # What any thread may ask, while it waits for something else than a message

    @property
    def can_move(self) -> bool:
        """See `Waiter.can_move`."""
        return not self._lock.locked() and any(steps.can_move for steps in self._steps)

    @property
    def is_stuck(self) -> bool:
        """See `Waiter.is_stuck`."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not any(steps.can_move or steps.is_at_work for steps in self._steps)
        finally:
            self._lock.release()

    @property
    def missing(self) -> list[int]:
        """See `Waiter.missing`."""
        return sorted({rank for steps in self._steps for rank in steps.missing})


class _Steps:
    """The steps of one end, and what it waits for, which is None for a message."""

    def __init__(self, steps: Waits) -> None:
        self._steps, self._is_over, self.num_steps = steps, False, 0
        self._wait: Wait | None = None

    def go_on(self) -> bool:
        """Go on as far as possible; return whether that was the end."""
        while not self._is_over and (self._wait is None or self._wait.is_over()):
            self.num_steps += self._wait is not None
            try:
                self._wait = next(self._steps)
            except StopIteration:
                self._is_over, self._wait = True, None
            if self._wait is None:
                break
        return self._is_over

    def close(self) -> None:
        """End the steps."""
        self._steps.close()
        self._is_over, self._wait = True, None

    @property
    def can_move(self) -> bool:
        """Whether it waits for something that has come."""
        return (wait := self._wait) is not None and wait.has_ended

    @property
    def is_at_work(self) -> bool:
        """Whether a device is at work, for which it waits."""
        return (wait := self._wait) is not None and wait.is_at_work

    @property
    def missing(self) -> list[int]:
        """The ranks that it waits for, beside those whose messages it waits for."""
        return [] if (wait := self._wait) is None else wait.missing()
