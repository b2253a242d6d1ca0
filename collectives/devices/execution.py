"""Runs programs on devices: data goes from the memory of one device to that of another.

Before a call, the ranks of a host meet: each publishes where its arrays are, opens the memory of
its peers, and says so.  Then each enqueues its device program on a stream that begins after what is
on the caller's, and the host polls an event.  If some rank cannot do that, all ranks stage their
messages in host memory.  As long as all ranks make a call again on the same arrays, they do not
meet again: each says that it has come, and enqueues the same program.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array
from collectives.devices.call import DeviceCall
from collectives.devices.driver import DriverError
from collectives.devices.exposed import Exposed, aliasing_of
from collectives.devices.kept import Kept
from collectives.devices.links import Links, Proposal
from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.rows import HostRows
from collectives.devices.streams import STREAMS, Stream
from collectives.devices.table import VALUE, Table, Words, rises_of, table_of
from collectives.diagnostics import CallLog, Waiting
from collectives.engines import FAILS, WORKS, CallKey, Operands, PinnedMemory, Staged, Transport
from collectives.errors import CollectiveMismatch
from collectives.lowering import Counter, DeviceKind, DeviceOperation
from collectives.programs import BUFFERS, Program


class OnDevice:
    """An execution of a call on devices.

    `kept`: the executions of this communicator that can run again without a meeting.
    `why_staged`: why this rank's array cannot be used by its peers; "" if it can.
    """

    state_address = 0  # the state is its own

    def __init__(
        self,
        transport: Transport,
        links: Links,
        kept: Kept,
        call: DeviceCall,
        program: Program,
        operands: Operands,
        tag: int,
        why_staged: str = "",
    ) -> None:
        self._transport, self._links, self._call, self.program = transport, links, call, program
        self._kept, self._backend, self._driver = kept, operands.backend, links.driver
        self._num_scratch = call.num_scratch(transport.rank, transport.size)
        self._exposed = Exposed(links, call, why_staged)
        self.attach(operands, tag)
        self._loop = Loop(links.driver, operands, program.itemsize)
        STREAMS.add_user(links.driver, self._loop)
        self._others = [rank for rank in links.board.local_ranks if rank != transport.rank]
        self._tables: dict[Any, Table] = {}  # the last one, by what it depends on
        self._pinned = PinnedMemory(operands.backend)
        self._staged: Staged | None = None
        self._is_staged, self.row, self._seconds = False, 0, 0.0
        self._wait: Wait | None = None
        self._borrowed: Stream | None = None
        self._on_host: HostRows | None = None
        self._operations: tuple[DeviceOperation, ...] = ()
        self._first_row = 0  # of the operations

    # The interface of executions

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        self.program.check_arrays(operands.input, operands.output, operands.scratch)
        if operands.scratch.nbytes < self._num_scratch:
            dtype = operands.scratch.dtype
            shape = (self._num_scratch // dtype.itemsize,)
            operands = operands._replace(scratch=operands.backend.empty(shape, dtype))
        self._operands, self._tag = operands, tag
        self._exposed.attach(operands)

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        del self._operands
        self._exposed.detach()
        self._pinned = PinnedMemory(self._backend)
        self._staged = None

    def interrupt(self, is_wanted: bool) -> None:
        """See `Execution.interrupt`."""
        self._loop.interrupt(is_wanted)

    def restart(self, number: int) -> None:
        """Go to the first row, and show the other ranks of the host that this one has come."""
        self._begin(number)
        with self._backend.on_stream(self._stream):
            if self._can_run_again():
                answer = self._loop.come(number, self._of_caller)
                self._steps = self._run_again(answer == self._loop.names.MEET)
            else:
                self.forget()
                self._come_to_meeting()
                self._steps = self._run()

    def _begin(self, number: int) -> None:
        """Note the number and the stream of a run that begins."""
        plan = self._call.plan
        self._key = CallKey(plan, number) if plan else CallKey(number)
        self.row, self._is_staged = 0, False
        self._wait = Wait(lambda: True, self._missing)
        self._stream = self._backend.current_stream()
        self._of_caller = self._links.pointer(self._stream)
        self._transport.watch(self)

    def advance(self, seconds: float) -> bool:
        """See `Execution.advance`; it waits only for ranks and devices, in compiled code."""
        self._seconds = seconds
        with self._backend.on_stream(self._stream):
            while self._wait is None or self._wait.is_over():
                self.row += 1
                try:
                    self._wait = next(self._steps)
                except StopIteration:
                    self._transport.unwatch(self)
                    self._loop.log_completion()
                    self._wait = None  # which refers to this object
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
        row, operations = self._loop.row - self._first_row, self._operations
        if not self._loop.is_busy:  # the ranks are still coming
            number = 0
        elif row < len(operations):
            number = operations[max(row, 0)].round
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
        self._loop.forget()
        is_done = self._on_host is None or self._on_host.abandon()
        if self._borrowed is not None:
            is_done &= STREAMS.abandon(self._driver, self._borrowed)
            self._borrowed = None
        self._loop.end()
        if is_done:
            self._meeting.leave()
        return is_done

    # Runs of a plan that compiled code starts

    @property
    def loop(self) -> OnDevice:
        """What starts it; see `Reusable`."""
        return self

    def make_reusable(
        self,
        log: CallLog,
        key: int,
        counter: NDArray[np.int64],
        source: Array | None,
        target: Array | None,
    ) -> None:
        """See `Reusable.make_reusable`; the arrays are those that are attached."""
        self._loop.log_runs(log, key, counter)

    def run(self, state: int, source: int, target: int, nanoseconds: int) -> int:
        """See `Loop.run` of `Reusable`; the arrays are those that are attached."""
        stream = self._backend.current_stream()
        if self._backend.is_current:
            return self._loop.run(self._links.pointer(stream), nanoseconds)
        with self._backend.on_stream(stream):
            return self._loop.run(self._links.pointer(stream), nanoseconds)

    def started(self, answer: int) -> bool:
        """See `Reusable.started`."""
        names = self._loop.names
        if answer == names.MISFIT:
            return False
        self._begin(self._loop.run_number)
        self._steps = self._run_again(answer == names.MEET, answer == names.DRIVER_ERROR)
        return True

    @property
    def is_running(self) -> bool:
        """Whether a run that compiled code has started is not complete."""
        return self.run_number != 0

    @property
    def run_number(self) -> int:
        """The number of the run that compiled code has started."""
        return self._loop.run_number

    @property
    def log_entry(self) -> int:
        """The index of that run's entry in the log."""
        return self._loop.log_entry

    # Runs without a meeting

    def _can_run_again(self) -> bool:
        """Whether the last run can be repeated; then nothing but this run can end that."""
        is_kept = bool(self._call.plan) or self._kept.take_call(self)
        return is_kept and self._loop.can_run_again and self._is_unchanged()

    def _is_unchanged(self) -> bool:
        """Whether the arrays are those of the last run; those of a plan always are."""
        return bool(self._call.plan) or self._exposed.is_unchanged

    def _run_again(self, must_meet: bool, has_failed: bool = False) -> Waits:
        """The steps of a run on the same arrays as before, unless a rank has others."""
        loop = self._loop
        if has_failed:
            loop.raise_error()
        while loop.is_coming and not must_meet:
            must_meet = loop.advance(self._seconds) == loop.names.MEET
            if loop.is_coming and not must_meet:
                yield Wait(self._is_decided, self._not_come)
                must_meet = bool(self._elsewhere())
        if must_meet:
            self.forget()
            self._come_to_meeting()
            yield from self._run()
        else:
            yield from self._finish()
            self._note_kept()

    def _is_decided(self) -> bool:
        """Whether it is known how the ranks make this run."""
        return self._loop.can_advance() or bool(self._elsewhere())

    def _not_come(self) -> list[int]:
        """The ranks that have not come."""
        return [self._others[at] for at in self._loop.late()]

    def _elsewhere(self) -> list[int]:
        """The ranks that make this run in another way."""
        board, key = self._links.board, self._key
        return [
            rank
            for rank in self._not_come()
            if board.find(rank, key) is not None or board.is_on_host(rank, key)
        ]

    def _keep(self, table: Table) -> None:
        """Let the next run do without a meeting, if it is on the same arrays."""
        meeting, loop = self._meeting, self._loop
        self._exposed.keep(self._records[self._transport.rank])
        arrivals = [meeting.arrival(rank) for rank in self._others]
        loop.keep(meeting.arrival(self._transport.rank), arrivals, table.most_runs - 1)

    def _note_kept(self) -> None:
        """Note that this run is over, and that the next one may do without a meeting."""
        if plan := self._call.plan:
            self._kept.add_plan(plan, self)
        else:
            self._kept.add_call(self)

    def forget(self) -> None:
        """Let the ranks meet before the next run."""
        if self._borrowed is not None:
            self._loop.forget()
            self._exposed.forget()
            STREAMS.give_back(self._driver, self._borrowed)
            self._borrowed = None
            self._meeting.leave()

    # The meeting

    def _come_to_meeting(self) -> None:
        """Publish the records of this rank, unless too many calls are under way."""
        links, plan = self._links, self._call.plan
        self._operations, self._records = (), dict[int, Any]()
        self._meeting, self._proposal = Meeting(links.board, self._key), None
        if links.staged is None:
            self._proposal = Proposal(links, self._key)
        self._publish()
        if not self._meeting.is_published and not plan:  # too many calls are under way
            links.board.note_host_call(self._key.call)

    def _publish(self) -> None:
        """Publish the records, if there is room.

        The proposal comes first: a rank whose record is there proposes nothing any more.
        """
        proposal = self._proposal
        if proposal is None or proposal.is_published or proposal.publish():
            is_plan = bool(self._call.plan)
            self._meeting.publish(self._exposed.fields(self._of_caller, is_plan=is_plan))

    def _run(self) -> Waits:
        """The steps of a run that begins with a meeting."""
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
            self._publish()
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
        self._operations, self._borrowed = table.operations, STREAMS.borrow(self._driver)
        rows, self._first_row = self._exposed.with_shadow(self._rows(table, starts))
        self._loop.begin(rows, self._borrowed, self._of_caller)
        yield from self._finish()
        if all(record["lasts"] for record in records.values()):
            self._keep(table)
            self._note_kept()
        else:
            self.forget()
        return True

    def _table(self) -> Table:
        """The table of this rank, which depends on where each rank's output lies."""
        records, me = self._records, self._transport.rank
        size, staged = self._transport.size, self._links.staged or frozenset()
        aliasings = [aliasing_of(records[r]) if r in records else "none" for r in range(size)]
        key = tuple(aliasings), staged
        if key not in self._tables:
            lowered = self._call.lowered(aliasings, records, staged)
            process = self._links.process
            threads = {rank for rank in records if records[rank]["process"] == process}
            rises = rises_of(lowered[rank] for rank in records)
            self._tables = {key: table_of(lowered[me], frozenset(threads - {me}), rises)}
        return self._tables[key]

    def _starts(self) -> Words:
        """The addresses of all buffers of all ranks.  Raises DriverError."""
        starts = np.zeros((self._transport.size, len(BUFFERS)), np.int64)
        for rank, record in self._records.items():
            if rank == self._transport.rank or self._links.is_direct(rank):
                starts[rank] = [self._links.address(record, k) for k in range(len(BUFFERS))]
        return starts.reshape(-1)

    def _rows(self, table: Table, starts: Words) -> Words:
        """The rows of a table with addresses."""
        rows = np.empty_like(table.rows)
        counters = {counter: self._word(counter).ctypes.data for counter in set(table.counters)}
        table.fill(rows, starts, counters)
        return rows

    def _word(self, counter: Counter) -> Any:
        """The memory of a counter."""
        slot = self._meeting.slots[counter.writer]
        return self._links.board.counter(counter.writer, slot, counter.reader, counter.is_read)

    def _finish(self) -> Waits:
        """Enqueue all rows, except for those that need the host, and wait for the device."""
        loop, for_device = self._loop, Wait(self._loop.can_advance, self._late, is_at_work=True)
        while (answer := loop.advance(self._seconds)) != loop.names.DONE:
            if answer == loop.names.WAITING:
                yield for_device
            else:
                yield from self._run_on_host(loop.row - self._first_row)
                loop.row += 1
        if self._on_host is not None:
            yield from self._on_host.finish()
            self._on_host = None

    def _run_on_host(self, at: int) -> Waits:
        """Run an operation that needs the host."""
        assert self._borrowed is not None
        if self._on_host is None:
            messages = self._transport.messages(self._tag)
            self._on_host = HostRows(
                self._driver, messages, self._borrowed, self._backend, self._pinned
            )
            self._on_host.post_receives(self._operations)
        rows = self._loop.rows[self._first_row :]
        yield from self._on_host.run(at, self._operations[at], rows, self._word)

    def _missing(self) -> list[int]:
        """The ranks that this rank or its device waits for in compiled code."""
        return self._not_come() if self._loop.is_coming else self._late()

    def _late(self) -> list[int]:
        """The ranks whose signals the device of this rank still awaits."""
        late = set()
        rows = self._loop.rows[self._first_row :]
        for operation, row in zip(self._operations, rows, strict=False):
            counter = operation.counter
            is_await = operation.kind == DeviceKind.AWAIT
            if is_await and counter is not None and self._word(counter)[0] < row[VALUE]:
                late.add(counter.writer)
        return sorted(late)
