"""What a row reads and writes, as spans of a rank's memory: two spans may be the same bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

from collectives.programs import INPUT, OUTPUT, Aliasing, Kind, Row


class Span(NamedTuple):
    """The bytes from `start` to `stop` of a memory."""

    memory: int
    start: float
    stop: float

    def overlaps(self, other: Span) -> bool:
        """Return whether the two have a byte in common."""
        return self.memory == other.memory and self.start < other.stop and other.start < self.stop

    def covers(self, other: Span) -> bool:
        """Return whether every byte of the other one is in this one."""
        return self.memory == other.memory and self.start <= other.start and other.stop <= self.stop


class Spans:
    """The memory of one rank.

    Attributes
    ----------
    aliasing : int, "none" or "odd"
        Where its output lies beside its input; see `programs.placement.compile_lane`.
    """

    def __init__(self, aliasing: Aliasing, itemsize: int) -> None:
        self._aliasing, self._itemsize = aliasing, itemsize

    def span(self, buffer: int, offset: int, size: int) -> Span:
        """Return the bytes of a region.

        The input is a part of the output's memory if they overlap.
        """
        if buffer != INPUT or self._aliasing == "none" or size == 0:
            return Span(buffer, offset, offset + size)
        if self._aliasing == "odd":  # it may be any byte of the output
            return Span(OUTPUT, -math.inf, math.inf)
        start = offset - self._aliasing * self._itemsize
        return Span(OUTPUT, start, start + size)

    def written(self, row: Row) -> Span:
        """Return what a row that receives, copies, combines or divides writes."""
        return self.span(row.buffer, row.offset, row.size)

    def read(self, row: Row) -> tuple[Span, ...]:
        """Return what a row reads."""
        return tuple(self.span(*region) for region in regions_read(row))


def regions_read(row: Row) -> tuple[tuple[int, int, int], ...]:
    """Return the buffer, the offset and the bytes of each region that a row reads."""
    own, left = (row.buffer, row.offset, row.size), (row.left, row.left_offset, row.size)
    if row.kind in (Kind.SEND, Kind.DIVIDE):
        return (own,)
    if row.kind == Kind.COPY:
        return (left,)
    if row.kind == Kind.COMBINE:
        return left, (row.right, row.right_offset, row.size)
    return ()
