"""A CUDA driver over host memory: what the library asks of a GPU, on machines without one.

It is meaner than a GPU.  Streams execute in any order that CUDA allows, and as late as it allows;
functions that may wait for the whole device always do.  What CUDA leaves undefined, and what the
library promises never to do, is remembered as a violation, in a sentence.

`gpu()` is the GPU of this process.  Its memory is a file without a name, which other processes map
when they open a handle.  The file begins with a table of its allocations, so that all processes
know what was freed, and who has opened what.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import itertools
import math
import mmap
import os
import random
import struct
import threading
import time
import weakref
from bisect import bisect, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collectives.arrays.backends import HOST, Bytes
from collectives.arrays.kernels import KINDS, kind
from collectives.devices import kernel_program
from collectives.devices.driver import (
    BUFFER_ID,
    DISABLE_TIMING,
    FUNCTIONS,
    LAZY_PEER_ACCESS,
    MEMORY_OPERATION_WORDS,
    NON_BLOCKING,
    NOT_READY,
    NUM_MULTIPROCESSORS,
    WAIT_VALUE,
    WRITE_VALUE,
    Driver,
    DriverError,
    IpcHandle,
)
from tests.fakes.interpreter import IllegalUseError, KernelRun, combined
from tests.fakes.interpreter import Words as ProgramWords
from tests.fakes.races import NOTHING, Clock, Races, Use

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT, ALREADY_MAPPED = 1, 2, 201, 208
INVALID_HANDLE, ILLEGAL_ADDRESS, LAUNCH_FAILED = 400, 700, 719
CAPTURE_UNSUPPORTED, CAPTURE_IMPLICIT = 900, 906
# Functions that need no current context:
WITHOUT_CONTEXT = {"cuEventQuery", "cuEventDestroy_v2", "cuThreadExchangeStreamCaptureMode"}
ALREADY_REGISTERED, NOT_REGISTERED, UNKNOWN = 712, 713, 999

NUM_BYTES = 1 << 32  # of device memory; only what is written takes room
ALIGNMENT = 512  # of allocations and arrays
CHUNK = 1 << 21  # bytes that the pool allocates for small arrays
GARBAGE = 0xCB  # every byte of new memory
NAP = 50e-6  # seconds between two tries of a function that waits

_NAME = "fake-gpu"
_MAGIC = b"FAKE-IPC"
_HANDLE = struct.Struct("<8sQIiQQQI")  # magic, file, process, descriptor, offset, size, id, row
_ROW = np.dtype([("id", "u8"), ("is_live", "u4"), ("openers", "u4", 25)])
_NUM_ROWS = 1 << 12
_TABLE_BYTES = 1 << 20

_WORD, _UNSIGNED = ctypes.c_int64, ctypes.c_uint32


class Range(NamedTuple):
    """Device memory that an operation reads, or writes."""

    address: int
    size: int
    is_written: bool = False

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.size

    def __str__(self) -> str:
        verb = "writes" if self.is_written else "reads"
        return f"it {verb} {self.size} bytes at {self.address:#x}"


class FreeMemory:
    """The parts of a stretch of memory that are free; the first that is large enough is taken."""

    def __init__(self, start: int, end: int) -> None:
        self.gaps = [(start, end)]

    def take(self, size: int) -> int | None:
        """The address of a part that is not free any more; None if all gaps are too small."""
        size = _rounded(size)
        for at, (start, end) in enumerate(self.gaps):
            if end - start >= size:
                self.gaps[at : at + 1] = [(start + size, end)] * (end - start > size)
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Make a part free again; neighbouring gaps become one."""
        end = start + _rounded(size)
        at = bisect(self.gaps, (start, end))
        if at < len(self.gaps) and self.gaps[at][0] == end:
            _, end = self.gaps.pop(at)
        if at and self.gaps[at - 1][1] == start:
            at -= 1
            start, _ = self.gaps.pop(at)
        self.gaps.insert(at, (start, end))


def _rounded(size: int) -> int:
    return max(size + ALIGNMENT - 1, ALIGNMENT) // ALIGNMENT * ALIGNMENT


