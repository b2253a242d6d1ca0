"""The device program of a rank with the addresses of all ranks' arrays, on a stream of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from collectives.arrays import Backend
from collectives.devices.call import DeviceCall
from collectives.devices.exposed import Exposed, aliasing_of
from collectives.devices.links import Links
from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.rows import HostRows
from collectives.devices.streams import STREAMS, Stream
from collectives.devices.table import VALUE, Table, Words, rises_of, table_of
from collectives.diagnostics import Waiting
from collectives.engines import PinnedMemory, Transport
from collectives.lowering import Counter, DeviceKind, DeviceOperation
from collectives.programs import BUFFERS

Records = Mapping[int, Any]


class Placed:
    """What the device of one rank does in a call, from one meeting of the ranks to the next.

    `meeting`: the last one.  `table`: the program that followed from it.
    """

    def __init__(
        self, transport: Transport, links: Links, call: DeviceCall, loop: Loop, backend: Backend
    ) -> None:
        self._transport, self._links, self._call, self._loop = transport, links, call, loop
        self._backend, self._driver = backend, links.driver
        self._tables: dict[Any, Table] = {}  # the last one, by what it depends on
        self._pinned = PinnedMemory(backend)
        self._stream: Stream | None = None
        self._on_host: HostRows | None = None
        self._operations: tuple[DeviceOperation, ...] = ()
        self._first_row = 0  # of the operations
        self.meeting: Meeting
        self.table: Table

    # Addresses

    def find(self, records: Records) -> Words:
        """Find the program and a stream; return where the buffers of all ranks start.

        Raises DriverError.
        """
        self.table = self._table(records)
        self._stream = self._stream or STREAMS.borrow(self._driver)
        starts = np.zeros((self._transport.size, len(BUFFERS)), np.int64)
        for rank, record in records.items():
            if rank == self._transport.rank or self._links.is_direct(rank):
                starts[rank] = [self._links.address(record, k) for k in range(len(BUFFERS))]
        return starts.reshape(-1)

    def _table(self, records: Records) -> Table:
        """The table of this rank, which depends on where each rank's output lies."""
        me, staged = self._transport.rank, self._links.staged or frozenset()
        ranks = range(self._transport.size)
        aliasings = [aliasing_of(records[r]) if r in records else "none" for r in ranks]
        key = tuple(aliasings), staged
        if key not in self._tables:
            lowered = self._call.lowered(aliasings, records, staged)
            process = self._links.process
            threads = {rank for rank in records if records[rank]["process"] == process}
            rises = rises_of(lowered[rank] for rank in records)
            self._tables = {key: table_of(lowered[me], frozenset(threads - {me}), rises)}
        return self._tables[key]

    def begin(self, starts: Words, meeting: Meeting, exposed: Exposed) -> None:
        """Begin the first run after a meeting."""
        self.meeting, self._operations = meeting, self.table.operations
        rows = self.table.with_counters(lambda counter: int(self._word(counter).ctypes.data))
        self.table.set_starts(rows, starts)
        rows, self._first_row = exposed.with_shadow(rows)
        assert self._stream is not None
        self._loop.begin(rows, self._stream)

    def move(self, starts: Words) -> None:
        """Go on with a run in which buffers start elsewhere than in the last one."""
        self.table.set_starts(self._loop.rows, starts)
        self._loop.go_on()

    def _word(self, counter: Counter) -> Any:
        """The memory of a counter."""
        slot = self.meeting.slots[counter.writer]
        return self._links.board.counter(counter.writer, slot, counter.reader, counter.is_read)

    # Runs

    def finish(self, tag: int) -> Waits:
        """Enqueue all rows, except for those that need the host, and wait for the device.

        `tag`: of messages.
        """
        loop = self._loop
        for_device = Wait(loop.can_advance, self.late, is_at_work=True, is_in_code=True)
        while (answer := loop.advance()) != loop.names.DONE:
            if answer == loop.names.WAITING:
                yield for_device
            else:
                yield from self._run_on_host(loop.row - self._first_row, tag)
                loop.row += 1
        if self._on_host is not None:
            yield from self._on_host.finish()
            self._on_host = None

    def progress(self) -> bool:
        """Let MPI move the messages of a run; return whether it has any."""
        return self._on_host is not None and self._on_host.progress()

    def waiting_for(self) -> list[Waiting]:
        """The messages that are not known to be complete."""
        on_host = self._on_host
        return [] if on_host is None else on_host.waiting_for()

    def _run_on_host(self, at: int, tag: int) -> Waits:
        """Run an operation that needs the host."""
        assert self._stream is not None
        if self._on_host is None:
            messages = self._transport.messages(tag)
            self._on_host = HostRows(self._driver, messages, self._stream, self._pinned)
            self._on_host.post_receives(self._operations)
        rows = self._loop.rows[self._first_row :]
        yield from self._on_host.run(at, self._operations[at], rows, self._word)

    def late(self) -> list[int]:
        """The ranks whose signals the device of this rank still awaits."""
        late = set()
        rows = self._loop.rows[self._first_row :]
        for operation, row in zip(self._operations, rows, strict=False):
            counter = operation.counter
            is_await = operation.kind == DeviceKind.AWAIT
            if is_await and counter is not None and self._word(counter)[0] < row[VALUE]:
                late.add(counter.writer)
        return sorted(late)

    def round_of(self, num_rounds: int) -> int:
        """The round of the operation that is enqueued next.  `num_rounds`: of the program."""
        row = self._loop.row - self._first_row
        if not self._loop.is_busy:  # the ranks are still coming
            return 0
        return self._operations[max(row, 0)].round if row < len(self._operations) else num_rounds

    # The end

    def detach(self) -> None:
        """Release the memory for messages."""
        self._pinned = PinnedMemory(self._backend)

    def end(self) -> None:
        """Let others use the stream and the memory of the meeting."""
        if self._stream is not None:
            self.give_back()
            self.meeting.leave()

    def give_back(self) -> None:
        """Let others use the stream, on which nothing is."""
        if self._stream is not None:
            self._loop.forget()
            STREAMS.give_back(self._driver, self._stream)
            self._stream, self._operations = None, ()

    def abandon(self) -> bool:
        """End a run that has failed; return whether the device does not use its memory any more.

        What is enqueued goes on.
        """
        self._loop.forget()
        is_done = self._on_host is None or self._on_host.abandon()
        if self._stream is not None and self._loop.is_busy:
            is_done &= STREAMS.abandon(self._driver, self._stream)
        else:
            self.give_back()
        self._stream = None
        self._loop.end()
        return is_done
