"""Device programs with addresses: the tables that the compiled loop enqueues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting
from collectives.devices.row_format import (
    COUNTER,
    KIND,
    LEFTS,
    NUM_OPERANDS,
    ON_HOST,
    PLACES,
    RISE,
    ROW_WORDS,
    SIZE,
    TARGET,
    VALUE,
    Words,
    most_runs,
)
from collectives.devices.watched import WatchedRows
from collectives.lowering import (
    MOST_OPERANDS,
    SYNCHRONIZING,
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
    Place,
)
from collectives.programs import BUFFERS


class Table(NamedTuple):
    """A device program without addresses.

    The values of its counters are the values in a run before the first one: each run raises them.

    Attributes
    ----------
    operations : tuple of DeviceOperation
        The operations of the program.
    rows : array
        The rows, with offsets in the place of addresses.
    bases : array
        For each place in the rows the number of its buffer, `BUFFERS` for each rank.
    signals : array
        The numbers of the rows that have a counter.
    counters : sequence of Counter
        The counters of these rows.
    """

    operations: tuple[DeviceOperation, ...]
    rows: Words
    bases: Words
    signals: Words
    counters: Sequence[Counter]

    @property
    def most_runs(self) -> int:
        """How often it can run."""
        return most_runs(int(self.rows[:, RISE].max(initial=1)))

    def placed(self, meeting: Meeting, starts: Words) -> Words:
        """Return the rows with the addresses of counters, and of buffers with these starts."""
        words = {counter: meeting.word(counter).ctypes.data for counter in set(self.counters)}
        rows = self.rows.copy()
        rows[self.signals, COUNTER] = [words[counter] for counter in self.counters]
        self.set_starts(rows, starts)
        return rows

    def set_starts(self, rows: Words, starts: Words) -> None:
        """Write into the rows where the buffers start."""
        np.add(self.rows[:, PLACES], starts[self.bases], out=rows[:, PLACES])

    def watched(self, text: str, meeting: Meeting, rows: Words, loop: Loop) -> WatchedRows:
        """Return what is watched in the runs of these rows."""
        return WatchedRows(text, meeting, self.operations, rows, loop)


def rises_of(programs: Iterable[DeviceProgram]) -> dict[Counter, int]:
    """Return by how much each counter rises when these programs run once."""
    return {
        operation.counter: operation.value  # the last one of each counter
        for program in programs
        for operation in program.operations
        if operation.kind == DeviceKind.SIGNAL and operation.counter is not None
    }


def table_of(
    program: DeviceProgram, rank: int, by_events: frozenset[int], rises: Mapping[Counter, int]
) -> Table:
    """Return the table of the device program of a rank.

    If the device waits for any counter, it first raises one of its own rank, which says that it has
    entered the run.

    Parameters
    ----------
    program : DeviceProgram
        The program.
    rank : int
        The rank.
    by_events : frozenset of int
        The peers in the same process, with which events keep the order.
    rises : mapping of Counter to int
        By how much each run raises the counters.
    """
    operations, mark = program.operations, Counter(rank, rank)
    awaited = {operation.counter for operation in operations if operation.kind == DeviceKind.AWAIT}
    if any(counter is not None and by_events.isdisjoint(counter[:2]) for counter in awaited):
        operations = DeviceOperation(DeviceKind.SIGNAL, 0, mark, 1), *operations
        rises = {**rises, mark: 1}
    rows = np.zeros((len(operations), ROW_WORDS), np.int64)
    bases = np.zeros((len(operations), 1 + MOST_OPERANDS), np.int64)
    signals = [at for at, operation in enumerate(operations) if operation.kind in SYNCHRONIZING]
    for at, operation in enumerate(operations):
        counter = operation.counter
        is_on_host = counter is not None and not by_events.isdisjoint(counter[:2])
        rows[at, KIND] = operation.kind + ON_HOST * is_on_host
        rows[at, SIZE], rows[at, LEFTS] = operation.size, operation.lefts
        rows[at, NUM_OPERANDS] = len(operation.operands)
        if operation.kind in SYNCHRONIZING and counter is not None:
            rows[at, RISE] = rises[counter]
            rows[at, VALUE] = operation.value - rises[counter]
        for number, place in enumerate((operation.target, *operation.operands)):
            if place is not None:
                bases[at, number], rows[at, TARGET + number] = _base(place), place.offset
    of_signals = [operations[at].counter for at in signals]
    counters = [counter for counter in of_signals if counter is not None]
    return Table(operations, rows, bases, np.array(signals, np.int64), counters)


def _base(place: Place) -> int:
    return place.rank * len(BUFFERS) + place.buffer