class MemoryFile:
    """The device memory of one process, mapped here, and the table of its allocations.

    Row 0 of the table is no allocation: its number tells this file from all others.  Memory of
    another process cannot be written here at all.
    """

    def __init__(self, descriptor: int, process: int) -> None:
        self.descriptor, self.process = descriptor, process
        writing = mmap.PROT_WRITE if process == os.getpid() else 0
        memory = mmap.mmap(descriptor, NUM_BYTES, prot=mmap.PROT_READ | writing)
        self.bytes = np.frombuffer(memory, np.uint8)
        self.base: int = self.bytes.ctypes.data
        self.rows = np.frombuffer(mmap.mmap(descriptor, _TABLE_BYTES), _ROW, _NUM_ROWS)

    @classmethod
    def of_this_process(cls) -> MemoryFile:
        """A new file."""
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, NUM_BYTES)
        file = cls(descriptor, os.getpid())
        file.rows[0]["id"] = int.from_bytes(os.urandom(8))
        return file

    @classmethod
    def of_process(cls, process: int, descriptor: int) -> MemoryFile:
        """The file of another process.  Raises OSError if it does not exist any more."""
        path = f"/proc/{process}/fd/{descriptor}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise OSError("the process has ended, and another has its number")
        return cls(os.open(path, os.O_RDWR), process)

    @property
    def number(self) -> int:
        """What no other file has."""
        return int(self.rows[0]["id"])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from changing the table."""
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    @cached_property
    def writable(self) -> Bytes:
        """The memory, as kernels may write the counters in it."""
        return np.frombuffer(mmap.mmap(self.descriptor, NUM_BYTES), np.uint8)

    def close(self) -> None:
        """Give the descriptor back; the mapping goes with the last array of it."""
        os.close(self.descriptor)


@dataclass(eq=False)
class Allocation:
    """Device memory of this process, or that of another which is open here.

    `number`: what its owner has called it.  `buffer_id`: what this process calls it.  `free`: the
    memory of an allocation of the pool that no array has.  `arrays`: the sizes of its arrays.
    """

    file: MemoryFile
    base: int
    size: int
    buffer_id: int
    row: int
    number: int
    is_exportable: bool = True
    free: FreeMemory | None = None
    arrays: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.base + self.size

    @property
    def is_own(self) -> bool:
        """Whether this process has allocated it."""
        return self.file.process == os.getpid()

    @property
    def is_live(self) -> bool:
        """Whether its owner has not freed it."""
        row = self.file.rows[self.row]
        return bool(row["is_live"]) and int(row["id"]) == self.number

    def has_array(self, used: Range) -> bool:
        """Whether a range lies in one array, if this allocation consists of arrays."""
        if self.free is None or self.arrays.get(used.address, -1) >= used.size:
            return True
        start, end = used.address, used.end
        return any(at <= start and end <= at + size for at, size in self.arrays.items())


class DeviceMemory:
    """All allocations that this process may use; its own, and those that it has opened."""

    def __init__(self) -> None:
        self.file = MemoryFile.of_this_process()
        self.allocations: dict[int, Allocation] = {}
        self._bases: list[int] = []  # sorted
        self._free = FreeMemory(self.file.base + _TABLE_BYTES, self.file.base + NUM_BYTES)
        self._free_rows = [*range(1, _NUM_ROWS)]
        self._ids = itertools.count(1)
        self._files: dict[int, MemoryFile] = {}
        self._past: deque[tuple[int, int, str]] = deque(maxlen=64)

    def allocate(self, size: int, *, exportable: bool = True) -> Allocation:
        """New memory; its contents are what was there before."""
        base = self._free.take(size) if size > 0 and self._free_rows else None
        if base is None:
            raise DriverError("cuMemAlloc_v2", OUT_OF_MEMORY if size > 0 else INVALID_VALUE)
        row, number = self._free_rows.pop(), next(self._ids)
        self.file.rows[row] = (number, 1, 0)
        return self._add(Allocation(self.file, base, size, number, row, number, exportable))

    def _add(self, allocation: Allocation) -> Allocation:
        self.allocations[allocation.base] = allocation
        insort(self._bases, allocation.base)
        return allocation

    def _remove(self, allocation: Allocation, verb: str) -> None:
        del self.allocations[allocation.base]
        self._bases.remove(allocation.base)
        self._past.append((allocation.base, allocation.end, verb))

    def free(self, base: int) -> list[int]:
        """Free memory of this process; return the processes that have it open still."""
        allocation = self.allocations.get(base)
        if allocation is None or not allocation.is_own or allocation.arrays:
            raise DriverError("cuMemFree_v2", INVALID_VALUE)
        self._remove(allocation, "freed")
        with self.file.locked():
            row = self.file.rows[allocation.row]
            row["is_live"] = 0
            openers = [process for process in row["openers"].tolist() if process]
        self._free.give(base, allocation.size)
        self._free_rows.append(allocation.row)
        return [process for process in openers if is_alive(process)]

    def find(self, address: int) -> Allocation | None:
        """The allocation that contains an address."""
        at = bisect_right(self._bases, address) - 1
        allocation = self.allocations[self._bases[at]] if at >= 0 else None
        return allocation if allocation is not None and address < allocation.end else None

    def view(self, address: int, size: int) -> Bytes:
        """The bytes of a range that has been checked."""
        allocation = self.find(address)
        if allocation is None:
            return np.empty(0, np.uint8)  # of no bytes, which may lie anywhere
        start = address - allocation.file.base
        return allocation.file.bytes[start : start + size]

    def handle(self, address: int) -> bytes:
        """What names an allocation of this process to others."""
        allocation = self.find(address)
        if allocation is None or not (allocation.is_own and allocation.is_exportable):
            raise DriverError("cuIpcGetMemHandle", INVALID_VALUE)
        file = self.file
        where = file.number, file.process, file.descriptor, allocation.base - file.base
        what = allocation.size, allocation.number, allocation.row
        return _HANDLE.pack(_MAGIC, *where, *what).ljust(64, b"\0")

    def open(self, handle: bytes) -> int:
        """The address, here, of an allocation of another process."""
        magic, number_of_file, process, descriptor, offset, size, number, row = _HANDLE.unpack(
            handle[: _HANDLE.size]
        )
        if magic != _MAGIC:
            raise DriverError("cuIpcOpenMemHandle_v2", INVALID_VALUE)
        file = self._file(number_of_file, process, descriptor)
        base = file.base + offset
        opened = Allocation(file, base, size, next(self._ids), row, number, is_exportable=False)
        code = ALREADY_MAPPED if base in self.allocations else self._note_opener(opened)
        if code:
            self._close_unused_files()
            raise DriverError("cuIpcOpenMemHandle_v2", code)
        return self._add(opened).base

    def _file(self, number: int, process: int, descriptor: int) -> MemoryFile:
        """The file of another process, mapped once."""
        if number == self.file.number:
            raise DriverError("cuIpcOpenMemHandle_v2", INVALID_CONTEXT)
        if number not in self._files:
            try:
                file = MemoryFile.of_process(process, descriptor)
            except OSError as error:
                raise DriverError("cuIpcOpenMemHandle_v2", INVALID_VALUE) from error
            self._files[file.number] = file
        if number not in self._files:  # another process has this number now
            self._close_unused_files()
            raise DriverError("cuIpcOpenMemHandle_v2", INVALID_VALUE)
        return self._files[number]

    def _note_opener(self, opened: Allocation) -> int:
        """Write into the owner's table that this process has it open; return an error code."""
        with opened.file.locked():
            openers = opened.file.rows[opened.row]["openers"]
            places = np.flatnonzero(openers == 0)
            if not opened.is_live or not places.size:
                return INVALID_VALUE
            openers[places[0]] = os.getpid()
            return 0

    def close(self, base: int) -> None:
        """Close what was opened."""
        allocation = self.allocations.get(base)
        if allocation is None or allocation.is_own:
            raise DriverError("cuIpcCloseMemHandle", INVALID_VALUE)
        self._remove(allocation, "closed")
        with allocation.file.locked():
            row = allocation.file.rows[allocation.row]
            if int(row["id"]) == allocation.number:  # else the row is of another allocation now
                row["openers"][row["openers"] == os.getpid()] = 0
        self._close_unused_files()

    def _close_unused_files(self) -> None:
        used = {allocation.file.number for allocation in self.allocations.values()}
        for number in self._files.keys() - used:
            self._files.pop(number).close()

    def objection(self, used: Range) -> str:
        """Why an operation must not use a range, if it must not."""
        allocation = self.find(used.address)
        if not used.size:
            return ""
        if allocation is None:
            return f"{used}, {self._what_was_at(used.address)}"
        if used.end > allocation.end:
            return f"{used}, of which some are not in the same allocation"
        if not allocation.is_live:
            return f"{used}, which process {allocation.file.process} has freed"
        if used.is_written and not allocation.is_own:
            return f"{used}, which are memory of process {allocation.file.process}"
        return ""

    def _what_was_at(self, address: int) -> str:
        for start, end, verb in reversed(self._past):
            if start <= address < end:
                return f"which were {verb}"
        return "which are in no allocation"


def is_alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


class Block:
    """The memory of an array of the pool: it lives as long as the array and all views of it."""

    def __init__(self, address: int, size: int) -> None:
        data = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.__array_interface__ = data


