"""Runs programs row by row in plain Python.

It serves ranks that are threads, arrays on a device, operators written in Python, and machines
where the compiled loop of `executor.py` is not available.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Bytes
from collectives.diagnostics import COMPLETE, Waiting
from collectives.engines.host_memory import NUM_HOST_CALLS
from collectives.engines.transport import Messages, Operands
from collectives.programs import INPUT, OUTPUT, SCRATCH, Kind, Program, Row


class Memory:
    """The three buffers of a program, and the operations on them that send nothing."""

    def __init__(self, operands: Operands, itemsize: int) -> None:
        self.operands, self.backend = operands, operands.backend
        self._itemsize, self._divisor = itemsize, operands.divisor
        self._arrays = {INPUT: operands.input, OUTPUT: operands.output, SCRATCH: operands.scratch}
        if operands.function is not None:
            self._function = self.backend.binary(operands.function, operands.output.dtype)

    def view(self, buffer: int, offset: int, count: int) -> Array:
        """Return the elements of `count` bytes at byte `offset` of a buffer."""
        start = offset // self._itemsize
        return self._arrays[buffer][start : start + count // self._itemsize]

    def work(self, row: Row) -> None:
        """Copy, combine or divide, as the row says."""
        if row.kind == Kind.COPY:
            self.copy(row)
        elif row.kind == Kind.COMBINE:
            self.combine(row)
        else:
            self.divide(row)

    def copy(self, row: Row) -> None:
        """Copy within this rank."""
        source = self.view(row.left, row.left_offset, row.size)
        self.backend.copy(source, self.view(row.buffer, row.offset, row.size))

    def combine(self, row: Row) -> None:
        """Combine two regions into one.  NumPy is faster if equal regions are the same view."""
        places = [
            (row.left, row.left_offset),
            (row.right, row.right_offset),
            (row.buffer, row.offset),
        ]
        views = {place: self.view(*place, row.size) for place in places}
        self._function(*(views[place] for place in places))

    def divide(self, row: Row) -> None:
        """Divide a sum by the number of ranks."""
        self.backend.divide(self.view(row.buffer, row.offset, row.size), self._divisor)


class Interpreted:
    """An execution in plain Python."""

    enqueued, final_state = None, COMPLETE
    limit: float | None = None

    def when_complete(self, then: Callable[[float], object]) -> None:
        """See `Execution.when_complete`."""
        then(time.perf_counter())

    def link(self, rank: int) -> str:
        """See `Execution.link`."""
        return "host"

    @property
    def device_row(self) -> str:
        """See `Execution.device_row`."""
        return ""

    def leave_callers_stream(self) -> None:
        """Do nothing: it waits for its own work."""

    def __init__(
        self,
        program: Program,
        operands: Operands,
        messages: Messages,
        host_calls: NDArray[np.int64] | None = None,
    ) -> None:
        """Prepare the buffers; `host_calls` is as in `Transport.execution`."""
        program.check_arrays(operands.input, operands.output, operands.scratch)
        self.program, self.messages, self._host_calls = program, messages, host_calls
        self.memory = Memory(operands, program.itemsize)
        self.row = 0

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        self.program.check_arrays(operands.input, operands.output, operands.scratch)
        self.memory, self.messages.tag = Memory(operands, self.program.itemsize), tag

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        del self.memory

    def restart(self, number: int, *, is_async: bool = False) -> None:
        """Go back to the first row."""
        self.row = 0
        if self._host_calls is not None:
            self._host_calls[number % NUM_HOST_CALLS] = number

    def interrupt(self, is_wanted: bool) -> None:
        """Do nothing: this execution never waits."""

    def advance(self, seconds: float) -> bool:
        """Continue until a message is missing.  It never waits, so `seconds` is not used."""
        rows = self.program.listed
        while self.row < len(rows):
            if not self._run(rows[self.row]):
                return False
            self.row += 1
        return self.is_over()

    def _run(self, row: Row) -> bool:
        """Do what a row says; return False if it must be tried again."""
        if row.kind == Kind.WAIT:
            return self.wait(row)
        if row.kind == Kind.RECEIVE:
            return self.receive(row)
        if row.kind == Kind.SEND:
            return self.send(row)
        self.memory.work(row)
        return True

    def receive(self, row: Row) -> bool:
        """Post a receive; return False if it must be tried again."""
        self.messages.receive(row.slot, row.peer, self._bytes(row))
        return True

    def send(self, row: Row) -> bool:
        """Post a send; return False if it must be tried again."""
        self.messages.send(row.slot, row.peer, self._bytes(row))
        return True

    def wait(self, row: Row) -> bool:
        """Return whether the messages that a row waits for are complete."""
        return self.messages.test(range(row.slot, row.slot + row.size), row.peer)

    def is_over(self) -> bool:
        """Return whether the call is complete when all rows are."""
        return True

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        self.messages.note_completed()

    def position(self) -> tuple[int, list[Waiting]]:
        """See `Execution.position`."""
        number = self.program.round_of(self.row)
        return number, self.messages.waiting_for()

    def abandon(self) -> bool:
        """See `Execution.abandon`."""
        return self.messages.abandon()

    def _bytes(self, row: Row) -> Bytes:
        return self.memory.backend.host_buffer(self.memory.view(row.buffer, row.offset, row.size))
