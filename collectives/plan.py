"""A program bound to arrays: what is run, once or many times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from collectives import arguments, staging
from collectives.arrays import Array, Backend, BinaryFunction, Bytes
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.flight_recorder import Position
from collectives.lanes import Woven
from collectives.ledger import Recorder, finish
from collectives.program import Combine, Message, Move, Program, Region, Step
from collectives.progress import ProgressThread
from collectives.reduction import Operator
from collectives.staging import PinnedMemory
from collectives.transport import Action, Exchange, Transport, deadline_in, do, until
from collectives.work import Work

_STAGE_BYTES = 4096
_clock = time.perf_counter

_RUNNING = "is already running; wait for it first"


class Buffers(NamedTuple):
    """The flat arrays a program works on, and the backend that serves all three."""

    backend: Backend
    input: Array
    output: Array
    scratch: Array


class Stage(NamedTuple):
    """Wait for these messages, which are those of this round, and then do this.

    `among`: how many rounds there are, in words, where they are not those of the algorithm.
    """

    exchange: Exchange
    round: int
    actions: list[Action]
    among: str = ""


class Guard(Protocol):
    """What is exchanged around a plan's own messages, see `checked.Guard`."""

    num_bytes: int
    objection: CollectiveError | None
    has_passed: bool

    def around(
        self, opening: list[Action], stages: list[Stage]
    ) -> tuple[list[Action], list[Stage]]:
        """What a plan does, with what comes before and after it."""

    def in_place(self, is_in_place: bool) -> None:
        """What the next run is, where the plan itself cannot know."""


