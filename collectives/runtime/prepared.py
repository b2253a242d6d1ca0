"""Prepared calls: a program with its execution, and what ledgers and reports show of it.

A prepared call runs many times, each time on other arrays.  It belongs to its kind while it is idle
(`kind.py`), to a `Work` while it runs, or to a `Plan`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Arrays, Operator
from collectives.devices import OnDevice
from collectives.diagnostics import (
    COMPLETE,
    FAILED,
    CallLog,
    Entered,
    Position,
    Recorder,
    Waiting,
    finish,
    part_of_report,
)
from collectives.engines import Execution, Operands, Reusable, Transport
from collectives.programs import CallSpec, Program
from collectives.schedule import SPECS, grid

Words = NDArray[np.int64]
_BY_ENVELOPE = "peer", "thread"  # links of messages that are handed over
_MAX_ROWS = 16  # ranks whose schedules a time-out shows
_MAX_ROUNDS = 4  # rounds that it shows before the current one, and after it


class Shown(NamedTuple):
    """What ledgers, the flight recorder and errors show of a program.

    Attributes
    ----------
    schedules : function
        Returns a text that shows a position in the schedules of the ranks.
    """

    recorder: Recorder
    num_rounds: str
    schedules: Callable[[Position], str] | None = None


def show_schedules(spec: CallSpec, rank: int, size: int, position: Position) -> str:
    """Show the schedules, with the cell where this rank waits; of many ranks only some."""
    algorithm, here = spec.algorithm, position.round
    root = spec.root if SPECS[spec.collective].is_rooted else None
    with_peers = {rank, *(waiting.peer for waiting in position.waiting_for)}
    ranks = range(size) if size <= _MAX_ROWS else sorted(with_peers)
    options = dict(spec.options)
    schedules = {shown: algorithm.schedule(shown, size, root, **options) for shown in ranks}
    return grid(schedules, (rank, here), range(max(0, here - _MAX_ROUNDS), here + _MAX_ROUNDS))


class _Ended:
    """The execution of a run that has ended and does not run again."""

    row, is_running = -1, False
    enqueued, device_row, final_state = None, "", COMPLETE
    limit: float | None = None

    def restart(self, number: int, *, is_async: bool = False) -> None:
        raise AssertionError("this run has ended")

    def leave_callers_stream(self) -> None:
        """Do nothing: it has ended."""

    def attach(self, operands: Operands, tag: int) -> None:
        raise AssertionError("this run has ended")

    def detach(self) -> None:
        """Do nothing: it has no arrays."""

    def advance(self, seconds: float) -> bool:
        return True

    def interrupt(self, is_wanted: bool) -> None:
        """Do nothing: it has ended."""

    def when_complete(self, then: Callable[[float], object]) -> None:
        raise AssertionError("this run has ended")

    def link(self, rank: int) -> str:
        raise AssertionError("it has no messages")

    def note_completed(self) -> None:
        """Do nothing: it has no messages."""

    def position(self) -> tuple[int, list[Waiting]]:
        return 0, []

    def abandon(self) -> bool:
        return True


ENDED = _Ended()


class Prepared:
    """A program with its execution, its entries in the ledgers, and its entry in the log.

    Attributes
    ----------
    log : CallLog
        The log in which its runs are entered.
    op, divisor
        What combines arrays, and what divides an average.
    part_of : str
        The call that error messages name, if this is a part of it.
    shown, shown_if_staged : Shown
        What is shown of a run; and of one that is staged, if that has another program.
    is_ahead : bool
        Whether this is a header exchange that precedes the call itself.
    scratch_bytes : int
        The scratch memory of the program; of a comparison in checked mode, that of the call itself.
    envelope : Recorder
        Records the envelope that is sent if the message is handed over.
    number_plan : callable
        Returns, for the number of a plan, what makes the numbers of its runs; None: it has none.
    is_reusable : bool
        Whether compiled code may start its runs; then it keeps its scratch memory.
    give : callable
        Takes it back when a run is complete; called once.
    when_released : callable
        Called once, when it is given back or does not run again.
    """

    part_of = ""
    shown_if_staged: Shown | None = None
    is_ahead = is_reusable = _is_staged = False
    envelope: Recorder | None = None
    number_plan: Callable[[int], Callable[[int], str]] | None = None
    give: Callable[[Prepared], object] | None = None
    when_released: Callable[[], object] | None = None

    def __init__(
        self,
        transport: Transport,
        program: Program,
        execution: Execution,
        shown: Shown,
        log: CallLog | None = None,
        op: Operator | None = None,
        divisor: int = 1,
    ) -> None:
        self.transport, self.program, self.shown = transport, program, shown
        self.execution: Execution = execution
        self.op, self.divisor = op, divisor
        self.scratch_bytes = program.num_scratch
        self._number, self._entered = 1, list[Entered]()
        self.log = transport.log if log is None else log
        self.key = self.log.register_run(shown.recorder.describe, self)
        self._entry, self._entry_key = -1, self.key
        self.is_running = False
        self._is_logged_by_code = False  # compiled code marks it complete in the log

    def attach(self, arrays: Arrays, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        keeps_scratch = self.is_reusable or isinstance(self.execution, OnDevice)
        num_scratch = 0 if keeps_scratch else self.program.num_scratch
        self.execution.attach(Operands.of(arrays, num_scratch, self.op, self.divisor), tag)

    def renumber(self, number: int) -> None:
        """Give the next run the number of a call, or all next runs the number of a plan."""
        if self.number_plan is None:
            self._number = number
            return
        self.transport.board.note_host_call(number)  # of a device, no plan is used again
        recorder = self.shown.recorder.renumbered(self.number_plan(number))
        self.shown, self._number = self.shown._replace(recorder=recorder), 1
        self.key = self.log.register_run(recorder.describe, self)

    def let_code_start(self, counter: Words, arrays: Arrays, tags: range = range(0)) -> None:
        """Let compiled code start runs on arrays like these; see `Reusable.make_reusable`."""
        _, source, target = arrays
        self.reusable.make_reusable(self.log, self.key, counter, source, target, tags)
        self.is_reusable = True

    def let_code_start_like(self, other: Reusable) -> None:
        """Let compiled code start runs as it starts those of another execution."""
        self.reusable.make_reusable_like(other, self.key)
        self.is_reusable = True

    @property
    def can_be_reusable(self) -> bool:
        """Whether compiled code can start its runs."""
        return hasattr(self.execution, "make_reusable")

    @property
    def reusable(self) -> Reusable:
        """The execution of a run that compiled code can start."""
        return cast(Reusable, self.execution)

    @property
    def number(self) -> int:
        """The number, in the ledger, of the current or next run."""
        return self.reusable.run_number if self._is_logged_by_code else self._number

    @number.setter
    def number(self, number: int) -> None:
        self._number = number

    @property
    def name(self) -> str:
        """The number of the run as text."""
        return self.shown.recorder.number(self.number)

    @property
    def _shown_now(self) -> Shown:
        """What is shown of the current run, or of the last one."""
        return self.shown_if_staged if self._is_staged and self.shown_if_staged else self.shown

    @property
    def title(self) -> str:
        """The run, as error messages name it: collective, algorithm, number of the call."""
        if self.part_of:
            return self.part_of
        collective, algorithm = self._shown_now.recorder.names
        return f"{collective} ({algorithm}), call {self.name}"

    def begin(
        self, phase: str, site: str, *, is_async: bool = False, limit: float | None = None
    ) -> None:
        """Start the run.  Its messages are posted when the execution is advanced.

        Parameters
        ----------
        phase : str
            The phase under which it is recorded.
        site : str
            See `Recorder.record`.
        is_async : bool
            See `Execution.restart`.
        limit : float, optional
            See `Execution`.
        """
        if not self.is_running:
            self.execution.limit = limit
            self.execution.restart(self.number, is_async=is_async)
            self.is_running, self._is_staged = True, False
            self._entry = self.log.begin_entry(self.key, self.number)
            self._entry_key = self.key
            self._began = self.number, phase, site, time.perf_counter()
            self._entered = self.shown.recorder.record(*self._began)

    def started_by_code(self) -> None:
        """Note that compiled code has started this run and has entered it in the log."""
        self.is_running = self._is_logged_by_code = True
        self._is_staged = False

    def note_staged(self) -> None:
        """Show the program of a staged run, which is about to send."""
        self._is_staged = True
        if self.shown_if_staged is None:
            return
        recorder, number = self.shown_if_staged.recorder, self.number
        if self._entered:
            recorder.replace(self._entered, self._began[2])
        if self._is_logged_by_code:  # which knows one program only
            self._number, self._entry = number, self.reusable.log_entry
            self._is_logged_by_code = False
        self._entry_key = self.log.register_run(recorder.describe, self)
        self.log.replace_key(self._entry, self.key, number, self._entry_key)

    def complete(self) -> None:
        """Note that the run is complete."""
        if self._is_logged_by_code:
            self.is_running = self._is_logged_by_code = False
        else:
            self._log_end(self.execution.final_state)
        if self._entered:
            self._shown_now.recorder.note_links(self._entered, self.execution.link)
            self.execution.when_complete(partial(finish, self._entered))
            self._entered = []
            if self.envelope is not None and self.execution.link(0) in _BY_ENVELOPE:
                self._record_envelope(self.envelope)

    def _record_envelope(self, recorder: Recorder) -> None:
        entered = recorder.record(*self._began)
        recorder.note_links(entered, lambda _: "host")
        finish(entered, time.perf_counter())

    def give_back(self) -> None:
        """Return to where it belongs, after the next step of its call has started."""
        if (give := self.give) is not None:
            self.give = None
            self._release()
            give(self)

    def _release(self) -> None:
        if (action := self.when_released) is not None:
            self.when_released = None
            action()

    def fail(self) -> bool:
        """End the run after a failure; return whether none of its messages is in flight.

        While messages are in flight its buffers are kept, if necessary until the process ends.
        """
        execution, failed = self.execution, self.transport.failed
        failed.append(execution)  # first, because a signal may interrupt this
        self.transport.flight.dump_if_asked()
        self._log_end(FAILED)
        is_done = execution.abandon()
        if is_done:
            failed.remove(execution)
        self.detach()
        return is_done

    def _log_end(self, state: int) -> None:
        """Enter the final state in the log, as compiled code does for runs that it completes."""
        if self._is_logged_by_code:
            self._number, self._entry = self.number, self.reusable.log_entry
            self._entry_key = self.key
        self.log.end_entry(self._entry, self._entry_key, self._number, state)
        self.is_running = self._is_logged_by_code = False

    def detach(self) -> None:
        """Release the arrays; the run does not run again."""
        self.execution = ENDED
        self._release()

    def note_completed(self) -> None:
        """Note which messages are complete, for `position`.

        Only the thread that advances the run may call it.
        """
        self.execution.note_completed()

    def position(self) -> Position:
        """Return the position of the current run.

        Any thread may ask, while another advances the run.
        """
        number, waiting = self.execution.position()
        num_rounds, device_row = self._shown_now.num_rounds, self.execution.device_row
        return Position(number, num_rounds, waiting, device_row)

    def time_out_report(self, timeout: float | None) -> str:
        """Return the text of a time-out, which names the ranks that it waits for.

        Another thread may advance the run meanwhile.  Parts that cannot be made are left out.
        """
        flight = self.transport.flight
        flight.dump_if_asked()
        title = part_of_report(lambda: self.title)
        waited = f"{title}: rank {self.transport.rank} waited {timeout} s"
        position = part_of_report(self._position_as_text)
        return "\n".join([f"{waited} {position}", part_of_report(flight.lines)])

    def _position_as_text(self) -> str:
        """Return the position, the ranks that it waits for, and its place in the schedules."""
        position = self.position()
        if (show := self._shown_now.schedules) is None:
            return str(position)
        return "\n".join([str(position), part_of_report(lambda: show(position))])
