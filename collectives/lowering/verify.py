"""Prove device programs: every read is in order with every write, and finds what programs say.

Elements are random words of 64 bits, and so is what a combination or a division makes of them; it
depends on the order of the operands.  So a result is right only if it comes from the same elements,
combined in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.operations import (
    MOST_OPERANDS,
    RAISING,
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
    Place,
)
from collectives.lowering.order import Clock, in_order
from collectives.programs import INPUT, OUTPUT, SCRATCH, Aliasing, Kind, Program, Row
from collectives.schedule import ScheduleError

Words = NDArray[np.uint64]
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)


class Sizes(NamedTuple):
    """The elements of a rank's input and output, and where its output lies beside its input."""

    num_input: int
    num_output: int
    aliasing: Aliasing = "none"


class LoweredCall(NamedTuple):
    """A call: for each rank its program, its device program, and the sizes of its arrays.

    Attributes
    ----------
    num_blocks : int
        The number of blocks of each rank's kernel; then there is a device program for each block of
        each rank.
    """

    programs: Sequence[Program]
    lowered: Sequence[DeviceProgram]
    sizes: Sequence[Sizes]
    is_barrier: bool = False
    num_blocks: int = 1


def verify_lowered(*calls: LoweredCall) -> None:
    """Prove the device programs of all ranks, in calls that follow each other on the same memory.

    Before each call, the caller of each rank writes to all buffers, in order with its device;
    after it, the caller reads the output.  The operations of a rank are in one order, whatever
    their streams are: each run waits for the event of the one before it, and for that of its start
    (tests/devices/test_order_of_streams.py looks for what has no order).  The blocks of a kernel
    have an order of their own each; the first one is in order with the caller.

    Raises ScheduleError if two ranks use the same bytes without an order between them, if ranks
    wait for each other forever, if a rank writes to a peer's memory, or if a result is wrong.
    """
    _Run(calls).run()


class MemoryLayout:
    """Where the buffers of one rank lie in its memory, of one word for each element."""

    def __init__(self, sizes: Sizes, program: Program) -> None:
        self.itemsize = program.itemsize
        num_input, num_output, aliasing = sizes
        shift = num_input if isinstance(aliasing, str) else aliasing  # of the output
        first, last = min(0, shift), max(num_input, shift + num_output)
        self.starts = {INPUT: -first, OUTPUT: shift - first, SCRATCH: last - first}
        self.num_words = last - first + program.num_scratch // self.itemsize
        self.output = slice(shift - first, shift - first + num_output)

    def part(self, buffer: int, offset: int, size: int) -> slice:
        """Return the words of a region."""
        start = self.starts[buffer] + offset // self.itemsize
        stop = start + size // self.itemsize
        assert 0 <= start <= stop <= self.num_words, "a region lies outside of its buffer"
        return slice(start, stop)


def _contents(call: int, rank: int, num_words: int) -> Words:
    """Return what the caller of a rank writes before a call."""
    random = np.random.default_rng((call, rank))
    words: Words = random.integers(0, 2**64, num_words, np.uint64)
    return words


def _combined(left: Words, right: Words) -> Words:
    """Return a word for each pair of words, in this order."""
    mixed: Words = left * _FACTORS[0] + (right ^ (right >> np.uint64(29))) * _FACTORS[1]
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _divided(words: Words) -> Words:
    """Return a word for each word that is divided."""
    changed: Words = words * _FACTORS[2] + _FACTORS[0]
    return changed


def _results(number: int, call: LoweredCall) -> list[Words]:
    """Return the outputs of all ranks if the programs run as they are meant, with messages."""
    layouts = [*map(MemoryLayout, call.sizes, call.programs)]
    memories = [_contents(number, rank, x.num_words) for rank, x in enumerate(layouts)]
    queues: dict[tuple[int, int], deque[Words]] = {}
    waiting = {
        rank: _rows(rank, program.listed, layouts[rank], memories[rank], queues)
        for rank, program in enumerate(call.programs)
    }
    while waiting:
        moves = {rank: next(rows, None) for rank, rows in waiting.items()}
        waiting = {
            rank: waiting[rank] for rank, has_moved in moves.items() if has_moved is not None
        }
        if not any(has_moved is None or has_moved for has_moved in moves.values()):
            raise ScheduleError(f"ranks {sorted(waiting)} wait for messages forever")
    return [words[layout.output] for words, layout in zip(memories, layouts, strict=True)]