class Pool:
    """Arrays that share allocations, as CuPy's memory pool makes them.

    None of them begins where its allocation begins.  An allocation stays when its arrays are gone,
    until `trim`.  The memory of an array that is gone is used again only when all operations that
    were on streams at that time are executed: then no operation can use it.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self._chunks: list[Allocation] = []
        # Arrays end at any time, even while this pool is being changed: then they are only noted.
        self._dropped: deque[tuple[Allocation, int]] = deque()
        self._waiting: deque[tuple[dict[int, int], Allocation, int, int]] = deque()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], exportable: bool) -> np.ndarray:
        """A new array; its contents are garbage."""
        size = math.prod(shape) * dtype.itemsize
        chunk, address = self._take(size, exportable)
        chunk.arrays[address] = size
        self.memory.view(address, size)[...] = GARBAGE
        block = Block(address, size)
        weakref.finalize(block, self._dropped.append, (chunk, address)).atexit = False
        return np.ndarray(shape, dtype, np.asarray(block))

    def _take(self, size: int, exportable: bool) -> tuple[Allocation, int]:
        for chunk in self._chunks:
            if chunk.is_exportable == exportable:
                address = chunk.free.take(size)
                if address is not None:
                    return chunk, address
        length = max(CHUNK, ALIGNMENT + _rounded(size))
        chunk = self.memory.allocate(length, exportable=exportable)
        chunk.free = FreeMemory(chunk.base + ALIGNMENT, chunk.base + length)
        self._chunks.append(chunk)
        return chunk, chunk.free.take(size)

    def sweep(
        self, marks: Callable[[], dict[int, int]], is_passed: Callable[[dict[int, int]], bool]
    ) -> None:
        """Take back the memory of arrays that are gone.

        `marks`: returns how far each stream must be until no operation uses what has gone by now.
        """
        if self._dropped:
            now = marks()
        while self._dropped:
            chunk, address = self._dropped.popleft()
            self._waiting.append((now, chunk, address, chunk.arrays.pop(address)))
        # Streams pass later marks later.
        while self._waiting and is_passed(self._waiting[0][0]):
            _, chunk, address, size = self._waiting.popleft()
            chunk.free.give(address, size)

    def has_array_at(self, address: int) -> bool:
        """Whether an array begins there."""
        return any(address in chunk.arrays for chunk in self._chunks)

    def trim(self) -> list[Allocation]:
        """Give up the allocations that have no arrays; their owner frees them."""
        waiting = {id(chunk) for _, chunk, _, _ in self._waiting}
        unused = [chunk for chunk in self._chunks if not chunk.arrays and id(chunk) not in waiting]
        self._chunks = [chunk for chunk in self._chunks if chunk not in unused]
        return unused


class Mark:
    """A place on a stream, at which an event was recorded.

    `clock`: what is certainly over when it is passed.
    """

    is_passed, time = False, 0.0
    clock: Clock = NOTHING

    def pass_by(self) -> None:
        """Note that it is passed now."""
        self.time, self.is_passed = time.perf_counter(), True


def _always() -> bool:
    return True


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Operation:
    """Something on a stream.

    `ranges`: the device memory that it uses.  `counter`: the address of the word that it awaits, or
    writes, if `is_raising`; and `value`.  `mark`: what it passes.  `awaited`: the mark that it
    waits for.  `run`: what executes it in parts.  `known`: what the host had seen when it enqueued
    this.
    """

    what: str
    execute: Callable[[], object] = _nothing
    ranges: Sequence[Range] = ()
    counter: int | None = None
    value: int = 0
    is_raising: bool = False
    mark: Mark | None = None
    awaited: Mark | None = None
    is_ready: Callable[[], bool] = _always
    run: KernelRun | None = None
    known: Clock = field(default_factory=dict)

    def __str__(self) -> str:
        value = "" if self.counter is None else f" (it is {_word(self.counter).value})"
        return self.what + value


def _word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


@dataclass(eq=False)
class Stream:
    """Operations that are executed in this order."""

    handle: int
    queue: deque[Operation] = field(default_factory=deque)
    num_enqueued: int = 0

    @property
    def num_executed(self) -> int:
        """How many of its operations are over."""
        return self.num_enqueued - len(self.queue)


class Lock:
    """A lock that its holder can take again; it knows how often it is held."""

    def __init__(self) -> None:
        self._lock, self.depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()


class Streams:
    """All streams of this process, executed by whoever calls, in an order drawn by a seed.

    `violations`: what must not happen and has.  `error`: after memory was used that must not be
    used, this error of every function; then nothing is executed any more.  `limit`: the seconds
    without any progress after which waiting is a violation.  `num_left`: how many operations
    are executed from now on, before it stands still; `standing`: the streams that do; None: all.
    """

    num_left = math.inf
    standing: Collection[int] | None = None

    def __init__(self, memory: DeviceMemory) -> None:
        self.lock, self.memory = Lock(), memory
        self.violations: list[str] = []
        self.error, self.limit = 0, 20.0
        self.random, self.queue_length = random.Random(0), 64
        self.registered: dict[int, int] = {}  # page-locked host memory: addresses and sizes
        self.streams_used: set[int] = set()
        self._handles = itertools.count(0x1000, 16)
        self._streams = {0: Stream(0)}
        self._busy: dict[int, Stream] = {}  # those that have operations
        self._num_executed = 0
        self.races = Races()

    def new_handle(self) -> int:
        """A number that no other stream, event or kernel has."""
        return next(self._handles)

    def new_stream(self) -> int:
        """The handle of a new stream, which waits for no other by itself."""
        with self.lock:
            handle = self.new_handle()
            self._streams[handle] = Stream(handle)
            return handle

    def marks(self) -> dict[int, int]:
        """How far each stream must be until all that is on it now is executed."""
        return {stream.handle: stream.num_enqueued for stream in self._busy.values()}

    def is_passed(self, marks: dict[int, int]) -> bool:
        """Whether the streams are as far as `marks` says."""
        return all(self._streams[stream].num_executed >= number for stream, number in marks.items())

    def is_registered(self, address: int) -> bool:
        """Whether a word lies in page-locked host memory."""
        registered = self.registered.items()
        return any(start <= address and address + 4 <= start + size for start, size in registered)

    def put(self, name: str, handle: int, *operations: Operation) -> None:
        """Enqueue operations for the function of this name; wait while the queue is full."""
        with self.lock:
            stream = self.stream(name, handle)
            for operation in operations:
                self._refuse_use_after_free(name, operation)
                if objection := self._objection(operation):
                    self._break(ILLEGAL_ADDRESS, f"{name}: {operation.what}: {objection}")
                    raise DriverError(name, self.error)
                operation.known = self.races.host
            self.streams_used.add(handle)
        for operation in operations:
            self._put_one(name, stream, operation)

    def stream(self, name: str, handle: int) -> Stream:
        """The stream of a handle."""
        if handle not in self._streams:
            raise DriverError(name, INVALID_HANDLE)
        return self._streams[handle]

    def _put_one(self, name: str, stream: Stream, operation: Operation) -> None:
        def has_room() -> bool:
            if len(stream.queue) >= self.queue_length:
                return False
            stream.queue.append(operation)
            stream.num_enqueued += 1
            self._busy[stream.handle] = stream
            return True

        self.wait(name, has_room, f"{name}: the queue is full and nothing moves")

    def _refuse_use_after_free(self, name: str, operation: Operation) -> None:
        """An array may end while operations that use it are on streams, but no new ones may come.

        Only the process itself can know: in the memory of others arrays come and go.
        """
        for used in operation.ranges:
            allocation = self.memory.find(used.address)
            if used.size and allocation is not None and not allocation.has_array(used):
                sentence = (
                    f"{name}: {operation.what}: {used}, which are not in one array that exists"
                )
                self._break(ILLEGAL_ADDRESS, sentence)
                raise DriverError(name, self.error)

    def _objection(self, operation: Operation) -> str:
        """Why an operation must not be executed, if it must not."""
        if operation.counter is not None and not self.is_registered(operation.counter):
            return f"the word at {operation.counter:#x} is not in page-locked memory"
        return next(filter(None, map(self.memory.objection, operation.ranges)), "")

    def _break(self, code: int, sentence: str) -> None:
        """Something happened after which a GPU serves this process no longer."""
        self.violations.append(sentence)
        self.error = self.error or code
        self._drop_operations()

    def _drop_operations(self) -> None:
        for stream in self._busy.values():
            for operation in stream.queue:
                if operation.mark is not None:
                    operation.mark.pass_by()
            stream.queue.clear()
        self._busy.clear()

    def execute(self, budget: int) -> int:
        """Execute operations that are ready, at most so many; return how many.

        A destructor of Python's may call this while operations are executed: it does nothing then.
        """
        num_executed = 0
        with self.lock:
            while self.lock.depth == 1 and num_executed < budget and self._execute_one():
                num_executed += 1
        return num_executed

    def _execute_one(self) -> bool:
        """Execute the first operation of any stream where it is ready, if there is one."""
        streams = [stream for stream in self._busy.values() if not self._stands_still(stream)]
        ready = [stream for stream in streams if self._is_ready(stream.queue[0])]
        if not ready:
            return False
        stream = self.random.choice(ready)
        operation = stream.queue[0]
        if operation.run is None or self._has_ended(stream, operation, operation.run):
            if self.error:  # then there is no operation any more
                return True
            stream.queue.popleft()
            if not stream.queue:
                del self._busy[stream.handle]
            if operation.run is None:
                self._execute(stream, operation)
        self._num_executed += 1
        self.num_left -= self._may_stand_still(stream)
        return True

    def _may_stand_still(self, stream: Stream) -> bool:
        return self.standing is None or stream.handle in self.standing

    def _stands_still(self, stream: Stream) -> bool:
        return not self.num_left and self._may_stand_still(stream)

    def _is_ready(self, operation: Operation) -> bool:
        # The word of a wait may not exist any more; to execute the wait says so.
        is_lost = operation.counter is not None and not self.is_registered(operation.counter)
        return is_lost or operation.is_ready()

    def _has_ended(self, stream: Stream, operation: Operation, run: KernelRun) -> bool:
        """Execute a part of an operation; return whether it was the last one."""
        if not run.has_begun:
            self._keep_in_order(stream.handle, operation)
            run.begin(self.races.of(stream.handle))
        try:
            with np.errstate(all="ignore"):
                has_ended = run.step(self.random.choice)
        except IllegalUseError as error:
            self._break(ILLEGAL_ADDRESS, f"stream {stream.handle:#x}: {operation.what}: {error}")
            return True
        self.violations += run.violations
        run.violations.clear()
        if has_ended:
            self.races.begin(stream.handle, *run.clocks())
        return has_ended

    def _execute(self, stream: Stream, operation: Operation) -> None:
        place = f"stream {stream.handle:#x}: {operation.what}"
        if objection := self._objection(operation):
            self._break(ILLEGAL_ADDRESS, f"{place}: {objection}")
        else:
            self._keep_in_order(stream.handle, operation)
            try:
                with np.errstate(all="ignore"):  # as on a GPU
                    operation.execute()
            except BaseException as error:  # noqa: BLE001 - whoever is here did not call it
                self._break(LAUNCH_FAILED, f"{place}: {error!r}")
        if operation.mark is not None:
            operation.mark.pass_by()

    def _keep_in_order(self, stream: int, operation: Operation) -> None:
        """Note what comes before an operation, and what it does in no order with others."""
        races, word, value = self.races, operation.counter, operation.value
        before = [operation.known]
        if operation.awaited is not None:
            before.append(operation.awaited.clock)
        if word is not None and not operation.is_raising:
            before.append(races.raised(word, value))
        clock = races.begin(stream, *before)
        if operation.mark is not None:
            operation.mark.clock = clock
        if word is not None and operation.is_raising:
            why = races.raise_to(stream, word, value, _word(word).value)
            self.violations += [why] if why else []
        for used in sorted(operation.ranges, key=lambda used: used.is_written):
            if used.size and operation.run is None:
                number, what = clock[stream], operation.what
                use = Use(used.address, used.end, stream, number, used.is_written, what)
                self.violations += races.use(use)

    def wait(self, name: str, is_over: Callable[[], bool], who: str) -> None:
        """Execute operations until `is_over`; others may go on in between.

        Raises DriverError if nothing moves for too long, which is a violation.
        """
        seen, since = -1, 0.0
        while True:
            with self.lock:
                if self.error:
                    raise DriverError(name, self.error)
                if is_over():
                    return
                if self.lock.depth > 1:
                    self._give_up(name, f"{who}, in an operation or a destructor")
                if self._execute_one():
                    continue
                if seen != self._num_executed:
                    seen, since = self._num_executed, time.monotonic()
                elif time.monotonic() - since > self.limit:
                    self._give_up(name, who)
            time.sleep(NAP)

    def _give_up(self, name: str, who: str) -> None:
        where = [
            f"stream {stream.handle:#x} waits for {stream.queue[0]}"
            for stream in self._busy.values()
            if not self._is_ready(stream.queue[0])
        ]
        self.violations.append(", and ".join([who, *where]))
        raise DriverError(name, UNKNOWN)

    def wait_for_all(self, name: str) -> None:
        """Wait until all that is on any stream now is executed, as some functions of CUDA may."""
        with self.lock:
            marks = self.marks()
        self.wait(name, lambda: self.is_passed(marks), f"{name} waits for all streams")
        self._see(marks)

    def _see(self, streams: Iterable[int]) -> None:
        """Note that the host has seen what some streams have executed."""
        with self.lock:
            for handle in streams:
                self.races.see(self.races.of(handle))

    def wait_for(self, name: str, handle: int) -> None:
        """Wait until all that is on one stream now is executed."""
        with self.lock:
            marks = {handle: self.stream(name, handle).num_enqueued}
        self.wait(name, lambda: self.is_passed(marks), f"{name} waits for stream {handle:#x}")
        self._see(marks)


class Kernel(NamedTuple):
    """A kernel: the operation that it is with its parameters, and the words of each of these.

    `is_cooperative`: whether its blocks wait for each other.
    """

    operation: Callable[..., Operation]
    sizes: Sequence[int]
    is_cooperative: bool = False

    def launched(self, parameters: int, *grid: int) -> Operation:
        """The operation, with the parameters to which there are pointers."""
        pointers = (_WORD * len(self.sizes)).from_address(parameters)
        values = [
            list((_WORD * size).from_address(pointer))
            for pointer, size in zip(pointers, self.sizes, strict=True)
        ]
        return self.operation(*values, *grid)


class FakeKernels:
    """The kernels of the library, by numbers in place of addresses."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._addresses: dict[tuple[str, np.dtype[Any]], int] = {}
        self.by_address: dict[int, Kernel] = {}
        self._are_lost = False

    @contextmanager
    def lost(self) -> Iterator[None]:
        """Meanwhile no address is that of a kernel."""
        known, self.by_address, self._are_lost = self.by_address, {}, True
        try:
            yield
        finally:
            self.by_address, self._are_lost = known, False

    def unload(self) -> None:
        """Let all kernels be loaded again, as in a process that has not loaded any."""
        self._addresses.clear()

    def combine(self, function: str, dtype: np.dtype[Any]) -> int | None:
        """See `collectives.devices.driver.Kernels`."""
        if not _is_served(dtype) or kind(dtype) not in KINDS.get(function, ""):
            return None
        kernel = Kernel(partial(self._combination, function, dtype), (1,) * 12)
        return self._address(function, dtype, kernel)

    def divide(self, dtype: np.dtype[Any]) -> int | None:
        """See `collectives.devices.driver.Kernels`."""
        if not _is_served(dtype) or kind(dtype) not in "fc":
            return None
        return self._address("divide", dtype, Kernel(partial(self._division, dtype), (1,) * 3))

    def interpret(self, function: str | None, dtype: np.dtype[Any]) -> int | None:
        """See `collectives.devices.driver.Kernels`."""
        is_served = function is None or self.combine(function, dtype) is not None
        if not self._gpu.has_interpreter or not is_served:
            return None
        sizes = kernel_program.NUM_WORDS, 1
        kernel = Kernel(partial(self._program, function, dtype), sizes, is_cooperative=True)
        return self._address(f"interpret {function}", dtype, kernel)

    def _program(
        self,
        function: str | None,
        dtype: np.dtype[Any],
        words: list[int],
        run: list[int],
        num_blocks: int,
        stream: int,
    ) -> Operation:
        program, agents = ProgramWords(words, *run), self._gpu.agents(stream, num_blocks)
        parts = KernelRun(program, function, dtype, self._gpu, self._gpu.races, agents)
        ranges = [Range(*bounds) for bounds in program.ranges()]
        what = f"run {run[0]} of a program"
        return Operation(what, ranges=ranges, is_ready=parts.can_move, run=parts)

    def _address(self, function: str, dtype: np.dtype[Any], kernel: Kernel) -> int:
        """The number of a kernel; the first time it is loaded, which waits for all streams."""
        name = f"the first request for the kernel {function} of {dtype}"
        self._gpu.begin("kernels")
        if self._are_lost:
            return 1
        if (function, dtype) not in self._addresses:
            self._gpu.wait_for_all(name)
        with self._gpu.lock:
            address = self._addresses.setdefault((function, dtype), self._gpu.new_handle())
            self.by_address.setdefault(address, kernel)
            return address

    def _combination(self, name: str, dtype: np.dtype[Any], *grid: Any) -> Operation:
        (result,), (lefts,), (num_operands,), (num_elements,) = grid[:4]
        addresses = [address for (address,) in grid[4:12]]
        if not 1 <= num_operands <= len(addresses) or num_elements < 0:
            raise DriverError("cuLaunchKernel", INVALID_VALUE)
        size = num_elements * dtype.itemsize
        reads = [Range(address, size) for address in addresses[:num_operands]]
        ranges = [Range(result, size, is_written=True), *reads]

        def execute() -> None:
            target, first, *others = (self._view(operand, dtype) for operand in ranges)
            target[...] = combined(name, first, others, lefts)

        return Operation(f"{name} of {num_operands} operands of {dtype}", execute, ranges)

    def _division(self, dtype: np.dtype[Any], *grid: Any) -> Operation:
        (address,), (num_elements,), (divisor,) = grid[:3]
        if num_elements < 0:
            raise DriverError("cuLaunchKernel", INVALID_VALUE)
        ranges = [Range(address, num_elements * dtype.itemsize, is_written=True)]

        def execute() -> None:
            HOST.divide(self._view(ranges[0], dtype), divisor)

        return Operation(f"division of {dtype} by {divisor}", execute, ranges)

    def _view(self, used: Range, dtype: np.dtype[Any]) -> np.ndarray:
        return self._gpu.memory.view(used.address, used.size).view(dtype)