class Plan:
    """A collective bound to its arrays.  `run()`, or `start()` and then `test()` or `wait()`.

    `result` is what `run` and `wait` return: the output array, or None on a rank that gets none.
    A plan may be run again as soon as it is complete; every run reads the input afresh.  `timeout`
    is what `run` and `wait` use where they are given none.
    """

    def __init__(
        self,
        names: tuple[str, str, str],
        program: Woven,
        buffers: Buffers,
        transport: Transport,
        *,
        tag: int,
        result: Array | None,
        timeout: float | None = None,
        operator: Operator | None = None,
        is_kept: bool = False,
        recorder: Recorder | None = None,
        counter: list[int] | None = None,
        picture: Callable[[Position], str] | None = None,
        thread: ProgressThread | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`counter`: what numbers the runs, if they are not numbered from 1.

        `picture`: shows a position in the schedules of all ranks.
        """
        self._names, self.result, self.timeout = names, result, timeout
        self._transport, self._is_kept = transport, is_kept
        self._recorder, self._picture = recorder, picture
        self._counter = [0] if counter is None else counter
        self._flight = transport.flight
        self._enter = transport.flight.entries.append
        self._ledgers = () if recorder is None else recorder.ledgers
        self._num_rounds = program.num_rounds
        binder = Binder(program, buffers, transport, operator, tag, is_kept)
        self._opening, self._stages = binder.bound()
        self.guard, self.was_stopped = guard, False
        if guard is not None:
            self._opening, self._stages = guard.around(self._opening, self._stages)
        # What keeping it costs: its scratch, and roughly what the stages take.
        self.num_bytes = buffers.scratch.size * buffers.input.dtype.itemsize
        self.num_bytes += _STAGE_BYTES * len(self._stages)
        self.num_bytes += 0 if guard is None else guard.num_bytes
        # All of it, for a run that has nobody else to think of.
        self._script = [*self._opening]
        for stage in self._stages:
            self._script += (*stage.exchange.waits, *stage.actions)
        self._stage: int | None = None  # the one waited for
        self._refusal: str | None = None  # why it cannot be started
        self._error: BaseException | None = None
        self._entered: list[list[Any]] = []  # into ledgers, by the run under way
        self._flown: list[Any] = [None, 0, 0.0, True]  # and into the flight recorder
        # What is driven by a thread is nobody else's to carry along, and not among these.
        self._in_flight, self._thread = transport.in_flight, thread
        self._over: Future[None] | None = None

    @property
    def title(self) -> str:
        """What is run, as messages of errors call it: collective, algorithm, number of the call."""
        collective, algorithm, number = self._names
        return f"{collective} ({algorithm})" + (f", call {number}" if number else "")

    def run(self, timeout: float | None = None) -> Array | None:
        """Start and wait.  `timeout` in seconds."""
        has_limit = timeout is not None or self.timeout is not None
        if has_limit or self._refusal is not None or self._in_flight:  # others need us meanwhile
            limit = arguments.seconds(timeout)
            self.start()
            return self.wait(limit)
        # The rest is what takes small messages longer than MPI's own calls: nothing needless here.
        self._refusal = _RUNNING
        number = self._counter[0] = self._counter[0] + 1
        started = _clock()
        self._flown = flown = [self._recorder, number, started, self]
        self._enter(flown)
        is_recorded = False
        for ledgers in self._ledgers:
            if ledgers:
                is_recorded = True
                break
        try:
            for action in self._script:
                if action() is False:
                    until(action)
        except BaseException as error:  # noqa: BLE001 - raised again, as what it means
            failure = self._fail(error)
            raise failure from failure.__cause__
        finally:
            if is_recorded and self._recorder is not None:
                self._recorder.record(number, started, _clock())
        flown[3] = True
        self._refusal = None
        if not self._is_kept:
            self.free()
        return self.result

    def start(self) -> None:
        """Begin.  Raises RuntimeError while it runs, after a failure, and after `free`."""
        if self._refusal is not None:
            raise RuntimeError(f"{self.title} {self._refusal}")
        self._refusal, self._stage = _RUNNING, 0
        if self._thread is None:
            self._in_flight.append(self)
        try:
            number = self._counter[0] = self._counter[0] + 1
            started = _clock()
            self._flown = [self._recorder, number, started, self]
            self._enter(self._flown)
            if self._recorder is not None and any(self._ledgers):
                self._entered = self._recorder.record(number, started)
            do(self._opening)
            self._end_if_over()
        except BaseException as error:  # noqa: BLE001 - raised again, as what it means
            failure = self._fail(error)
            raise failure from failure.__cause__
        if self._thread is not None and self.is_active:
            self._over = self._thread.adopt(self)

    @property
    def is_active(self) -> bool:
        """Whether the plan has started and is not complete."""
        return self._refusal is _RUNNING

    def test(self) -> bool:
        """Go as far as possible without waiting; whether the plan is complete."""
        if self._thread is None:
            self.progress()
            is_over = self._stage is None
        else:
            is_over = self._over is None or self._over.done()
        if self._error is not None:
            raise self._error
        return is_over

    def wait(self, timeout: float | None = None) -> Array | None:
        """Wait until complete, and return the result.

        Raises CollectiveTimeout, which says whom it waited for, after `timeout` seconds; the plan
        is then still under way, and `wait` may be called again.
        """
        timeout = self.timeout if timeout is None else arguments.seconds(timeout)
        if self._thread is None:
            self._wait(timeout)
        elif self._over is not None:
            self._wait_for_thread(self._over, self._thread, timeout)
        if self._error is not None:
            raise self._error
        return self.result

    def when_over(self, action: Action) -> None:
        """Do this when the run under way is complete or has failed; now if that has happened.

        Only for a plan that a thread drives: it is this thread that does it then.
        """
        assert self._thread is not None, "nobody would do it"
        if self._over is None:
            action()
        else:
            self._over.add_done_callback(lambda _: action())

    def _wait(self, timeout: float | None) -> None:
        """Wait by going on ourselves."""
        deadline = deadline_in(timeout)
        num_tries = 0
        while self._stage is not None:
            is_alone = len(self._in_flight) == 1
            if is_alone and not self._complete_stage(deadline):
                raise self._timed_out(timeout)
            if not is_alone and not self._carry_all_along(deadline, num_tries):
                raise self._timed_out(timeout)
            num_tries += 1

    def _wait_for_thread(
        self, over: Future[None], thread: ProgressThread, timeout: float | None
    ) -> None:
        """Wait for the thread to be done with this run."""
        try:
            self._sleep_until(over, deadline_in(timeout))
        except TimeoutError:
            with thread.lock:
                if self._stage is not None:
                    raise self._timed_out(timeout) from None
        except BaseException as error:
            with thread.lock:
                if self._stage is not None:
                    self._fail(error)
            raise

    def _sleep_until(self, over: Future[None], deadline: float | None) -> None:
        """Sleep, as long as no plan without a thread has to be carried along."""
        is_in_time, num_tries = True, 0
        while self._in_flight and is_in_time and not over.done():
            is_in_time = self._carry_all_along(deadline, num_tries)
            num_tries += 1
        over.result(None if deadline is None else deadline - time.monotonic())

    def progress(self) -> bool:
        """Go as far as possible without waiting; whether anything moved.

        Raises only KeyboardInterrupt, for whoever waits: a failure of this plan is for those who
        wait for this one, and others call this too.
        """
        before = self._stage
        try:
            while self._stage is not None and self._stages[self._stage].exchange.test():
                self._next_stage()
        except BaseException as error:  # kept, and raised by test and wait
            self._fail(error)
            if isinstance(error, KeyboardInterrupt):
                raise
        return self._stage != before

    def free(self) -> None:
        """Give back the engine's requests.  The plan must be complete and is of no use after."""
        if self.is_active:
            raise RuntimeError(f"{self.title} {self._refusal}")
        if self._error is None:  # a failed one has given back what could be given back
            self._refusal = "was freed"
            for stage in self._stages:
                stage.exchange.free()
            self._let_go()

    def _complete_stage(self, deadline: float | None) -> bool:
        """Wait for the messages of this stage and go on; False if the deadline came first."""
        assert self._stage is not None
        try:
            is_complete = self._stages[self._stage].exchange.wait(deadline)
            if is_complete:
                self._next_stage()
        except BaseException as error:  # noqa: BLE001 - raised again, as what it means
            failure = self._fail(error)
            raise failure from failure.__cause__
        return is_complete

    def _carry_all_along(self, deadline: float | None, num_tries: int) -> bool:
        """Let every plan under way progress; False if the deadline has passed.

        If we waited for our own messages only, two ranks that wait for the same plans in different
        orders would wait for ever.
        """
        try:
            has_moved = [plan.progress() for plan in list(self._in_flight)]
            if not any(has_moved):
                self._transport.pause(deadline, num_tries)
        except BaseException as error:
            if self in self._in_flight:
                self._fail(error)
            raise
        return self._stage is None or deadline is None or time.monotonic() < deadline

    def _next_stage(self) -> None:
        """The messages of this stage are there: do what comes then."""
        assert self._stage is not None
        do(self._stages[self._stage].actions)
        self._stage += 1
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._stage == len(self._stages):
            self._stage = None
            if self._thread is None:
                self._in_flight.remove(self)
            self._end()

    def _end(self) -> None:
        self._flown[3], self._refusal = True, None
        finish(self._entered, _clock())
        self._entered = []
        if not self._is_kept:
            self.free()

    def _fail(self, error: BaseException) -> BaseException:
        """Give up; what to raise: the error, or what it means."""
        failure = self._transport.meaning(error)
        if failure is not error:
            failure.__cause__ = error
        self._flight.dump_if_asked()
        self._flown[3] = None
        self._error, self._stage, self._refusal = failure, None, "has failed"
        if self in self._in_flight:
            self._in_flight.remove(self)
        if self.guard is not None and self.guard.objection is error:
            self._stop(self.guard)
        # Messages may still be on their way: until all are over, and be it never, the buffers must
        # not go to anybody else.
        self._transport.failed.append(self)
        are_over = [stage.exchange.abandon() for stage in self._stages]
        if all(are_over):
            self._transport.failed.remove(self)
            self._let_go()
        return failure

    def _stop(self, guard: Guard) -> None:
        """All ranks end it here, and nothing of it is on its way."""
        self.was_stopped = True
        if not guard.has_passed and self._recorder is not None:
            self._recorder.withdraw(self._entered)
            self._recorder = None

    def _let_go(self) -> None:
        """Of the arrays, at once: an exchange and what it does refer to each other."""
        for stage in self._stages:
            stage.exchange.starts.clear()
            stage.exchange.waits.clear()
        self._opening, self._stages, self._script = [], [], []
        self.guard = None

    def position(self) -> Position:
        """Where the run under way stands."""
        for number, stage in enumerate(self._stages):
            waiting = stage.exchange.waiting_for()
            # A run that has nobody else to think of does not count its stages.
            if waiting or number == self._stage:
                return Position(stage.round, stage.among or str(self._num_rounds), waiting)
        return Position(self._num_rounds, str(self._num_rounds), [])

    def _timed_out(self, timeout: float | None) -> CollectiveTimeout:
        self._flight.dump_if_asked()
        position = self.position()
        waiting_for = ", ".join(map(str, position.waiting_for))
        sentence = (
            f"{self.title}: rank {self._transport.rank} waited {timeout} s in round "
            f"{position.round} of {position.among} for {waiting_for}"
        )
        picture = []
        if self._picture is not None and position.among == str(self._num_rounds):
            picture = [self._picture(position)]
        return CollectiveTimeout("\n".join([sentence, *picture, self._flight.lines()]), Work(self))


class Binder:
    """A program on arrays: turns regions into views and actions, once for all runs."""

    def __init__(
        self,
        program: Woven,
        buffers: Buffers,
        transport: Transport,
        operator: Operator | None,
        tag: int,
        is_kept: bool,
    ) -> None:
        self.program, self.transport, self.tag, self.is_kept = program, transport, tag, is_kept
        self.backend, self.operator = buffers.backend, operator
        self.arrays = {name: getattr(buffers, name) for name in ("input", "output", "scratch")}
        self.original = buffers.input
        if program.copies_input:
            self.arrays["input"] = self.backend.empty(self.original.shape, self.original.dtype)
        self.combine: BinaryFunction | None = None
        if operator is not None:
            self.combine = self.backend.binary(operator.function, buffers.output.dtype)
        if self.backend.is_host:
            self.itemsize = buffers.input.dtype.itemsize
            self.bytes = {
                name: self.backend.host_buffer(array) for name, array in self.arrays.items()
            }
        else:
            self.pinned = PinnedMemory(self.backend)
        self.use_lane(0)

    def bound(self) -> tuple[list[Action], list[Stage]]:
        """What is done first, and then the stages."""
        opening = list(self.opening())
        stages: list[Stage] = []
        exchanges: dict[tuple[int, int], Exchange] = {}
        actions = opening
        for lane, number, is_start in self.program.events:
            self.use_lane(lane)
            step = self.lane.steps[number]
            if is_start:
                exchange = exchanges[lane, number] = self.exchange(step, number)
                actions += self.moves(step.packing)
                actions += exchange.starts
                if number == 0:
                    actions += self.moves(self.lane.staying)
            else:
                actions = [self.action(action) for action in step.finishing]
                if number == self.program.num_rounds - 1:
                    actions += self.closing()
                stages.append(Stage(exchanges.pop((lane, number)), number, actions))
        if not self.backend.is_host:
            # This may be another stream than the one that is current when the result is used.
            actions.append(self.backend.synchronize)
        return opening, stages

    def opening(self) -> Iterator[Action]:
        """A copy of the input if it is needed; and everything, if there are no rounds."""
        if self.program.copies_input:
            yield partial(self.backend.copy, self.original, self.arrays["input"])
        if self.program.num_rounds == 0:
            yield from self.moves(self.lane.staying)
            yield from self.closing()

    def use_lane(self, number: int) -> None:
        """Bind for this lane from now on."""
        program = self.program
        self.lane: Program = program.lanes[number]
        self.slot = number % program.num_slots
        shift = number * program.stride
        self.shifts = {
            "input": shift,
            "output": shift,
            "scratch": self.slot * program.num_scratch,
        }

    def view(self, region: Region) -> Array:
        name, start, stop = region
        shift = self.shifts[name]
        return self.arrays[name][start + shift : stop + shift]

    def exchange(self, step: Step, number: int) -> Exchange:
        """The messages of a step: directly from host memory, staged from anywhere else."""
        if self.backend.is_host:
            sends, receives = self.parcels(step.sends), self.parcels(step.receives)
            return self.transport.exchange(sends, receives, self.tag, self.is_kept)
        return staging.prepare(
            self.pinned,
            (self.slot, number),
            self.transport,
            [(message.peer, self.view(message.region)) for message in step.sends],
            [(message.peer, self.view(message.region)) for message in step.receives],
            self.tag,
            self.is_kept,
        )

    def parcels(self, messages: tuple[Message, ...]) -> list[tuple[int, Bytes]]:
        """Messages from and into host memory."""
        size, parcels = self.itemsize, []
        for peer, (name, start, stop) in messages:
            shift = self.shifts[name]
            parcels.append((peer, self.bytes[name][(start + shift) * size : (stop + shift) * size]))
        return parcels

    def closing(self) -> Iterator[Action]:
        """The lane's last moves, and the division of an average."""
        yield from self.moves(self.lane.closing)
        if self.operator is not None and self.operator.is_average:
            start = self.shifts["output"]
            part = self.arrays["output"][start : start + self.program.stride or None]
            if part.size:
                yield partial(self.backend.divide, part, self.transport.size)

    def moves(self, moves: tuple[Move, ...]) -> list[Action]:
        return [self.action(move) for move in moves]

    def action(self, action: Move | Combine) -> Action:
        # One view for one region: NumPy takes as long again to find out that two are the same.
        views = {region: self.view(region) for region in action}
        if isinstance(action, Combine):
            assert self.combine is not None, "only a reduction combines"
            return partial(self.combine, *(views[region] for region in action))
        return partial(self.backend.copy, *(views[region] for region in action))