def _rows(
    rank: int,
    rows: Sequence[Row],
    layout: MemoryLayout,
    words: Words,
    queues: dict[tuple[int, int], deque[Words]],
) -> Iterator[bool]:
    """Run one rank; say whether it has moved, each time before it looks for messages again."""
    posted: dict[int, Row] = {}
    has_moved = True
    for row in rows:
        if row.kind == Kind.RECEIVE:
            posted[row.slot] = row
        elif row.kind == Kind.SEND:
            here = layout.part(row.buffer, row.offset, row.size)
            queues.setdefault((rank, row.peer), deque()).append(words[here].copy())
        elif row.kind == Kind.WAIT:
            for receive in [posted.pop(row.slot + at) for at in range(row.peer)]:
                while not queues.get((receive.peer, rank)):
                    yield has_moved
                    has_moved = False
                here = layout.part(receive.buffer, receive.offset, receive.size)
                words[here] = queues[receive.peer, rank].popleft()
                has_moved = True
        else:
            _work(row, layout, words)
        has_moved = True


def _work(row: Row, layout: MemoryLayout, words: Words) -> None:
    """Copy, combine or divide."""
    here = layout.part(row.buffer, row.offset, row.size)
    if row.kind == Kind.DIVIDE:
        words[here] = _divided(words[here])
        return
    value = words[layout.part(row.left, row.left_offset, row.size)].copy()
    if row.kind == Kind.COMBINE:
        value = _combined(value, words[layout.part(row.right, row.right_offset, row.size)])
    words[here] = value


class _Watched:
    """The memory of a rank, and when each agent has read or written each of its words.

    `names` are those of all agents.
    """

    def __init__(self, names: Sequence[str], num_words: int) -> None:
        self._names = names
        self.words: Words = np.zeros(num_words, np.uint64)
        self._read_at, self._written_at = np.zeros((2, len(names), num_words), np.int64)

    def read(self, agent: int, clock: Clock, part: slice) -> Words:
        """Return what is there, for an agent that reads it."""
        if (other := _later(self._written_at[:, part], clock)) is not None:
            names = self._names[agent], self._names[other]
            raise ScheduleError("{} reads what {} may write at the same time".format(*names))
        self._read_at[agent, part] = clock[agent]
        return self.words[part]

    def write(self, agent: int, clock: Clock, part: slice, words: Words) -> None:
        """Let an agent of the owner write there."""
        for times, verb in ((self._read_at, "read"), (self._written_at, "write")):
            if (other := _later(times[:, part], clock)) is not None:
                names = self._names[agent], self._names[other]
                raise ScheduleError("{} writes what {} may still {}".format(*names, verb))
        self._written_at[agent, part] = clock[agent]
        self.words[part] = words


def _later(times: Clock, clock: Clock) -> int | None:
    """Return an agent with a time that does not certainly come before the clock.

    None if there is no such agent.
    """
    late = np.flatnonzero((times > clock[:, None]).any(axis=1))
    return int(late[0]) if late.size else None


