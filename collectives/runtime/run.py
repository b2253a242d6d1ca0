"""The runs of a program on one communicator, with their entries in ledgers and flight recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import cast

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
from collectives.programs import Program
from collectives.runtime.shown import Shown

_BY_ENVELOPE = "peer", "thread"  # links of messages that are handed over


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


class Run:
    """A program with its execution, its entries in the ledgers, and its entry in the log.

    - `log`: the log in which it is entered; None: the log of the communicator's collectives.
    - `part_of`: the call that error messages name, if this run is a part of it.
    - `shown`: what is shown of a run.  `shown_if_staged`: what is shown of one that is staged, if
      that has another program.
    - `is_ahead`: whether this is a header exchange that precedes the call itself.
    - `scratch_bytes`: of its program; of a comparison in checked mode, those of the call itself.
    - `envelope`: records the envelope that is sent if the message is handed over.
    - `release`: called with the run when it is complete.
    - `when_detached`: called when it does not run again.
    """

    part_of = ""
    shown_if_staged: Shown | None = None
    is_ahead = _is_staged = False
    envelope: Recorder | None = None
    release: Callable[[Run], object] | None = None
    when_detached: Callable[[], object] | None = None

    def __init__(
        self,
        transport: Transport,
        program: Program,
        execution: Execution,
        shown: Shown,
        log: CallLog | None = None,
    ) -> None:
        self.transport, self.program, self.shown = transport, program, shown
        self.execution: Execution = execution
        self.scratch_bytes = program.num_scratch
        self._number, self._entered = 1, list[Entered]()
        self.log = transport.log if log is None else log
        self.key = self.log.register_run(shown.recorder.describe, self)
        self._entry, self._entry_key = -1, self.key
        self.is_running = False
        self._is_logged_by_code = False  # compiled code marks it complete in the log

    def renumber(self, numbered: Callable[[int], str]) -> None:
        """Give the run other numbers in the ledgers, and a new key in the log."""
        self.shown = self.shown._replace(recorder=self.shown.recorder.renumbered(numbered))
        self.key = self.log.register_run(self.shown.recorder.describe, self)

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

        `phase`: under which it is recorded.  `site`: see `Recorder.record`.  `is_async`: see
        `Execution.restart`.  `limit`: see `Execution`.
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
        """Release a complete run, after the next run of its call has started."""
        if (release := self.release) is not None:
            self.release = None
            release(self)

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
        if (action := self.when_detached) is not None:
            self.when_detached = None
            action()

    def note_completed(self) -> None:
        """Note which messages are complete, for `position`.

        Only the thread that advances the run may call it.
        """
        self.execution.note_completed()

    def position(self) -> Position:
        """The position of the current run.  Any thread may ask, while another advances the run."""
        number, waiting = self.execution.position()
        num_rounds, device_row = self._shown_now.num_rounds, self.execution.device_row
        return Position(number, num_rounds, waiting, device_row)

    def time_out_report(self, timeout: float | None) -> str:
        """The text of a time-out, which names the ranks that it waits for.

        Another thread may advance the run meanwhile.  Parts that cannot be made are left out.
        """
        flight = self.transport.flight
        flight.dump_if_asked()
        title = part_of_report(lambda: self.title)
        waited = f"{title}: rank {self.transport.rank} waited {timeout} s"
        position = part_of_report(self._position_as_text)
        return "\n".join([f"{waited} {position}", part_of_report(flight.lines)])

    def _position_as_text(self) -> str:
        """The position, the ranks that it waits for, and its place in the schedules."""
        position = self.position()
        if (show := self._shown_now.position) is None:
            return str(position)
        return "\n".join([str(position), part_of_report(lambda: show(position))])
