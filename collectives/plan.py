"""A program bound to arrays: what is run, once or many times."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from collectives import staging
from collectives.arrays import Array, Backend
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.ledger import Entry
from collectives.program import Combine, Message, Move, Program, Region, Step
from collectives.reduction import Operator
from collectives.transport import Exchange, Transport, back_off

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
    A plan may be run again as soon as it is complete; every run reads the input afresh.
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
        operator: Operator | None = None,
        is_kept: bool = False,
        on_start: Callable[[], list[Entry]] = list,
    ) -> None:
        self.title, self.program, self.result = title, program, result
        self._transport, self._on_start, self._is_kept = transport, on_start, is_kept
        bind = _Binder(buffers, transport, operator, tag, is_kept)
        self._opening = bind.moves(program.opening)
        self._steps = [bind.step(step) for step in program.steps]
        self._closing = bind.moves(program.closing)
        if operator is not None and operator.is_average and buffers.output.size:
            size = transport.size
            self._closing.append(lambda: buffers.backend.divide(buffers.output, size))
        self._at = -1  # the round in progress, or -1
        self._entries: list[Entry] = []

    def run(self, timeout: float | None = None) -> Array | None:
        """Start and wait.  `timeout` in seconds."""
        if timeout is None and not self._transport.in_flight:
            return self._run_alone()
        self.start()
        return self.wait(timeout)

    def _run_alone(self) -> Array | None:
        """The shortest way through all rounds, when there is nothing else to carry along."""
        self._entries = self._on_start()
        _do(self._opening)
        for packing, exchange, finishing in self._steps:
            _do(packing)
            exchange.start()
            exchange.wait(None)
            _do(finishing)
        self._finish()
        return self.result

    def start(self) -> None:
        """Begin.  Raises RuntimeError if the last run is not complete."""
        if self.is_active:
            raise RuntimeError(f"{self.title} is already running; wait for it first")
        self._entries = self._on_start()
        _do(self._opening)
        self._at = 0
        if self._steps:
            self._transport.in_flight.append(self)
            self._begin()
        else:
            self._finish()

    @property
    def is_active(self) -> bool:
        """Whether the plan has started and is not complete."""
        return self._at >= 0

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the plan is complete."""
        try:
            while self.is_active and self._steps[self._at].exchange.test():
                self._end()
        except CollectiveError:
            self._abandon()
            raise
        return not self.is_active

    def wait(self, timeout: float | None = None) -> Array | None:
        """Wait until complete, and return the result.

        Raises CollectiveTimeout, which says whom it waited for, after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        num_tries = 0
        while self.is_active:
            if len(self._transport.in_flight) == 1:
                self._wait_for_round(deadline, timeout)
                continue
            # Others are under way: each must go on while we wait, or two ranks that wait for the
            # same plans in different orders would wait for ever.
            for plan in list(self._transport.in_flight):
                plan.test()
            if deadline is not None and self.is_active and time.monotonic() > deadline:
                self._time_out(timeout)
            back_off(num_tries)
            num_tries += 1
        return self.result

    def free(self) -> None:
        """Give back the engine's requests.  The plan must be complete and is of no use after."""
        if self.is_active:
            raise RuntimeError(f"{self.title} is running; wait for it first")
        for step in self._steps:
            step.exchange.free()

    def _begin(self) -> None:
        step = self._steps[self._at]
        _do(step.packing)
        step.exchange.start()

    def _end(self) -> None:
        """Finish the round whose messages have completed, and begin the next."""
        _do(self._steps[self._at].finishing)
        self._at += 1
        if self._at < len(self._steps):
            self._begin()
        else:
            self._transport.in_flight.remove(self)
            self._finish()

    def _finish(self) -> None:
        _do(self._closing)
        self._at = -1
        for entry in self._entries:
            entry.finished = time.perf_counter()
        if not self._is_kept:
            self.free()

    def _wait_for_round(self, deadline: float | None, timeout: float | None) -> None:
        try:
            is_complete = self._steps[self._at].exchange.wait(deadline)
        except CollectiveError:
            self._abandon()
            raise
        if not is_complete:
            self._time_out(timeout)
        self._end()

    def _abandon(self) -> None:
        """After an error between ranks nobody shall try to carry this plan on."""
        if self in self._transport.in_flight:
            self._transport.in_flight.remove(self)
        self._at = -1

    def _time_out(self, timeout: float | None) -> None:
        peers = ", ".join(self._steps[self._at].exchange.waiting_for())
        raise CollectiveTimeout(
            f"{self.title}: rank {self._transport.rank} waited {timeout} s in round {self._at} of "
            f"{len(self._steps)} for {peers}"
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
        self.combine = buffers.backend.binary(operator.ufunc) if operator else None

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
