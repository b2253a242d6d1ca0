"""Ranks of a host that wait for each other for ever, in blocking calls of different communicators.

No call is enqueued before all its ranks have come, so such ranks wait on the host.  In checked mode
each shows for whom it waits.  Ranks stand still if each waits for the next one in a circle, and has
looked again after another one has seen all of them wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from collectives.engines import Board, HostMemory, PendingCall

# Threads of this library that make no call of the program.
_THREADS = {"collectives watch", "collectives loading", "collectives flight recorder"}
_NUM_LOOKS = 2  # the first one may have begun before it was asked for
_SECONDS = 0.05  # between two looks

Seen = dict[int, tuple[int, int]]  # for each rank of the host the number of its wait, and its looks


class Standstill:
    """What one rank shows while it waits in a blocking call of a communicator.

    `in_flight`: the asynchronous calls of the rank, which may come to other calls meanwhile.
    """

    def __init__(self, board: Board, in_flight: Sequence[PendingCall]) -> None:
        self._board, self._in_flight = board, in_flight
        self._seen: Seen = {}
        self._next_look = 0.0

    def begin(self) -> None:
        """Note that a call begins."""
        self._next_look = time.monotonic() + _SECONDS

    def look(self, missing: Sequence[int], what: str) -> str:
        """Show that this rank still waits for others; return why that does not end, or "".

        `what`: the wait, as text.
        """
        memory = self._board.memory
        if memory is None or memory.is_of_threads or not missing or not self._is_alone():
            return ""
        self._next_look = time.monotonic() + _SECONDS
        mine, ranks = memory.waits[memory.part], [self._board.parts[rank] for rank in missing]
        mask = sum(1 << part for part in ranks if part is not None)
        text = what.encode()[: memory.waits.dtype["what"].itemsize]
        if (int(mine["ranks"]), bytes(mine["what"])) != (mask, text):
            mine["number"] += 1
            mine["ranks"], mine["what"] = mask, text
        mine["looks"] += 1
        if mine["ended"] != mine["number"]:
            self._find(memory)
        is_over = mine["ended"] == mine["number"]
        return bytes(mine["why"]).decode(errors="replace") if is_over else ""

    @property
    def is_due(self) -> bool:
        """Whether this rank should look again."""
        return time.monotonic() > self._next_look

    def _is_alone(self) -> bool:
        """Whether no other thread of this rank, and no call under way, can come to another call."""
        current = threading.current_thread()
        others = [each for each in threading.enumerate() if each is not current]
        return not self._in_flight and all(each.name in _THREADS for each in others)

    def _find(self, memory: HostMemory) -> None:
        """End the waits of ranks that stand still."""
        circle = _circle(memory.waits, memory.part)
        now = {part: _seen(memory.waits[part]) for part in circle}
        if now.keys() != self._seen.keys() or any(now[p][0] != self._seen[p][0] for p in now):
            self._seen = now
        elif circle and all(now[p][1] >= self._seen[p][1] + _NUM_LOOKS for p in now):
            texts = "; ".join(bytes(memory.waits["what"][part]).decode() for part in circle)
            why = f"ranks wait for each other in blocking calls of different communicators: {texts}"
            for part in circle:
                memory.waits["why"][part] = why.encode()
                memory.waits["ended"][part] = now[part][0]


def _seen(wait: Any) -> tuple[int, int]:
    return int(wait["number"]), int(wait["looks"])


def _circle(waits: Any, start: int) -> list[int]:
    """The ranks from one on, of which each waits for the next, up to those in a circle.

    It is empty if there is no circle.
    """
    paths, done = [[start]], {start}
    while paths:
        path = paths.pop()
        mask = int(waits["ranks"][path[-1]])
        for part in (part for part in range(len(waits)) if mask >> part & 1):
            if part in path:
                return path
            if part not in done:
                done.add(part)
                paths.append([*path, part])
    return []
