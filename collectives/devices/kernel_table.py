"""Device programs that one kernel runs: a table of one row, which launches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from collectives.devices import kernel_program
from collectives.devices.concurrency import addresses
from collectives.devices.loop import Loop
from collectives.devices.meeting import Meeting
from collectives.devices.row_format import (
    KERNEL,
    KIND,
    RISE,
    ROW_WORDS,
    SIZE,
    TARGET,
    VALUE,
    Words,
    most_runs,
)
from collectives.devices.watched import WatchedKernel
from collectives.lowering import (
    Counter,
    DeviceOperation,
    DeviceProgram,
    Spans,
    can_be_kernel,
    in_steps,
)

MOST_BYTES = 32 << 20  # of an operation; for more, copies and kernels of their own are faster
MOST_BLOCKS = 64
BYTES_OF_A_BLOCK = 16 << 10


class KernelTable(NamedTuple):
    """A device program that a kernel runs.

    Attributes
    ----------
    operations : tuple of DeviceOperation
        The operations of the program.
    words : array of int
        See `kernel_program`; `placed` writes addresses into them.
    kernel : int
        The address of the kernel.
    num_blocks : int
        The number of its blocks.
    counters : dict of int to int
        The address of the counters of each rank.
    most_runs : int
        How often it can run.
    """

    operations: tuple[DeviceOperation, ...]
    words: Words
    kernel: int
    num_blocks: int
    counters: dict[int, int]
    most_runs: int

    def placed(self, meeting: Meeting, starts: Words) -> Words:
        """Return the row that launches the kernel, with the addresses of its parameters."""
        kernel_program.set_addresses(self.words, addresses(meeting, self.counters))
        kernel_program.set_starts(self.words, starts)
        row = np.zeros((1, ROW_WORDS), np.int64)
        row[0, [KIND, SIZE, VALUE, RISE]] = KERNEL, self.num_blocks, -1, 1
        row[0, [TARGET, TARGET + 1]] = self.kernel, self.words.ctypes.data
        return row

    def set_starts(self, _: Words, starts: Words) -> None:
        """Let the next run use buffers that start elsewhere."""
        kernel_program.set_starts(self.words, starts)

    def watched(self, text: str, meeting: Meeting, rows: Words, loop: Loop) -> WatchedKernel:
        """Return what is watched in the runs of these rows."""
        return WatchedKernel(text, meeting, self.operations, rows, loop)


class Ranks(NamedTuple):
    """The device programs of all ranks, their memories, and by how much runs raise the counters.

    Ranks may start programs of plans in any order, so the kernels of many of them must have room on
    a device.
    """

    lowered: Sequence[DeviceProgram]
    memories: Sequence[Spans]
    rises: Mapping[Counter, int]
    are_plans: bool

    def words(self, rank: int, divisor: int) -> Words | None:
        """Return the words of a rank's program; None if a kernel cannot run it, or should not."""
        program, most = self.lowered[rank], BYTES_OF_A_BLOCK if self.are_plans else MOST_BYTES
        is_small = all(operation.size <= most for operation in program.operations)
        if not is_small or not can_be_kernel(program):
            return None
        steps = [*in_steps(program, self.memories[rank])]
        return kernel_program.words_of(steps, rank, len(self.lowered), self.rises, divisor)


def kernel_table(
    ranks: Ranks, rank: int, loop: Loop, counters: dict[int, int], most_blocks: int
) -> KernelTable | None:
    """Return the table of a rank; None unless all ranks run their programs as kernels.

    All ranks come to the same result.
    """
    every = [ranks.words(other, loop.divisor) for other in range(len(ranks.lowered))]
    words, operations = every[rank], ranks.lowered[rank].operations
    if words is None or any(other is None for other in every):
        return None
    largest = max((operation.size for operation in operations), default=0)
    num_blocks = max(min(most_blocks, MOST_BLOCKS, -(-largest // BYTES_OF_A_BLOCK)), 1)
    most_of_them = most_runs(max(ranks.rises.values(), default=1))
    return KernelTable(operations, words, loop.interpreter, num_blocks, counters, most_of_them)
