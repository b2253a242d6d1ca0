"""The rows of a device program that need the host: staged messages, and events between threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from collectives.devices.driver import Driver
from collectives.devices.loop import Loop
from collectives.devices.meeting import Wait, Waits
from collectives.devices.row_format import TARGET, VALUE, Words
from collectives.devices.streams import EVENTS, STREAMS
from collectives.diagnostics import Waiting
from collectives.engines import MessageBuffers, Messages
from collectives.lowering import Counter, DeviceKind, DeviceOperation

SEND, RECEIVE = DeviceKind.SEND, DeviceKind.RECEIVE
_COPIES = {  # to a message, and from one, by the link
    "staged": ("cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2"),
    "direct": ("cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2"),
}
_OF_A_COPY = 2  # operations on the stream: the copy, and its event


class _Leaving(NamedTuple):
    """A message that is sent when the event behind the copy of its data is complete."""

    row: int
    peer: int
    data: Any
    event: int


class HostRows:
    """The rows of one call that need the host.

    Parameters
    ----------
    driver : Driver
        The driver of the device.
    messages : Messages
        The messages of the call.
    loop : Loop
        The loop that enqueues the other rows on its stream.
    buffers : MessageBuffers
        The memory for messages.
    check : function
        Raises the error of a failure.
    """

    def __init__(
        self,
        driver: Driver,
        messages: Messages,
        loop: Loop,
        buffers: MessageBuffers,
        check: Callable[[], object],
    ) -> None:
        self._driver, self._messages, self._loop = driver, messages, loop
        self._buffers, self._check = buffers, check
        self._copy_to, self._copy_from = _COPIES[buffers.memory.link]
        self._data: dict[int, Any] = {}
        self._leaving = deque[_Leaving]()
        self._sent: list[int] = []

    def post_receives(self, operations: Sequence[DeviceOperation]) -> Waits:
        """Allocate the memory of all messages, and post the receives in their order."""
        order = self._loop.order
        if any(operation.kind in (SEND, RECEIVE) for operation in operations):
            yield Wait(lambda: order.has_ended, list, is_at_work=True)
        for row, operation in enumerate(operations):
            if operation.kind in (SEND, RECEIVE):  # while it may wait for all streams
                self._data[row] = self._buffers.buffer(row, operation.size)
            if operation.kind == RECEIVE and operation.counter is not None:
                self._messages.receive(row, operation.counter.writer, self._data[row])

    def run(
        self, row: int, operation: DeviceOperation, rows: Words, word_of: Callable[[Counter], Any]
    ) -> Waits:
        """Run one of the rows, which have addresses; `word_of` returns the memory of a counter."""
        counter = operation.counter
        assert counter is not None
        if operation.kind == SEND:
            yield from self._make_room()
            self._copy_to_message(row, operation, int(rows[row, TARGET + 1]))
            return
        yield from self._send_all()
        if operation.kind == RECEIVE:
            yield from self._receive(row, operation, int(rows[row, TARGET]))
        elif operation.kind == DeviceKind.SIGNAL:
            self._signal(operation, word_of(counter), int(rows[row, VALUE]))
        else:
            yield from self.await_word(operation, word_of(counter), int(rows[row, VALUE]))

    def _signal(self, operation: DeviceOperation, word: Any, value: int) -> None:
        """Record an event, then let the host of the other thread know it."""
        self._loop.order.count(1)
        event = EVENTS.of(self._driver, word.ctypes.data, operation.value)
        self._driver.call("cuEventRecord", event, self._loop.stream)
        word[0] = value

    def await_word(self, operation: DeviceOperation, word: Any, value: int) -> Waits:
        """Let the stream wait for the event of another thread, once it is recorded."""
        counter = operation.counter
        assert counter is not None
        yield Wait(lambda: bool(word[0] >= value), lambda: [counter.writer])
        self._loop.order.count(1)
        event = EVENTS.of(self._driver, word.ctypes.data, operation.value)
        self._driver.call("cuStreamWaitEvent", self._loop.stream, event, 0)

    def _copy_to_message(self, row: int, operation: DeviceOperation, source: int) -> None:
        """Let the device copy the data of a message, which is sent after that."""
        assert operation.counter is not None
        data, stream = self._data[row], self._loop.stream
        self._loop.order.count(_OF_A_COPY)
        if operation.size:
            arguments = data.ctypes.data, source, operation.size, stream
            self._driver.call(self._copy_to, *arguments)
        event = STREAMS.borrow_event(self._driver)
        self._driver.call("cuEventRecord", event, stream)
        self._leaving.append(_Leaving(row, operation.counter.reader, data, event))

    def _make_room(self) -> Waits:
        """Wait until the stream has room for a copy; else the driver would."""
        if self._loop.has_room(_OF_A_COPY):
            return
        yield from self._send_all()
        order = self._loop.order
        self._driver.call("cuEventRecord", order.stream.event, self._loop.stream)
        yield Wait(lambda: order.has_ended, list, is_at_work=True)
        order.count_none()

    def _send_all(self) -> Waits:
        """Send all messages whose data the device copies."""
        while self._leaving:
            yield Wait(self.is_copied, list, is_at_work=True)
            self._send_copied()

    def is_copied(self) -> bool:
        """Return whether the data of the next message is copied, or there is no next message."""
        return not self._leaving or self._driver.is_complete(self._leaving[0].event)

    def _send_copied(self) -> None:
        """Send the messages whose data is copied, in order; give their events back."""
        while self._leaving and self.is_copied():
            self._check()  # or ranks of other hosts would take void data for theirs
            row, peer, data, event = self._leaving.popleft()
            STREAMS.give_back_event(self._driver, event)
            self._messages.send(row, peer, data)
            self._sent.append(row)

    def _receive(self, row: int, operation: DeviceOperation, target: int) -> Waits:
        """Receive, and let the device copy the data."""
        while not self._messages.test(range(row, row + 1), 1):
            yield None
        yield from self._make_room()
        if operation.size:
            self._loop.order.count(1)
            arguments = target, self._data[row].ctypes.data, operation.size, self._loop.stream
            self._driver.call(self._copy_from, *arguments)

    def finish(self) -> Waits:
        """Wait until MPI has taken all that was sent from the buffers."""
        yield from self._send_all()
        for row in self._sent:
            while not self._messages.test(range(row, row + 1), 0):
                yield None

    def progress(self) -> bool:
        """Send what is copied, and let MPI move messages; return whether any is under way."""
        if not self._data:
            return False
        self._send_copied()
        self._messages.note_completed()
        return bool(self._leaving or self._messages.waiting_for())

    def waiting_for(self) -> list[Waiting]:
        """See `Messages.waiting_for`."""
        return self._messages.waiting_for()

    def abandon(self) -> bool:
        """See `Execution.abandon`."""
        for one in self._leaving:
            STREAMS.give_back_event(self._driver, one.event)
        self._leaving.clear()
        return self._messages.abandon()
