"""Boxes: memory of a device in which a rank puts messages for other ranks of its host.

A box is a number and memory of any size.  The words of a box are in the memory that the host
shares: they say which message is in it, and whether that was read.  Streams of one process do not
wait for words, so ranks that are threads record events.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Bytes
from collectives.devices import shadow
from collectives.devices.driver import (
    MEMORY_OPERATION_WORDS,
    NOT_READY,
    WAIT_VALUE,
    WRITE_VALUE,
    Driver,
)
from collectives.devices.links import Links
from collectives.devices.shadow import Allocation
from collectives.devices.streams import EVENTS, STREAMS
from collectives.engines import BUFFER_RECORD, NUM_BOXES, Box

ENVELOPE = np.dtype(
    [
        *(("token", "<i8"), ("process", "<i8"), ("number", "<i8"), ("value", "<i8")),
        *(("size", "<i8"), ("buffers", BUFFER_RECORD, (1,))),
    ]
)
"""What MPI carries of a message in a box.

The fields are the `Board.token` of the receiver, the process of the sender, the number of the box,
the value of its words for this message, the bytes of the message, and the buffer where it is.
"""


AHEAD = 8  # messages of a size for which memory is allocated at once
_MOST_AHEAD = 64 << 20  # bytes of these messages
_LEAST = 512  # bytes of a piece of memory


class Piece(NamedTuple):
    """Memory for a message."""

    of: Allocation
    address: int
    size: int


class Put(NamedTuple):
    """A message in a box of this rank; see `ENVELOPE`."""

    number: int
    box: Box
    value: int
    memory: Piece
    size: int
    reader: int


class Memory:
    """The memory of the boxes of one rank of a communicator.

    It is allocated for several messages, because that may wait for all streams of the process.

    Attributes
    ----------
    full : dict of int to Put
        The messages that are not known to be read, by the numbers of their boxes.
    are_by_events : bool
        Whether threads wait for events, in place of words that devices write.
    """

    def __init__(self, driver: Driver, *, are_by_events: bool) -> None:
        self._driver, self.are_by_events = driver, are_by_events
        self.full: dict[int, Put] = {}
        self.allocations = list[Allocation]()
        self._pieces = defaultdict[int, list[Piece]](list)  # by size, those that are not in use

    def has(self, num_bytes: int) -> bool:
        """Return whether a message of this size needs no allocation."""
        return bool(self._pieces[_piece_size(num_bytes)])

    def take(self, num_bytes: int) -> Piece:
        """Return a piece of memory for a message.  Raises DriverError."""
        size = _piece_size(num_bytes)
        if not self._pieces[size]:
            number = max(1, min(AHEAD, _MOST_AHEAD // size))
            allocation = shadow.taken(self._driver, number * size)
            self.allocations.append(allocation)
            starts = range(allocation.address, allocation.address + number * size, size)
            self._pieces[size] += [Piece(allocation, start, size) for start in starts]
        return self._pieces[size].pop()

    def clear(self) -> None:
        """Let the memory of messages that were read be used again."""
        for number, put in list(self.full.items()):
            if put.box.is_free and self.is_read(put.box):
                del self.full[number]
                self._pieces[put.memory.size].append(put.memory)

    def is_read(self, box: Box) -> bool:
        """Return whether devices have done with a box whose words say so."""
        is_filled, is_read = _events_of(self._driver, box)
        events = (is_filled, is_read) if self.are_by_events else (is_filled,)
        return all(self._driver.try_call("cuEventQuery", event) != NOT_READY for event in events)

    def give_back(self) -> bool:
        """Let others have the memory, unless a message is not read; return whether they do."""
        self.clear()
        if not self.full:
            for allocation in self.allocations:
                shadow.give_back(self._driver, allocation)
        return not self.full


class Boxes:
    """The boxes of one rank of a communicator."""

    def __init__(self, links: Links) -> None:
        self._links, self._driver, self._board = links, links.driver, links.board
        self.memory = Memory(links.driver, are_by_events=links.is_of_one_process)
        self._lock = threading.Lock()  # threads may send at the same time
        self._pinned = set[int]()  # ids of allocations
        self._retire = finalize(self, _retired.append, self.memory)
        self._retire.atexit = False

    @property
    def are_by_events(self) -> bool:
        """See `Memory`."""
        return self.memory.are_by_events

    def has_free(self) -> bool:
        """Return whether a box is free."""
        with self._lock:
            self.memory.clear()
            return len(self.memory.full) < NUM_BOXES

    def has_memory(self, num_bytes: int) -> bool:
        """Return whether there is memory for a message, or memory may be allocated now."""
        return self.memory.has(num_bytes) or STREAMS.may_block(self._driver)

    def take(self, num_bytes: int, reader: int) -> Put | None:
        """Return a box for a message; None if another thread has taken the last one, or the memory.

        Raises DriverError.
        """
        with self._lock:
            full = self.memory.full
            number = next((n for n in range(NUM_BOXES) if n not in full), None)
            if number is None or not self.has_memory(num_bytes):
                return None
            _give_retired_back()
            memory = self.memory.take(num_bytes)
            box = self._board.box(self._board.rank, number)
            self._board.note_reader(number, reader)
            box.taken[0] += 1
            _events_of(self._driver, box)  # they are made here, where a context is current
            full[number] = Put(number, box, int(box.taken[0]), memory, num_bytes, reader)
            return full[number]

    def free(self) -> None:
        """Let others have the memory: now, or some time after all messages were read."""
        self._retire()
        _give_retired_back()

    def envelope(self, put: Put) -> Bytes:
        """Return the envelope of a message.

        Raises DriverError if other ranks cannot open the message's memory.
        """
        links = self._links
        buffer = links.describe(put.memory.address, put.size, put.memory.of)
        if buffer.id not in self._pinned:  # its readers have it open
            self._pinned.add(buffer.id)
            links.exports.pin([buffer.id])
        token = self._board.token(put.reader)
        fields = token, links.process, put.number, put.value, put.size, [tuple(buffer)]
        return np.array([fields], ENVELOPE).view(np.uint8)

    def give_up(self, put: Put) -> None:
        """Let a box be used again, of which no envelope was sent."""
        put.box.give_up(put.value)

    def fill(self, put: Put, source: int, stream: int) -> None:
        """Let a stream copy the data at an address to a box.  Raises DriverError."""
        arguments = put.memory.address, source, put.size, stream
        self._driver.call("cuMemcpyDtoDAsync_v2", *arguments)
        if not self.are_by_events:
            _enqueue(self._driver, stream, (WRITE_VALUE, put.box.ready, put.value))
        is_filled, _ = _events_of(self._driver, put.box)
        self._driver.call("cuEventRecord", is_filled, stream)
        if self.are_by_events:
            put.box.ready[0] = put.value

    def take_out(self, envelope: Any, sender: int, copy: Callable[[], None], stream: int) -> None:
        """Let a stream copy a message out of another rank's box, when it is there.

        `copy` puts the copy on the stream.  Raises DriverError.
        """
        driver, value = self._driver, int(envelope["value"])
        box = self.box_of(envelope, sender)
        is_filled, is_read = _events_of(driver, box)
        if self.are_by_events:
            driver.call("cuStreamWaitEvent", stream, is_filled, 0)
            copy()
        else:
            driver.call("cuStreamWaitEvent", stream, is_read, 0)  # by this rank, the last time
            entered, wait = (WRITE_VALUE, box.entered, value), (WAIT_VALUE, box.ready, value)
            _enqueue(driver, stream, entered, wait)
            copy()
            _enqueue(driver, stream, (WRITE_VALUE, box.read, value))
        driver.call("cuEventRecord", is_read, stream)
        if self.are_by_events:
            box.read[0] = value

    def give_back(self, envelope: Any, sender: int) -> None:
        """Let the sender use a box again, of which the message is not read."""
        self.box_of(envelope, sender).read[0] = envelope["value"]

    def box_of(self, envelope: Any, sender: int) -> Box:
        """Return the words of the box of an envelope."""
        return self._board.box(sender, int(envelope["number"]))


_retired: list[Memory] = []  # of communicators that are freed, or that nothing refers to


def _give_retired_back() -> None:
    """Let others have memory in which all messages are read."""
    for memory in list(_retired):
        with suppress(ValueError):  # another thread is faster
            _retired.remove(memory)
            if not memory.give_back():
                _retired.append(memory)


def _piece_size(num_bytes: int) -> int:
    """Return the size of the memory for a message of so many bytes."""
    return 1 << (max(num_bytes, _LEAST) - 1).bit_length()


def _events_of(driver: Driver, box: Box) -> list[int]:
    """Return the events that this process records when a message is ready, and when it is read."""
    return [EVENTS.of(driver, word.ctypes.data, 0) for word in (box.ready, box.read)]


def _enqueue(driver: Driver, stream: int, *operations: tuple[int, NDArray[np.uint32], int]) -> None:
    """Let a stream write values to words, or wait until words have them.  Raises DriverError."""
    words = np.zeros((len(operations), MEMORY_OPERATION_WORDS), np.int64)
    for row, (kind, word, value) in zip(words, operations, strict=True):
        row[:3] = kind, word.ctypes.data, value
    driver.call("cuStreamBatchMemOp_v2", stream, len(words), words.ctypes.data, 0)
