"""The kernel that runs device programs, on the fake GPU: blocks that go on in any order.

It reads the words of a program by itself, and does what the kernel's source says.  Each block is a
generator, which stops wherever another block may go on; what blocks do in no order is noticed, as
it is of streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from collectives.arrays.backends import HOST
from collectives.devices import kernel_program as program
from collectives.engines import KernelWord
from collectives.lowering import DeviceKind
from tests.fakes.races import Clock, Races, Use

MASK, VECTOR = 255, 16
PIECES = 4  # of an operation that a block has at most; a block of a GPU has more of long ones
AWAIT, SIGNAL, COPY, COMBINE, DIVIDE = (
    *(DeviceKind.AWAIT, DeviceKind.SIGNAL),
    *(DeviceKind.COPY, DeviceKind.COMBINE, DeviceKind.DIVIDE),
)


class Memory(Protocol):
    """The memory of the fake GPU."""

    def view(self, address: int, size: int) -> np.ndarray:
        """The bytes of a range."""

    def counter(self, address: int) -> np.ndarray:
        """A counter, which may be that of another process."""

    def why_not(self, address: int, size: int, is_written: bool) -> str:
        """Why a range must not be used now; "" if it may."""


class IllegalUseError(Exception):
    """Memory that must not be used."""


class Row(NamedTuple):
    """A row of a program: what it does, its bytes and places, or the words of its counters."""

    kind: int
    is_after_barrier: bool
    lefts: int
    number: int
    size: int = 0
    places: Sequence[int] = ()
    counters: Sequence[tuple[int, int]] = ()


class Words:
    """The words of a program."""

    def __init__(self, words: Sequence[int], run: int) -> None:
        self._words, self.run = list(words), run
        self.num_ranks, self.rank = words[program.NUM_RANKS], words[program.RANK]
        self.barrier, self.host = words[program.BARRIER], words[program.HOST]
        self.divisor = words[program.DIVISOR]
        floor = words[self._of_rank(self.rank) + 1]
        self.generation = floor >> program.GENERATION_AT

    def ranges(self) -> Iterator[tuple[int, int, bool]]:
        """The memory that the program uses: address, size, and whether it is written."""
        for row in self.rows():
            for k, place in enumerate(row.places):
                yield place, row.size, k == 0

    def rows(self) -> Iterator[Row]:
        """All rows."""
        at, words = self._words[program.FIRST], self._words
        while at < words[program.END]:
            head = words[at]
            count = head >> program.COUNT_AT & MASK
            kind, number = head & MASK, head >> program.NUMBER_AT
            start = kind, bool(head >> program.BARRIER_AT & 1)
            lefts = head >> program.LEFTS_AT & MASK
            if kind in (SIGNAL, AWAIT):
                pairs = [(words[at + 1 + 2 * k], words[at + 2 + 2 * k]) for k in range(count)]
                yield Row(*start, lefts, number, counters=pairs)
                at += 1 + 2 * count
            else:
                places = [self._place(words[at + 2 + k]) for k in range(count + 1)]
                yield Row(*start, lefts, number, words[at + 1], places)
                at += 3 + count

    def _of_rank(self, rank: int) -> int:
        return program.NUM_HEAD_WORDS + program.RANK_WORDS * rank

    def _place(self, word: int) -> int:
        base, offset = word >> program.BASE_AT, word & (1 << program.BASE_AT) - 1
        rank, buffer = divmod(base, program.RANK_WORDS - 2)
        return self._words[self._of_rank(rank) + 2 + buffer] + offset

    def counter(self, word: int, rise: int, *, is_signal: bool) -> tuple[int, int]:
        """The address of a counter, and its value in this run."""
        peer, is_read = word >> program.PEER_AT & MASK, word >> program.IS_READ_AT & 1
        writer, reader = (self.rank, peer) if is_signal else (peer, self.rank)
        base = self._words[self._of_rank(reader)] + 8 * (2 * writer + is_read)
        floor = self._words[self._of_rank(reader) + 1]
        return base, floor + self.run * rise + (word & 0xFFFFFFFF)


class KernelRun:
    """One launch.

    `agents`: the numbers of the blocks, for `races`.
    """

    has_begun = False
    leaves = True  # when the host says so; else it waits for nothing any more

    def __init__(
        self,
        words: Words,
        function: str | None,
        dtype: np.dtype[Any],
        memory: Memory,
        races: Races,
        agents: Sequence[int],
    ) -> None:
        self._words, self._function, self._dtype, self._memory = words, function, dtype, memory
        self._races, self._agents = races, agents
        self._host = (ctypes.c_uint32 * len(KernelWord)).from_address(words.host)
        self._num_come, self._turn = 0, 0
        self._met, self._joined = list[Clock](), list[Clock]()
        self._blocks = {at: self._block(at) for at in range(len(agents))}
        self._stands: dict[int, Callable[[], bool]] = {}  # the blocks that wait, and until when
        self.violations: list[str] = []

    def begin(self, clock: Clock) -> None:
        """Begin after what is before the kernel on its stream."""
        self.has_begun, self._start = True, clock
        self._host[KernelWord.ENTERED] = self._words.run + 1

    def can_move(self) -> bool:
        """Whether some block would not only wait."""
        if self._is_told_to_leave():
            return True
        return any(at not in self._stands or self._stands[at]() for at in self._blocks)

    def step(self, choose: Callable[[Sequence[int]], int]) -> bool:
        """Let one block go on, which `choose` chooses; return whether all have ended."""
        if self._is_told_to_leave() and self.leaves:
            self._blocks.clear()
        ready = [at for at in self._blocks if at not in self._stands or self._stands[at]()]
        if ready:
            at = choose(ready)
            self._stands.pop(at, None)
            until = next(self._blocks[at], None)
            if until is None:
                del self._blocks[at]
            elif until is not _GO_ON:
                self._stands[at] = until
        return not self._blocks

    def _is_told_to_leave(self) -> bool:
        return bool(self._host[KernelWord.GENERATION] != self._words.generation)

    def clocks(self) -> list[Clock]:
        """What is over when all blocks have ended."""
        return [self._races.of(agent) for agent in self._agents]

    # A block

    def _block(self, at: int) -> Iterator[Callable[[], bool]]:
        """All that a block does; it yields whether it can go on, or what it waits for."""
        agent = self._agents[at]
        self._races.begin(agent, self._start)
        for row in self._words.rows():
            if row.is_after_barrier:
                yield from self._barrier(agent)
            if row.kind == SIGNAL:
                if at == 0:
                    self._signal(agent, row)
            elif row.kind == AWAIT:
                yield from self._await(at, agent, row)
            else:
                yield _GO_ON
                self._work(at, agent, row)
            yield _GO_ON

    def _barrier(self, agent: int) -> Iterator[Callable[[], bool]]:
        """Wait for the other blocks, if there are any."""
        turn = self._turn
        self._met.append(self._races.of(agent))
        self._num_come += 1
        if self._num_come == len(self._agents):
            self._joined, self._met = self._met, []
            self._num_come, self._turn = 0, turn + 1
        yield lambda: self._turn > turn
        self._races.begin(agent, *self._joined)

    def _signal(self, agent: int, row: Row) -> None:
        for word, rise in row.counters:
            address, value = self._words.counter(word, rise, is_signal=True)
            counter = self._memory.counter(address)
            self._races.begin(agent)
            why = self._races.raise_to(agent, address, value, int(counter[0]))
            self.violations += [why] if why else []
            counter[0] = value

    def _await(self, at: int, agent: int, row: Row) -> Iterator[Callable[[], bool]]:
        for k, (word, rise) in enumerate(row.counters):
            address, value = self._words.counter(word, rise, is_signal=False)
            if not self._has_come(address, value):
                if at == 0:
                    self._host[KernelWord.STANDING] = row.number + k + 1
                yield lambda address=address, value=value: self._has_come(address, value)
                if at == 0:
                    self._host[KernelWord.STANDING] = 0
            self._races.begin(agent, self._races.raised(address, value))

    def _has_come(self, address: int, value: int) -> bool:
        has_come = self._memory.view(address, 8).view(np.int64)[0] >= value
        return bool(has_come or self._is_told_to_leave())

    def _work(self, at: int, agent: int, row: Row) -> None:
        """Do what a block has of a row: some vectors, and some of the elements after them."""
        width = 1 if row.kind == COPY else self._dtype.itemsize
        unit = VECTOR if all(place % VECTOR == 0 for place in row.places) else width
        rest = row.size // unit * unit
        for start, stop, step in ((0, rest, unit), (rest, row.size, width)):
            piece = step * max(1, (stop - start) // (step * PIECES * len(self._agents)))
            for first in range(start + at * piece, stop, len(self._agents) * piece):
                self._do(agent, row, first, min(piece, stop - first))

    def _do(self, agent: int, row: Row, start: int, size: int) -> None:
        clock = self._races.begin(agent)
        target, *operands = (place + start for place in row.places)
        what = f"operation {row.number} of a kernel"
        for address in operands or [target]:
            self._use(Use(address, address + size, agent, clock[agent], False, what))
        self._use(Use(target, target + size, agent, clock[agent], True, what))
        values = [self._memory.view(address, size) for address in operands]
        out = self._memory.view(target, size)
        if row.kind == COPY:
            out[...] = values[0]
        elif row.kind == DIVIDE:
            HOST.divide(out.view(self._dtype), self._words.divisor)
        else:
            first, *others = (value.view(self._dtype) for value in values)
            out.view(self._dtype)[...] = combined(self._function or "", first, others, row.lefts)

    def _use(self, used: Use) -> None:
        size = used.end - used.start
        if why := self._memory.why_not(used.start, size, used.is_written):
            raise IllegalUseError(why)
        self.violations += self._races.use(used)


def _GO_ON() -> bool:  # noqa: N802 - a constant
    return True


def combined(
    function: str, first: np.ndarray, others: Sequence[np.ndarray], lefts: int
) -> np.ndarray:
    """The combination of operands, in new memory: the result may lie where an operand does."""
    result, combine = first.copy(), HOST.binary(function, first.dtype)
    for k, operand in enumerate(others, 1):
        pair = (operand, result) if lefts >> k & 1 else (result, operand)
        combine(*pair, result)
    return result
