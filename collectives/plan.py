"""A program bound to arrays: what is run, once or many times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from collectives import staging
from collectives.arrays import Array, Backend
from collectives.errors import CollectiveTimeout
from collectives.ledger import Entry
from collectives.program import Combine, Message, Move, Program, Region, Step
from collectives.reduction import Operator
from collectives.transport import Exchange, Transport

Action = Callable[[], object]


class Buffers(NamedTuple):
    """The flat arrays a program works on, and the backend that serves all three."""

    backend: Backend
    input: Array
    output: Array
    scratch: Array

    def view(self, region: Region) -> Array:
        return getattr(self, region.buffer)[region.start : region.stop]


class _BoundStep(NamedTuple):
    packing: list[Action]
    exchange: Exchange
    finishing: list[Action]


class Plan:
    """A collective bound to its arrays.  `run()`, or `start()` and then `test()` or `wait()`.

    `result` is what `run` and `wait` return: the output array, or None on a rank that gets none.
    A plan may be run again as soon as it is complete; every run reads the input afresh.  `timeout`
    is what `run` and `wait` use where they are given none.
    """

    def __init__(
        self,
        title: str,
        program: Program,
        buffers: Buffers,
        transport: Transport,
        *,
        tag: int,
        result: Array | None,
        timeout: float | None = None,
        operator: Operator | None = None,
        is_kept: bool = False,
        on_start: Callable[[], list[Entry]] = list,
    ) -> None:
        self.title, self.program, self.result, self.timeout = title, program, result, timeout
        self._transport, self._on_start, self._is_kept = transport, on_start, is_kept
        bind = _Binder(buffers, transport, operator, tag, is_kept)
        self._opening = bind.moves(program.opening)
        self._steps = [bind.step(step) for step in program.steps]
        self._closing = bind.closing(program)
        self._round: int | None = None  # the one in progress
        self._refusal: str | None = None  # why it cannot be started
        self._error: BaseException | None = None
        self._entries: list[Entry] = []

    def run(self, timeout: float | None = None) -> Array | None:
        """Start and wait.  `timeout` in seconds."""
        self.start()
        return self.wait(timeout)

    def start(self) -> None:
        """Begin.  Raises RuntimeError while it runs, after a failure, and after `free`."""
        if self._refusal is not None:
            raise RuntimeError(f"{self.title} {self._refusal}")
        self._refusal = "is already running; wait for it first"
        self._transport.in_flight.append(self)
        self._round = -1
        try:
            self._entries = self._on_start()
            _do(self._opening)
            self._next_round()
        except BaseException as error:
            self._fail(error)
            raise

    @property
    def is_active(self) -> bool:
        """Whether the plan has started and is not complete."""
        return self._round is not None

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the plan is complete."""
        self._progress()
        if self._error is not None:
            raise self._error
        return self._round is None

    def wait(self, timeout: float | None = None) -> Array | None:
        """Wait until complete, and return the result.

        Raises CollectiveTimeout, which says whom it waited for, after `timeout` seconds; the plan
        is then still under way, and `wait` may be called again.
        """
        timeout = self.timeout if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        num_tries = 0
        while self._round is not None:
            is_alone = len(self._transport.in_flight) == 1
            if is_alone and not self._complete_round(deadline):
                raise self._timed_out(timeout)
            if not is_alone and not self._carry_all_along(deadline, num_tries):
                raise self._timed_out(timeout)
            num_tries += 1
        if self._error is not None:
            raise self._error
        return self.result

    def free(self) -> None:
        """Give back the engine's requests.  The plan must be complete and is of no use after."""
        if self._round is not None:
            raise RuntimeError(f"{self.title} {self._refusal}")
        self._refusal = "was freed"
        for step in self._steps:
            step.exchange.free()

    def _complete_round(self, deadline: float | None) -> bool:
        """Wait for the round in progress and begin the next; False if the deadline came first."""
        assert self._round is not None
        try:
            is_complete = self._steps[self._round].exchange.wait(deadline)
            if is_complete:
                self._next_round()
        except BaseException as error:
            self._fail(error)
            raise
        return is_complete

    def _carry_all_along(self, deadline: float | None, num_tries: int) -> bool:
        """Let every plan under way progress; False if the deadline has passed.

        If we waited for our own messages only, two ranks that wait for the same plans in different
        orders would wait for ever.
        """
        has_moved = [plan._progress() for plan in list(self._transport.in_flight)]
        if not any(has_moved):
            self._transport.pause(deadline, num_tries)
        return self._round is None or deadline is None or time.monotonic() < deadline

    def _progress(self) -> bool:
        """Finish every round whose messages are there; whether there was one.

        Raises nothing: a failure is for those who wait for this plan, and others call this too.
        """
        before = self._round
        try:
            while self._round is not None and self._steps[self._round].exchange.test():
                self._next_round()
        except BaseException as error:  # noqa: BLE001 - kept, and raised by test and wait
            self._fail(error)
        return self._round != before

    def _next_round(self) -> None:
        """Do what ends the round in progress, and begin the next or end the plan."""
        assert self._round is not None
        if self._round >= 0:
            _do(self._steps[self._round].finishing)
        self._round += 1
        if self._round < len(self._steps):
            step = self._steps[self._round]
            _do(step.packing)
            step.exchange.start()
        else:
            _do(self._closing)
            self._end()

    def _end(self) -> None:
        self._round = self._refusal = None
        self._transport.in_flight.remove(self)
        for entry in self._entries:
            entry.finished = time.perf_counter()
        if not self._is_kept:
            self.free()

    def _fail(self, error: BaseException) -> None:
        self._error, self._round, self._refusal = error, None, "has failed"
        self._transport.in_flight.remove(self)
        # Messages may still arrive: the buffers must never go to anybody else.
        self._transport.failed.append(self)

    def _timed_out(self, timeout: float | None) -> CollectiveTimeout:
        assert self._round is not None
        peers = ", ".join(self._steps[self._round].exchange.waiting_for())
        return CollectiveTimeout(
            f"{self.title}: rank {self._transport.rank} waited {timeout} s in round {self._round} "
            f"of {len(self._steps)} for {peers}",
            Work(self),
        )


