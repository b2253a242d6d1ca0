"""Whether the ranks of a host run at the same time, so that their kernels can wait for each other.

Ranks that share a GPU take turns of milliseconds, unless NVIDIA's Multi-Process Service runs; ranks
with a GPU each do not.  No setting is read: when the ranks agree on their links, a kernel of each
sends signals around all ranks, and the time that this takes decides.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from itertools import pairwise, starmap

import numpy as np

from collectives.devices import kernel_program as program
from collectives.devices.driver import Driver, DriverError
from collectives.devices.meeting import Meeting, Wait, Waits
from collectives.devices.shadow import Allocation, taken
from collectives.devices.streams import STREAMS, Stream
from collectives.engines import FAILS, NUM_SLOTS, WORKS, KernelWord
from collectives.lowering import Counter, DeviceKind, DeviceOperation, Step

NUM_ROUNDS = 16
_NUM_TIMED, _NUM_THREADS = 4, 32  # kernels, each of one block of so many threads
SECONDS_OF_A_ROUND = 30e-6  # more than a signal takes to another GPU; less than a turn
SECONDS = 0.5  # within which the kernels of all ranks end
_READY = 1  # the turn of the answer
_SURE = 3  # a verdict beside WORKS and FAILS: this rank knows whether kernels can wait
_NO_KERNEL = "there is no kernel that runs programs"

Member = tuple[int, bytes]  # of a communicator: its process and its device
REASONS: dict[frozenset[Member], str] = {}  # why kernels of these cannot wait for each other
_UINT8 = np.dtype(np.uint8)  # of a kernel that only copies, and here only signals


def counters_of(driver: Driver, num_ranks: int) -> Allocation | None:
    """Return memory for a rank's counters in all runs that can be under way.

    None if there is no kernel that uses it.  To load the kernel and to allocate may wait for all
    streams.
    """
    if driver.kernels.interpret(None, _UINT8) is None:
        return None
    zeros = np.zeros(NUM_SLOTS * program.counters_bytes(num_ranks), np.uint8)
    memory, stream = taken(driver, zeros.nbytes), STREAMS.borrow(driver)
    arguments = memory.address, zeros.ctypes.data, zeros.nbytes, stream.handle
    driver.call("cuMemcpyHtoDAsync_v2", *arguments)
    driver.call("cuStreamSynchronize", stream.handle)
    STREAMS.give_back(driver, stream)
    return memory


def refuse(meeting: Meeting) -> None:
    """Tell the other ranks of a meeting that this rank will not try."""
    meeting.answer_change(_READY, FAILS)


def _known_of(members: frozenset[Member]) -> str | None:
    """Return why kernels of these members cannot wait for each other; None if it is not known.

    If the kernels of more members can, the kernels of a part of them can too.
    """
    if any(members <= others and not why for others, why in REASONS.copy().items()):
        return ""
    return REASONS.get(members)


def addresses(meeting: Meeting, counters: dict[int, int]) -> program.Addresses:
    """Return where the kernels find each other in the runs that follow from a meeting.

    `counters` has the address, in this process, of the counters of each rank.
    """
    board, slots = meeting.board, meeting.slots
    num_ranks = len(meeting.ranks)
    size = program.counters_bytes(num_ranks)
    of_slots = [counters[rank] + slots[rank] * size for rank in meeting.ranks]
    floors = [program.floor_of(int(meeting.record(rank)["generation"])) for rank in meeting.ranks]
    barrier = program.barrier_of(of_slots[board.rank], num_ranks)
    return program.Addresses(of_slots, floors, barrier, meeting.kernel_words.ctypes.data)


class Handshake:
    """Signals around all ranks of a communicator, by a kernel of each, which are timed.

    Parameters
    ----------
    driver : Driver
        The driver of this rank's device.
    meeting : Meeting
        The meeting of the ranks.
    members : frozenset of Member
        What identifies the process and the device of each rank.
    counters : dict of int to int
        The address of the counters of each rank that has any.
    """

    def __init__(
        self, driver: Driver, meeting: Meeting, members: frozenset[Member], counters: dict[int, int]
    ) -> None:
        self._driver, self._meeting, self._members = driver, meeting, members
        self._counters, self._host = counters, meeting.kernel_words

    def try_it(self) -> Waits:
        """Return why kernels cannot wait for each other, as far as this rank knows; "" if they can.

        No kernel begins before all ranks are ready: their hosts may wait for each other.
        """
        verdicts = yield from self._verdicts()
        if FAILS in verdicts:
            return _NO_KERNEL
        if verdicts != {_SURE}:
            REASONS[self._members] = yield from self._why_not()
        return _known_of(self._members)

    def _verdicts(self) -> Waits:
        """Return what all ranks say: that they are ready or sure, or that they cannot try."""
        verdict = WORKS if _known_of(self._members) is None else _SURE
        if len(self._counters) < len(self._meeting.ranks):
            verdict = FAILS
        yield self._meeting.answer_change(_READY, verdict)
        return {int(self._meeting.record(rank)["answer"]) % 4 for rank in self._meeting.ranks}

    def _why_not(self) -> Waits:
        try:
            seconds = yield from self._timed()
        except DriverError as error:
            return str(error)
        if seconds is None:
            return f"the kernels of the ranks do not end within {SECONDS} s"
        if seconds > NUM_ROUNDS * SECONDS_OF_A_ROUND:
            return f"ranks take turns: a signal takes {seconds / NUM_ROUNDS * 1e6:.0f} us"
        return ""

    def _words(self) -> program.Words:
        """Return the words of the kernel."""
        rank, num_ranks = self._meeting.board.rank, len(self._meeting.ranks)
        steps = [*_around(rank, num_ranks)]
        rises = {step.operation.counter: NUM_ROUNDS for step in steps if step.operation.counter}
        words = program.words_of(steps, rank, num_ranks, rises, 1)
        assert words is not None
        program.set_addresses(words, addresses(self._meeting, self._counters))
        return words

    def _timed(self) -> Waits:
        """Return the least seconds of a kernel after the first one, which waits for all ranks.

        None if the kernels do not end in time.  A host that is late once does not count.
        """
        driver = self._driver
        kernel, words = driver.kernels.interpret(None, _UINT8), self._words()
        assert kernel is not None, "the memory for counters is allocated only if there is one"
        events = [STREAMS.borrow_event(driver, is_timed=True) for _ in range(1 + _NUM_TIMED)]
        stream = STREAMS.borrow(driver)
        STREAMS.note_waiting(driver, stream)
        try:
            for run, event in enumerate(events):
                self.launch(kernel, words, stream, run)
                driver.call("cuEventRecord", event, stream.handle)
            has_ended = yield from self._until_ended(events[-1])
            return min(starmap(driver.seconds_between, pairwise(events))) if has_ended else None
        finally:
            self._host[KernelWord.GENERATION] = 0
            STREAMS.abandon(driver, stream)
            for event in events:
                STREAMS.give_back_event(driver, event, is_timed=True)

    def _until_ended(self, event: int) -> Waits:
        """Wait for the kernels; return whether they have ended by themselves in time."""
        deadline = time.monotonic() + SECONDS

        def has_ended() -> bool:
            return self._driver.is_complete(event)

        def missing() -> list[int]:
            return [rank for rank in self._meeting.ranks if rank != self._meeting.board.rank]

        yield Wait(lambda: has_ended() or time.monotonic() > deadline, missing, is_at_work=True)
        if has_ended():
            return True
        self._host[KernelWord.GENERATION] = 0
        yield Wait(has_ended, missing, is_at_work=True)
        return False

    def launch(self, kernel: int, words: program.Words, stream: Stream, run: int) -> None:
        number = ctypes.c_int64(run)
        places = words.ctypes.data, ctypes.addressof(number)
        parameters = (ctypes.c_int64 * 2)(*places)
        shape = 1, 1, 1, _NUM_THREADS, 1, 1, 0
        where = stream.handle, ctypes.addressof(parameters)
        self._driver.call("cuLaunchCooperativeKernel", kernel, *shape, *where)


def _around(rank: int, num_ranks: int) -> Iterator[Step]:
    """Yield signals to the next rank, each after a signal of the rank before."""
    onward = Counter(rank, (rank + 1) % num_ranks)
    awaited = Counter((rank - 1) % num_ranks, rank)
    for value in range(1, NUM_ROUNDS + 1):
        for kind, counter in ((DeviceKind.SIGNAL, onward), (DeviceKind.AWAIT, awaited)):
            yield Step(DeviceOperation(kind, 0, counter, value), False)
