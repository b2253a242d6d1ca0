"""The receiving end of a message."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import Bytes
from collectives.devices.meeting import Wait, Waits
from collectives.devices.messages.boxes import ENVELOPE
from collectives.devices.messages.mail import Route
from collectives.devices.messages.passage import RECEIVE, End, Passage
from collectives.devices.messages.stream import StreamOfCall
from collectives.devices.order import Enqueued, drop
from collectives.devices.streams import STREAMS
from collectives.devices.watched import WatchedMessage
from collectives.engines import wrong_length
from collectives.errors import CollectiveMismatch
from collectives.lowering import Counter


class Receiving:
    """The receiving end of one message.

    Parameters
    ----------
    end : End
        The end.
    passage : Passage
        The run.
    is_data : bool
        Whether the message certainly comes as data; else it may be an envelope.
    """

    def __init__(self, end: End, passage: Passage, *, is_data: bool) -> None:
        self._end, self._passage, self._is_data = end, passage, is_data
        self._pinned: Bytes | None = None
        self._watched: WatchedMessage | None = None
        self._posted: Bytes | None = None  # where a message may arrive
        self._unread: Any = None  # an envelope of which the box is not given back

    def steps(self) -> Waits:
        """Receive."""
        passage = self._passage
        if self._is_data:
            yield from passage.run_other(self._end)
            return
        self._posted = self._landing()
        passage.messages.receive(RECEIVE, self._end.peer, self._posted, may_be_shorter=True)
        while not self._has_come():
            yield None
        message, num_bytes = self._arrived()
        if self._unread is not None and passage.route is not None:
            yield from self._open(passage.route, self._unread)
        else:
            self._check_length(num_bytes)
            yield from self._take(message)

    def _has_come(self) -> bool:
        return self._passage.messages.test(range(RECEIVE, RECEIVE + 1), 1)

    def _arrived(self) -> tuple[Bytes, int]:
        """Return what has arrived, and how many bytes were sent; note an envelope."""
        assert self._posted is not None
        num_bytes = self._passage.messages.lengths[RECEIVE]
        message, self._posted = self._posted[:num_bytes], None
        self._unread = self._passage.mail.opened(message)
        return message, num_bytes

    def abandon(self) -> None:
        """End a receive that has failed; what is enqueued goes on."""
        with suppress(Exception):  # it may have failed in the engine
            if self._posted is not None and self._has_come():
                self._arrived()
        self._give_box_back()

    def _give_box_back(self) -> None:
        """Let the sender use the box of a message that is not read again."""
        envelope, self._unread = self._unread, None
        if envelope is not None and (route := self._passage.route) is not None:
            route.boxes.give_back(envelope, self._end.peer)

    def _landing(self) -> Bytes:
        """Return where the message arrives: in the output where that saves a copy."""
        if self._passage.operands.backend.is_host and self._end.num_bytes >= ENVELOPE.itemsize:
            return self._host_buffer()
        return np.empty(max(self._end.num_bytes, ENVELOPE.itemsize), np.uint8)

    def _host_buffer(self) -> Bytes:
        """Return the output if it is in host memory, else page-locked memory for it."""
        operands = self._passage.operands
        return operands.backend.host_buffer(operands.output)

    def _check_length(self, num_bytes: int) -> None:
        """Raise CollectiveMismatch if a message has another length than the output."""
        if num_bytes != self._end.num_bytes:
            lengths = num_bytes, self._end.num_bytes
            rank = self._passage.transport.rank
            raise CollectiveMismatch(wrong_length(rank, self._end.peer, *lengths))

    def _take(self, message: Bytes) -> Waits:
        """Copy data that has arrived to the output."""
        route, stream = self._passage.route, self._passage.stream
        if route is None or stream is None:
            yield from self._take_to_output(message)
        elif message.size:
            self._pinned = pinned = yield from self._pinned_piece(route)
            pinned[: message.size] = message
            self._copy(route, stream, "cuMemcpyHtoDAsync_v2", self._target, pinned.ctypes.data)

    def _take_to_output(self, message: Bytes) -> Waits:
        """Copy data to an output that is not on the device of the route, and wait for that."""
        backend, host = self._passage.operands.backend, self._host_buffer()
        host[:] = message
        if not backend.is_host:
            with backend.on_stream(backend.current_stream()):
                backend.to_device([(self._passage.operands.output, host)])
                end = backend.record()
            yield Wait(lambda: end.is_complete, list, is_at_work=True)

    def _open(self, route: Route, envelope: Any) -> Waits:
        """Let the device take a message out of a box of its sender."""
        links, stream = route.links, self._passage.stream
        self._check_length(int(envelope["size"]))
        if not links.is_open(envelope):
            yield Wait(partial(STREAMS.may_block, links.driver), list, is_at_work=True)
        source = links.address(envelope, 0)
        if stream is not None:
            self._take_out(route, stream, envelope, "cuMemcpyDtoDAsync_v2", self._target, source)
            return
        pinned = yield from self._pinned_piece(route)
        stream = StreamOfCall(links.driver, links.backend, is_beside=True)
        arguments = "cuMemcpyDtoHAsync_v2", pinned.ctypes.data, source
        self._take_out(route, stream, envelope, *arguments)
        mark = self.mark(route, stream)
        route.watch.held.add(mark, partial(drop, pinned))
        yield Wait(lambda: mark.is_complete, list, is_at_work=True)
        route.watch.check()
        yield from self._take_to_output(pinned[: self._end.num_bytes])
        route.pinned.give_back(pinned)

    @property
    def _target(self) -> int:
        """The address of the output."""
        operands = self._passage.operands
        return operands.backend.extent(operands.output)[0]

    def _take_out(self, route: Route, stream: StreamOfCall, envelope: Any, *arguments: Any) -> None:
        """Let a stream take a message out of a box by a copy with these arguments; watch it."""
        if not route.boxes.are_by_events:
            peer, num_bytes = self._end.peer, self._end.num_bytes
            self._watched = WatchedMessage(
                f"a message of {num_bytes} bytes from rank {peer}",
                route.boxes.box_of(envelope, peer),
                int(envelope["value"]),
                Counter(peer, self._passage.transport.rank),
                self._passage.limit,
            )
            route.watch.begin(self._watched)
        stream.is_used, self._unread = True, None
        copy = partial(self._copy, route, stream, *arguments)
        route.boxes.take_out(envelope, self._end.peer, copy, stream.handle)

    def _copy(
        self, route: Route, stream: StreamOfCall, function: str, target: int, source: int
    ) -> None:
        """Let a stream copy the message."""
        stream.is_used = True
        route.links.driver.call(function, target, source, self._end.num_bytes, stream.handle)

    def _pinned_piece(self, route: Route) -> Generator[Wait, None, Bytes]:
        """Return page-locked memory of at least the size of the message."""
        num_bytes, driver = self._end.num_bytes, route.links.driver
        if not route.pinned.has(num_bytes):
            yield Wait(partial(STREAMS.may_block, driver), list, is_at_work=True)
        return route.pinned.take(num_bytes)

    def mark(self, route: Route, stream: StreamOfCall) -> Enqueued:
        """Return a mark behind what is on a stream; until then it is watched, its memory kept."""
        mark, held = self._passage.mark(route, stream), route.watch.held
        if self._pinned is not None:
            held.add(mark, partial(route.pinned.give_back, self._pinned))
            self._pinned = None
        if self._watched is not None:
            held.add(mark, partial(route.watch.end, self._watched))
            self._watched = None
        return mark
