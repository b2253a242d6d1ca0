"""The rows of a program: what each does, and how far they reach into the buffers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.schedule import ScheduleError

INPUT, OUTPUT, SCRATCH = range(3)
BUFFERS = "input", "output", "scratch"


class Kind(IntEnum):
    """The operation of a row."""

    RECEIVE = 0  # into (buffer, offset), `size` bytes from `peer`
    SEND = 1  # from (buffer, offset), `size` bytes to `peer`
    WAIT = 2  # for `size` messages from `slot` on, of which the first `peer` are receives
    COPY = 3  # `size` bytes to (buffer, offset) from (left, left_offset)
    COMBINE = 4  # `size` bytes at (buffer, offset) become left (+) right
    DIVIDE = 5  # `size` bytes at (buffer, offset), by the number of ranks


class Row(NamedTuple):
    """One operation.  `round`: the round of the algorithm.  `slot`: the index of the request."""

    kind: int
    round: int
    peer: int = 0
    buffer: int = 0
    offset: int = 0
    size: int = 0
    slot: int = 0
    left: int = 0
    left_offset: int = 0
    right: int = 0
    right_offset: int = 0


NUM_COLUMNS = len(Row._fields)
_KIND, _PEER, _SIZE, _SLOT = map(Row._fields.index, ("kind", "peer", "size", "slot"))
# The places in buffers that rows have, and for each kind which of them it uses.
_BUFFERS = list(map(Row._fields.index, ("buffer", "left", "right")))
_OFFSETS = list(map(Row._fields.index, ("offset", "left_offset", "right_offset")))
_NUM_PLACES = {Kind.WAIT: 0, Kind.COPY: 2, Kind.COMBINE: 3}  # of other kinds: 1
_USES = np.array([np.arange(3) < _NUM_PLACES.get(kind, 1) for kind in Kind])
_WRITES = np.array([kind not in (Kind.SEND, Kind.WAIT) for kind in Kind])  # to the first place


def extents(rows: NDArray[np.int64], num_slots: int) -> tuple[int, ...]:
    """The bytes of the input, the output and the scratch that the rows read or write.

    Raises ScheduleError if a row is wrong whatever the sizes are: its kind, buffer or slot does not
    exist, it begins before a buffer, or it writes to the input.
    """
    kind, size = rows[:, _KIND], rows[:, _SIZE]
    if rows.min(initial=0) < 0 or kind.max(initial=0) > max(Kind):
        raise ScheduleError("a program has an unknown kind of row, or begins before a buffer")
    is_used = _USES[kind] & (size > 0)[:, None]  # an empty place may be anywhere
    buffers, stops = rows[:, _BUFFERS], rows[:, _OFFSETS] + size[:, None]
    if buffers.max(initial=0) > SCRATCH:
        raise ScheduleError("a program uses an unknown buffer")
    if (is_used[:, 0] & _WRITES[kind] & (buffers[:, 0] == INPUT)).any():
        raise ScheduleError("a program writes to its input")
    _check_slots(rows, kind == Kind.WAIT, num_slots)
    needed = np.zeros(len(BUFFERS), np.int64)
    np.maximum.at(needed, buffers[is_used], stops[is_used])
    return tuple(needed.tolist())


def _check_slots(rows: NDArray[np.int64], is_wait: NDArray[np.bool_], num_slots: int) -> None:
    """Raise ScheduleError if messages are in slots that do not exist."""
    num_messages = np.where(is_wait, rows[:, _SIZE], rows[:, _KIND] <= Kind.SEND)
    if (rows[:, _SLOT] + num_messages).max(initial=0) > num_slots:
        raise ScheduleError(f"a program has messages beyond its {num_slots} slots")
    if (is_wait & (rows[:, _PEER] > rows[:, _SIZE])).any():
        raise ScheduleError("a program waits for more receives than messages")
