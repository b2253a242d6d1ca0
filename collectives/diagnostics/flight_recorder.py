"""The flight recorder: the last calls of a rank and what it waits for, always kept.

A dump is a JSON file, one for each rank; `ring flight` joins them.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from itertools import chain, count
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import numpy as np

NUM_CALLS = 256
WORDS = 4  # of an entry
UNDER_WAY, COMPLETE, FAILED, ENQUEUED = 1, 2, 3, 4  # states of a call
_STATES = {UNDER_WAY: "under way", COMPLETE: "complete", FAILED: "failed", ENQUEUED: "enqueued"}
_MAX_FREED_LOGS = 16  # logs of freed communicators that are kept

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Waiting(NamedTuple):
    """A message that is not complete: its peer and its direction."""

    peer: int
    is_receive: bool

    def __str__(self) -> str:
        return (
            f"a message from rank {self.peer}"
            if self.is_receive
            else f"rank {self.peer} to receive"
        )


class Position(NamedTuple):
    """The position of a run: its round, the number of rounds (a text), and what it waits for.

    Attributes
    ----------
    device_row : str
        The row at which its device is, as text; "" if it has no device.
    """

    round: int
    num_rounds: str
    waiting_for: list[Waiting]
    device_row: str = ""

    def __str__(self) -> str:
        where = f"in round {self.round} of {self.num_rounds}"
        if self.device_row:
            where += f", {self.device_row}"
        waiting_for = ", ".join(map(str, self.waiting_for))
        return f"{where} for {waiting_for}" if waiting_for else f"{where}; no message is missing"


class Run(Protocol):
    """A run that may be in progress.

    Attributes
    ----------
    key : int
        Its current key in the log.
    """

    key: int

    def position(self) -> Position:
        """Return the position of the current run.

        Any thread may ask, while another advances the run.
        """


UNKNOWN = Position(0, "?", [])


Describe = Callable[[int], dict[str, Any]]
"""Returns, for the number of a run: its name, collective, algorithm and bytes sent."""


class CallLog:
    """The last calls of one communicator, as integers that compiled code can write.

    Attributes
    ----------
    words : array of int64
        The number of entries so far, then for each of the last entries the key of its program, the
        number of the run, the time of its start (nanoseconds) and its state.
    members : sequence of int
        The ranks of the job in the communicator.
    ordinal : int
        Its number among communicators of the same ranks.
    device_state : function
        Returns the state of the runs that were left to a device.
    """

    device_state: Callable[[], int] = staticmethod(lambda: ENQUEUED)

    def __init__(self, members: tuple[int, ...], ordinal: int) -> None:
        self.members, self.ordinal = members, ordinal
        self.words = np.zeros(1 + NUM_CALLS * WORDS, np.int64)
        self._entries = self.words[1:].reshape(NUM_CALLS, WORDS)
        self._runs: dict[int, tuple[Describe, ReferenceType[Run]]] = {}
        self._keys, self._most_runs = count(1), 2 * NUM_CALLS
        self._lock = threading.Lock()  # threads may register at the same time

    def register_run(self, describe: Describe, run: Run) -> int:
        """Return a new key for a program.

        The log keeps only a weak reference to the run.
        """
        with self._lock:
            if len(self._runs) >= self._most_runs:
                self._forget()
            key = next(self._keys)
            self._runs[key] = describe, ref(run)
            return key

    def _forget(self) -> None:
        """Forget the programs that no entry names and no run uses."""
        named = set(self._entries[:, 0].tolist())
        for key, (_, reference) in list(self._runs.items()):
            run = reference()
            if key not in named and (run is None or run.key != key):
                del self._runs[key]
        self._most_runs = len(self._runs) + 2 * NUM_CALLS

    def begin_entry(self, key: int, number: int) -> int:
        """Add the entry of a run that starts; return its index."""
        at = int(self.words[0]) % NUM_CALLS
        self.words[0] += 1
        self._entries[at] = key, number, time.perf_counter_ns(), UNDER_WAY
        return at

    def end_entry(self, at: int, key: int, number: int, state: int) -> None:
        """Set the final state of a run, unless a later run has reused its entry."""
        if self._entries[at, 0] == key and self._entries[at, 1] == number:
            self._entries[at, 3] = state

    def replace_key(self, at: int, key: int, number: int, other: int) -> None:
        """Let the entry of a run name another program, which runs instead."""
        if self._entries[at, 0] == key and self._entries[at, 1] == number:
            self._entries[at, 0] = other

    def calls(self, now: int) -> list[tuple[int, dict[str, Any]]]:
        """Return the time of each entry's start, and its description.

        Any thread may ask: meanwhile others add entries, and forget and advance runs.
        """
        runs = self._runs.copy()
        self.note_device_state()
        entries = [entry for entry in self._entries.tolist() if entry[0] in runs]
        return [(entry[2], self._call(entry, now, *runs[entry[0]])) for entry in entries]

    def note_device_state(self) -> None:
        """Enter what is known of the runs that were left to a device."""
        states = self._entries[:, 3]
        (enqueued,) = np.nonzero(states == ENQUEUED)  # before the device is looked at
        if len(enqueued):
            states[enqueued] = self.device_state()

    def _call(
        self, entry: list[int], now: int, describe: Describe, reference: ReferenceType[Run]
    ) -> dict[str, Any]:
        _, number, started, state = entry
        run = reference()
        if state == UNDER_WAY and run is None:
            state = FAILED  # nothing can complete it
        call = {"members": self.members, "ordinal": self.ordinal, **describe(number)}
        seconds_ago = max(now - started, 0) * 1e-9  # it may have begun after `now`
        call |= {"seconds_ago": seconds_ago, "state": _STATES[state]}
        if run is not None and state in (UNDER_WAY, ENQUEUED):
            call |= _position_of(run)._asdict()
        return call


def _position_of(run: Run) -> Position:
    """Return the position of a run; `UNKNOWN` if it cannot be determined.

    An error here must not end the report.
    """
    try:
        return run.position()
    except Exception as error:  # noqa: BLE001 - see above
        logging.getLogger(__name__).warning("a position is not known: %s", reason_of(error))
        return UNKNOWN


class FlightRecorder:
    """The last calls of one rank in all its communicators.  `rank` and `size` are the job's."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.logs: list[CallLog] = []
        self._freed_logs: deque[CallLog] = deque(maxlen=_MAX_FREED_LOGS)
        self.directory: Path | None = None
        self._thread = threading.get_ident()

    def log(self, members: tuple[int, ...], ordinal: int) -> CallLog:
        """Return the log of a new communicator."""
        log = CallLog(members, ordinal)
        self.logs.append(log)
        return log

    def close(self, log: CallLog) -> None:
        """Keep the log of a freed communicator among the last `_MAX_FREED_LOGS`."""
        if log in self.logs:
            self.logs.remove(log)
            self._freed_logs.append(log)

    def calls(self) -> list[dict[str, Any]]:
        """Return the last calls, the latest at the end."""
        now = time.perf_counter_ns()
        logs = *self._freed_logs, *self.logs
        calls = sorted(chain.from_iterable(log.calls(now) for log in logs), key=itemgetter(0))
        return [call for _, call in calls[-NUM_CALLS:]]

    def lines(self, most: int = 8) -> str:
        """Return the last few calls as text, the latest first."""
        calls = self.calls()[::-1][:most]
        return "\n".join(
            [f"last calls of rank {self.rank}:", *(f"  {_line(call)}" for call in calls)]
        )

    def report(self) -> dict[str, Any]:
        """Return the report of this rank, as a dump contains it."""
        return {
            "rank": self.rank,
            "size": self.size,
            "host": platform.node(),
            "pid": os.getpid(),
            "time": time.time(),
            "calls": self.calls(),
            "at": self._place(),
        }

    def dump(self, directory: str | Path) -> Path:
        """Write the report to `flight.<rank>.json` in a directory, which is made if necessary."""
        path = Path(directory) / f"flight.{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # So that no reader finds half of it, and two threads do not write the same file.
        unfinished = path.with_suffix(f".{threading.get_ident()}.part")
        try:
            unfinished.write_text(json.dumps(self.report(), indent=1))
            return unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)  # if it could not be written, on a full disk

    def dump_if_asked(self) -> None:
        """Write a dump if `listen` was called.  An error is only logged.

        The caller is about to raise another error, or is the thread that must serve later signals.
        """
        try:
            if self.directory is not None:
                self.dump(self.directory)
        except Exception as error:  # noqa: BLE001 - see above
            logging.getLogger(__name__).warning(
                "no dump of rank %d: %s", self.rank, reason_of(error)
            )

    def listen(self, directory: str | Path, signum: int = signal.SIGUSR1) -> None:
        """Dump to a directory after a time-out or failure, and at a signal, from now on.

        A thread writes the dump, so it also works while the program computes or is stuck in a call
        of MPI.  This takes Python's only wake-up descriptor for signals.  Only the main thread may
        call it.
        """
        self.directory = Path(directory)
        ours, pythons = socket.socketpair()
        pythons.setblocking(False)
        signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(pythons.detach(), warn_on_full_buffer=False)
        name, arguments = "collectives flight recorder", (ours, signum)
        threading.Thread(target=self._listen, args=arguments, name=name, daemon=True).start()

    def _listen(self, signals: socket.socket, signum: int) -> None:
        with signals:
            while numbers := signals.recv(64):
                if signum in numbers:
                    self.dump_if_asked()

    def _place(self) -> list[str]:
        """Return the stack of the rank's own thread outside this package.

        The innermost line is the last.
        """
        frame = sys._current_frames().get(self._thread)
        lines = [] if frame is None else traceback.extract_stack(frame)
        return [
            f"{line.filename}:{line.lineno} in {line.name}"
            for line in lines
            if not line.filename.startswith((_PACKAGE, "<frozen"))
        ]


def part_of_report(make: Callable[[], str]) -> str:
    """Return a part of a report; if making it fails, a sentence that says why.

    The report belongs to another error, which must not be replaced.
    """
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - see above
        return f"(a part of this report could not be made: {reason_of(error)})"


def reason_of(error: Exception) -> str:
    """Return an error in one line, also if its own text cannot be made."""
    return traceback.format_exception_only(error)[-1].strip()


def _line(call: dict[str, Any]) -> str:
    what = f"{call['call']} {call['collective']} ({call['algorithm']}), {call['bytes']} bytes sent"
    line = f"{what}, begun {call['seconds_ago']:.3g} s ago, {call['state']}"
    return f"{line} {_position_in_job(call)}" if "waiting_for" in call else line


def _position_in_job(call: dict[str, Any]) -> Position:
    """Return the position of a call that is under way, with the numbers of ranks in the job."""
    members = call["members"]
    waits = [Waiting(members[peer], is_receive) for peer, is_receive in call["waiting_for"]]
    return Position(call["round"], call["num_rounds"], waits, call["device_row"])
