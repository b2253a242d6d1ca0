"""The links between the devices of a communicator's ranks: which can read each other's memory.

The ranks of a host agree on it at the first call on a device.  Each rank reads a pattern out of the
memory of every other rank, and their streams await each other once: what a device says of its
abilities is not asked.  Pairs for which that fails are staged, as are ranks of other hosts.  If all
ranks read each other, they also find out whether their kernels can wait for each other.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from collectives.arrays import Backend
from collectives.devices.allocations import Buffer, Exports, openings_of
from collectives.devices.check import Check, until
from collectives.devices.concurrency import Handshake, counters_of, refuse
from collectives.devices.driver import (
    MAPPED,
    MEMORY_OPERATION_WORDS,
    NOT_READY,
    PORTABLE,
    WAIT_VALUE,
    WRITE_VALUE,
    Driver,
    DriverError,
)
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.shadow import Allocation, give_back
from collectives.devices.sharing import tell_of_sharing
from collectives.devices.streams import STREAMS, Stream
from collectives.engines import Board, CallKey

_PATTERN_WORDS = 64
_PATTERN_BYTES = 8 * _PATTERN_WORDS
_COUNTERS = 2  # the number of their buffer in a proposal; the others have the pattern
_SECONDS = 5.0  # within which a stream sees what another one has written
_ANSWERED = 1 << 62  # a verdict that no bit of a rank makes 0
_FAILED = 1 << 61  # in a verdict of a rank whose stream has not written its counters

# Answers to whether kernels of the ranks can wait for each other; LACKING: this call has no kernel.
UNTRIED, YES, NO, LACKING = range(4)

_OTHERS = "another rank finds that its kernels cannot wait"
_ABANDONED = "a call was abandoned in which the ranks tried it"

Pair = tuple[int, int]
PROCESS = int.from_bytes(os.urandom(7), "little")  # two containers may have a process of one number
_users = itertools.count(1)  # the numbers of links in this process


def pattern(process: int) -> Any:
    """Return the words that the ranks of a process let the others read."""
    return np.random.default_rng(process).integers(0, 2**63, _PATTERN_WORDS, np.int64)


class Links:
    """The links of one rank of a communicator, for one device.

    Attributes
    ----------
    staged : frozenset of (int, int) or None
        The pairs of ranks of this host that cannot read each other's memory; None until all ranks
        have agreed.
    by_mpi : str
        The link of messages between such ranks, and between hosts.
    why : dict of int to str
        Why this rank cannot read the memory of another rank; "" if it can.
    why_last_staged : str
        Why the last call that was staged was staged.
    why_lost : str
        Why this rank does not know what the others may have agreed on, so that it stages all calls;
        "" if it knows.
    why_no_kernels : str or None
        Why kernels of the ranks cannot wait for each other, as far as this rank knows; "" if they
        can; None until they have tried.
    counters : dict of int to int
        The addresses, in this process, of the ranks' counters for kernels.
    """

    why_last_staged = why_lost = ""
    why_no_kernels: str | None = None
    _counters: Allocation | None = None

    def __init__(self, board: Board, backend: Backend, driver: Driver, by_mpi: str) -> None:
        self.board, self.backend, self.driver, self.by_mpi = board, backend, driver, by_mpi
        self.process, self.exports = PROCESS, Exports(driver)
        self._openings = openings_of(driver)
        self.user = next(_users)
        self.staged: frozenset[Pair] | None = None
        self.why: dict[int, str] = {}
        self.uuids: dict[int, bytes] = {}
        self.uuid = driver.uuid()
        self.counters: dict[int, int] = {}

    @property
    def can_try_kernels(self) -> bool:
        """Whether kernels of the ranks may be able to wait for each other.

        Threads are not tried: a call of CUDA in one of them may wait for the kernels of all.
        """
        return self.board.has_all_ranks and not self.is_of_one_process

    @property
    def answer_on_kernels(self) -> int:
        """UNTRIED, YES or NO: whether kernels of the ranks can wait for each other."""
        return UNTRIED if self.why_no_kernels is None else NO if self.why_no_kernels else YES

    def agree_on_kernels(self, answers: Collection[int]) -> int:
        """Return what the answers of all ranks mean for a call; a NO holds for all later calls."""
        if NO in answers:
            self.why_no_kernels = self.why_no_kernels or _OTHERS
        return next((answer for answer in (NO, LACKING) if answer in answers), min(answers))

    def describe_counters(self) -> Buffer:
        """Return the memory of this rank's counters for kernels; empty if the rank has none.

        It is allocated at first use, and stays open as long as the communicator.
        """
        try:
            if self._counters is None and self.can_try_kernels:
                self._counters = counters_of(self.driver, len(self.board.parts))
        except DriverError:  # then there are no kernels
            return Buffer(0, 0)
        if self._counters is None:
            return Buffer(0, 0)
        memory = self._counters
        buffer = self.describe(memory.address, memory.num_bytes, memory)
        if buffer.id:
            self.exports.pin([buffer.id])
        return buffer

    def is_peer(self, rank: int) -> bool:
        """Return whether this rank and another one can read each other's memory."""
        pair = min(rank, self.board.rank), max(rank, self.board.rank)
        is_local = self.board.parts[rank] is not None
        return is_local and self.staged is not None and pair not in self.staged

    def link(self, rank: int) -> str:
        """Return how the messages of this rank reach another one; see `Row.link` of ledgers."""
        if not self.is_peer(rank):
            return self.by_mpi
        return "thread" if self.is_of_one_process else "peer"

    @property
    def why_any_staged(self) -> str:
        """Why some pair of ranks is staged; "" if none is."""
        others = (rank for rank in range(len(self.board.parts)) if rank != self.board.rank)
        staged = next((rank for rank in others if not self.is_peer(rank)), None)
        if staged is not None:
            return f"rank {staged} is staged: {self.why.get(staged) or 'it is on another host'}"
        return "another pair of ranks is staged" if self.staged else ""

    def pointer(self, stream: Any) -> int:
        """Return the driver's handle of a stream of the backend."""
        return int(stream.ptr)

    def describe(self, address: int, num_bytes: int, owner: object = None) -> Buffer:
        """Return a buffer for the other ranks.  Raises DriverError if they cannot open it.

        Its `owner` keeps its memory as long as other ranks may have it open; without an owner the
        caller does.
        """
        if not num_bytes:
            return Buffer(0, 0)
        if self.is_of_one_process:
            return Buffer(address, num_bytes)
        return self.exports.describe(address, num_bytes, owner)

    @property
    def is_of_one_process(self) -> bool:
        """Whether all ranks are threads of this process."""
        memory = self.board.memory
        return memory is not None and memory.is_of_threads

    def address(self, record: Any, number: int) -> int:
        """Return the address, in this process, of a buffer of a rank.  Raises DriverError."""
        buffer, process = record["buffers"][number], int(record["process"])
        if process == self.process or not buffer["size"]:
            return int(buffer["address"])
        return self._openings.open(process, buffer, self.user)

    def is_open(self, record: Any) -> bool:
        """Return whether this rank has opened all memory of a rank."""
        process = int(record["process"])
        if process == self.process:
            return True
        return all(self._openings.has(process, buffer, self.user) for buffer in record["buffers"])

    def close(self, record: Any) -> None:
        """Close the allocations that a rank wants to free."""
        if record["process"] != self.process:
            for number in filter(None, record["closing"].tolist()):
                self._openings.close(int(record["process"]), number, self.user)

    def free(self, *, has_failed: bool) -> None:
        """Close all memory of peers, and release what they had opened.

        After a failure, kernels of peers may still raise counters, so the memory of counters stays.
        """
        self._openings.free(self.user)
        self.exports.free()
        if self._counters is not None and not (has_failed or self.why_lost):
            give_back(self.driver, self._counters)


