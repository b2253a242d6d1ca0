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
_RECEIVE, _SEND, _WAIT, _COPY, _COMBINE, _DIVIDE = map(int, Kind)  # faster than enum members
_WITH_LEFT = _COPY, _COMBINE


def extents(rows: NDArray[np.int64], num_slots: int) -> tuple[int, ...]:
    """The bytes of the input, the output and the scratch that the rows read or write.

    Raises ScheduleError if a row is wrong whatever the sizes are: its kind, buffer or slot does not
    exist, it begins before a buffer, or it writes to the input.
    """
    needed = [0] * len(BUFFERS)
    for row in rows.tolist():  # for the usual few rows faster than NumPy's functions
        kind, _, peer, buffer, offset, size, slot, left, left_offset, right, right_offset = row
        if kind > _DIVIDE or min(row) < 0:
            raise ScheduleError("a program has an unknown kind of row, or begins before a buffer")
        if kind <= _WAIT:
            _check_slots(kind, peer, size, slot, num_slots)
        if kind == _WAIT or not size:
            continue  # an empty place may be anywhere
        if max(buffer, left, right) > SCRATCH or (buffer == INPUT and kind != _SEND):
            raise ScheduleError("a program uses an unknown buffer, or writes to its input")
        needed[buffer] = max(needed[buffer], offset + size)
        if kind in _WITH_LEFT:
            needed[left] = max(needed[left], left_offset + size)
        if kind == _COMBINE:
            needed[right] = max(needed[right], right_offset + size)
    return tuple(needed)


def _check_slots(kind: int, peer: int, size: int, slot: int, num_slots: int) -> None:
    """Raise ScheduleError if a message, or those that a WAIT waits for, have no slots."""
    if slot + (size if kind == _WAIT else 1) > num_slots:
        raise ScheduleError(f"a program has messages beyond its {num_slots} slots")
    if kind == _WAIT and peer > size:
        raise ScheduleError("a program waits for more receives than messages")
