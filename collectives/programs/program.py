"""A collective call compiled for one rank: a table of integers that an executor runs.

A row is one operation: post a receive or a send, wait for messages, copy, combine, divide.  It
contains offsets in bytes into three buffers (input, output, scratch), never addresses, so one
program serves all arrays of the same size and dtype.  What a program sends is known before it runs.
A program can be printed, proved, priced and cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain, zip_longest
from operator import gt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.algorithms import Algorithm, Option
from collectives.arrays import Array, Operator
from collectives.diagnostics import Sent
from collectives.programs.lanes import Lanes, compile_lanes
from collectives.programs.steps import Aliasing, Combine, Counts, Lane, Message, Move, OwnCounts
from collectives.schedule import Region, ScheduleError

INPUT, OUTPUT, SCRATCH = range(3)
BUFFERS = "input", "output", "scratch"

MESSAGE_BYTES = 2**30  # the largest message of MPI; longer ones are cut
_ALIGNMENT = 64  # of each part of the scratch, in bytes: a cache line


class Kind(IntEnum):
    """The operation of a row."""

    RECEIVE = 0  # into (buffer, offset), `size` bytes from `peer`
    SEND = 1  # from (buffer, offset), `size` bytes to `peer`
    WAIT = 2  # for `size` messages from `slot` on, of which the first `peer` are receives
    COPY = 3  # `size` bytes to (buffer, offset) from (left, left_offset)
    COMBINE = 4  # `size` bytes at (buffer, offset) become left (+) right
    DIVIDE = 5  # `size` bytes at (buffer, offset), by the number of ranks


class Row(NamedTuple):
    """One operation.

    Attributes
    ----------
    round : int
        The round of the algorithm.
    slot : int
        The index of the request.
    """

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
_SIZE = Row._fields.index("size")


class Direct(NamedTuple):
    """The algorithm of a call in which ranks read each other's memory; see `CallSpec`."""

    algorithm: Algorithm
    options: tuple[tuple[str, Option], ...]
    chosen: str


class CallSpec(NamedTuple):
    """Everything that determines what a collective call does; hashable, and the key of all caches.

    Attributes
    ----------
    counts, aliasing
        See `placement.compile_lane`; counts are of elements.
    algorithm, options, segments
        See `select.Choice`.
    chosen : str
        The algorithm as a caller names it.
    shape : tuple of int
        The shape of the caller's array, or of one of its shards.
    label : str
        The name in the ledger, if it is not the collective's.
    blocking, out
        Whether the call blocks, and whether the caller passes `out`; they are only compared in
        checked mode.
    direct : Direct or None
        What runs instead if the ranks read each other's memory; None for the same.
    """

    collective: str
    algorithm: Algorithm
    options: tuple[tuple[str, Option], ...]
    segments: int
    chosen: str
    dtype: np.dtype[Any]
    counts: Counts
    root: int = 0
    op: Operator | None = None
    aliasing: Aliasing = "none"
    shape: tuple[int, ...] | None = None
    label: str = ""
    blocking: str = ""
    out: str = ""
    direct: Direct | None = None

    @property
    def if_direct(self) -> CallSpec:
        """The call that runs if the ranks read each other's memory."""
        if self.direct is None:
            return self
        return self._replace(**self.direct._asdict(), segments=1, direct=None)

    @property
    def names(self) -> tuple[str, str]:
        """The names of the collective and the algorithm in the ledger."""
        return self.label or self.collective, self.chosen

    def num_contributions(self, size: int) -> int:
        """Return the number of arrays that a reduction on `size` ranks combines."""
        options: dict[str, Any] = dict(self.options)
        number: int = options.get("shards") or size
        return number

    @property
    def is_recurring(self) -> bool:
        """Whether more calls like this are expected; counts known to one rank may not come again.

        What is made for other calls is not kept at the first one.
        """
        return not isinstance(self.counts, OwnCounts)


