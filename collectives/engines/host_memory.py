"""Memory that all ranks of a host share, in which they see each other's calls.

It is one file without a name, mapped by all processes.  Each rank has a part of its own: an
entry for each communicator, and areas for those that use a device.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Bytes

FOLDER = "/dev/shm"  # the files there lose their names once all processes have opened them
MOST_RANKS = 16  # of a host, that can use a device
NUM_ENTRIES, NUM_AREAS = 256, 8  # of each rank
NUM_SLOTS = 48  # runs of a communicator that can be under way on a device
NUM_PLANS = 32  # of a communicator on a device: fewer than slots, so that no plan waits for another
NUM_HOST_CALLS = 64  # of a communicator, which are remembered
_LINE = 64  # bytes of a cache line

ENTRY = np.dtype(
    {
        "names": ["identity", "area", "host_calls", "checks"],
        "formats": ["V16", "<i8", *[("<i8", (NUM_HOST_CALLS,))] * 2],
        "offsets": [0, 16, _LINE, _LINE + 8 * NUM_HOST_CALLS],
        "itemsize": _LINE + 16 * NUM_HOST_CALLS,
    }
)
"""A communicator: what identifies it, its calls on host arrays, and the number of its area or 0.

`host_calls`: the numbers of calls, each at its remainder.  `checks`: the ways of the comparisons of
checked mode, in the same order; see `Board.note_check`.  The first entry of a rank stands for no
communicator; its area is 1 if there are communicators without an entry.
"""

BUFFER = np.dtype(
    [
        *(("address", "<i8"), ("size", "<i8"), ("offset", "<i8")),
        *(("id", "<i8"), ("allocated", "<i8"), ("handle", "V64")),
    ]
)
"""A buffer: its address in its own process and its bytes; and its allocation for other processes.

`offset`: of the buffer in the allocation.  `id`: of the allocation, 0 if it cannot be opened.
`allocated`: the bytes of the allocation.
"""

RECORD = np.dtype(
    [
        ("generation", "<i8"),  # of this slot; written last
        ("call", "<i8"),
        ("run", "<i8"),
        ("check", "<i8"),  # the number of the comparison of checked mode; 0: there is none
        ("process", "<i8"),
        ("aliasing", "<i8"),
        ("digest", "V16"),
        ("compared", "V16"),  # a digest of what checked mode compares
        ("uuid", "V16"),
        ("buffers", BUFFER, (3,)),
        ("closing", "<i8", (3,)),  # ids of allocations that peers must close
        ("what", "S160"),  # the call as text
        ("why_staged", "S160"),  # "" if this rank can use its device
        ("why_refused", "S160"),  # "" if this rank can make the call at all
        ("verdict", "<i8"),  # 0: none yet; see `Meeting.answer`
        ("lasts", "<i8"),  # whether this rank can make the call again with the same record
        ("arrived", "<i8"),  # says that it does; see `enqueue.word_of`
        ("answer", "<i8"),  # to other buffers of a rank; see `Meeting.answer_change`
    ]
)
"""What a rank says of a call."""


def area_of(num_parts: int) -> np.dtype[Any]:
    """What a rank shares of a communicator that uses a device.

    `counters`: those of each slot, by reader, "ready" and "read", each in a cache line of its own.
    `acks`: for each rank and slot, the generation that this rank no longer reads.  `plans`: the
    numbers of plans on a device.
    """
    return np.dtype(
        [
            ("counters", "<u4", (NUM_SLOTS, num_parts, 2, _LINE // 4)),
            ("acks", "<i8", (num_parts, NUM_SLOTS)),
            ("plans", "<i8", (NUM_PLANS,)),
            ("records", RECORD, (NUM_SLOTS,)),
        ]
    )


class HostMemory:
    """The memory of all ranks of a host, as this rank sees it.

    `part`: the number of this rank among them.  `is_of_threads`: whether they are one process.
    `why_no_device`: why they cannot use a device; "" if they can.  `closing`: the boards of
    communicators that are freed, while others may read them.
    """

    def __init__(
        self, memory: Bytes, num_parts: int, part: int, *, is_of_threads: bool = False
    ) -> None:
        self.bytes, self.num_parts, self.part = memory, num_parts, part
        self.is_of_threads, self.closing = is_of_threads, list[Any]()
        self.why_no_device = ""
        if num_parts > MOST_RANKS:
            self.why_no_device = f"more than {MOST_RANKS} ranks are on one host"
        elif platform.machine() not in ("x86_64", "AMD64"):
            # Records rely on it that others see writes in the order in which they were made.
            self.why_no_device = f"this is a processor of another kind ({platform.machine()})"
        stop = num_parts * NUM_ENTRIES * ENTRY.itemsize
        self.entries: NDArray[Any] = memory[:stop].view(ENTRY).reshape(num_parts, NUM_ENTRIES)
        area, num_areas = area_of(num_parts), 0 if self.why_no_device else NUM_AREAS
        areas = memory[stop : stop + num_parts * num_areas * area.itemsize]
        self.areas: NDArray[Any] = areas.view(area).reshape(num_parts, num_areas)


def num_bytes(num_parts: int) -> int:
    """The size of the memory of so many ranks."""
    num_areas = NUM_AREAS if num_parts <= MOST_RANKS else 0
    used = num_parts * (NUM_ENTRIES * ENTRY.itemsize + num_areas * area_of(num_parts).itemsize)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def of_threads(num_ranks: int) -> Bytes:
    """The memory of ranks that are threads of this process."""
    anonymous = mmap.mmap(-1, num_bytes(num_ranks))
    return np.frombuffer(anonymous, np.uint8)


def make_file(num_ranks: int) -> str:
    """The path of a new file for so many processes; its space is reserved.  Raises OSError."""
    descriptor, path = tempfile.mkstemp(prefix="collectives-", dir=FOLDER)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes(num_ranks))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
    return path


def map_file(path: str, num_ranks: int) -> Bytes:
    """The memory of a file.  Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, num_bytes(num_ranks)), np.uint8)
    finally:
        os.close(descriptor)
