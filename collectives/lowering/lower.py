"""Lower programs: the rows of messages become operations of devices.

A receive is a copy out of the sender's memory.  The copy is left out, and the only row that reads
what was received reads it where it lies, unless that could let ranks wait for each other in a
circle: a rank says that it has read a message before it awaits that others have read its own.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from collectives.lowering.fusing import fused
from collectives.lowering.operations import (
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
    Place,
)
from collectives.lowering.spans import Span, Spans, regions_read
from collectives.lowering.superfluous import without_superfluous
from collectives.programs import SCRATCH, Aliasing, Kind, Program, Row
from collectives.schedule import ScheduleError


def lower(
    programs: Sequence[Program | None],
    aliasings: Sequence[Aliasing],
    *,
    staged: Collection[tuple[int, int]] = frozenset(),
    is_barrier: bool = False,
) -> list[DeviceProgram]:
    """Return the device programs of all ranks.

    Parameters
    ----------
    programs : sequence of (Program or None)
        Of each rank; None for ranks on other hosts, with which all messages are staged, and which
        get an empty device program.
    aliasings : sequence of Aliasing
        Of each rank; see `programs.placement.compile_lane`.
    staged : collection of tuple of int
        The pairs of ranks, the lower one first, that cannot read each other's memory.
    is_barrier : bool
        Whether messages of no bytes order ranks; else they are left out.

    Raises
    ------
    ScheduleError
        If a rank receives what nobody sends, or if ranks wait for each other.
    """
    memories = [
        Spans(aliasing, 1 if program is None else program.itemsize)
        for aliasing, program in zip(aliasings, programs, strict=True)
    ]
    ranks = [
        []
        if program is None
        else _operations(_Calls(programs, rank, staged, is_barrier), memories[rank])
        for rank, program in enumerate(programs)
    ]
    for rank, program in enumerate(programs):
        if program is None:  # its messages come whatever the others do
            ranks[rank] = _sends_to(ranks, rank)
    needed = without_superfluous(ranks, memories, is_barrier=is_barrier)
    return [
        DeviceProgram(() if program is None else tuple(fused(operations, memory)))
        for program, operations, memory in zip(programs, needed, memories, strict=True)
    ]


def _sends_to(ranks: Sequence[Sequence[DeviceOperation]], sender: int) -> list[DeviceOperation]:
    """Return the sends of what ranks receive from a rank on another host."""
    return [
        DeviceOperation(DeviceKind.SEND, operation.round, operation.counter, operation.value)
        for operations in ranks
        for operation in operations
        if operation.kind == DeviceKind.RECEIVE
        and operation.counter is not None
        and operation.counter.writer == sender
    ]


class MessageId(NamedTuple):
    """A message: its sender or receiver, and its number among those of this pair, from 1 on."""

    peer: int
    number: int


class _Calls:
    """What a rank knows of a call: its own rows, and what its peers send to it."""

    def __init__(
        self,
        programs: Sequence[Program | None],
        rank: int,
        staged: Collection[tuple[int, int]],
        is_barrier: bool,
    ) -> None:
        self.rank, self.is_barrier, self._staged = rank, is_barrier, staged
        self._rows = [[] if program is None else program.listed for program in programs]
        self._elsewhere = {other for other, program in enumerate(programs) if program is None}
        self._sent_to_me = [
            [row for row in rows if row.kind == Kind.SEND and row.peer == rank]
            for rows in self._rows
        ]

    @property
    def rows(self) -> list[Row]:
        """The rows of this rank."""
        return self._rows[self.rank]

    def is_staged(self, peer: int) -> bool:
        """Return whether messages between this rank and a peer go through host memory."""
        pair = min(self.rank, peer), max(self.rank, peer)
        return peer in self._elsewhere or pair in self._staged

    def sent(self, message: MessageId, size: int) -> Place:
        """Return where a message that this rank receives lies in the memory of its sender."""
        peer, number = message
        sends = self._sent_to_me[peer][number - 1 : number]
        if [row.size for row in sends] != [size]:
            raise ScheduleError(f"rank {self.rank} receives what rank {peer} never sends")
        return Place(peer, sends[0].buffer, sends[0].offset)


class _NeedsCopyError(Exception):
    """These messages cannot be read where they lie."""

    def __init__(self, messages: set[MessageId]) -> None:
        self.messages = messages


def _operations(call: _Calls, memory: Spans) -> list[DeviceOperation]:
    """Return the operations of one rank; the values of counters are the numbers of messages."""
    copied: set[MessageId] = set()
    while True:
        try:
            return Lowering(call, memory, frozenset(copied)).operations
        except _NeedsCopyError as refused:
            copied |= refused.messages


class Lowering:
    """One walk over the rows of a rank.

    Attributes
    ----------
    copied : frozenset of MessageId
        The messages that are copied out of the sender's memory when they are there.
    remote : dict of Span to (MessageId, Place)
        The messages that are still in the sender's memory, by the span in which they were to be
        received.
    unread : list of (MessageId, Span)
        The messages of this rank that peers may not have read yet.
    """

    def __init__(self, call: _Calls, memory: Spans, copied: frozenset[MessageId]) -> None:
        self.call, self.rank, self.spans, self.copied = call, call.rank, memory, copied
        self.accesses = [(row, memory.read(row), memory.written(row)) for row in call.rows]
        self.operations: list[DeviceOperation] = []
        self.num_sent, self.num_received = Multiset[int](), Multiset[int]()
        self.posted: dict[int, tuple[Row, MessageId]] = {}
        self.remote: dict[Span, tuple[MessageId, Place]] = {}
        self.unread: list[tuple[MessageId, Span]] = []
        self.round = 0
        for at, row in enumerate(call.rows):
            self.round = row.round
            self._row(at, row)
        self._await_reads(self.unread)

    def _row(self, at: int, row: Row) -> None:
        if row.kind == Kind.RECEIVE:
            self.num_received[row.peer] += 1
            self.posted[row.slot] = row, MessageId(row.peer, self.num_received[row.peer])
        elif row.kind == Kind.SEND:
            self._send(row)
        elif row.kind == Kind.WAIT:
            for slot in range(row.slot, row.slot + row.peer):
                self._receive(at, *self.posted.pop(slot))
        elif row.size:
            self._work(row)

    def _send(self, row: Row) -> None:
        self.num_sent[row.peer] += 1
        message, counter = (
            MessageId(row.peer, self.num_sent[row.peer]),
            Counter(self.rank, row.peer),
        )
        if self.call.is_staged(row.peer):  # also without bytes: the peer may run its own program
            place = (self._own(row),) if row.size else ()
            self._add(DeviceKind.SEND, counter, message.number, size=row.size, operands=place)
            return
        if not (row.size or self.call.is_barrier):
            return
        self._add(DeviceKind.SIGNAL, counter, message.number)
        if row.size:
            self.unread.append((message, self.spans.written(row)))

    def _receive(self, at: int, row: Row, message: MessageId) -> None:
        """Await a message, and copy it unless it can be read where it lies."""
        span, counter = self.spans.written(row), Counter(message.peer, self.rank)
        if self.call.is_staged(message.peer):
            if row.size:
                self.before_writing(span)
            target = self._own(row) if row.size else None
            self._add(DeviceKind.RECEIVE, counter, message.number, target=target, size=row.size)
            return
        source = self.call.sent(message, row.size)
        if not (row.size or self.call.is_barrier):
            return
        self._add(DeviceKind.AWAIT, counter, message.number)
        if not row.size:
            return
        if message not in self.copied and self._has_one_reader(at + 1, span):
            self.remote[span] = message, source
            return
        self.before_writing(span)
        self._add(DeviceKind.COPY, target=self._own(row), size=row.size, operands=(source,))
        self.acknowledge(message)

    def _work(self, row: Row) -> None:
        """Copy, combine or divide."""
        self.before_writing(self.spans.written(row))
        target, size = self._own(row), row.size
        if row.kind == Kind.DIVIDE:
            self._add(DeviceKind.DIVIDE, target=target, size=size)
            return
        spans = self.spans.read(row)
        operands = tuple(
            self.remote[span][1] if span in self.remote else Place(self.rank, buffer, offset)
            for span, (buffer, offset, _) in zip(spans, regions_read(row), strict=True)
        )
        kind = DeviceKind.COPY if row.kind == Kind.COPY else DeviceKind.COMBINE
        self._add(kind, target=target, size=size, operands=operands)
        for span in dict.fromkeys(spans):
            if span in self.remote:
                message, _ = self.remote.pop(span)
                self.acknowledge(message)

    def _has_one_reader(self, start: int, span: Span) -> bool:
        """Return whether one copy or combination alone needs the span, of the rows from `start` on.

        It reads exactly the span, before anything else is written there.
        """
        has_reader = False
        for row, read, written in islice(self.accesses, start, None):
            if row.kind == Kind.WAIT or not row.size:
                continue
            if touched := {operand for operand in read if operand.overlaps(span)}:
                is_reader = row.kind in (Kind.COPY, Kind.COMBINE) and touched == {span}
                if has_reader or not is_reader:
                    return False
                has_reader = True
            if row.kind != Kind.SEND and written.overlaps(span):
                if not has_reader:
                    return False
                if written.covers(span):
                    return True
        return has_reader and span.memory == SCRATCH  # else it is a part of the result

    def before_writing(self, span: Span) -> None:
        """Await that peers have read what lies there."""
        hit = [(message, sent) for message, sent in self.unread if sent.overlaps(span)]
        if hit and self.remote:
            raise _NeedsCopyError({message for message, _ in self.remote.values()})
        self._await_reads(hit)

    def _await_reads(self, messages: Sequence[tuple[MessageId, Span]]) -> None:
        """Await that peers have read these messages, and so all before them."""
        last = {message.peer: message.number for message, _ in messages}  # they are in order
        for peer, value in last.items():
            self._add(DeviceKind.AWAIT, Counter(peer, self.rank, is_read=True), value)
        self.unread = [
            (message, span)
            for message, span in self.unread
            if message.number > last.get(message.peer, 0)
        ]

    def acknowledge(self, message: MessageId) -> None:
        """Say that a message is read; a counter must not go back."""
        late = {other for other, _ in self.remote.values() if other.peer == message.peer}
        if late := {other for other in late if other.number < message.number}:
            raise _NeedsCopyError(late)
        counter = Counter(self.rank, message.peer, is_read=True)
        self._add(DeviceKind.SIGNAL, counter, message.number)

    def _own(self, row: Row) -> Place:
        return Place(self.rank, row.buffer, row.offset)

    def _add(
        self,
        kind: DeviceKind,
        counter: Counter | None = None,
        value: int = 0,
        *,
        target: Place | None = None,
        size: int = 0,
        operands: tuple[Place, ...] = (),
    ) -> None:
        operation = DeviceOperation(kind, self.round, counter, value, target, size, operands)
        self.operations.append(operation)
