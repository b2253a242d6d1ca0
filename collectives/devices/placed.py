"""The device program of a rank with the addresses of all ranks' arrays, on a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import Backend
from collectives.devices.call import DeviceCall
from collectives.devices.exposed import Exposed, aliasing_of
from collectives.devices.kernel_table import KernelTable, Ranks, kernel_table
from collectives.devices.links import Links
from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.row_format import Words
from collectives.devices.rows import HostRows
from collectives.devices.table import Table, rises_of, table_of
from collectives.devices.watch import Watch
from collectives.devices.watched import Watched
from collectives.diagnostics import Waiting
from collectives.engines import MessageBuffers, Transport
from collectives.lowering import Counter, DeviceProgram, Spans
from collectives.programs import BUFFERS, Aliasing

Records = Mapping[int, Any]


class Placed:
    """What the device of one rank does in a call, from one meeting of the ranks to the next.

    Attributes
    ----------
    table : Table or KernelTable
        The program that followed from the meeting.
    watched : Watched or None
        What is watched in the runs of its rows, until `end`.
    """

    watched: Watched | None = None

    def __init__(
        self,
        transport: Transport,
        links: Links,
        call: DeviceCall,
        loop: Loop,
        backend: Backend,
        watch: Watch,
    ) -> None:
        self._watch = watch
        self._transport, self._links, self._call, self._loop = transport, links, call, loop
        self._backend, self._driver = backend, links.driver
        self._tables: dict[Any, Table | KernelTable] = {}  # the last one, by what it depends on
        self._buffers = self._new_buffers()
        self._on_host: HostRows | None = None
        self._first_row = 0  # of the operations
        self.table: Table | KernelTable

    def _new_buffers(self) -> MessageBuffers:
        return MessageBuffers(self._transport.message_memory(self._backend))

    def find(self, records: Records) -> Words:
        """Return where the buffers of all ranks start.  Raises DriverError."""
        starts = np.zeros((self._transport.size, len(BUFFERS)), np.int64)
        for rank, record in records.items():
            if rank == self._transport.rank or self._links.is_peer(rank):
                starts[rank] = [self._links.address(record, k) for k in range(len(BUFFERS))]
        return starts.reshape(-1)

    def _table(self, records: Records, *, may_be_kernels: bool) -> Table | KernelTable:
        """Return the table of this rank, which depends on where each rank's output lies."""
        me, staged = self._transport.rank, self._links.staged or frozenset()
        ranks = range(self._transport.size)
        aliasings = [aliasing_of(records[r]) if r in records else "none" for r in ranks]
        key = tuple(aliasings), staged, may_be_kernels
        if key not in self._tables:
            lowered = self._call.lowered(aliasings, records, staged)
            rises = rises_of(lowered[rank] for rank in records)
            process = self._links.process
            threads = {rank for rank in records if records[rank]["process"] == process} - {me}
            table = self._kernel_table(lowered, aliasings, rises) if may_be_kernels else None
            self._tables = {key: table or table_of(lowered[me], me, frozenset(threads), rises)}
        return self._tables[key]

    def _kernel_table(
        self,
        lowered: Sequence[DeviceProgram],
        aliasings: Sequence[Aliasing],
        rises: Mapping[Counter, int],
    ) -> KernelTable | None:
        """Return the table of a kernel, if all ranks can run the call as kernels."""
        links, itemsize = self._links, self._call.spec.dtype.itemsize
        memories = [Spans(aliasing, itemsize) for aliasing in aliasings]
        num_sharing = sum(uuid == links.uuid for uuid in links.uuids.values())
        # The kernels of all ranks must run at the same time, beside those of another communicator.
        most_blocks = self._loop.num_blocks_at_once // (2 * num_sharing)
        ranks = Ranks(lowered, memories, rises, bool(self._call.plan))
        me = self._transport.rank
        return kernel_table(ranks, me, self._loop, links.counters, most_blocks)

    def begin(
        self,
        records: Records,
        starts: Words,
        meeting: Meeting,
        exposed: Exposed,
        *,
        may_be_kernels: bool,
    ) -> None:
        """Begin the first run after a meeting.

        It may be kernels if all ranks have said that their kernels can wait for each other.
        """
        self.table = self._table(records, may_be_kernels=may_be_kernels)
        rows, self._first_row = exposed.with_shadow(self.table.placed(meeting, starts))
        own_rows = rows[self._first_row :]
        self.watched = self.table.watched(self._call.text, meeting, own_rows, self._loop)
        self._watch.begin(self.watched)
        self._loop.begin(rows)

    def move(self, starts: Words) -> None:
        """Go on with a run in which buffers start elsewhere than in the last one."""
        self.table.set_starts(self._loop.rows, starts)
        self._loop.go_on()

    def finish(self, tag: int) -> Waits:
        """Enqueue all rows; run on the host those that need it, with messages of this tag."""
        loop = self._loop
        for_room = Wait(loop.can_advance, self.late, is_at_work=True, is_in_code=True)
        while (answer := loop.advance()) != loop.names.DONE:
            if answer == loop.names.WAITING:
                yield for_room
            else:
                yield from self._run_on_host(loop.row - self._first_row, tag)
                loop.row += 1
        if self._on_host is not None:
            yield from self._on_host.finish()
            self._on_host = None

    def progress(self) -> bool:
        """Let MPI move the messages of a run; return whether any are under way."""
        return self._on_host is not None and self._on_host.progress()

    def waiting_for(self) -> list[Waiting]:
        """Return the messages that are not known to be complete."""
        on_host = self._on_host
        return [] if on_host is None else on_host.waiting_for()

    def _run_on_host(self, at: int, tag: int) -> Waits:
        """Run an operation that needs the host."""
        watched = self.watched
        assert watched is not None
        if self._on_host is None:
            messages = self._transport.messages(tag)
            self._on_host = HostRows(
                *(self._driver, messages, self._loop, self._buffers, self._watch.check)
            )
            yield from self._on_host.post_receives(watched.operations)
        yield from self._on_host.run(at, watched.operations[at], watched.rows, watched.meeting.word)

    def late(self) -> list[int]:
        """Return the ranks whose signals the device of this rank still awaits."""
        awaited = [] if self.watched is None else self.watched.awaited()
        return sorted({operation.writer for operation in awaited})

    def round_of(self, num_rounds: int) -> int:
        """Return the round in which the device is, or of the operation that is enqueued next.

        Return `num_rounds`, the number of rounds of the program, if all is done.
        """
        if self.watched is None:  # the ranks are still coming
            return 0
        awaited, operations = self.watched.awaited(), self.watched.operations
        row = self._loop.row - self._first_row if self._loop.is_open else len(operations)
        if awaited:
            row = min(row, awaited[0].row) if isinstance(self.table, Table) else awaited[0].row
        return operations[max(row, 0)].round if row < len(operations) else num_rounds

    @property
    def device_row(self) -> str:
        """The row at which the device waits, as text; "" if it does not wait."""
        awaited = [] if self.watched is None else self.watched.awaited()
        if self.watched is None or not awaited:
            return ""
        return f"row {awaited[0].row} of {len(self.watched.operations)} of its device"

    def detach(self) -> None:
        """Release the memory for messages, when the device has read it."""
        if self._buffers.is_used:
            self._loop.order.keep(self._buffers)
            self._buffers = self._new_buffers()

    def end(self) -> None:
        """Let other calls use the memory of the meeting, when the device has done with it."""
        if self.watched is not None:
            self._loop.forget()
            self._loop.order.after_all(partial(self._watch.end, self.watched))
            self.watched = None
        self.detach()

    def abandon(self) -> bool:
        """End a run that has failed; return whether the device does not use its memory any more.

        What is enqueued goes on.
        """
        order, stream, was_open = self._loop.order, self._loop.stream, self._loop.is_open
        self._loop.forget()
        is_done = self._on_host is None or self._on_host.abandon()
        if was_open:
            order.break_off(stream)
            is_done &= order.has_ended
        self.end()
        return is_done
