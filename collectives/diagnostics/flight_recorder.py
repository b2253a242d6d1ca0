"""The last calls of a rank and what it waits for, always kept, for the day when something hangs.

A dump is a JSON file, one for each rank; `python -m collectives.flight` lines them up.
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
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import ReferenceType, ref

import numpy as np

NUM_CALLS = 256
WORDS = 4  # of an entry
UNDER_WAY, COMPLETE, FAILED = 1, 2, 3  # states of a call
_STATES = {UNDER_WAY: "under way", COMPLETE: "complete", FAILED: "failed"}
_MAX_FREED_LOGS = 16  # communicators that were freed, whose calls are still known

_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class Waiting(NamedTuple):
    """One message that has not completed: to or from which rank."""

    peer: int
    is_receive: bool

    def __str__(self) -> str:
        return (
            f"a message from rank {self.peer}"
            if self.is_receive
            else f"rank {self.peer} to receive"
        )


class Position(NamedTuple):
    """Where a run stands: in which round, of how many (in words), and what that waits for."""

    round: int
    num_rounds: str
    waiting_for: list[Waiting]


class Run(Protocol):
    """A program that may be under way.  `key`: the number that stands for it now."""

    key: int

    def position(self) -> Position:
        """Where the run under way stands."""


Describe = Callable[[int], dict[str, Any]]
"""Of a run: its number in words, its collective, its algorithm, the bytes sent."""


class CallLog:
    """The last calls of one communicator, as integers that compiled code can write.

    `words`: how many calls were entered, then for each of the last ones the number that stands for
    its program, the number of the run, when it began (nanoseconds) and its state.  `members`: the
    ranks of the job that take part; `ordinal`: which one of the communicators of these ranks.
    """

    def __init__(self, members: tuple[int, ...], ordinal: int) -> None:
        self.members, self.ordinal = members, ordinal
        self.words = np.zeros(1 + NUM_CALLS * WORDS, np.int64)
        self._entries = self.words[1:].reshape(NUM_CALLS, WORDS)
        self._runs: dict[int, tuple[Describe, ReferenceType[Run]]] = {}
        self._next_key, self._most_runs = 0, 2 * NUM_CALLS

    def register_run(self, describe: Describe, run: Run) -> int:
        """The number that stands for a program in the entries.  The log keeps no run alive."""
        if len(self._runs) >= self._most_runs:
            self._forget()
        self._next_key += 1
        self._runs[self._next_key] = describe, ref(run)
        return self._next_key

    def _forget(self) -> None:
        """Forget the programs that no entry names and that nobody runs under that number."""
        named = set(self._entries[:, 0].tolist())
        for key, (_, reference) in list(self._runs.items()):
            run = reference()
            if key not in named and (run is None or run.key != key):
                del self._runs[key]
        self._most_runs = len(self._runs) + 2 * NUM_CALLS

    def begin_entry(self, key: int, number: int) -> int:
        """A run has begun; where its entry is."""
        at = int(self.words[0]) % NUM_CALLS
        self.words[0] += 1
        self._entries[at] = key, number, time.perf_counter_ns(), UNDER_WAY
        return at

    def end_entry(self, at: int, key: int, number: int, state: int) -> None:
        """A run is over, unless its entry has gone to another since."""
        if self._entries[at, 0] == key and self._entries[at, 1] == number:
            self._entries[at, 3] = state

    def calls(self, now: int) -> list[tuple[int, dict[str, Any]]]:
        """When each began, and what there is to say of it."""
        entries = [entry for entry in self._entries.tolist() if entry[0] in self._runs]
        return [(entry[2], self._call(entry, now)) for entry in entries]

    def _call(self, entry: list[int], now: int) -> dict[str, Any]:
        key, number, started, state = entry
        describe, reference = self._runs[key]
        run = reference()
        if state == UNDER_WAY and run is None:
            state = FAILED  # nobody can bring it to its end
        call = {"members": self.members, "ordinal": self.ordinal, **describe(number)}
        call |= {"seconds_ago": (now - started) * 1e-9, "state": _STATES[state]}
        if run is not None and state == UNDER_WAY:
            call |= run.position()._asdict()
        return call


class FlightRecorder:
    """What one rank called lately, in all its communicators.  `rank` and `size`: of the job."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.logs: list[CallLog] = []
        self._freed_logs: deque[CallLog] = deque(maxlen=_MAX_FREED_LOGS)
        self.directory: Path | None = None
        self._thread = threading.get_ident()

    def log(self, members: tuple[int, ...], ordinal: int) -> CallLog:
        """The log of a new communicator."""
        self.logs.append(CallLog(members, ordinal))
        return self.logs[-1]

    def close(self, log: CallLog) -> None:
        """A communicator was freed; its log stays until some others were."""
        if log in self.logs:
            self.logs.remove(log)
            self._freed_logs.append(log)

    def calls(self) -> list[dict[str, Any]]:
        """The last calls, the latest at the end."""
        now = time.perf_counter_ns()
        found = [each for log in (*self._freed_logs, *self.logs) for each in log.calls(now)]
        found.sort(key=itemgetter(0))
        return [call for _, call in found[-NUM_CALLS:]]

    def lines(self, most: int = 8) -> str:
        """The last few calls in words, the latest first."""
        calls = self.calls()[::-1][:most]
        return "\n".join(
            [f"last calls of rank {self.rank}:", *(f"  {_line(each)}" for each in calls)]
        )

    def report(self) -> dict[str, Any]:
        """Everything there is to say of this rank now."""
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
        """Write the report to `flight.<rank>.json` in this directory, which is made if need be."""
        path = Path(directory) / f"flight.{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")  # nobody shall read half of it
        unfinished.write_text(json.dumps(self.report(), indent=1))
        return unfinished.replace(path)

    def dump_if_asked(self) -> None:
        """Dump where `listen` was told to, if it was.  What goes wrong here hides no failure."""
        try:
            if self.directory is not None:
                self.dump(self.directory)
        except OSError as error:
            logging.getLogger(__name__).warning("no dump of rank %d: %s", self.rank, error)

    def listen(self, directory: str | Path, signum: int = signal.SIGUSR1) -> None:
        """From now on dump to this directory after a time-out or failure, and at this signal.

        A thread writes the dump, so it comes also while the program computes, or is stuck in a call
        of MPI.  Python has one wake-up descriptor for signals, which this takes.  Only the main
        thread may call it.
        """
        self.directory = Path(directory)
        ours, pythons = socket.socketpair()
        pythons.setblocking(False)
        signal.signal(signum, lambda *_: None)
        signal.set_wakeup_fd(pythons.detach(), warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(ours, signum), daemon=True)
        listener.start()

    def _listen(self, signals: socket.socket, signum: int) -> None:
        while numbers := signals.recv(64):
            if signum in numbers:
                self.dump_if_asked()

    def _place(self) -> list[str]:
        """Where the rank's own thread is, outside this package: the innermost line last."""
        frame = sys._current_frames().get(self._thread)
        lines = [] if frame is None else traceback.extract_stack(frame)
        return [
            f"{line.filename}:{line.lineno} in {line.name}"
            for line in lines
            if not line.filename.startswith((_PACKAGE, "<frozen"))
        ]


def _line(call: dict[str, Any]) -> str:
    what = f"{call['call']} {call['collective']} ({call['algorithm']}), {call['bytes']} bytes sent"
    return f"{what}, begun {call['seconds_ago']:.3g} s ago, {call['state']}"
