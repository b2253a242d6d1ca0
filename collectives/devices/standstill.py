"""Ranks of a host that wait for each other for ever, in blocking calls of different communicators.

No call is enqueued before all its ranks have come, so such ranks wait on the host.  In checked mode
each shows for whom it waits.  Some ranks stand still if each waits for another one of them, and has
looked again after all of them were seen to wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.engines import Board, HostMemory, PendingCall

# Threads of this library that make no call of the program.
THREADS = {"collectives watch", "collectives loading", "collectives flight recorder"}
_NUM_LOOKS = 2  # the first one may have begun before the ranks were seen to wait
SECONDS = 0.05  # between two looks
_FIRST_PATIENCE, _MOST_PATIENCE = 4, 256  # looks after which the ranks are seen anew


class Standstill:
    """What one rank shows while it waits in a blocking call of a communicator.

    Parameters
    ----------
    board : Board
        The memory that the ranks share.
    in_flight : sequence of PendingCall
        The asynchronous calls of the rank, which may come to other calls meanwhile.
    """

    def __init__(self, board: Board, in_flight: Sequence[PendingCall]) -> None:
        self._board, self.in_flight = board, in_flight
        self._wait: object = None  # that is shown
        self._seen: dict[int, tuple[int, int]] = {}  # for each rank the number of its wait; looks
        self._num_looks, self._patience = 0, _FIRST_PATIENCE
        self._next_look = 0.0

    def begin(self) -> None:
        """Note that a call begins."""
        self._next_look = time.monotonic() + SECONDS

    @property
    def is_due(self) -> bool:
        """Whether this rank should look again."""
        return time.monotonic() > self._next_look

    def look(self, wait: object, missing: Sequence[int], what: str) -> str:
        """Show that this rank still waits for others; return why that does not end, or "".

        Parameters
        ----------
        wait : object
            What the rank waits for: the same object as long as that does not change.
        missing : sequence of int
            The ranks that it waits for.
        what : str
            The wait as text.
        """
        self._next_look = time.monotonic() + SECONDS
        memory = self._board.memory
        if memory is None or memory.is_of_threads or not missing or not self._is_alone():
            self.end()
            return ""
        mine = memory.waits[memory.part]
        self._show(mine, wait, missing, what.encode()[: memory.waits.dtype["what"].itemsize])
        self._find(memory)
        is_over = mine["ended"] == mine["number"]
        return _text(mine["why"]) if is_over else ""

    def end(self) -> None:
        """Show that this rank does not wait any more."""
        memory = self._board.memory
        if memory is not None and self._wait is not None:
            memory.waits["ranks"][memory.part] = 0
        self._wait = None

    def _show(self, mine: Any, wait: object, missing: Sequence[int], text: bytes) -> None:
        parts = [self._board.parts[rank] for rank in missing]
        mask = sum(1 << part for part in parts if part is not None)
        if wait is not self._wait or mine["ranks"] != mask:
            mine["ranks"] = 0
            mine["number"] += 1  # before the others see for whom
            mine["what"] = text
            mine["ranks"] = mask
            self._seen, self._patience = {}, _FIRST_PATIENCE
        self._wait = wait
        mine["looks"] += 1

    def _is_alone(self) -> bool:
        """Return whether no other thread or call of this rank can come to another call."""
        current = threading.current_thread()
        others = [thread for thread in threading.enumerate() if thread is not current]
        return not self.in_flight and all(thread.name in THREADS for thread in others)

    def _find(self, memory: HostMemory) -> None:
        """End the waits of ranks that stand still, if this one is among them."""
        waits, seen = memory.waits, self._seen
        self._num_looks += 1
        still = [
            part
            for part, (number, looks) in seen.items()
            if waits["number"][part] == number and waits["looks"][part] >= looks + _NUM_LOOKS
        ]
        stuck = _stuck(waits["ranks"].copy(), still)
        if memory.part in stuck:
            texts = "; ".join(_text(waits["what"][part]) for part in stuck)
            why = f"ranks wait for each other in blocking calls of different communicators: {texts}"
            for part in stuck:
                waits["why"][part] = why.encode()
                waits["ended"][part] = seen[part][0]
        elif not seen or self._num_looks > self._patience:
            self._num_looks, self._patience = 0, min(2 * self._patience, _MOST_PATIENCE)
            shown = [part for part, mask in enumerate(waits["ranks"]) if mask]
            self._seen = {p: (int(waits["number"][p]), int(waits["looks"][p])) for p in shown}


def _stuck(masks: NDArray[np.int64], parts: Collection[int]) -> list[int]:
    """Return the given ranks that stand still: each of them waits for another one of them."""
    stuck = list(parts)
    while True:
        mask = sum(1 << part for part in stuck)
        rest = [part for part in stuck if int(masks[part]) & mask]
        if rest == stuck:
            return stuck
        stuck = rest


def _text(field: Any) -> str:
    return bytes(field).decode(errors="replace")