@dataclass(frozen=True, eq=False)
class Program:
    """The operations of one rank.

    Attributes
    ----------
    rows : array of int64
        A table with one `Row` in each row.
    num_rounds : int
        The rounds of the algorithm.
    num_slots : int
        The largest number of messages in flight.
    num_scratch : int
        The bytes of scratch.
    sent : sequence of (round, destination, bytes, segments)
        Every message of the schedule; it is sent as `segments` messages of MPI.
    """

    rows: NDArray[np.int64]
    num_rounds: int
    num_slots: int
    num_scratch: int
    itemsize: int
    sent: Sent

    def __str__(self) -> str:
        return "\n".join(map(str, self.listed))

    @cached_property
    def listed(self) -> list[Row]:
        """The rows as `Row` objects."""
        return [Row(*row) for row in self.rows.tolist()]

    @cached_property
    def needed(self) -> tuple[int, ...]:
        """The bytes of input, output and scratch that the rows read or write; see `extents`."""
        return extents(self.rows, self.num_slots)

    def check_arrays(self, source: Array, target: Array, scratch: Array | None) -> None:
        """Raise ScheduleError if a row reaches outside the input, the output or the scratch.

        Every execution checks the arrays that it is given; the rows are read once.  With None for
        `scratch` the scratch is not checked, because a device needs less.
        """
        num_scratch = self.num_scratch if scratch is None else scratch.nbytes
        sizes = source.nbytes, target.nbytes, num_scratch
        if any(map(gt, self.needed, sizes)):
            buffers = zip(BUFFERS, self.needed, sizes, strict=True)
            buffer, needed, size = next(entry for entry in buffers if entry[1] > entry[2])
            raise ScheduleError(
                f"a program needs {needed} bytes of {buffer}, and is given {size}: "
                "it was not compiled for these arrays"
            )

    def round_of(self, row: int) -> int:
        """Return the round of a row; after the last row, the number of rounds."""
        return self.listed[row].round if row < len(self.listed) else self.num_rounds


def compile_call(spec: CallSpec, rank: int, size: int, *, is_kept: bool = True) -> Program:
    """Return the program of one rank, from a cache of bounded size if the call is recurring.

    If `is_kept` is False, it is compiled, and not kept.
    """
    is_average = spec.op is not None and spec.op.is_average
    return (_compiled if spec.is_recurring and is_kept else _compiled.__wrapped__)(
        *(spec.algorithm, rank, size, spec.root, spec.counts, spec.options, spec.aliasing),
        *(spec.segments, spec.dtype.itemsize, is_average),
    )


@lru_cache(maxsize=512)
def _compiled(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    counts: Counts,
    options: tuple[tuple[str, Option], ...],
    aliasing: Aliasing,
    num_lanes: int,
    itemsize: int,
    is_average: bool,
) -> Program:
    lanes = compile_lanes(algorithm, rank, size, root, counts, options, aliasing, num_lanes)
    return assembled(lanes, itemsize, is_average=is_average)


def assembled(lanes: Lanes, itemsize: int, *, is_average: bool = False) -> Program:
    """Return the program that runs a rank's lanes."""
    return _Assembler(lanes, itemsize, is_average).program()


