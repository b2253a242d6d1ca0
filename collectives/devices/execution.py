"""Runs programs on devices: data goes from the memory of one device to that of another.

Before a call, the ranks of a host meet: each publishes where its arrays are, opens the memory of
its peers, and says so.  Then each enqueues its device program on a stream that begins after what is
on the caller's, and the host polls an event.  If some rank cannot do that, all ranks stage their
messages in host memory.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from collectives.devices.call import DeviceCall
from collectives.devices.driver import DriverError
from collectives.devices.links import Links, Proposal
from collectives.devices.loop import Loop
from collectives.devices.meeting import NO_WAIT, Meeting, Wait, Waits
from collectives.devices.rows import HostRows
from collectives.devices.shadow import Extent, Shadow
from collectives.devices.streams import STREAMS, Stream
from collectives.devices.table import Table, table_of
from collectives.diagnostics import Waiting
from collectives.engines import FAILS, WORKS, CallKey, Operands, PinnedMemory, Staged, Transport
from collectives.errors import CollectiveMismatch
from collectives.lowering import Counter, DeviceKind, DeviceOperation
from collectives.programs import BUFFERS, Aliasing, Program

_ODD, _NONE = -(2**62), -(2**62) + 1  # aliasings that are no offset
_TEXT_BYTES = 160


class OnDevice:
    """An execution of a call on devices.

    `why_staged`: why this rank's array cannot be used by its peers; "" if it can.
    """

    def __init__(
        self,
        transport: Transport,
        links: Links,
        call: DeviceCall,
        program: Program,
        operands: Operands,
        tag: int,
        why_staged: str = "",
    ) -> None:
        self._transport, self._links, self._call, self.program = transport, links, call, program
        self._num_scratch = call.num_scratch(transport.rank, transport.size)
        self._why_staged = why_staged
        self._constant = _constant_fields(links, call)
        self.attach(operands, tag)
        self._backend, self._driver = operands.backend, links.driver
        self._loop = Loop(links.driver, operands, program.itemsize)
        self._tables: dict[Any, Table] = {}  # the last one, by what it depends on
        self._pinned = PinnedMemory(operands.backend)
        self._shadow: Shadow | None = None
        self._staged: Staged | None = None
        self._is_staged, self.row = False, 0
        self._wait: Wait | None = NO_WAIT
        self._borrowed: Stream | None = None
        self._on_host: HostRows | None = None

    # The interface of executions

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        self.program.check_arrays(operands.input, operands.output, operands.scratch)
        if operands.scratch.nbytes < self._num_scratch:
            dtype = operands.scratch.dtype
            shape = (self._num_scratch // dtype.itemsize,)
            operands = operands._replace(scratch=operands.backend.empty(shape, dtype))
        self._operands, self._tag = operands, tag

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        del self._operands
        self._pinned = PinnedMemory(self._backend)
        if self._shadow is not None:
            self._shadow.give_back()
            self._shadow = None
        self._staged = None

    def interrupt(self, is_wanted: bool) -> None:
        """Do nothing: this execution never waits."""

    def restart(self, number: int) -> None:
        """Go to the first row, and show the other ranks of the host that this one has come."""
        plan = self._call.plan
        self._key = CallKey(plan, number) if plan else CallKey(number)
        self.row, self._is_staged, self._wait = 0, False, NO_WAIT
        self._operations: tuple[DeviceOperation, ...] = ()
        self._records: dict[int, Any] = {}
        self._meeting, self._proposal = Meeting(self._links.board, self._key), None
        self._stream = self._backend.current_stream()
        self._of_caller = self._links.pointer(self._stream)
        if self._links.staged is None:
            self._proposal = Proposal(self._links, self._key)
        with self._backend.on_stream(self._stream):
            self._come()
        if not self._meeting.is_published and not plan:  # too many calls are under way
            self._links.board.note_host_call(number)
        self._steps = self._run()
        self._transport.watch(self)

    def advance(self, seconds: float) -> bool:
        """Continue until something is missing.  It never waits, so `seconds` is not used."""
        with self._backend.on_stream(self._stream):
            while self._wait is None or self._wait.is_over():
                self.row += 1
                try:
                    self._wait = next(self._steps)
                except StopIteration:
                    self._transport.unwatch(self)
                    return True
                if self._wait is None:
                    break
        return False

    @property
    def can_move(self) -> bool:
        """Whether it can go on; if it waits for a message, its transport knows that."""
        return self._wait is not None and self._wait.is_over()

    @property
    def is_at_work(self) -> bool:
        """Whether a device is at work for it, so that it may go on later."""
        return self._wait is not None and self._wait.is_at_work

    @property
    def missing(self) -> list[int]:
        """The ranks that it waits for."""
        return [] if self._wait is None else self._wait.missing()

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        if self._is_staged and self._staged is not None:
            self._staged.note_completed()

    def position(self) -> tuple[int, list[Waiting]]:
        """See `Execution.position`."""
        if self._is_staged and self._staged is not None:
            return self._staged.position()
        row, operations = self._loop.row, self._operations
        if not operations:  # the ranks are still meeting
            number = 0
        elif row < len(operations):
            number = operations[row].round
        else:
            number = self.program.num_rounds
        return number, [Waiting(rank, is_receive=True) for rank in self.missing]

    def abandon(self) -> bool:
        """See `Execution.abandon`; what is enqueued goes on.

        The memory of the meeting is kept for ever if the device still uses its counters.
        """
        self._transport.unwatch(self)
        if self._is_staged and self._staged is not None:
            return self._staged.abandon()
        is_done = self._on_host is None or self._on_host.abandon()
        if self._borrowed is not None:
            is_done &= STREAMS.abandon(self._driver, self._borrowed)
        if is_done:
            self._meeting.leave()
        return is_done

    # The meeting

    def _come(self) -> None:
        """Publish this rank's records, unless too many calls are under way.

        The proposal comes first: a rank whose record is there proposes nothing any more.
        """
        proposal = self._proposal
        if proposal is None or proposal.is_published or proposal.publish():
            self._meeting.publish(self._fields())

    def _fields(self) -> dict[str, Any]:
        """The record of this rank."""
        links, why, fields = self._links, self._why_staged, dict(self._constant)
        try:
            if self._driver.is_capturing(self._of_caller):
                why = why or "the stream is being captured"
            if not self._is_aligned():
                why = why or "an array begins between two elements, which kernels cannot read"
            fields["buffers"] = self._buffers()
            fields["closing"] = (*links.exports.to_close(), 0, 0, 0)[:3]
        except DriverError as error:
            why = str(error)
        return {**fields, "why_staged": why.encode()[:_TEXT_BYTES]}

    def _is_aligned(self) -> bool:
        """Whether kernels can read the arrays, if it needs any."""
        operands, dtype = self._operands, self._operands.output.dtype
        unit = dtype.itemsize // (1 + (dtype.kind == "c"))
        arrays = operands.input, operands.output
        starts = [self._backend.extent(array)[0] for array in arrays if array.size]
        return operands.function is None or not any(start % unit for start in starts)

    def _buffers(self) -> list[Any]:
        """The records of the buffers of this rank, or of their shadow."""
        operands, links = self._operands, self._links
        arrays = operands.input, operands.output, operands.scratch
        extents = [Extent(*self._backend.extent(array)) for array in arrays]
        try:
            if self._shadow is None:
                return [links.describe(start, stop - start) for start, stop in extents]
        except DriverError:
            pass
        shadow = self._shadow = self._shadow or Shadow(self._driver, *extents)
        return [
            links.describe(shadow.address(extent), extent.stop - extent.start, shadow.memory)
            for extent in extents
        ]

    def _run(self) -> Waits:
        """All steps of a call."""
        is_direct = yield from self._meet()
        if is_direct:
            is_direct = yield from self._run_direct()
        if not is_direct:
            yield from self._run_staged()

    def _meet(self) -> Waits:
        """Wait for the other ranks of the host; return whether all can use their devices."""
        board, meeting, proposal = self._links.board, self._meeting, self._proposal
        while self._call.plan and not meeting.is_published:
            yield Wait(lambda: board.has_room, lambda: board.local_ranks)
            self._come()
        if proposal is not None and proposal.is_published:
            have_agreed = yield from proposal.agree(meeting)
            if not have_agreed:
                return False
        if not meeting.is_published:
            return False
        yield meeting.for_all()
        return not meeting.absent() and self._all_can()

    def _run_staged(self) -> Waits:
        """Let all messages go through host memory."""
        self._meeting.leave()
        self._transport.unwatch(self)
        if self._staged is None:
            messages = self._transport.messages(self._tag)
            self._staged = Staged(self.program, self._operands, messages)
        else:
            self._staged.attach(self._operands, self._tag)
        self._staged.restart(self._key.call)
        self._is_staged = True
        while not self._staged.advance(0.0):
            yield None

    def _all_can(self) -> bool:
        """Whether all ranks can use their devices; all see the same.

        Raises CollectiveMismatch if the ranks make different calls.
        """
        meeting, links = self._meeting, self._links
        self._records = {rank: meeting.record(rank).copy() for rank in meeting.ranks}
        first = min(self._records)
        for rank, record in self._records.items():
            if record["digest"] != self._records[first]["digest"]:
                raise CollectiveMismatch(self._difference(first, rank))
        return not any(
            record["why_staged"] or links.uuids[rank] != record["uuid"].tobytes()
            for rank, record in self._records.items()
        )

    def _difference(self, *ranks: int) -> str:
        texts = {rank: self._records[rank]["what"].decode(errors="replace") for rank in ranks}
        said = "; ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        return f"the ranks make different calls (call {self._key.call}): {said}"

    # The call

    def _run_direct(self) -> Waits:
        """Open the memory of the others, enqueue, and wait for the device.

        Returns False if a rank cannot open the memory of another one, or knows of other links.
        """
        meeting, links, records = self._meeting, self._links, self._records
        if not all(map(links.is_open, records.values())):
            yield Wait(partial(STREAMS.may_block, self._driver), list, is_at_work=True)
            for record in records.values():
                links.close(record)
        try:
            table, starts = self._table(), self._starts()
            verdict = WORKS + 4 * crc32(repr(sorted(links.staged or ())).encode())
        except DriverError:
            verdict = FAILS
        except BaseException:
            meeting.answer(FAILS)  # or the others would wait for the answer
            raise
        meeting.answer(verdict)
        yield meeting.for_answers()
        links.exports.closed(records[self._transport.rank]["closing"].tolist())
        if verdict == FAILS or set(meeting.verdicts().values()) != {verdict}:
            return False
        rows = np.empty_like(table.rows)
        counters = {counter: self._word(counter).ctypes.data for counter in set(table.counters)}
        table.fill(rows, starts, counters)
        self._operations = table.operations
        self._borrowed = stream = STREAMS.borrow(self._driver)
        self._driver.call("cuEventRecord", stream.event, self._of_caller)
        self._driver.call("cuStreamWaitEvent", stream.handle, stream.event, 0)
        STREAMS.note_waiting(self._driver, stream)
        self._loop.begin(rows, stream.handle)
        if self._shadow is not None:
            self._shadow.copy_in(stream.handle)
        yield from self._enqueue(stream)
        self._borrowed = None
        STREAMS.give_back(self._driver, stream)
        meeting.leave()
        return True

    def _table(self) -> Table:
        """The table of this rank, which depends on where each rank's output lies."""
        records, me = self._records, self._transport.rank
        aliasings = [self._aliasing(rank) for rank in range(self._transport.size)]
        staged = self._links.staged or frozenset()
        key = tuple(aliasings), staged
        if key not in self._tables:
            lowered = self._call.lowered(aliasings, records, staged)
            process = self._links.process
            threads = {rank for rank in records if records[rank]["process"] == process}
            self._tables = {key: table_of(lowered[me], frozenset(threads - {me}))}
        return self._tables[key]

    def _aliasing(self, rank: int) -> Aliasing:
        """Where the output of a rank lies beside its input."""
        if rank not in self._records:
            return "none"
        aliasing = int(self._records[rank]["aliasing"])
        return "odd" if aliasing == _ODD else "none" if aliasing == _NONE else aliasing

    def _starts(self) -> Any:
        """The addresses of all buffers of all ranks.  Raises DriverError."""
        starts = np.zeros((self._transport.size, len(BUFFERS)), np.int64)
        for rank, record in self._records.items():
            if rank == self._transport.rank or self._links.is_direct(rank):
                starts[rank] = [self._links.address(record, k) for k in range(len(BUFFERS))]
        return starts.reshape(-1)

    def _word(self, counter: Counter) -> Any:
        """The memory of a counter."""
        slot = self._meeting.slots[counter.writer]
        return self._links.board.counter(counter.writer, slot, counter.reader, counter.is_read)

    def _enqueue(self, stream: Stream) -> Waits:
        """Enqueue all rows, except for those that need the host, and wait for the device."""
        loop, messages = self._loop, self._transport.messages(self._tag)
        on_host = HostRows(self._driver, messages, stream, self._backend, self._pinned)
        self._on_host = on_host
        on_host.post_receives(self._operations)
        while (answer := loop.advance()) != loop.names.DONE:
            if answer == loop.names.FULL:
                yield self._for_device(stream)
                loop.nothing_outstanding()
            else:
                operation = self._operations[loop.row]
                yield from on_host.run(loop.row, operation, loop.rows, self._word)
                loop.row += 1
        if self._shadow is not None:
            self._shadow.copy_back(stream.handle)
        yield self._for_device(stream)
        yield from on_host.finish()
        self._on_host = None

    def _for_device(self, stream: Stream) -> Wait:
        """Wait for all that is enqueued."""
        self._driver.call("cuEventRecord", stream.event, stream.handle)
        return Wait(partial(self._driver.is_complete, stream.event), self._late, is_at_work=True)

    def _late(self) -> list[int]:
        """The ranks whose signals the device of this rank still awaits."""
        late = set()
        for operation in self._operations:
            counter = operation.counter
            is_await = operation.kind == DeviceKind.AWAIT
            if is_await and counter is not None and self._word(counter)[0] < operation.value:
                late.add(counter.writer)
        return sorted(late)


def _constant_fields(links: Links, call: DeviceCall) -> dict[str, Any]:
    """The fields of the record that are the same for all runs of a call."""
    aliasing = call.spec.aliasing
    code = {"odd": _ODD, "none": _NONE}
    return {
        "process": links.process,
        "aliasing": aliasing if isinstance(aliasing, int) else code[aliasing],
        "digest": np.void(call.digest),
        "uuid": np.void(links.uuid),
        "what": call.text.encode()[:_TEXT_BYTES],
        "closing": (0, 0, 0),
    }
