"""Memory that all ranks of a host share, in which they see each other's calls.

It is one file without a name, mapped by all processes.  Each rank has a part of its own: its
process, an entry for each communicator, and areas for those that use a device.
"""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Bytes

FOLDER = "/dev/shm"  # the files there lose their names once all processes have opened them
MOST_RANKS = 16  # of a host, that can use a device
NUM_ENTRIES, NUM_AREAS = 256, 8  # of each rank
NUM_SLOTS = 48  # runs of a communicator that can be under way on a device
NUM_BOXES = 32  # messages of a rank of a communicator that are handed over, and not read yet
NUM_PLANS = 32  # of a communicator on a device: fewer than slots, so that no plan waits for another
NUM_HOST_CALLS = 64  # of a communicator, which are remembered
_LINE = 64  # bytes of a cache line
_AT_ONCE = 8  # entries that are searched in one operation

ENTRY = np.dtype(
    {
        "names": ["identity", "area", "failure", "dead", "why", "host_calls", "checks"],
        "formats": ["V16", *["<i8"] * 3, "S320", *[("<i8", (NUM_HOST_CALLS,))] * 2],
        "offsets": [0, 16, 24, 32, _LINE, 6 * _LINE, 6 * _LINE + 8 * NUM_HOST_CALLS],
        "itemsize": 6 * _LINE + 16 * NUM_HOST_CALLS,
    }
)
"""A communicator: what identifies it, its calls on host arrays, and the number of its area or 0.

The field `failure` is 0, or how this rank knows that the communicator has failed, with the sentence
`why` and the rank that is `dead`; see `Board.note_failure`.  The numbers of calls in `host_calls`
are each at its remainder, and the ways of the comparisons of checked mode in `checks` have the same
order; see `Board.note_check`.  The first entry of a rank stands for no communicator; its area is 1
if there are communicators without an entry.
"""

PROCESS = np.dtype([("number", "<i8"), ("namespace", "<i8"), ("started", "<i8"), ("", "V40")])
"""The process of a rank: what tells whether it is alive."""

WAIT = np.dtype(
    [
        *(("number", "<i8"), ("ranks", "<i8"), ("looks", "<i8"), ("ended", "<i8")),
        *(("", "V32"), ("what", "S192"), ("why", "S3264")),
    ]
)
"""What a rank waits for in a blocking call, as a text and as bits of ranks of this host.

The wait has a `number`, and `looks` says how often the rank has looked whether it is over.  Whoever
finds out that a wait does not end by itself writes its number into `ended`, and the reason into
`why`.
"""

_PART_BYTES = PROCESS.itemsize + WAIT.itemsize

