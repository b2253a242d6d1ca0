"""The sending end of a message."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from functools import partial

import numpy as np

from collectives.arrays import Bytes
from collectives.devices.driver import DriverError
from collectives.devices.meeting import Wait, Waits
from collectives.devices.messages.boxes import Put
from collectives.devices.messages.mail import Route
from collectives.devices.messages.passage import SEND, End, Passage
from collectives.devices.messages.stream import StreamOfCall


class Sending:
    """The sending end of one message.

    Attributes
    ----------
    link : str
        How the message was sent; see `Row.link` of ledgers.
    """

    link = ""

    def __init__(self, end: End, passage: Passage) -> None:
        self._end, self._passage = end, passage
        self._line = end.peer, passage.messages.tag
        self._put: tuple[Put, Route, StreamOfCall] | None = None  # whose envelope is not sent
        passage.mail.line_up(self._line, self)

    def steps(self) -> Waits:
        """Send, after the messages before this one."""
        passage, end, mail = self._passage, self._end, self._passage.mail
        yield Wait(partial(mail.is_first, self._line, self), lambda: [end.peer])
        route, stream = passage.route, passage.stream
        is_sent = False
        if not end.num_bytes:
            self.link, is_sent = "host", True
            yield from self._post(np.empty(0, np.uint8))
        elif route and stream and mail.may_hand_over(end.peer):
            is_sent = yield from self._hand_over(route, stream)
        if not is_sent:
            yield from passage.run_other(end)
            self.link = passage.others[-1].link(end.peer)
        mail.step_out(self._line, self)

    def _post(self, message: Bytes) -> Waits:
        """Send what is in host memory; then later messages may go."""
        messages = self._passage.messages
        messages.send(SEND, self._end.peer, message)
        self._passage.mail.step_out(self._line, self)
        while not messages.test(range(SEND, SEND + 1), 0):
            yield None

    def _hand_over(self, route: Route, stream: StreamOfCall) -> Generator[Wait | None, None, bool]:
        """Put the data into a box, and send an envelope; return False if that cannot be done."""
        passage, boxes = self._passage, route.boxes
        source, _ = passage.operands.backend.extent(passage.operands.input)
        put = yield from self._box(route)
        if put is None:
            return False
        try:
            envelope = boxes.envelope(put)
        except DriverError:
            boxes.give_up(put)
            return False
        self._put, stream.is_used = (put, route, stream), True
        boxes.fill(put, source, stream.handle)
        self._put, self.link = None, "thread" if route.links.is_of_one_process else "peer"
        yield from self._post(envelope)
        return True

    def _box(self, route: Route) -> Generator[Wait, None, Put | None]:
        """Return a box for the message; None if none is free, or there is no memory."""
        boxes, size = route.boxes, self._end.num_bytes
        while boxes.has_free():
            yield Wait(partial(boxes.has_memory, size), list, is_at_work=True)
            try:
                if (put := boxes.take(size, self._end.peer)) is not None:
                    return put
            except DriverError:
                break
        return None

    def abandon(self) -> None:
        """End a send that has failed; its box is free when the device does not fill it any more."""
        self._passage.mail.step_out(self._line, self)
        if self._put is not None:
            put, route, stream = self._put
            self._put = None
            with suppress(DriverError):
                mark = self._passage.mark(route, stream)
                route.watch.held.add(mark, partial(route.boxes.give_up, put))
