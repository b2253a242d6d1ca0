"""A device program as one kernel: where its blocks of threads wait for each other.

The blocks run all operations in step.  Each copies or combines a part of every operation, which
depends on the alignment of the addresses; each awaits counters by itself; one of them signals.  So
the order of a device program holds within a block only, and grid barriers order the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.lowering.operations import (
    SYNCHRONIZING,
    Counter,
    DeviceKind,
    DeviceOperation,
    DeviceProgram,
)
from collectives.lowering.spans import Span, Spans

IN_KERNELS = *SYNCHRONIZING, DeviceKind.COPY, DeviceKind.COMBINE, DeviceKind.DIVIDE


class Step(NamedTuple):
    """An operation of a kernel, and whether all blocks wait for each other before it."""

    operation: DeviceOperation
    is_after_barrier: bool


class _Touched(NamedTuple):
    """What an operation reads and writes of the memory of its own rank."""

    read: tuple[Span, ...]
    written: Span

    def conflicts(self, other: _Touched) -> bool:
        """Return whether the order of two operations matters to some byte."""
        is_hit = any(self.written.overlaps(span) for span in (*other.read, other.written))
        return is_hit or any(other.written.overlaps(span) for span in self.read)


def can_be_kernel(program: DeviceProgram) -> bool:
    """Return whether one kernel can run a device program.

    It can send no message through the host.
    """
    return all(operation.kind in IN_KERNELS for operation in program.operations)


def in_steps(program: DeviceProgram, memory: Spans) -> Iterator[Step]:
    """Yield the operations of a rank as those of a kernel.

    A signal comes after all that the blocks have done before.  An operation that reads or writes
    comes after those of the other blocks that write or use the same bytes, because different
    blocks may have the same byte in two operations.

    `memory` is that of the rank.
    """
    since_barrier: list[_Touched] = []
    for operation in program.operations:
        touched = _touched(operation, memory)
        is_signal = operation.kind == DeviceKind.SIGNAL
        is_after_barrier = any(
            is_signal or (touched is not None and touched.conflicts(earlier))
            for earlier in since_barrier
        )
        if is_after_barrier:
            since_barrier.clear()
        if touched is not None:
            since_barrier.append(touched)
        yield Step(operation, is_after_barrier)


def _touched(operation: DeviceOperation, memory: Spans) -> _Touched | None:
    """Return what an operation reads and writes of its rank; None if it only signals or awaits."""
    target, size = operation.target, operation.size
    if target is None:
        return None
    written = memory.span(target.buffer, target.offset, size)
    own = [place for place in operation.operands if place.rank == target.rank]
    read = tuple(memory.span(place.buffer, place.offset, size) for place in own)
    return _Touched(read, written)


class Shares(NamedTuple):
    """How the blocks of a kernel share its operations, in the proof.

    Attributes
    ----------
    num_blocks : int
        Of each rank.
    units : sequence of int
        The elements that a thread has at a time, of each of the operations in turn; the last of an
        array, which are fewer, are taken one by one.
    """

    num_blocks: int
    units: Sequence[int]

    def of(
        self, operation: DeviceOperation, at: int, block: int, itemsize: int
    ) -> Iterator[DeviceOperation]:
        """Yield the parts of an operation that a block has; a block has one thread.

        `at` is the number of the operation.
        """
        num_elements = operation.size // itemsize
        unit = self.units[at % len(self.units)]
        num_units = num_elements // unit
        rest = num_units * unit
        for start in range(block * unit, rest, self.num_blocks * unit):
            yield _part(operation, start * itemsize, unit * itemsize)
        for start in range(rest + block, num_elements, self.num_blocks):
            yield _part(operation, start * itemsize, itemsize)


def _part(operation: DeviceOperation, start: int, size: int) -> DeviceOperation:
    """Return an operation on some of its bytes."""
    assert operation.target is not None
    target, *operands = (
        place._replace(offset=place.offset + start)
        for place in (operation.target, *operation.operands)
    )
    return operation._replace(target=target, size=size, operands=tuple(operands))


def in_blocks(
    programs: Sequence[Sequence[Step]], shares: Shares, itemsize: int
) -> list[DeviceProgram]:
    """Return what each block of each rank does, as device programs.

    The blocks are numbered by rank.  They wait for each other by counters of their own, also where
    the kernel begins and ends.
    """
    return [
        DeviceProgram(tuple(_of_block(steps, rank, block, shares, itemsize)))
        for rank, steps in enumerate(programs)
        for block in range(shares.num_blocks)
    ]


def _of_block(
    steps: Sequence[Step], rank: int, block: int, shares: Shares, itemsize: int
) -> Iterator[DeviceOperation]:
    """Yield what a block does."""
    num_blocks, num_barriers = shares.num_blocks, 1
    yield from _barrier(rank, block, num_blocks, 1)
    for at, (operation, is_after_barrier) in enumerate(steps):
        if is_after_barrier:
            num_barriers += 1
            yield from _barrier(rank, block, num_blocks, num_barriers)
        if operation.counter is None:
            yield from shares.of(operation, at, block, itemsize)
        elif block == 0 or operation.kind == DeviceKind.AWAIT:
            writer, reader, is_read = operation.counter
            counter = Counter(writer * num_blocks, reader * num_blocks, is_read)
            yield operation._replace(counter=counter)
    yield from _barrier(rank, block, num_blocks, num_barriers + 1)


def _barrier(rank: int, block: int, num_blocks: int, number: int) -> Iterator[DeviceOperation]:
    """Yield how a block waits for the others of its rank, each of which waits for it."""
    first = rank * num_blocks
    others = [first + other for other in range(num_blocks) if other != block]
    for kind in SYNCHRONIZING:
        for other in others:
            ends = (first + block, other) if kind == DeviceKind.SIGNAL else (other, first + block)
            yield DeviceOperation(kind, 0, Counter(*ends), number)
