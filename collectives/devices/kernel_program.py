"""Device programs as words: what the kernel that runs them gets as its parameter.

The words begin with a head, the addresses of all ranks, and then the operations.  Consecutive
signals are one row, and so are consecutive awaits.  Places are offsets in buffers, so only the
addresses change from run to run.  `interpreter_source.py` has the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.lowering import SYNCHRONIZING, Counter, DeviceKind, DeviceOperation, Place, Step
from collectives.programs import BUFFERS

Words = NDArray[np.int64]

# A kernel's parameters have 4096 bytes, on every GPU; the number of the run is one of them.
NUM_WORDS = 500

# The words of the head: the number of ranks, and this one; where the operations begin and end; the
# divisor; the address of the memory for barriers, and the address of the words for the host, which
# `KernelWord` numbers.
NUM_RANKS, RANK, FIRST, END, DIVISOR, BARRIER, HOST, NUM_HEAD_WORDS = range(8)

# The words of each rank: the address of its counters, their least value in this program, and its
# buffers.
RANK_WORDS = 2 + len(BUFFERS)

# Bits of the first word of a row, from the kind on; of a counter, from the value on; of a place,
# from the offset on.
BARRIER_AT, COUNT_AT, LEFTS_AT, NUMBER_AT = 8, 16, 24, 32
PEER_AT, IS_READ_AT = 32, 40
BASE_AT = 48

BARRIER_WORDS = 2  # how many blocks have come, and how often all have
GENERATION_AT = 32  # in the values of counters


def counters_bytes(num_ranks: int) -> int:
    """Return the bytes for one rank's counters in a program, and for the barriers of its kernel."""
    return 8 * (2 * num_ranks + BARRIER_WORDS)


def barrier_of(counters: int, num_ranks: int) -> int:
    """Return the address of the memory for barriers, behind the counters."""
    return counters + 8 * 2 * num_ranks


def floor_of(generation: int) -> int:
    """Return the least value of counters that were used by other programs before."""
    return generation << GENERATION_AT


class Addresses(NamedTuple):
    """Where the kernels of all ranks find each other.

    Attributes
    ----------
    counters : sequence of int
        The address of the counters of each rank, in its device's memory.
    floors : sequence of int
        The least values of these counters.
    barrier : int
        The address of the memory for barriers of this rank.
    host : int
        The address of the words in the memory of the host.
    """

    counters: Sequence[int]
    floors: Sequence[int]
    barrier: int
    host: int


def words_of(
    steps: Sequence[Step], rank: int, num_ranks: int, rises: Mapping[Counter, int], divisor: int
) -> Words | None:
    """Return the words of a rank's program without addresses; None if they are too many.

    `rises` says by how much each run raises the counters.
    """
    first = NUM_HEAD_WORDS + RANK_WORDS * num_ranks
    rows = [word for row in _rows(steps, rank, rises) for word in row]
    if first + len(rows) > NUM_WORDS:
        return None
    words = np.zeros(NUM_WORDS, np.int64)
    words[:BARRIER] = num_ranks, rank, first, first + len(rows), divisor
    words[first : first + len(rows)] = rows
    return words


def set_addresses(words: Words, addresses: Addresses) -> None:
    """Write into the words the addresses that stay for all runs."""
    ranks = _words_of_ranks(words)
    ranks[:, 0], ranks[:, 1] = addresses.counters, addresses.floors
    words[BARRIER], words[HOST] = addresses.barrier, addresses.host


def set_starts(words: Words, starts: Words) -> None:
    """Write into the words where the buffers of each rank in turn start."""
    _words_of_ranks(words)[:, 2:] = starts.reshape(-1, len(BUFFERS))


def _words_of_ranks(words: Words) -> Words:
    """Return the part of the words with a row for each rank."""
    return words[NUM_HEAD_WORDS : words[FIRST]].reshape(-1, RANK_WORDS)


def _rows(
    steps: Sequence[Step], rank: int, rises: Mapping[Counter, int]
) -> Iterator[Sequence[int]]:
    """Yield the rows, each as words."""
    for group in _grouped(steps):
        (number, (first, is_after_barrier)), count = group[0], len(group)
        if first.kind in SYNCHRONIZING:
            yield _head(first.kind, is_after_barrier, count, 0, number)
            for _, step in group:
                yield _counter(step.operation, rank, rises)
        else:
            places = [place for place in (first.target, *first.operands) if place is not None]
            count = len(first.operands)
            head = _head(first.kind, is_after_barrier, count, first.lefts, number)
            yield head[0], first.size, *map(_place, places)


def _grouped(steps: Sequence[Step]) -> Iterator[list[tuple[int, Step]]]:
    """Yield the numbered operations in groups.

    Consecutive signals, and consecutive awaits, are one group unless a barrier is between them.
    """
    number_of_group = 0

    def group(numbered: tuple[int, Step]) -> tuple[DeviceKind, int]:
        nonlocal number_of_group
        operation, is_after_barrier = numbered[1]
        number_of_group += is_after_barrier or operation.kind not in SYNCHRONIZING
        return operation.kind, number_of_group

    for _, members in groupby(enumerate(steps), key=group):
        yield list(members)


def _head(
    kind: DeviceKind, is_after_barrier: bool, count: int, lefts: int, number: int
) -> tuple[int]:
    """Return the first word of a row, with the number of its first operation."""
    word = kind | is_after_barrier << BARRIER_AT | count << COUNT_AT
    return (word | lefts << LEFTS_AT | number << NUMBER_AT,)


def _counter(
    operation: DeviceOperation, rank: int, rises: Mapping[Counter, int]
) -> tuple[int, int]:
    """Return the words of a signal or an await: its value with the other rank, and its rise."""
    counter = operation.counter
    assert counter is not None
    peer = counter.reader if counter.writer == rank else counter.writer
    where = peer << PEER_AT | int(counter.is_read) << IS_READ_AT
    return operation.value | where, rises[counter]


def _place(place: Place) -> int:
    return (place.rank * len(BUFFERS) + place.buffer) << BASE_AT | place.offset
