"""What both ends of a message need in one run: the stream, the arrays, and the engine beside it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from collectives.devices.meeting import Waits
from collectives.devices.messages.mail import Mail, Route
from collectives.devices.messages.stream import StreamOfCall
from collectives.devices.order import Enqueued, drop
from collectives.engines import Execution, Messages, Operands, Transport
from collectives.programs import Program

SEND, RECEIVE = range(2)  # slots of messages


class End(NamedTuple):
    """One end of a message: the other rank, the bytes, and the program that does only this."""

    peer: int
    num_bytes: int
    program: Program


class Passage:
    """One run of a send, a receive, or both.

    Attributes
    ----------
    limit : float or None
        The seconds that it may take on a device; None for the limit of the communicator.
    stream : StreamOfCall or None
        The stream of the arrays; None if they are not on the device of the route.
    others : list of Execution
        What the engine runs.
    """

    def __init__(
        self,
        transport: Transport,
        mail: Mail,
        route: Route | None,
        messages: Messages,
        operands: Operands,
        limit: float | None,
    ) -> None:
        self.transport, self.mail, self.messages = transport, mail, messages
        self.operands, self.limit, self.route = operands, limit, route
        self._callers = operands.backend.current_stream()
        self.others = list[Execution]()  # that the engine makes
        self.stream: StreamOfCall | None = None
        if route is not None and route.links.backend is operands.backend:
            self.stream = StreamOfCall(route.links.driver, operands.backend)

    def run_other(self, end: End) -> Waits:
        """Let the engine send or receive, through host memory if the array is on a device."""
        with self.operands.backend.on_stream(self._callers):
            other = self.transport.execution(end.program, self.operands, self.messages.tag)
            other.restart(0)
        self.others.append(other)
        while not other.advance(0.0):
            yield None

    def mark(self, route: Route, stream: StreamOfCall) -> Enqueued:
        """Return a mark behind what is on a stream.

        If the stream is not the caller's, the arrays are kept until then.
        """
        mark = stream.end()
        route.marks.add(mark)
        route.watch.hold()
        if stream.is_own:
            route.watch.held.add(mark, partial(drop, self.operands))
        return mark