class Proposal:
    """One attempt of a rank to agree on the links, before a call."""

    def __init__(self, links: Links, key: CallKey) -> None:
        self._links, self._driver, self._rank = links, links.driver, links.board.rank
        self._meeting = Meeting(links.board, CallKey(key.call, -1 - key.run))

    @property
    def is_published(self) -> bool:
        """Whether the other ranks can see it."""
        return self._meeting.is_published

    def publish(self, check: int) -> bool:
        """Publish the memory that holds the pattern of this rank; return whether there was room.

        `check` is the number of the comparison before the call, or 0.
        """
        links = self._links
        fields: dict[str, Any] = {"process": links.process, "uuid": np.void(links.uuid)}
        fields["check"] = check
        try:
            probe = probe_of(self._driver, links.process)
            pattern = links.describe(probe.address, _PATTERN_BYTES, probe)
            fields["buffers"] = [pattern, pattern, links.describe_counters()]
        except DriverError as error:
            fields["why_staged"] = str(error).encode()
        return self._meeting.publish({"why_staged": b"", **fields})

    def agree(self, call: Meeting, check: Check | None) -> Waits:
        """Agree with the others, unless some rank makes the call on host arrays.

        `call` is the meeting for the call itself.
        """
        meeting, links = self._meeting, self._links
        is_over, missing = meeting.for_all()[:2]
        yield from until(Wait(lambda: is_over() or self._is_needless(call), missing), check)
        if meeting.absent():
            meeting.withdraw()
            return
        if missing():  # it is needless
            meeting.withdraw()
            yield Wait(lambda: links.staged is not None or bool(links.why_lost), missing)
            return
        try:
            yield from self.look(meeting)
            if links.staged is None:
                links.staged = frozenset(self.staged_pairs(meeting.verdicts()))
                if self._rank == meeting.ranks[0] and not links.is_of_one_process:
                    tell_of_sharing(links.uuids, self._driver.num_devices())
            for rank in meeting.ranks:
                if rank != self._rank and not links.why[rank] and not links.is_peer(rank):
                    links.why[rank] = f"rank {rank} cannot read the memory of rank {self._rank}"
        except BaseException:
            meeting.answer(_ANSWERED | _FAILED)  # or the others would wait for it
            refuse(meeting)
            links.why_lost = "a call was abandoned in which the ranks agree on their links"
            meeting.leave()
            raise
        why_no_kernels = _ABANDONED  # if it is
        try:
            why_no_kernels = yield from self._try_kernels(meeting)
        finally:
            links.why_no_kernels = links.why_no_kernels or why_no_kernels
            if why_no_kernels == _ABANDONED:
                refuse(meeting)  # or the others would wait for it
            meeting.leave()

    def leave(self) -> None:
        """Let all ranks use the memory of their proposals for other calls."""
        if self.is_published:
            self._meeting.leave()

    def _is_needless(self, call: Meeting) -> bool:
        """Return whether some rank has come to the call without a proposal.

        That rank has agreed on links in another call, in which this rank agrees as well.
        """
        call.missing()
        self._meeting.missing()  # after that: a proposal is published before the record
        return any(rank not in self._meeting.slots for rank in call.slots)

    def look(self, meeting: Meeting) -> Waits:
        """Find out which ranks this one can read, and say so."""
        links, driver = self._links, self._driver
        peers = [rank for rank in meeting.ranks if rank != self._rank]
        links.uuids = {rank: meeting.record(rank)["uuid"].tobytes() for rank in meeting.ranks}
        records = [meeting.record(rank) for rank in peers]
        if not all(map(links.is_open, records)):
            yield Wait(partial(STREAMS.may_block, driver), list, is_at_work=True)
        links.why = {rank: self.why_unreadable(rank) for rank in peers}
        links.counters = self._opened_counters(meeting)  # now, while it may wait for all streams
        failed = 0
        if not links.is_of_one_process:
            failed = yield from self._try_counters(peers)
        readable = [links.board.parts[rank] or 0 for rank in peers if not links.why[rank]]
        meeting.answer(_ANSWERED | failed | sum(1 << part for part in readable))
        yield meeting.for_answers(_ANSWERED)

    def _opened_counters(self, meeting: Meeting) -> dict[int, int]:
        """Return the address of each rank's counters for kernels, of the ranks that have any."""
        counters = dict[int, int]()
        for rank in meeting.ranks:
            record = meeting.record(rank)
            if not record["why_staged"] and record["buffers"][_COUNTERS]["size"]:
                with suppress(DriverError):  # its pattern cannot be read either
                    counters[rank] = self._links.address(record, _COUNTERS)
        return counters

    def staged_pairs(self, verdicts: dict[int, int]) -> Iterator[Pair]:
        """Yield the pairs of which one cannot read the other's memory."""
        parts = self._links.board.parts
        for low, high in combinations(sorted(verdicts), 2):
            both = verdicts[low] >> (parts[high] or 0) & verdicts[high] >> (parts[low] or 0) & 1
            if not both:
                yield low, high

    def why_unreadable(self, rank: int) -> str:
        """Return why this rank cannot read another one's memory; "" if the pattern is there."""
        record = self._meeting.record(rank)
        if record["why_staged"]:
            return f"rank {rank}: {record['why_staged'].decode(errors='replace')}"
        is_thread = record["process"] == self._links.process
        if is_thread and record["uuid"].tobytes() != self._links.uuid:
            return f"rank {rank} is a thread of this process on another GPU"
        try:
            words = self._read_pattern(record)
        except DriverError as error:
            return f"the memory of rank {rank} cannot be read: {error}"
        if not np.array_equal(words, pattern(int(record["process"]))):
            return f"the memory of rank {rank} is read with wrong contents"
        return ""

    def _read_pattern(self, record: Any) -> Any:
        """Return the words in the place of another rank's pattern.  Raises DriverError."""
        driver, words = self._driver, np.zeros(_PATTERN_WORDS, np.int64)
        with _LOCK:  # all threads use the same place
            place = probe_of(driver, self._links.process).address + _PATTERN_BYTES
            stream = STREAMS.borrow(driver)
            try:
                source = self._links.address(record, 0)
                driver.call("cuMemcpyDtoDAsync_v2", place, source, _PATTERN_BYTES, stream.handle)
                arguments = words.ctypes.data, place, _PATTERN_BYTES, stream.handle
                driver.call("cuMemcpyDtoHAsync_v2", *arguments)
                driver.call("cuStreamSynchronize", stream.handle)
            finally:
                STREAMS.give_back(driver, stream)
        return words

    def _try_counters(self, others: list[int]) -> Waits:
        """Let the streams of these ranks and of this one await each other.

        A stream waits only for what is certainly written: all answer when that is enqueued.  Return
        _FAILED if this rank's stream has not written, else 0.
        """
        board, slots, driver = self._links.board, self._meeting.slots, self._driver
        written = [board.counter(self._rank, slots[self._rank], rank, False) for rank in others]
        failed, stream = 0, None
        try:
            try:
                stream = STREAMS.borrow(driver)
                _page_lock(driver, board)
                self._enqueue(stream.handle, WRITE_VALUE, written)
            except DriverError as error:
                failed = _FAILED
                self._note(others, f"streams cannot write values: {error}")
            self._meeting.answer(1 | failed)
            yield self._meeting.for_answers(1)
            verdicts = self._meeting.verdicts()
            have_failed = [rank for rank in others if verdicts[rank] & _FAILED]
            for rank in have_failed:
                self._note([rank], f"the stream of rank {rank} cannot write values")
            if stream is not None and not failed:
                have_written = [rank for rank in others if rank not in have_failed]
                yield from self._await_counters(stream, have_written)
        finally:
            if stream is not None:
                STREAMS.abandon(driver, stream)
        return failed

    def _try_kernels(self, meeting: Meeting) -> Waits:
        """Return why kernels of the ranks cannot wait for each other; "" if they can."""
        links = self._links
        if links.staged or not links.can_try_kernels:
            refuse(meeting)
            return "some ranks cannot read each other's memory, or are threads"
        records = map(meeting.record, meeting.ranks)
        members = frozenset(
            (int(record["process"]), record["uuid"].tobytes()) for record in records
        )
        return (yield from Handshake(self._driver, meeting, members, links.counters).try_it())

    def _note(self, ranks: Iterable[int], why: str) -> None:
        """Note why this rank cannot read the memory of others, unless there is a reason before."""
        self._links.why |= {rank: why for rank in ranks if not self._links.why[rank]}

    def _await_counters(self, stream: Stream, others: list[int]) -> Waits:
        """Let the stream await what the streams of other ranks have written."""
        board, slots, driver = self._links.board, self._meeting.slots, self._driver
        awaited = [board.counter(rank, slots[rank], self._rank, False) for rank in others]
        STREAMS.note_waiting(driver, stream)
        try:
            self._enqueue(stream.handle, WAIT_VALUE, awaited)
            driver.call("cuEventRecord", stream.event, stream.handle)
            deadline = time.monotonic() + _SECONDS

            def has_ended() -> bool:
                return driver.try_call("cuEventQuery", stream.event) != NOT_READY

            yield Wait(
                lambda: has_ended() or time.monotonic() > deadline, lambda: others, is_at_work=True
            )
            driver.is_complete(stream.event)  # or raises the error with which it has ended
            for rank, counter in zip(others, awaited, strict=True):
                if not counter[0]:
                    self._note([rank], f"what the stream of rank {rank} writes is not seen")
                    counter[0] = 1
            yield Wait(has_ended, lambda: others, is_at_work=True)
            driver.is_complete(stream.event)
        except DriverError as error:
            self._note(others, f"streams cannot await values: {error}")
        finally:
            for counter in awaited:
                counter[0] = 1  # or the stream might wait for ever

    def _enqueue(self, stream: int, kind: int, counters: Sequence[Any]) -> None:
        """Let a stream write 1 to counters, or wait for it."""
        words = np.zeros((len(counters), MEMORY_OPERATION_WORDS), np.int64)
        for row, counter in zip(words, counters, strict=True):
            row[:3] = kind, counter.ctypes.data, 1
        if len(words):
            arguments = stream, len(words), words.ctypes.data, 0
            self._driver.call("cuStreamBatchMemOp_v2", *arguments)


_LOCK = threading.RLock()  # of what all communicators of the process use together
_probes: dict[Driver, Allocation] = {}
_page_locked: dict[int, Any] = {}  # by address, the memory of hosts


def probe_of(driver: Driver, process: int) -> Allocation:
    """Return memory, made once, with the pattern of this process and room for another one."""
    with _LOCK:
        if driver not in _probes:
            probe, words = Allocation(driver, 2 * _PATTERN_BYTES), pattern(process)
            stream = STREAMS.borrow(driver)
            arguments = probe.address, words.ctypes.data, words.nbytes, stream.handle
            driver.call("cuMemcpyHtoDAsync_v2", *arguments)
            driver.call("cuStreamSynchronize", stream.handle)
            STREAMS.give_back(driver, stream)
            _probes[driver] = probe
        return _probes[driver]


def _page_lock(driver: Driver, board: Board) -> None:
    """Let devices write and read the memory of the host, once in a process."""
    assert board.memory is not None
    memory = board.memory.bytes
    address = memory.ctypes.data
    with _LOCK:
        if address not in _page_locked:
            driver.call("cuMemHostRegister_v2", address, memory.nbytes, PORTABLE | MAPPED)
            _page_locked[address] = memory