BUFFER = np.dtype(
    [
        *(("address", "<i8"), ("size", "<i8"), ("offset", "<i8")),
        *(("id", "<i8"), ("allocated", "<i8"), ("handle", "V64")),
    ]
)
"""A buffer: its address in its own process and its bytes; and its allocation for other processes.

The buffer begins at `offset` in the allocation, which has `allocated` bytes, and an `id` that is 0
if it cannot be opened.
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
    """Return the dtype of what a rank shares of a communicator that uses a device.

    Every counter of a slot, by reader, "ready" and "read", and every word of a box (see `Box`) has
    a cache line of its own.  An envelope for this rank begins with its `token`, which is 0 if it
    takes no envelopes.  In `acks` there is, for each rank and slot, the generation that this rank
    no longer reads, and in `plans` the numbers of plans on a device.
    """
    return np.dtype(
        [
            ("counters", "<u4", (NUM_SLOTS, num_parts, 2, _LINE // 4)),
            ("boxes", "<u4", (NUM_BOXES, 4, _LINE // 4)),
            ("token", "<i8"),
            ("acks", "<i8", (num_parts, NUM_SLOTS)),
            ("plans", "<i8", (NUM_PLANS,)),
            ("records", RECORD, (NUM_SLOTS,)),
        ]
    )


class HostMemory:
    """The memory of all ranks of a host, as this rank sees it.

    Attributes
    ----------
    part : int
        The number of this rank among them.
    is_of_threads : bool
        Whether they are threads of one process.
    waits : array of records
        What each rank waits for; see `WAIT`.
    why_no_device : str
        Why they cannot use a device; "" if they can.
    closing : list of Board
        The boards of communicators that are freed, while other ranks may read them.
    lock : Lock
        Held by the thread of this rank that looks for free entries and areas, or gives them back.
    """

    def __init__(
        self, memory: Bytes, num_parts: int, part: int, *, is_of_threads: bool = False
    ) -> None:
        self.bytes, self.num_parts, self.part = memory, num_parts, part
        self.is_of_threads, self.closing = is_of_threads, list[Any]()
        self.lock = threading.Lock()
        self.why_no_device = ""
        if num_parts > MOST_RANKS:
            self.why_no_device = f"more than {MOST_RANKS} ranks are on one host"
        elif platform.machine() not in ("x86_64", "AMD64"):
            # Records rely on it that others see writes in the order in which they were made.
            self.why_no_device = f"this is a processor of another kind ({platform.machine()})"
        first, start = num_parts * PROCESS.itemsize, num_parts * _PART_BYTES
        stop = start + num_parts * NUM_ENTRIES * ENTRY.itemsize
        self._processes: NDArray[Any] = memory[:first].view(PROCESS)
        self.waits: NDArray[Any] = memory[first:start].view(WAIT)
        self._processes[part : part + 1].view("<i8")[:3] = _process(os.getpid())
        self.entries: NDArray[Any] = memory[start:stop].view(ENTRY).reshape(num_parts, NUM_ENTRIES)
        area, num_areas = area_of(num_parts), 0 if self.why_no_device else NUM_AREAS
        areas = memory[stop : stop + num_parts * num_areas * area.itemsize]
        self.areas: NDArray[Any] = areas.view(area).reshape(num_parts, num_areas)

    def find_entry(self, part: int, identity: np.void) -> int:
        """Return the number of the first entry of a rank with this identity; 0 if there is none."""
        identities = self.entries["identity"][part]
        for first in range(1, NUM_ENTRIES, _AT_ONCE):  # pages that are not read need no memory
            matching = np.flatnonzero(identities[first : first + _AT_ONCE] == identity)
            if len(matching):
                return first + int(matching[0])
        return 0

    def end_process(self) -> None:
        """Note that this process ends, and does not die; do nothing in a forked process."""
        if self._processes["number"][self.part] == os.getpid():
            self._processes["number"][self.part] = 0

    def is_dead(self, part: int) -> bool:
        """Return whether it is certain that the process of a rank has ended.

        It is never certain of a process in another namespace, such as another container.
        """
        number, namespace, started, *_ = self._processes[part].item()
        mine = self._processes[self.part].item()
        is_comparable = number and namespace and namespace == mine[1]
        return bool(is_comparable and _start_of(number) != started)


@cache
def _process(number: int) -> tuple[int, int, int]:
    """Return the number, namespace and start of this process, which has that number."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return number, namespace, _start_of(number)


def _start_of(process: int) -> int:
    """Return when a process has started; 0 if it has ended, even if nobody has waited for it."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    state, *fields = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])


def num_bytes(num_parts: int) -> int:
    """Return the bytes of the memory of so many ranks."""
    num_areas = NUM_AREAS if num_parts <= MOST_RANKS else 0
    areas = num_areas * area_of(num_parts).itemsize
    used = num_parts * (_PART_BYTES + NUM_ENTRIES * ENTRY.itemsize + areas)
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


def of_threads(num_ranks: int) -> Bytes:
    """Return the memory of ranks that are threads of this process."""
    anonymous = mmap.mmap(-1, num_bytes(num_ranks))
    return np.frombuffer(anonymous, np.uint8)


def make_file(num_ranks: int) -> str:
    """Return the path of a new file for so many processes, whose space is reserved.

    Raises OSError.
    """
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
    """Return the memory of a file.  Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return np.frombuffer(mmap.mmap(descriptor, num_bytes(num_ranks)), np.uint8)
    finally:
        os.close(descriptor)