class _Assembler:
    """Writes the rows of all lanes in the order in which they run."""

    def __init__(self, lanes: Lanes, itemsize: int, is_average: bool) -> None:
        self.lanes, self.itemsize, self.is_average = lanes, itemsize, is_average
        self.most_bytes = max(MESSAGE_BYTES // itemsize, 1) * itemsize  # in one message
        self.slots_each = _most_messages(lanes.lanes, self.most_bytes // itemsize)
        self.rows: list[tuple[int, ...]] = []
        self.waits: dict[int, tuple[int, ...]] = {}
        self.sent: dict[tuple[int, int], list[int]] = {}  # by round, and place in the round
        stride = _aligned(lanes.num_scratch * itemsize, itemsize)
        self.num_scratch = stride * lanes.num_slots
        source, offset = self._source()
        # The offsets at which the buffers of each lane begin.
        self.bases: list[dict[str, tuple[int, int]]] = []
        for number in range(len(lanes.lanes)):
            start = number * lanes.stride * itemsize
            scratch = SCRATCH, number % lanes.num_slots * stride
            bases = {"input": (source, offset + start), "output": (OUTPUT, start)}
            self.bases.append({**bases, "scratch": scratch})

    def _source(self) -> tuple[int, int]:
        """Return the place of the input.

        It is in scratch if the output would overwrite the input before it is read.
        """
        if not (self.lanes.copies_input and (num_read := _num_read(self.lanes))):
            return INPUT, 0
        place, size = (SCRATCH, self.num_scratch), num_read * self.itemsize
        self.rows.append((_COPY, 0, 0, *place, size, 0, INPUT, 0, 0, 0))
        self.num_scratch += size
        return place

    def program(self) -> Program:
        lanes = self.lanes
        if lanes.num_rounds == 0:
            for number, lane in enumerate(lanes.lanes):
                self._work(number, 0, lane.staying)
                self._close(number, 0)
        last = lanes.num_rounds - 1
        for number, at, is_start in lanes.events:
            if 0 < at < last and not any(lanes.lanes[number].steps[at]):
                continue  # there is nothing to do
            if is_start:
                self._start(number, at)
            else:
                self._finish(number, at)
        return Program(
            np.array(self.rows, np.int64).reshape(-1, NUM_COLUMNS),
            lanes.num_rounds,
            self.slots_each * lanes.num_slots,
            self.num_scratch,
            self.itemsize,
            tuple((at, peer, size, parts) for (at, _), (peer, size, parts) in self.sent.items()),
        )

    def _start(self, number: int, at: int) -> None:
        """Pack and post the messages of a round, and make the moves that need no message."""
        lane, first = self.lanes.lanes[number], number % self.lanes.num_slots * self.slots_each
        step = lane.steps[at]
        self._work(number, at, step.packing)
        receives = self._messages(_RECEIVE, number, at, step.receives, first)
        sends = self._messages(_SEND, number, at, step.sends, first + len(receives))
        # By turns.  If all receives were posted first, peers could start all their sends at once,
        # and what this rank sends over the same connections would wait until those have arrived.
        self.rows += [row for row in chain(*zip_longest(receives, sends)) if row is not None]
        num_posted = len(receives) + len(sends)
        self.waits[number] = (_WAIT, at, len(receives), 0, 0, num_posted, first, 0, 0, 0, 0)
        if at == 0:
            self._work(number, at, lane.staying)

    def _messages(
        self, kind: int, number: int, at: int, messages: tuple[Message, ...], slot: int
    ) -> list[tuple[int, ...]]:
        """Return the rows that post messages, cut as MPI needs it, in slots from `slot` on."""
        bases, itemsize, most = self.bases[number], self.itemsize, self.most_bytes
        rows: list[tuple[int, ...]] = []
        for index, (peer, (name, first, stop)) in enumerate(messages):
            buffer, base = bases[name]
            offset, size = base + first * itemsize, (stop - first) * itemsize
            starts = range(0, size or 1, most)
            for start in starts:
                part = min(size - start, most)
                place = slot + len(rows)
                rows.append((kind, at, peer, buffer, offset + start, part, place, 0, 0, 0, 0))
            if kind == _SEND:  # all lanes have the same messages
                sent = self.sent.setdefault((at, index), [peer, 0, 0])
                sent[1] += size
                sent[2] += len(starts)
        return rows

    def _finish(self, number: int, at: int) -> None:
        """Wait for the messages of a round, and use what they contain."""
        wait = self.waits[number]
        if wait[_SIZE]:
            self.rows.append(wait)
        self._work(number, at, self.lanes.lanes[number].steps[at].finishing)
        if at == self.lanes.num_rounds - 1:
            self._close(number, at)

    def _close(self, number: int, at: int) -> None:
        """Make the last moves of a lane, and divide an average."""
        lane = self.lanes.lanes[number]
        self._work(number, at, lane.closing)
        stop = _num_written(lane) if self.is_average else 0
        if stop:
            place = self.bases[number]["output"]
            self.rows.append((_DIVIDE, at, 0, *place, stop * self.itemsize, 0, 0, 0, 0, 0))

    def _work(self, number: int, at: int, actions: Iterable[Move | Combine]) -> None:
        """Add rows for copies and combinations."""
        bases, itemsize, append = self.bases[number], self.itemsize, self.rows.append
        for action in actions:
            (left, left_start, _), (buffer, start, stop) = action[0], action[-1]
            where, base = bases[buffer]
            place = where, base + start * itemsize, (stop - start) * itemsize
            where, base = bases[left]
            source = where, base + left_start * itemsize
            if len(action) == 2:
                append((_COPY, at, 0, *place, 0, *source, 0, 0))
            else:
                right, right_start, _ = action[1]
                where, base = bases[right]
                append((_COMBINE, at, 0, *place, 0, *source, where, base + right_start * itemsize))


def _most_messages(lanes: Sequence[Lane], most: int) -> int:
    """Return the largest number of messages of a round, of at most `most` elements each."""
    largest, previous = 0, None
    for lane in lanes:
        if lane is previous:  # most lanes are one object
            continue
        previous = lane
        for step in lane.steps:
            number = 0
            for _, (_, start, stop) in step.sends + step.receives:
                number += -((start - stop) // most) or 1
            largest = max(largest, number)
    return largest


def _num_read(lanes: Lanes) -> int:
    """Return the number of elements of the input up to the last one that is read."""
    stops = [
        region.stop + number * lanes.stride
        for number, lane in enumerate(lanes.lanes)
        for region in _read(lane)
        if region.buffer == "input"
    ]
    return max(stops, default=0)


def _read(lane: Lane) -> Iterator[Region]:
    """Yield the regions that a lane reads."""
    yield from (message.region for step in lane.steps for message in step.sends)
    for action in _actions(lane):
        yield from action[:-1]


def _num_written(lane: Lane) -> int:
    """Return the number of elements of the output up to the last one that a lane fills."""
    regions = [action[-1] for action in _actions(lane)]
    regions += (message.region for step in lane.steps for message in step.receives)
    return max((region.stop for region in regions if region.buffer == "output"), default=0)


def _actions(lane: Lane) -> list[Move | Combine]:
    """Return all copies and combinations of a lane."""
    within = [action for step in lane.steps for action in (*step.packing, *step.finishing)]
    return [*lane.staying, *within, *lane.closing]


def _aligned(num_bytes: int, itemsize: int) -> int:
    """Return a number of bytes rounded up to whole cache lines and whole elements."""
    unit = math.lcm(_ALIGNMENT, itemsize)
    return -(-num_bytes // unit) * unit


def extents(rows: NDArray[np.int64], num_slots: int) -> tuple[int, ...]:
    """Return the bytes of the input, the output and the scratch that the rows read or write.

    Raises ScheduleError if a row is wrong whatever the sizes are: its kind, buffer or slot does not
    exist, it begins before a buffer, or it writes to the input.
    """
    needed = [0] * len(BUFFERS)
    for row in rows.tolist():  # for the usual few rows faster than NumPy's functions
        kind, _, peer, buffer, offset, size, slot, left, left_offset, right, right_offset = row
        if kind > _DIVIDE or min(row) < 0:
            raise ScheduleError("a program has an unknown kind of row, or begins before a buffer")
        if kind <= _WAIT and slot + (size if kind == _WAIT else 1) > num_slots:
            raise ScheduleError(f"a program has messages beyond its {num_slots} slots")
        if kind == _WAIT and peer > size:
            raise ScheduleError("a program waits for more receives than messages")
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
