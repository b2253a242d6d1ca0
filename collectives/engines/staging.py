"""Runs programs on device memory; messages are staged in memory that MPI takes.

That is page-locked host memory, which every MPI takes, or other memory of the device.  Copies to
it, messages and copies from it overlap: the host waits for none of them while it can go on with
another one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Backend, Bytes, Event, Stream
from collectives.engines.interpreter import Interpreted
from collectives.engines.transport import MessageMemory, Operands, Transport, poll_until
from collectives.programs import Program, Row

_BUFFERS_EACH = 2  # of a slot: one may be filled while the device still reads the other one
_MOST_IDLE = 16  # pairs of streams that are kept for later calls
_SECONDS_TO_END = 1.0  # that the device has when a call has failed


class PageLockedMemory:
    """Page-locked host memory for messages; see `MessageMemory`."""

    link = "staged"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.copy_to, self.copy_from = backend.to_host, backend.to_device

    def new(self, num_bytes: int) -> Bytes:
        """See `MessageMemory.new`."""
        return self._backend.host_buffer(np.broadcast_to(np.uint8(0), num_bytes))


class _Buffer:
    """Memory for messages.

    Attributes
    ----------
    reader : Event or None
        An event behind the copy that reads the memory, if a copy does.
    """

    memory: Bytes | None = None
    reader: Event | None = None

    @property
    def is_free(self) -> bool:
        """Whether the device does not read it."""
        return self.reader is None or self.reader.is_complete


class MessageBuffers:
    """Memory for messages: a few buffers for each slot, which grow as needed."""

    def __init__(self, memory: MessageMemory) -> None:
        self.memory = memory
        self._buffers = defaultdict[int, deque[_Buffer]](deque)  # the last one is in use

    @property
    def is_used(self) -> bool:
        """Whether there is any buffer."""
        return bool(self._buffers)

    def reader(self, slot: int) -> Event | None:
        """Return what the device must do before a slot has a free buffer.

        None if there is a free buffer, or room for one.
        """
        buffers = self._buffers[slot]
        if len(buffers) < _BUFFERS_EACH or any(buffer.is_free for buffer in buffers):
            return None
        return buffers[0].reader

    def buffer(self, slot: int, num_bytes: int) -> Bytes:
        """Return a free buffer of so many bytes, which is now in use."""
        buffers = self._buffers[slot]
        free = next((buffer for buffer in buffers if buffer.is_free), None)
        if free is None:
            free = _Buffer()
        else:
            buffers.remove(free)
        buffers.append(free)
        if free.memory is None or free.memory.size < num_bytes:
            free.memory = self.memory.new(num_bytes)
        return free.memory[:num_bytes]

    def keep_until(self, slot: int, reader: Event) -> None:
        """Let the buffer in use be free when the device has come so far."""
        self._buffers[slot][-1].reader = reader


class _Leaving(NamedTuple):
    """A message that is sent when the copy of its data is complete."""

    slot: int
    peer: int
    data: Bytes
    copied: Event


class Staged(Interpreted):
    """An execution on device memory: copies what it sends, and what it has received.

    It has two streams: one copies to the memory of messages, the other one from it, and computes.
    They begin after what was on the caller's stream, and the call is complete when nothing is left
    on them.
    """

    _streams: tuple[Stream, Stream] | None = None  # None: the run has not begun
    _end: Event | None = None  # of the last row
    _awaited: tuple[Event, ...] = ()  # to one of which the device must come before this goes on

    def __init__(
        self,
        program: Program,
        operands: Operands,
        transport: Transport,
        tag: int,
        host_calls: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(program, operands, transport.messages(tag), host_calls)
        self._transport = transport
        self._buffers = self._new_buffers()  # kept from run to run of a plan
        self._arriving: dict[int, tuple[Array, Bytes]] = {}
        self._leaving = deque[_Leaving]()
        self._lock = threading.Lock()  # held by the thread that advances it, or looks at it

    def detach(self) -> None:
        self._buffers = self._new_buffers()
        super().detach()

    def _new_buffers(self) -> MessageBuffers:
        return MessageBuffers(self._transport.message_memory(self.memory.backend))

    def restart(self, number: int, *, is_async: bool = False) -> None:
        super().restart(number)
        self._callers = self.memory.backend.current_stream()

    def advance(self, seconds: float) -> bool:
        with self._lock:
            inbound, _ = self._streams = self._streams or self._begin()
            with self.memory.backend.on_stream(inbound):
                is_complete = super().advance(seconds)
            if is_complete:
                self._leave(is_idle=True)
            return is_complete

    def _begin(self) -> tuple[Stream, Stream]:
        """Return two streams, of which the first begins after what is on the caller's."""
        backend = self.memory.backend
        with backend.on_stream(self._callers):
            start = backend.record()
        streams = _borrow(backend)
        with backend.on_stream(streams[0]):
            start.join()
        self._transport.watch(self)
        return streams

    def send(self, row: Row) -> bool:
        assert self._streams is not None
        backend, (_, outbound) = self.memory.backend, self._streams
        array = self.memory.view(row.buffer, row.offset, row.size)
        data, computed = self._buffer(row.slot, array), backend.record()
        with backend.on_stream(outbound):
            computed.join()
            self._buffers.memory.copy_to([(array, data)])
            self._leaving.append(_Leaving(row.slot, row.peer, data, backend.record()))
        self._send_copied()
        return True

    def _buffer(self, slot: int, array: Array) -> Bytes:
        """Return memory for a message with the data of an array."""
        return self._buffers.buffer(slot, array.size * array.dtype.itemsize)

    def _send_copied(self) -> None:
        """Send what has been copied, in order."""
        while self._leaving and self._leaving[0].copied.is_complete:
            slot, peer, data, _ = self._leaving.popleft()
            self.messages.send(slot, peer, data)
        self._awaited = (self._leaving[0].copied,) if self._leaving else ()

    def receive(self, row: Row) -> bool:
        self._send_copied()
        if (reader := self._buffers.reader(row.slot)) is not None:
            self._awaited += (reader,)
            self.messages.note_completed()  # messages move only in calls of MPI
            return False
        array = self.memory.view(row.buffer, row.offset, row.size)
        data = self._buffer(row.slot, array)
        self._arriving[row.slot] = array, data
        self.messages.receive(row.slot, row.peer, data)
        return True

    def wait(self, row: Row) -> bool:
        self._send_copied()
        if any(one.slot in range(row.slot, row.slot + row.size) for one in self._leaving):
            self.messages.note_completed()
            return False
        if not super().wait(row):
            return False
        self._take_arrived(range(row.slot, row.slot + row.peer))
        return True

    def _take_arrived(self, slots: range) -> None:
        """Copy messages that have arrived to the arrays."""
        if slots:
            self._buffers.memory.copy_from([self._arriving.pop(slot) for slot in slots])
            read = self.memory.backend.record()
            for slot in slots:
                self._buffers.keep_until(slot, read)

    def is_over(self) -> bool:
        self._end = self._end or self.memory.backend.record()
        self._awaited = (self._end,)
        return self._end.is_complete

    def abandon(self) -> bool:
        is_idle = False
        with self._lock:
            try:
                are_free = super().abandon()
                is_idle = self._have_ended()
            finally:
                self._leave(is_idle=is_idle)
        return are_free and is_idle

    def _have_ended(self) -> bool:
        """Return whether nothing is left on the streams, after some time."""
        backend, ends = self.memory.backend, list[Event]()
        try:
            for stream in self._streams or ():
                with backend.on_stream(stream):
                    ends.append(backend.record())
            deadline = time.monotonic() + _SECONDS_TO_END
            return poll_until(lambda: all(end.is_complete for end in ends), deadline)
        except RuntimeError:  # the driver has failed for good
            return False

    def _leave(self, *, is_idle: bool) -> None:
        """Give the streams back, if nothing is left on them."""
        self._transport.unwatch(self)
        idle = _idle[self.memory.backend.name]
        if is_idle and self._streams is not None and len(idle) < _MOST_IDLE:
            idle.append(self._streams)
        self._streams, self._end, self._awaited = None, None, ()
        self._arriving.clear()

    # What any thread may ask

    @property
    def can_move(self) -> bool:
        """See `Waiter.can_move`."""
        return not self._lock.locked() and self._has_come()

    @property
    def is_stuck(self) -> bool:
        """See `Waiter.is_stuck`."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._awaited
        finally:
            self._lock.release()

    def _has_come(self) -> bool:
        """Return whether the device has come to something that is awaited, or has failed."""
        try:
            return any(event.is_complete for event in self._awaited)
        except RuntimeError:  # who advances it raises that
            return True

    @property
    def missing(self) -> list[int]:
        """The ranks that it waits for, beside those whose messages it waits for."""
        return []

    def link(self, rank: int) -> str:
        return self._buffers.memory.link

    @property
    def device_row(self) -> str:
        """See `Execution.device_row`."""
        return "it waits for its device" if self._awaited and not self._has_come() else ""


_idle = defaultdict[str, list[tuple[Stream, Stream]]](list)  # by the name of their backend


def _borrow(backend: Backend) -> tuple[Stream, Stream]:
    """Return two streams on which nothing is."""
    try:
        return _idle[backend.name].pop()
    except IndexError:
        return backend.new_stream(), backend.new_stream()