class _Run:
    """One run of all devices, with vector clocks.

    An agent is what has its operations in one order: the device of a rank, or each of the blocks of
    its kernel.

    Attributes
    ----------
    clocks : array
        For each agent, how much each agent has certainly done before what this one does now.
    call_of : list of int
        The call that each agent has begun.
    starts : array
        The clock of the first agent of each rank at that moment.
    """

    def __init__(self, calls: Sequence[LoweredCall]) -> None:
        self.calls, self.num_blocks = calls, calls[0].num_blocks
        size = len(calls[0].programs)
        self.layouts = [[*map(MemoryLayout, call.sizes, call.programs)] for call in calls]
        self.results = [_results(number, call) for number, call in enumerate(calls)]
        names = [*self._names(size)]
        self.memories = [
            _Watched(names, max(layouts[rank].num_words for layouts in self.layouts))
            for rank in range(size)
        ]
        self.clocks: Clock = np.zeros((len(names), len(names)), np.int64)
        self.call_of = [-1] * len(names)
        self.starts = np.zeros((len(calls) + 1, size), np.int64)
        self.caused: dict[tuple[int, int], Clock] = {}
        self.sent: dict[tuple[Counter, int], Words] = {}

    def _names(self, size: int) -> Iterator[str]:
        """Yield how the agents are called."""
        for rank, block in product(range(size), range(self.num_blocks)):
            yield f"block {block} of rank {rank}" if self.num_blocks > 1 else f"rank {rank}"

    def run(self) -> None:
        agents, ends = _one_after_another(self.calls)
        for agent, index, operation, cause in in_order(agents):
            while self.call_of[agent] < 0 or index >= ends[self.call_of[agent]][agent]:
                self._next_call(agent)
            clock = self.clocks[agent]
            clock[agent] += 1
            if operation.kind in RAISING:
                self.caused[agent, index] = clock.copy()
            elif cause is not None:
                np.maximum(clock, self.caused[cause], out=clock)
            self._work(agent, operation)
        for agent in range(len(agents)):
            while self.call_of[agent] < len(self.calls):
                self._next_call(agent)

    def _next_call(self, agent: int) -> None:
        """Go on to the next call, between which and the last one is the caller of a rank."""
        if agent % self.num_blocks == 0:
            self._return(agent, agent // self.num_blocks)
        self.call_of[agent] += 1

    def _return(self, agent: int, rank: int) -> None:
        """Do what a caller does between two calls: read the output, and write everything."""
        number, memory, clock = self.call_of[agent], self.memories[rank], self.clocks[agent]
        clock[agent] += 1
        if number >= 0:
            self._check_end(agent, number)
            output = memory.read(agent, clock, self.layouts[number][rank].output)
            if not np.array_equal(output, self.results[number][rank]):
                raise ScheduleError(f"rank {rank} gets another result than its program says")
        number += 1
        clock[agent] += 1
        self.starts[number, rank] = clock[agent]
        words = _contents(number, rank, memory.words.size)
        if number < len(self.calls):
            num_words = self.layouts[number][rank].num_words
            words[:num_words] = _contents(number, rank, num_words)
        memory.write(agent, clock, slice(None), words)

    def _check_end(self, agent: int, number: int) -> None:
        """Check that every rank has come to a barrier that this one leaves."""
        starts, clock = self.starts[number], self.clocks[agent][:: self.num_blocks]
        is_early = (starts == 0).any() or (clock < starts).any()
        if self.calls[number].is_barrier and is_early:
            raise ScheduleError("a rank may leave the barrier before another one has come")

    def _work(self, agent: int, operation: DeviceOperation) -> None:
        """Read and write the data of an operation."""
        target, size, rank = operation.target, operation.size, agent // self.num_blocks
        kind, operands = operation.kind, operation.operands
        if not size:
            return
        layout = self.layouts[self.call_of[agent]]
        values = [self._read(agent, place, size) for place in operands]
        if kind == DeviceKind.SEND:
            assert operation.counter is not None
            self.sent[operation.counter, operation.value] = values[0].copy()
            return
        if target is None or target.rank != rank or len(operands) > MOST_OPERANDS:
            raise ScheduleError(f"rank {rank} cannot run {operation}")
        part = layout[rank].part(*target[1:], size)
        own = [layout[rank].part(*place[1:], size) for place in operands if place.rank == rank]
        if any(x != part and x.start < part.stop and part.start < x.stop for x in own):
            raise ScheduleError(f"rank {rank} overwrites what it still reads: {operation}")
        clock, value = self.clocks[agent], self._value(agent, operation, values, part)
        self.memories[rank].write(agent, clock, part, value)

    def _value(
        self, agent: int, operation: DeviceOperation, values: Sequence[Words], part: slice
    ) -> Words:
        """Return what an operation writes."""
        if operation.kind == DeviceKind.RECEIVE:
            assert operation.counter is not None
            return self.sent.pop((operation.counter, operation.value))
        if operation.kind == DeviceKind.DIVIDE:
            memory = self.memories[agent // self.num_blocks]
            return _divided(memory.read(agent, self.clocks[agent], part))
        result = values[0].copy()
        for at, value in enumerate(values[1:], 1):
            is_left = operation.lefts >> at & 1
            result = _combined(value, result) if is_left else _combined(result, value)
        return result

    def _read(self, agent: int, place: Place, size: int) -> Words:
        layout = self.layouts[self.call_of[agent]][place.rank]
        part = layout.part(*place[1:], size)
        return self.memories[place.rank].read(agent, self.clocks[agent], part)


def _one_after_another(
    calls: Sequence[LoweredCall],
) -> tuple[list[list[DeviceOperation]], list[list[int]]]:
    """Return the operations of all calls, for each agent, and where those of each call end.

    The counters go on from call to call.
    """
    agents: list[list[DeviceOperation]] = [[] for _ in calls[0].lowered]
    ends: list[list[int]] = []
    reached: dict[Counter, int] = {}
    for call in calls:
        highest = dict(reached)
        for operations, lowered in zip(agents, call.lowered, strict=True):
            for operation in lowered.operations:
                if (counter := operation.counter) is not None:
                    value = operation.value + reached.get(counter, 0)
                    highest[counter] = max(highest.get(counter, 0), value)
                    operations.append(operation._replace(value=value))
                else:
                    operations.append(operation)
        reached = highest
        ends.append([*map(len, agents)])
    return agents, ends