def _is_served(dtype: np.dtype[Any]) -> bool:
    """Whether a GPU can compute with a dtype; it has no `long double`."""
    return dtype.isnative and dtype.char not in "gG"


class FakeGpu(Streams):
    """The GPU of this process.

    `driver`: what the library uses.  `num_calls`: of each function of the driver.  `bytes_copied`:
    by the copies that were enqueued.  `capturing`: the streams that claim to be captured for a
    graph.  `waiting_for_captured`: those that wait for such a stream, as the legacy stream does.
    `num_queries_refused`: of events, because another thread captures a stream.  `uuid`: the 16
    bytes that identify the GPU, the same in every process unless a test gives each a GPU of its
    own.  `num_devices`: how many GPUs the driver claims to have; there is one.  `has_interpreter`:
    whether there is a kernel that runs programs, with room for `num_blocks_at_once`.
    `seconds_between`: any two timed events; 0: what really passes.
    """

    has_interpreter, num_blocks_at_once, seconds_between = False, 12, 0.0

    def __init__(self) -> None:
        super().__init__(DeviceMemory())
        self.num_calls: Counter[str] = Counter()
        self.bytes_copied = {"DtoD": 0, "DtoH": 0, "HtoD": 0}
        self.capturing: set[int] = set()
        self.waiting_for_captured: set[int] = set()
        self.num_queries_refused = 0
        self.uuid, self.num_devices = b"GPU of the tests", 1
        self._thread = threading.local()
        self.kernels = FakeKernels(self)
        self._agents: dict[int, list[int]] = {}
        self._pool = Pool(self.memory)
        self._functions = Functions(self)
        self.driver = Driver(self._functions.addresses, self.kernels)
        self.driver.most_outstanding = self.queue_length - 6

    def reset(self, seed: int = 0, queue_length: int = 64) -> None:
        """Begin anew with a seed.  Raises AssertionError if there were violations.

        Memory, streams, events, handles and page-locked memory stay; operations that are still on
        streams are dropped, because the host memory that they use may be gone.
        """
        self.make_current()
        with self.lock:
            self._drop_operations()
            self.random, self.queue_length = random.Random(seed), queue_length
            # Room for what a call puts on its stream before and after its program.
            self.driver.most_outstanding = max(queue_length - 6, 1)
            self.error, self.num_left, self.standing = 0, math.inf, None
            self.num_calls.clear()
            self.streams_used.clear()
            self.bytes_copied.update(dict.fromkeys(self.bytes_copied, 0))
            self.races = Races()
            self.check()

    def make_current(self) -> None:
        """Let this thread call the driver, until it ends."""
        self._thread.has_context = True

    def check(self) -> None:
        """Raise AssertionError with all violations, if there are any, and forget them."""
        with self.lock:
            text = "\n".join(self.violations)
            self.violations.clear()
        if text:
            raise AssertionError(text)

    def begin(self, name: str, budget: int = 3) -> None:
        """What precedes every function: others have had time, so some operations are executed.

        Raises DriverError if the GPU serves this process no longer, or this thread has no context.
        """
        if name not in WITHOUT_CONTEXT and not getattr(self._thread, "has_context", False):
            raise DriverError(name, INVALID_CONTEXT)
        with self.lock:
            self.num_calls[name] += 1
            num_operations = self.random.randint(0, budget) if self.lock.depth == 1 else 0
        self.execute(num_operations)
        with self.lock:
            self._sweep()
            if self.error:
                raise DriverError(name, self.error)

    def _sweep(self) -> None:
        if self.lock.depth == 1:  # a destructor may be here while the pool is being changed
            self._pool.sweep(self.marks, self.is_passed)

    def progress(self) -> int:
        """Execute some operations that are ready, or none; return how many."""
        with self.lock:
            self._sweep()
            budget = self.random.randint(0, 24)
        return self.execute(budget)

    def go_on_alone(self) -> None:
        """From now on, execute operations now and then although nobody calls, as a GPU does.

        It ends before Python exits: a daemon that Python stops may hold the lock for ever.
        """
        is_over = threading.Event()

        def work() -> None:
            while not is_over.wait(20 * NAP):
                self.progress()

        def end() -> None:
            is_over.set()
            thread.join(10)

        thread = threading.Thread(target=work, daemon=True, name="fake GPU")
        thread.start()
        atexit.register(end)

    def allocate(self, num_bytes: int) -> int:
        """The address of an allocation, full of garbage; without waiting for any stream."""
        with self.lock:
            address = self.memory.allocate(num_bytes).base
            self.memory.view(address, num_bytes)[...] = GARBAGE
            self.races.forget(address, num_bytes)
            return address

    def free(self, address: int) -> None:
        """Free an allocation at once, whatever streams still do with it."""
        with self.lock:
            if openers := self.memory.free(address):
                who = " and ".join(map(str, openers))
                self.violations.append(f"memory was freed that process {who} has open")

    def array(
        self, shape: int | tuple[int, ...], dtype: Any, exportable: bool = True
    ) -> np.ndarray:
        """An array of garbage in device memory, which ends with the last view of it.

        `exportable`: whether there is a handle for its allocation; not so for cudaMallocAsync.
        """
        with self.lock:
            self._sweep()
            shape = (shape,) if isinstance(shape, int) else tuple(shape)
            array = self._pool.array(shape, np.dtype(dtype), exportable)
            self.races.forget(array.ctypes.data, array.nbytes)
            return array

    def has_array_at(self, address: int) -> bool:
        """Whether an array that has not ended begins there."""
        with self.lock:
            self._sweep()
            return self._pool.has_array_at(address)

    def trim(self) -> None:
        """Free the allocations that have no arrays any more, after waiting for all streams."""
        self.wait_for_all("trim")
        with self.lock:
            self._sweep()
            for allocation in self._pool.trim():
                self.free(allocation.base)

    def enqueue(
        self, stream: int, function: Callable[[], object], ranges: Iterable[Sequence[int]] = ()
    ) -> None:
        """Put a function of Python's on a stream.

        `ranges`: the device memory that it uses, (address, size) or (address, size, is_written).
        """
        operation = Operation("a function", function, [Range(*used) for used in ranges])
        self.put("cuLaunchHostFunc", stream, operation)

    def agents(self, stream: int, num_blocks: int) -> list[int]:
        """The numbers of the blocks of kernels on a stream, which no stream has."""
        with self.lock:
            agents = self._agents.setdefault(stream, [])
            while len(agents) < num_blocks:
                agents.append(self.new_handle())
            return agents[:num_blocks]

    def view(self, address: int, size: int) -> Bytes:
        """The bytes of a range."""
        return self.memory.view(address, size)

    def why_not(self, address: int, size: int, is_written: bool) -> str:
        """Why a kernel must not use a range; "" if it may."""
        return self.memory.objection(Range(address, size, is_written))

    def counter(self, address: int) -> np.ndarray:
        """A counter of this process or of another one, which a kernel may write."""
        allocation = self.memory.find(address)
        assert allocation is not None
        start = address - allocation.file.base
        return allocation.file.writable[start : start + 8].view(np.int64)

    def mark(self, stream: int, what: str = "a mark") -> Mark:
        """A mark behind all that is on a stream now."""
        mark = Mark()
        self.put("cuEventRecord", stream, Operation(what, mark=mark))
        return mark

    def wait_for_mark(self, stream: int, mark: Mark, what: str = "a mark") -> None:
        """Let a stream wait until a mark is passed."""
        wait = Operation(what, awaited=mark, is_ready=lambda: mark.is_passed)
        self.put("cuStreamWaitEvent", stream, wait)

    def see(self, mark: Mark) -> bool:
        """Whether a mark is passed, for the host to know."""
        with self.lock:
            if mark.is_passed:
                self.races.see(mark.clock)
            return mark.is_passed

    def synchronize(self, stream: int | None = None) -> None:
        """Wait until all that is on a stream, or on any, is executed."""
        if stream is None:
            self.wait_for_all("cuCtxSynchronize")
        else:
            self.wait_for("cuStreamSynchronize", stream)