class Work:
    """A collective under way, returned by `async_op=True`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the collective is complete."""
        return self._plan.test()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait until complete, and return what the blocking call would have returned."""
        return self._plan.wait(timeout)


def _do(actions: list[Action]) -> None:
    for action in actions:
        action()


class _Binder:
    """Turns regions into views and actions, once for all runs."""

    def __init__(
        self,
        buffers: Buffers,
        transport: Transport,
        operator: Operator | None,
        tag: int,
        is_kept: bool,
    ) -> None:
        self.buffers, self.transport, self.tag, self.is_kept = buffers, transport, tag, is_kept
        self.operator = operator
        self.combine = buffers.backend.binary(operator.function) if operator else None

    def step(self, step: Step) -> _BoundStep:
        exchange = staging.prepare(
            self.buffers.backend,
            self.transport,
            self.messages(step.sends),
            self.messages(step.receives),
            self.tag,
            self.is_kept,
        )
        return _BoundStep(
            self.moves(step.packing), exchange, [self.action(a) for a in step.finishing]
        )

    def closing(self, program: Program) -> list[Action]:
        """The program's last moves, the division of an average, and the end of a GPU's work."""
        actions = self.moves(program.closing)
        backend, output = self.buffers.backend, self.buffers.output
        if self.operator is not None and self.operator.is_average and output.size:
            actions.append(partial(backend.divide, output, self.transport.size))
        if not backend.is_host:
            # This may be another stream than the one that is current when the result is used.
            actions.append(backend.synchronize)
        return actions

    def messages(self, messages: tuple[Message, ...]) -> list[tuple[int, Array]]:
        return [(message.peer, self.buffers.view(message.region)) for message in messages]

    def moves(self, moves: tuple[Move, ...]) -> list[Action]:
        return [self.action(move) for move in moves]

    def action(self, action: Move | Combine) -> Action:
        if isinstance(action, Combine):
            left, right, into = map(self.buffers.view, action)
            assert self.combine is not None, "only a reduction combines"
            return partial(self.combine, left, right, out=into)
        src, dst = map(self.buffers.view, action)
        return partial(self.buffers.backend.copy, src, dst)
