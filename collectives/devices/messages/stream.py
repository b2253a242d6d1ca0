"""The stream on which a message is enqueued."""

from __future__ import annotations

from weakref import finalize

from collectives.arrays import Backend
from collectives.devices.driver import Driver
from collectives.devices.order import Enqueued
from collectives.devices.streams import STREAMS, Stream
from collectives.errors import CollectiveError

_CAPTURED = "the stream is being captured for a graph, which cannot contain this message"


class StreamOfCall:
    """The stream of one call: its caller's, or one that begins after what is on the caller's.

    Parameters
    ----------
    driver, backend : Driver, Backend
        The driver and the arrays of the device.
    is_beside : bool
        Whether it need not begin after what is on the caller's stream.

    Attributes
    ----------
    is_used : bool
        Whether anything was put on it.

    Raises
    ------
    CollectiveError
        If the caller's stream is captured.
    """

    is_used = False
    _own: Stream | None = None
    _start: Enqueued | None = None

    def __init__(self, driver: Driver, backend: Backend, *, is_beside: bool = False) -> None:
        self._driver, self._backend = driver, backend
        self.handle = int(backend.current_stream().ptr)
        if is_beside:
            self.leave_caller()
            return
        if driver.is_capturing(self.handle):
            raise CollectiveError(_CAPTURED)
        self._start = self._marked()

    @property
    def is_own(self) -> bool:
        """Whether it is not its caller's."""
        return self._own is not None

    def leave_caller(self) -> None:
        """Go on beside the caller, after what was on its stream at the call, or is of this call."""
        if self._own is None:
            self._own = STREAMS.borrow(self._driver)
            self._give_back = finalize(self, STREAMS.drop, self._driver, self._own)
            self._give_back.atexit = False
            start = self._marked() if self.is_used else self._start
            self.handle = self._own.handle
            if start is not None:
                self._driver.call("cuStreamWaitEvent", self.handle, start.event, 0)
            self._driver.call("cuEventRecord", self._own.event, self.handle)

    def end(self) -> Enqueued:
        """Return a mark behind all that was put on it.  Raises DriverError."""
        if self._own is not None:
            self._driver.call("cuEventRecord", self._own.event, self.handle)
        return self._marked()

    def _marked(self) -> Enqueued:
        """Return a mark behind all that is on it."""
        mark = Enqueued(self._driver, self._backend)
        self._driver.call("cuEventRecord", mark.event, self.handle)
        return mark
