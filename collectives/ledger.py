"""The record of what was sent.

A program knows its messages before it runs, so recording a call is appending one entry when it
begins; the rows are made when somebody asks for them.  Bytes are payload bytes of point-to-point
messages.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Collect = Callable[[bytes], "list[bytes] | None"]

_phase: ContextVar[str] = ContextVar("phase", default="")
_current_phase = _phase.get


@contextmanager
def phase(label: str) -> Iterator[None]:
    """Label everything sent inside the block; labels nest as "outer/inner".

    The label belongs to the thread (or task) that sets it.
    """
    outer = _phase.get()
    token = _phase.set(f"{outer}/{label}" if outer else label)
    try:
        yield
    finally:
        _phase.reset(token)


class Row(NamedTuple):
    """One message of a schedule, which went as so many `segments`, messages of MPI.

    `call` counts the calls of the communicator; what goes ahead of call 7 is "7a".  `src` and `dst`
    are ranks of the communicator that records.
    """

    phase: str
    collective: str
    algorithm: str
    call: str
    round: int
    src: int
    dst: int
    bytes: int
    segments: int


class Summary(NamedTuple):
    """Totals of a group of rows.

    A call counts once, however many ranks took part, and every segment as a message.
    """

    calls: int
    messages: int
    bytes: int


Sent = tuple[tuple[int, int, int, int], ...]


class Call(NamedTuple):
    """What all runs of a plan have in common.

    `sent`: (round, destination, bytes, segments) of the messages of rank `src`; `ranks` translates
    the destinations of a sub-communicator's call.  `numbered` makes the call's number, in words,
    from what is entered with a run.
    """

    collective: str
    algorithm: str
    sent: Sent
    src: int
    ranks: Sequence[int] | None
    numbered: Callable[[int], str]


class Entry(NamedTuple):
    """A recorded call: its phase, when it began, and when it was found complete (seconds).

    Entered as a plain list, which is quicker to make; `finished` is 0 while the call is under way.
    """

    call: Call
    number: int
    phase: str
    started: float
    finished: float

    def rows(self) -> Iterator[Row]:
        """One row per message."""
        call, ranks = self.call, self.call.ranks
        name = call.numbered(self.number)
        for number, dst, num_bytes, segments in call.sent:
            dst = dst if ranks is None else ranks[dst]
            yield Row(
                self.phase,
                call.collective,
                call.algorithm,
                name,
                number,
                call.src,
                dst,
                num_bytes,
                segments,
            )


_FINISHED = Entry._fields.index("finished")


def finish(entered: list[list[Any]], finished: float) -> None:
    """Say when calls that were entered before have been found complete."""
    for entry in entered:
        entry[_FINISHED] = finished


class Ledger:
    """What one rank sent while the ledger was open; `gather` joins those of all ranks.

    `rank` and `size` are those of the recording communicator.
    """

    def __init__(self, rank: int, size: int, collect: Collect | None = None) -> None:
        self.rank, self.size = rank, size
        self._collect = collect
        self.entered: list[list[Any]] = []
        self._gathered: list[Row] = []

    @property
    def entries(self) -> list[Entry]:
        """The calls recorded, in the order in which they were entered."""
        return [Entry(*each) for each in self.entered]

    def rows(self) -> list[Row]:
        """One row per message sent, in the order of the calls."""
        return self._gathered + [row for entry in self.entries for row in entry.rows()]

    def summary(
        self, by: Sequence[str] = ("phase", "collective")
    ) -> dict[tuple[Any, ...], Summary]:
        """Calls, messages and bytes, grouped by these columns, in order of first appearance."""
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows():
            groups.setdefault(tuple(getattr(row, column) for column in by), []).append(row)
        return {
            key: Summary(
                len({(r.phase, r.collective, r.algorithm, r.call) for r in rows}),
                sum(r.segments for r in rows),
                sum(r.bytes for r in rows),
            )
            for key, rows in groups.items()
        }

    def matrix(self) -> NDArray[np.int64]:
        """p x p bytes from row to column; before `gather` only this rank's row is filled."""
        matrix = np.zeros((self.size, self.size), np.int64)
        for row in self.rows():
            matrix[row.src, row.dst] += row.bytes
        return matrix

    def gather(self) -> Ledger | None:
        """A ledger of every rank's rows on rank 0, None on the others.  All ranks call it.

        What it sends for this is labelled "ledger" in the ledgers that are still open.
        """
        assert self._collect is not None, "a gathered ledger is already whole"
        parts = self._collect(json.dumps(self.rows()).encode())
        if parts is None:
            return None
        whole = Ledger(self.rank, self.size)
        whole._gathered = [Row(*row) for part in parts for row in json.loads(part)]
        return whole

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as a CSV file with a header."""
        with open(path, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(Row._fields)
            writer.writerows(self.rows())

    def to_json(self, path: str | Path) -> None:
        """Write the rows as a JSON list of objects."""
        Path(path).write_text(json.dumps([row._asdict() for row in self.rows()], indent=0))

    def to_chrome_trace(self, path: str | Path) -> None:
        """Write this rank's calls as a timeline for chrome://tracing or Perfetto.

        One bar per call from its start to the moment it was found complete, in microseconds.
        """
        events = [
            {
                "name": f"{entry.call.collective} ({entry.call.algorithm})",
                "cat": entry.phase,
                "ph": "X",
                "pid": self.rank,
                "tid": 0,
                "ts": entry.started * 1e6,
                "dur": max(entry.finished - entry.started, 0.0) * 1e6,
                "args": {
                    "phase": entry.phase,
                    "call": entry.call.numbered(entry.number),
                    "messages": sum(segments for *_, segments in entry.call.sent),
                    "bytes": sum(num_bytes for _, _, num_bytes, _ in entry.call.sent),
                },
            }
            for entry in self.entries
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))


# Ledgers that record a communicator, and its ranks in their numbering (None: the same).
Ancestry = list[tuple[list[Ledger], Sequence[int] | None]]


class Recorder:
    """Enters the runs of a plan of `rank` into the ledgers that are open at the time.

    `numbered`: see `Call`.  `sent`: what every run sends.  `communicator`: the ranks of the job
    that take part, and which one of the communicators of these ranks it is.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        numbered: Callable[[int], str],
        sent: Callable[[], Sent],
        ancestry: Ancestry,
        rank: int,
        communicator: tuple[tuple[int, ...], int] = ((), 0),
    ) -> None:
        self._names, self._numbered, self._sent = (collective, algorithm), numbered, sent
        self.communicator = communicator
        self._ancestry, self._rank = ancestry, rank
        self.ledgers = [ledgers for ledgers, _ in ancestry]  # to look at, before calling us
        self._calls: list[tuple[list[Ledger], Call]] = []

    def number(self, number: int) -> str:
        """The number of a run, in words."""
        return self._numbered(number)

    def record(self, number: int, started: float, finished: float = 0.0) -> list[list[Any]]:
        """Enter a run.  It shall take no time, so what can be said later is not said here."""
        phase = _current_phase()
        entered = []
        for ledgers, call in self._calls or self._made_calls():
            for ledger in ledgers:
                entry = [call, number, phase, started, finished]
                ledger.entered.append(entry)
                entered.append(entry)
        return entered

    def describe(self, number: int) -> dict[str, Any]:
        """A run in words, for the flight recorder."""
        collective, algorithm = self._names
        return {
            "call": self.number(number),
            "collective": collective,
            "algorithm": algorithm,
            "bytes": sum(num_bytes for _, _, num_bytes, _ in self._sent()),
        }

    def withdraw(self, entered: list[list[Any]]) -> None:
        """Take out again what was entered with a run: nothing of it was sent."""
        for ledgers in self.ledgers:
            for ledger in ledgers:
                kept = [each for each in ledger.entered if not any(each is one for one in entered)]
                ledger.entered[:] = kept

    def _made_calls(self) -> list[tuple[list[Ledger], Call]]:
        sent = self._sent()
        for ledgers, ranks in self._ancestry:
            src = self._rank if ranks is None else ranks[self._rank]
            call = Call(*self._names, sent, src, ranks, self._numbered)
            self._calls.append((ledgers, call))
        return self._calls
