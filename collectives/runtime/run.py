"""The runs of a program on one communicator: in its ledgers, and in the flight recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from collectives.diagnostics import COMPLETE, FAILED, CallLog, Position, Recorder, Waiting, finish
from collectives.engines import Execution, Operands, Reusable, Transport
from collectives.errors import CollectiveTimeout
from collectives.programs import Program


class _Over:
    """The execution of a run that has ended and is not run again."""

    row, is_begun = -1, False

    def restart(self) -> None:
        raise AssertionError("this run does not come again")

    def attach(self, operands: Operands, tag: int) -> None:
        raise AssertionError("this run does not come again")

    def let_go(self) -> None:
        """There are no arrays."""

    def advance(self, seconds: float) -> bool:
        return True

    def interrupt(self, is_wanted: bool) -> None:
        """Nothing is under way."""

    def position(self) -> tuple[int, list[Waiting]]:
        return 0, []

    def abandon(self) -> bool:
        return True


OVER = _Over()


class Run:
    """A program with its execution, its entries in the ledgers, and its place in the log.

    - `log`: where it is entered; None: in the log of the communicator's collectives.
    - `part_of`: the call that error messages name, if this run is only a part of it.
    - `among`: the number of rounds in words, if they are not those of the algorithm.
    - `picture`: shows a position in the schedules of all ranks.
    - `is_ahead`: whether the call itself comes after this run.
    - `release`: takes the run back when it is complete.
    """

    part_of = among = ""
    picture: Callable[[Position], str] | None = None
    is_ahead = False
    release: Callable[[Run], object] | None = None

    def __init__(
        self,
        transport: Transport,
        program: Program,
        execution: Execution,
        recorder: Recorder,
        log: CallLog | None = None,
    ) -> None:
        self.transport, self.program, self._recorder = transport, program, recorder
        self.execution: Execution = execution
        self._number, self._entered = 1, list[list[Any]]()
        self.log = transport.log if log is None else log
        self.key = self.log.introduce(recorder.describe, self)
        self._entry = -1
        self.is_under_way = False
        self._is_left_by_code = False  # compiled code says in the log that the run is complete

    def introduce(self, numbered: Callable[[int], str]) -> None:
        """Give the run other numbers in the ledgers, and another key in the log."""
        self._recorder = self._recorder.renumbered(numbered)
        self.key = self.log.introduce(self._recorder.describe, self)

    @property
    def reusable(self) -> Reusable:
        """The execution of a run that compiled code can begin."""
        return cast(Reusable, self.execution)

    @property
    def number(self) -> int:
        """The number, in the ledger, of the run under way or of the next one."""
        return self.reusable.number if self._is_left_by_code else self._number

    @number.setter
    def number(self, number: int) -> None:
        self._number = number

    @property
    def name(self) -> str:
        """The number of the run in words."""
        return self._recorder.number(self.number)

    @property
    def title(self) -> str:
        """What is run, as error messages name it: collective, algorithm, number of the call."""
        if self.part_of:
            return self.part_of
        collective, algorithm = self._recorder.names
        return f"{collective} ({algorithm}), call {self.name}"

    def begin(self) -> None:
        """Begin.  Messages are posted when the execution is advanced."""
        if not self.is_under_way:
            self.is_under_way = True
            self.execution.restart()
            self._entry = self.log.enter(self.key, self.number)
            self._entered = self._recorder.record(self.number, time.perf_counter())

    def has_begun(self) -> None:
        """Compiled code has begun this run and has entered it into the log."""
        self.is_under_way = self._is_left_by_code = True

    def complete(self) -> None:
        """The run is complete."""
        if self._is_left_by_code:
            self.is_under_way = self._is_left_by_code = False
        else:
            self._leave(COMPLETE)
        if self._entered:
            finish(self._entered, time.perf_counter())
            self._entered = []

    def give_back(self) -> None:
        """Release the run: it is complete, and the next run of its call has begun."""
        if (release := self.release) is not None:
            self.release = None
            release(self)

    def fail(self) -> bool:
        """End the run after a failure; return whether none of its messages is still under way.

        While messages are under way its buffers are kept, if need be for ever.
        """
        execution, failed = self.execution, self.transport.failed
        self.transport.flight.dump_if_asked()
        self._leave(FAILED)
        failed.append(execution)
        is_over = execution.abandon()
        if is_over:
            failed.remove(execution)
        self.let_go()
        return is_over

    def _leave(self, state: int) -> None:
        """Say in the log that the run is over, as compiled code does of runs that it completes."""
        if self._is_left_by_code:
            self._number, self._entry = self.number, self.reusable.entry
        self.log.leave(self._entry, self.key, self._number, state)
        self.is_under_way = self._is_left_by_code = False

    def let_go(self) -> None:
        """Release the arrays; the run is not run again."""
        self.execution = OVER

    def position(self) -> Position:
        """Where the run under way stands."""
        number, waiting = self.execution.position()
        return Position(number, self.among or str(self.program.num_rounds), waiting)

    def timed_out(self, timeout: float | None, work: Any) -> CollectiveTimeout:
        """The error that says who is waited for.  `work`: the call that is under way."""
        self.transport.flight.dump_if_asked()
        position = self.position()
        waiting_for = ", ".join(map(str, position.waiting_for))
        sentence = (
            f"{self.title}: rank {self.transport.rank} waited {timeout} s in round "
            f"{position.round} of {position.among} for {waiting_for}"
        )
        picture = [] if self.picture is None else [self.picture(position)]
        lines = [sentence, *picture, self.transport.flight.lines()]
        return CollectiveTimeout("\n".join(lines), work)