class Functions:
    """The functions of the driver, for callers that know only their addresses."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._events: dict[int, Mark | None] = {}  # where each was recorded last
        self._timed: set[int] = set()
        bodies = self._bodies()
        assert bodies.keys() == FUNCTIONS.keys()
        self._callbacks = {name: self._callback(name, body) for name, body in bodies.items()}
        self.addresses = {
            name: ctypes.cast(callback, ctypes.c_void_p).value or 0
            for name, callback in self._callbacks.items()
        }

    def _bodies(self) -> dict[str, Callable[..., None]]:
        return {
            "cuCtxGetDevice": self._device,
            "cuDeviceGetAttribute": self._device_attribute,
            "cuDeviceGetCount": self._count,
            "cuDeviceGetUuid_v2": self._uuid,
            "cuEventCreate": self._create_event,
            "cuEventDestroy_v2": self._destroy_event,
            "cuEventElapsedTime": self._time_between,
            "cuEventQuery": self._query_event,
            "cuEventRecord": self._record_event,
            "cuIpcCloseMemHandle": self._close,
            "cuIpcGetMemHandle": self._handle,
            "cuIpcOpenMemHandle_v2": self._open,
            "cuLaunchCooperativeKernel": self._launch_together,
            "cuLaunchKernel": self._launch,
            "cuMemAlloc_v2": self._allocate,
            "cuMemFree_v2": self._free,
            "cuMemGetAddressRange_v2": self._address_range,
            "cuMemHostRegister_v2": self._register,
            "cuMemHostUnregister": self._unregister,
            "cuMemcpyDtoDAsync_v2": self._copy_on_device,
            "cuMemcpyDtoHAsync_v2": self._copy_to_host,
            "cuMemcpyHtoDAsync_v2": self._copy_to_device,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": self._occupancy,
            "cuPointerGetAttribute": self._attribute,
            "cuStreamBatchMemOp_v2": self._memory_operations,
            "cuStreamCreate": self._create_stream,
            "cuStreamIsCapturing": self._is_capturing,
            "cuStreamSynchronize": self._synchronize,
            "cuStreamWaitEvent": self._wait_event,
            "cuThreadExchangeStreamCaptureMode": self._exchange_mode,
        }

    def _callback(self, name: str, body: Callable[..., None]) -> Any:
        budget = 24 if name == "cuEventQuery" else 3

        def called(*arguments: Any) -> int:
            try:
                self._gpu.begin(name, budget)
                body(*(argument or 0 for argument in arguments))  # a null pointer is None
            except DriverError as error:
                return error.code
            except BaseException as error:  # noqa: BLE001 - ctypes would drop it and return 0
                self._gpu.violations.append(f"{name}: {error!r}")
                return UNKNOWN
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS[name])(called)

    def _device(self, device: int) -> None:
        _store(ctypes.c_int, device, 0)

    def _count(self, number: int) -> None:
        _store(ctypes.c_int, number, self._gpu.num_devices)

    def _uuid(self, uuid: int, device: int) -> None:
        if device or not uuid:
            raise DriverError("cuDeviceGetUuid_v2", INVALID_VALUE)
        ctypes.memmove(uuid, self._gpu.uuid, 16)

    def _create_stream(self, stream: int, flags: int) -> None:
        if flags != NON_BLOCKING:
            raise DriverError("cuStreamCreate", INVALID_VALUE)
        _store(_WORD, stream, self._gpu.new_stream())

    def _create_event(self, event: int, flags: int) -> None:
        with self._gpu.lock:
            handle = self._gpu.new_handle()
            _store(_WORD, event, handle)
            self._events[handle] = None
            if not flags & DISABLE_TIMING:
                self._timed.add(handle)

    def _mark(self, name: str, event: int) -> Mark | None:
        if event not in self._events:
            raise DriverError(name, INVALID_HANDLE)
        return self._events[event]

    def _destroy_event(self, event: int) -> None:
        with self._gpu.lock:
            self._mark("cuEventDestroy_v2", event)
            del self._events[event]

    def _time_between(self, milliseconds: int, start: int, end: int) -> None:
        name = "cuEventElapsedTime"
        with self._gpu.lock:
            marks = [self._mark(name, event) for event in (start, end)]
            if not {start, end} <= self._timed or None in marks:
                raise DriverError(name, INVALID_HANDLE)
            if not all(mark.is_passed for mark in marks):
                raise DriverError(name, NOT_READY)
            took = marks[1].time - marks[0].time
            _store(ctypes.c_float, milliseconds, (self._gpu.seconds_between or took) * 1e3)

    def _query_event(self, event: int) -> None:
        with self._gpu.lock:
            mark = self._mark("cuEventQuery", event)
            if self._gpu.num_queries_refused:
                self._gpu.num_queries_refused -= 1
                raise DriverError("cuEventQuery", CAPTURE_UNSUPPORTED)
            if mark is not None and not self._gpu.see(mark):
                raise DriverError("cuEventQuery", NOT_READY)

    def _record_event(self, event: int, stream: int) -> None:
        with self._gpu.lock:
            self._mark("cuEventRecord", event)
        mark = self._gpu.mark(stream, f"event {event:#x}")
        with self._gpu.lock:
            self._events[event] = mark

    def _wait_event(self, stream: int, event: int, flags: int) -> None:
        with self._gpu.lock:
            mark = self._mark("cuStreamWaitEvent", event)
        if flags:
            raise DriverError("cuStreamWaitEvent", INVALID_VALUE)
        if mark is None:  # as in CUDA: an event that was never recorded is over
            mark = Mark()
            mark.is_passed = True
        self._gpu.wait_for_mark(stream, mark, f"event {event:#x}")

    def _handle(self, handle: int, address: int) -> None:
        with self._gpu.lock:
            ctypes.memmove(handle, self._gpu.memory.handle(address), ctypes.sizeof(IpcHandle))

    def _open(self, address: int, handle: IpcHandle, flags: int) -> None:
        if flags != LAZY_PEER_ACCESS:
            raise DriverError("cuIpcOpenMemHandle_v2", INVALID_VALUE)
        self._gpu.wait_for_all("cuIpcOpenMemHandle_v2")
        with self._gpu.lock:
            _store(_WORD, address, self._gpu.memory.open(bytes(handle.bytes)))

    def _close(self, address: int) -> None:
        self._gpu.wait_for_all("cuIpcCloseMemHandle")
        with self._gpu.lock:
            self._gpu.memory.close(address)

    def _allocate(self, address: int, num_bytes: int) -> None:
        self._gpu.wait_for_all("cuMemAlloc_v2")
        _store(_WORD, address, self._gpu.allocate(num_bytes))

    def _free(self, address: int) -> None:
        self._gpu.wait_for_all("cuMemFree_v2")
        self._gpu.free(address)

    def _found(self, name: str, address: int) -> Allocation:
        allocation = self._gpu.memory.find(address)
        if allocation is None:
            raise DriverError(name, INVALID_VALUE)
        return allocation

    def _address_range(self, base: int, size: int, address: int) -> None:
        with self._gpu.lock:
            allocation = self._found("cuMemGetAddressRange_v2", address)
        for pointer, value in ((base, allocation.base), (size, allocation.size)):
            if pointer:  # either is optional
                _store(_WORD, pointer, value)

    def _attribute(self, value: int, attribute: int, address: int) -> None:
        with self._gpu.lock:
            allocation = self._found("cuPointerGetAttribute", address)
        if attribute != BUFFER_ID:
            raise DriverError("cuPointerGetAttribute", INVALID_VALUE)
        _store(_WORD, value, allocation.buffer_id)

    def _register(self, address: int, size: int, flags: int) -> None:
        self._gpu.wait_for_all("cuMemHostRegister_v2")
        if not address or size <= 0:
            raise DriverError("cuMemHostRegister_v2", INVALID_VALUE)
        with self._gpu.lock:
            registered = self._gpu.registered
            others = registered.items()
            if any(start < address + size and address < start + n for start, n in others):
                raise DriverError("cuMemHostRegister_v2", ALREADY_REGISTERED)
            registered[address] = size

    def _unregister(self, address: int) -> None:
        """Operations that are left must not touch the memory, which its owner may give up now."""
        if address not in self._gpu.registered:
            raise DriverError("cuMemHostUnregister", NOT_REGISTERED)
        try:
            self._gpu.wait_for_all("cuMemHostUnregister")
        finally:
            with self._gpu.lock:
                self._gpu.registered.pop(address, None)

    def _copy_on_device(self, target: int, source: int, size: int, stream: int) -> None:
        ranges = Range(target, size, is_written=True), Range(source, size)
        self._copy("DtoD", target, source, size, ranges, stream)

    def _copy_to_host(self, target: int, source: int, size: int, stream: int) -> None:
        self._copy("DtoH", target, source, size, [Range(source, size)], stream)

    def _copy_to_device(self, target: int, source: int, size: int, stream: int) -> None:
        ranges = [Range(target, size, is_written=True)]
        self._copy("HtoD", target, source, size, ranges, stream)

    def _copy(
        self, way: str, target: int, source: int, size: int, ranges: Sequence[Range], stream: int
    ) -> None:
        """Copy when it is executed; until then the source may change, and must not."""
        name = f"cuMemcpy{way}Async_v2"
        if size < 0 or (size and not (target and source)):
            raise DriverError(name, INVALID_VALUE)
        self._forbid_overlap(name, ranges)

        def copy() -> None:
            ctypes.memmove(target, source, size)

        self._gpu.put(name, stream, Operation(f"a copy of {size} bytes, {way}", copy, ranges))
        with self._gpu.lock:
            self._gpu.bytes_copied[way] += size

    def _forbid_overlap(self, name: str, ranges: Sequence[Range]) -> None:
        """What an operation writes it may read only at the same place."""
        for used, other in itertools.permutations(ranges, 2):
            is_common = used.address < other.end and other.address < used.end
            if used.is_written and is_common and used.address != other.address:
                self._gpu.violations.append(f"{name}: {used}, which overlap what it reads")

    def _launch(self, address: int, *arguments: int) -> None:
        """Enqueue a kernel; its parameters are read now, as CUDA does, and may change then."""
        *shape, extra = arguments
        if extra:
            raise DriverError("cuLaunchKernel", INVALID_VALUE)
        self._launch_kernel("cuLaunchKernel", address, *shape)

    def _launch_together(self, address: int, *shape: int) -> None:
        """Enqueue a kernel whose blocks wait for each other; all of them must have room."""
        self._launch_kernel("cuLaunchCooperativeKernel", address, *shape, is_cooperative=True)

    def _launch_kernel(
        self, name: str, address: int, *shape: int, is_cooperative: bool = False
    ) -> None:
        *sizes, _, stream, parameters = shape
        kernel = self._gpu.kernels.by_address.get(address)
        if kernel is None or kernel.is_cooperative != is_cooperative:
            raise DriverError(name, INVALID_HANDLE)
        is_too_large = is_cooperative and sizes[0] > self._gpu.num_blocks_at_once
        if not all(sizes) or math.prod(sizes[3:]) > 1024 or is_too_large or not parameters:
            raise DriverError(name, INVALID_VALUE)
        operation = kernel.launched(parameters, sizes[0], stream)
        if operation.run is None:
            self._forbid_overlap(name, operation.ranges)
        self._gpu.put(name, stream, operation)

    def _device_attribute(self, value: int, attribute: int, device: int) -> None:
        if attribute != NUM_MULTIPROCESSORS or device:
            raise DriverError("cuDeviceGetAttribute", INVALID_VALUE)
        _store(ctypes.c_int, value, self._gpu.num_blocks_at_once)

    def _occupancy(self, num_blocks: int, kernel: int, num_threads: int, shared: int) -> None:
        if kernel not in self._gpu.kernels.by_address or not num_threads or shared:
            raise DriverError("cuOccupancyMaxActiveBlocksPerMultiprocessor", INVALID_VALUE)
        _store(ctypes.c_int, num_blocks, 1)

    def _memory_operations(self, stream: int, count: int, words: int, flags: int) -> None:
        if not 1 <= count < 256 or flags or not words:
            raise DriverError("cuStreamBatchMemOp_v2", INVALID_VALUE)
        table = (ctypes.c_uint64 * MEMORY_OPERATION_WORDS * count).from_address(words)
        operations = [self._memory_operation(*row[:4]) for row in table]
        self._gpu.put("cuStreamBatchMemOp_v2", stream, *operations)

    def _memory_operation(self, which: int, address: int, value: int, flags: int) -> Operation:
        which, value, flags = (_UNSIGNED(word).value for word in (which, value, flags))
        if which not in (WAIT_VALUE, WRITE_VALUE) or flags or address % 4:
            raise DriverError("cuStreamBatchMemOp_v2", INVALID_VALUE)
        if which == WRITE_VALUE:
            what = f"a write of {value} to the word at {address:#x}"
            write = partial(_store, _UNSIGNED, address, value)
            return Operation(what, write, counter=address, value=value, is_raising=True)
        what = f"the word at {address:#x} to reach {value}"
        is_ready = partial(has_reached, address, value)
        return Operation(what, counter=address, value=value, is_ready=is_ready)

    def _is_capturing(self, stream: int, status: int) -> None:
        self._gpu.stream("cuStreamIsCapturing", stream)
        if stream in self._gpu.waiting_for_captured:
            raise DriverError("cuStreamIsCapturing", CAPTURE_IMPLICIT)
        _store(ctypes.c_int, status, int(stream in self._gpu.capturing))

    def _exchange_mode(self, mode: int) -> None:
        if ctypes.c_int.from_address(mode).value not in (0, 1, 2):
            raise DriverError("cuThreadExchangeStreamCaptureMode", INVALID_VALUE)
        _store(ctypes.c_int, mode, 0)

    def _synchronize(self, stream: int) -> None:
        self._gpu.wait_for("cuStreamSynchronize", stream)


def _store(ctype: Any, address: int, value: int) -> None:
    if not address:
        raise ValueError("the address of the result is null")
    ctype.from_address(address).value = value


def has_reached(address: int, value: int) -> bool:
    """Whether a counter is at least `value`, which may be on its second round."""
    return ctypes.c_int32(_word(address).value - value).value >= 0


_making = threading.Lock()
_made: list[FakeGpu] = []


def gpu() -> FakeGpu:
    """The GPU of this process."""
    with _making:
        if not _made:
            _made.append(FakeGpu())
        return _made[0]


def reset(seed: int = 0, queue_length: int = 64) -> None:
    """Begin anew with a seed; see `FakeGpu.reset`."""
    gpu().reset(seed, queue_length)


def _forget() -> None:
    """A process that was forked has a GPU of its own."""
    global _making
    _making = threading.Lock()  # another thread may have held the old one
    _made.clear()


os.register_at_fork(after_in_child=_forget)
