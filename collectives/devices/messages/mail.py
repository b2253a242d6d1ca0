"""The tagged messages of one rank of a communicator: their order, and which go by boxes."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from collectives.arrays import Bytes
from collectives.devices.links import Links
from collectives.devices.messages.boxes import ENVELOPE, Boxes
from collectives.devices.messages.pinned import Pinned
from collectives.devices.order import Marks
from collectives.devices.watch import Watch
from collectives.engines import Board

Line = tuple[int, int]  # a destination and a tag


class Route:
    """What messages by boxes need.

    Parameters
    ----------
    links : Links
        The links of this rank.
    watch : Watch
        What watches the device.
    is_neighbour : function
        Returns whether another rank and this one can read each other's memory.
    """

    def __init__(self, links: Links, watch: Watch, is_neighbour: Callable[[int], bool]) -> None:
        self.links, self.watch, self.is_neighbour = links, watch, is_neighbour
        self.boxes, self.pinned = Boxes(links), Pinned(links.backend)
        self.marks = Marks(links.driver)
        watch.add_messages(self.marks)


class Mail:
    """The tagged messages of one rank of a communicator.

    Attributes
    ----------
    route : Route or None
        The route of messages by boxes; None as long as no device was used.  From then on, receives
        from ranks of the host expect envelopes, too.  When no receive that expects only data is
        under way, this rank shows that it takes envelopes, and neighbours send them.
    """

    route: Route | None = None

    def __init__(self, board: Board) -> None:
        self._board, self._takes_envelopes = board, False
        self._data_only = WeakSet[object]()  # receives under way that expect data
        self._lines = defaultdict[Line, deque[object]](deque)
        self._lock = threading.Lock()

    def take_envelopes(self) -> None:
        """Show that this rank takes envelopes, if all its receives do."""
        if self.route is not None and not self._takes_envelopes:
            with self._lock:
                if not self._takes_envelopes and not self._data_only:
                    self._takes_envelopes = self._board.take_handed_over()

    def may_hand_over(self, rank: int) -> bool:
        """Return whether this rank has boxes, and another one takes envelopes from it."""
        is_neighbour = self.route is not None and self.route.is_neighbour(rank)
        return is_neighbour and self._board.area is not None and bool(self._board.token(rank))

    def expect_data_only(self, receive: object, peer: int) -> bool:
        """Note a receive that expects data; return False if it must expect envelopes, too.

        In this case `route` is known.  The note ends with the object that stands for the receive.
        """
        if peer == self._board.rank or self._board.parts[peer] is None:
            return True
        self._data_only.add(receive)
        if self.route is not None:  # this is asked last: another thread may set it meanwhile
            self._data_only.discard(receive)
            return False
        return True

    def has_received(self, receive: object) -> None:
        """Note that a receive is complete."""
        self._data_only.discard(receive)

    def opened(self, message: Bytes) -> Any:
        """Return the envelope that a message is; None if it is data."""
        is_envelope = message.size == ENVELOPE.itemsize
        envelope = message.view(ENVELOPE)[0] if is_envelope else None
        if envelope is None or envelope["token"] != self._board.token(self._board.rank):
            return None
        return envelope.copy() if envelope["token"] else None

    # The order of messages with the same destination and tag

    def line_up(self, line: Line, send: object) -> None:
        """Let later messages wait for this one."""
        with self._lock:
            self._lines[line].append(send)

    def is_first(self, line: Line, send: object) -> bool:
        """Return whether no earlier message waits."""
        with self._lock:
            return line not in self._lines or self._lines[line][0] is send

    def step_out(self, line: Line, send: object) -> None:
        """Let later messages go, unless that was done."""
        with self._lock:
            if send in self._lines.get(line, ()):
                self._lines[line].remove(send)
                if not self._lines[line]:
                    del self._lines[line]

    def has_line(self, dest: int | None, tag: int) -> bool:
        """Return whether messages to this destination with this tag wait."""
        return (dest, tag) in self._lines

    def free(self) -> None:
        """Give the memory of boxes back."""
        if self.route is not None:
            self.route.boxes.free()
            self.route = None
