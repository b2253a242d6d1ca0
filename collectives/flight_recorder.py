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
from pathlib import Path
from typing import Any, NamedTuple, Protocol

NUM_CALLS = 256

_PACKAGE = os.path.dirname(__file__)
_clock = time.perf_counter


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
    among: str
    waiting_for: list[Waiting]


class Flying(Protocol):
    """What is to be known of a plan under way."""

    def position(self) -> Position:
        """Where it stands."""


class Callsign(Protocol):
    """What is to be known of a call, besides."""

    communicator: tuple[tuple[int, ...], int]  # its ranks in the job; which one of the same ranks

    def describe(self, number: int) -> dict[str, Any]:
        """The call's number in words, its collective, its algorithm, the bytes sent."""


class FlightRecorder:
    """What one rank called lately, in all its communicators.

    `rank` and `size` are those of the job.  An entry is [callsign, number, started, state]; the
    state is the plan while it is under way, then True if it completed and None if it failed.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.entries: deque[list[Any]] = deque(maxlen=NUM_CALLS)
        self.directory: Path | None = None
        self._thread = threading.get_ident()

    def calls(self) -> list[dict[str, Any]]:
        """The last calls, the latest at the end."""
        now = _clock()
        return [_call(entry, now) for entry in self.entries.copy() if entry[0] is not None]

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


def _call(entry: list[Any], now: float) -> dict[str, Any]:
    callsign, number, started, state = entry
    members, ordinal = callsign.communicator
    call = {"members": members, "ordinal": ordinal, **callsign.describe(number)}
    call |= {"seconds_ago": now - started, "state": _STATES.get(state, "under way")}
    if call["state"] == "under way":
        call |= state.position()._asdict()
    return call


_STATES = {True: "complete", None: "failed"}


def _line(call: dict[str, Any]) -> str:
    what = f"{call['call']} {call['collective']} ({call['algorithm']}), {call['bytes']} bytes sent"
    return f"{what}, begun {call['seconds_ago']:.3g} s ago, {call['state']}"
