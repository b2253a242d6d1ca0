"""What the ranks of a communicator show each other in the memory that their host shares.

A rank notes each call on host arrays by its number, and publishes a record of each call on a
device.  So every rank of the host sees what each of the others does in a call, without a message.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.engines.host_memory import (
    NUM_AREAS,
    NUM_BOXES,
    NUM_HOST_CALLS,
    NUM_SLOTS,
    HostMemory,
)
from collectives.errors import Error, on_all_ranks

WORKS, FAILS = 1, 2  # of verdicts
HEADER, MESSAGES = 1, 2  # of ways to compare calls in checked mode; larger: by records
GAVE_UP, RANK_DIED, RUN_FAILED = 1, 2, 3  # how a rank knows of a failure


class Failure(NamedTuple):
    """What a rank says of a failure.

    Attributes
    ----------
    rank : int
        The rank that says so.
    kind : int
        How it knows: GAVE_UP, RANK_DIED or RUN_FAILED.
    why : str
        A sentence.
    dead : int
        The rank that has died; -1 if none has.
    """

    rank: int
    kind: int
    why: str
    dead: int


class KernelWord(IntEnum):
    """The words of a slot by which the kernel of a rank and its host know of each other.

    They have 32 bits: how many runs the kernel has entered; one of the operations at which it
    waits, plus 1, if it waits for long; and the generation of the record, by which a kernel of
    another one knows that it shall leave.
    """

    ENTERED = 0
    STANDING = 1
    GENERATION = 2


class Box(NamedTuple):
    """The words of a place for a message in the memory of its sender, each an array of one element.

    They say how many messages were put there: taken up by the sender's host, `ready` by its device,
    `entered` and `read` by the devices of their readers.
    """

    taken: NDArray[np.uint32]
    ready: NDArray[np.uint32]
    entered: NDArray[np.uint32]
    read: NDArray[np.uint32]

    @property
    def is_free(self) -> bool:
        """Whether all messages were put there, and read."""
        return bool(self.taken[0] == self.ready[0] == self.read[0])

    def give_up(self, value: int) -> None:
        """Say that the message of this value is not put there."""
        self.ready[0] = self.read[0] = value


class CallKey(NamedTuple):
    """A call: its number, or the number of its plan; and the number of the plan's run, or 0."""

    call: int
    run: int = 0


class Board:
    """One rank's view of what the ranks of a communicator on its host show.

    Attributes
    ----------
    memory : HostMemory or None
        The memory of the host.
    parts : sequence of int or None
        The part of the memory of each rank; None for ranks on other hosts.
    rank : int
        This rank.
    host_calls : array of int
        The numbers of the last calls of this rank on host arrays, each at its remainder; compiled
        code writes them too.
    why_no_device : str
        Why no rank of this host can use a device; "" if they can.
    why_no_area : str
        Why this rank cannot, if others can.
    """

    def __init__(
        self,
        memory: HostMemory | None,
        parts: Sequence[int | None],
        rank: int,
        identity: object,
        why_none: str = "",
    ) -> None:
        self.memory, self.parts, self.rank = memory, parts, rank
        self._identity = np.void(blake2b(repr(identity).encode(), digest_size=16).digest())
        self.why_no_device = why_none if memory is None else memory.why_no_device
        self.why_no_area = ""
        self.host_calls: NDArray[np.int64] = np.zeros(NUM_HOST_CALLS, np.int64)
        self._checks, self._headers = np.zeros((2, NUM_HOST_CALLS), np.int64)
        self._lock = threading.Lock()  # the progress thread publishes too
        self._entry: Any = None
        self._peers: dict[int, Any] = {}  # the entries of other ranks
        self._acks_due: list[tuple[int, CallKey]] = []
        if memory is not None and len(self.local_ranks) > 1:
            with memory.lock:
                self._take_entry(memory)

    def _take_entry(self, memory: HostMemory) -> None:
        """Show this communicator to the other ranks."""
        _give_back(memory)
        mine = memory.entries[memory.part]
        at = memory.find_entry(memory.part, np.void(bytes(16)))
        if not at:
            mine["area"][0] = 1  # or ranks would wait for this one to show the communicator
        if mine["area"][0]:
            self.why_no_area = "the rank has more communicators than it can show"
            return
        self._entry = mine[at : at + 1]
        for name in ("host_calls", "checks", "area", "failure"):
            self._entry[name] = 0
        self.host_calls, self._checks = self._entry["host_calls"][0], self._entry["checks"][0]
        self._entry["identity"] = self._identity

    def free(self) -> None:
        """Give back the memory of a communicator that is freed, when no other rank reads it."""
        if self.memory is not None and self._entry is not None:
            with self.memory.lock:
                if self not in self.memory.closing:
                    self.memory.closing.append(self)
                _give_back(self.memory)

    @property
    def is_quiet(self) -> bool:
        """Whether no other rank can still read what this one has shown."""
        if not self._entry["area"][0]:
            return True
        return all(map(self._is_free, range(NUM_SLOTS))) and not self._has_unread()

    def give_back(self) -> None:
        """Let other communicators have the memory."""
        self.host_calls, self._checks = np.zeros((2, NUM_HOST_CALLS), np.int64)
        self._entry["identity"] = np.void(bytes(16))
        self._entry["area"] = 0
        self._entry = self.__dict__["area"] = None
        self._acks_due.clear()

    @property
    def local_ranks(self) -> list[int]:
        """The ranks of the communicator on this host, this one among them."""
        local = [rank for rank, part in enumerate(self.parts) if part is not None]
        return local or [self.rank]

    @property
    def has_all_ranks(self) -> bool:
        """Whether all ranks of the communicator are on this host."""
        return len(self.local_ranks) == len(self.parts)

    def on_this_host(self, error: Error) -> Error:
        """Return an error that all ranks of this host raise, marked if no ranks are elsewhere."""
        return on_all_ranks(error) if self.has_all_ranks else error

    def note_failure(self, kind: int, why: str, dead: int = -1) -> None:
        """Let all ranks of this host know, for good, that the communicator has failed."""
        if self._entry is not None and not self._entry["failure"][0]:
            self._entry["why"], self._entry["dead"] = why.encode()[:320], dead
            self._entry["failure"] = kind

    @property
    def failure(self) -> Failure | None:
        """The failure of which some rank of this host knows, if there is one."""
        for rank in self.local_ranks:
            entry = self._entry if rank == self.rank else self._entry_of(rank)
            if entry is not None and entry["failure"][0]:
                kind, dead = int(entry["failure"][0]), int(entry["dead"][0])
                return Failure(rank, kind, entry["why"][0].decode(errors="replace"), dead)
        return None

    def is_dead(self, rank: int) -> bool:
        """Return whether it is certain that a rank of this host has died."""
        memory, part = self.memory, self.parts[rank]
        return memory is not None and part is not None and memory.is_dead(part)

    @cached_property
    def area(self) -> Any:
        """The area of this rank; None if all are in use."""
        memory = self.memory
        if memory is None or self._entry is None or self.why_no_device:
            return None
        with memory.lock:
            return self._take_area(memory)

    def _take_area(self, memory: HostMemory) -> Any:
        """Take a free area, if there is one."""
        _give_back(memory)
        used = set(memory.entries[memory.part]["area"][1:].tolist())
        free = [number for number in range(1, NUM_AREAS + 1) if number not in used]
        if not free:
            self.why_no_area = "too many communicators of this rank use a device"
            return None
        area = memory.areas[memory.part, free[0] - 1 : free[0]]
        area.view(np.uint8)[:] = 0
        self._entry["area"] = free[0]
        return area[0]

    def _area_of(self, rank: int) -> Any:
        """Return the area of a rank; None as long as the rank has none."""
        if rank == self.rank:
            return self.__dict__.get("area")
        memory, entry = self.memory, self._entry_of(rank)
        number = 0 if entry is None else int(entry["area"][0])
        return None if memory is None or not number else memory.areas[self.parts[rank], number - 1]

    def _entry_of(self, rank: int) -> Any:
        """Return the entry of another rank; None as long as it has not made the communicator."""
        if rank not in self._peers:
            memory, part = self.memory, self.parts[rank]
            assert memory is not None and part is not None
            at = memory.find_entry(part, self._identity)
            if not at:
                return None
            self._peers[rank] = memory.entries[part][at : at + 1]
        entry = self._peers[rank]
        return entry if entry["identity"][0] == self._identity else None

    def note_host_call(self, number: int) -> None:
        """Note that this rank makes a call on host arrays."""
        self.host_calls[number % NUM_HOST_CALLS] = number

    def note_check(self, number: int, way: int) -> None:
        """Note how this rank makes the comparison of this number, in checked mode.

        The way is HEADER or MESSAGES, or a larger number that stands for the record of a call.
        """
        at = number % NUM_HOST_CALLS
        self._checks[at] = number << 32 | way
        if way == HEADER:
            self._headers[at] = number

    def differs_in_check(self, rank: int, number: int) -> bool:
        """Return whether a rank makes a comparison in another way, or about another call.

        A rank that still compares the header, as this rank has done before, does not differ.
        """
        entry, at = self._entry_of(rank), number % NUM_HOST_CALLS
        theirs = 0 if entry is None else int(entry["checks"][0, at])
        if theirs >> 32 != number or theirs == self._checks[at]:
            return False
        return theirs & 0xFFFFFFFF != HEADER or bool(self._headers[at] != number)

    def note_plan(self, number: int) -> bool:
        """Note that the plan of this number is on a device; return False if there is no room."""
        free: Any = [] if self.area is None else np.flatnonzero(self.area["plans"] == 0)
        if not len(free):
            return False
        self.area["plans"][free[0]] = number
        return True

    def forget_plan(self, number: int) -> None:
        """Note that a plan was freed."""
        if self.area is not None:
            plans = self.area["plans"]
            plans[plans == number] = 0

    def is_on_host(self, rank: int, key: CallKey) -> bool:
        """Return whether it is certain that a rank makes a call on host arrays."""
        entry = self._entry_of(rank)
        if entry is None:
            return self._is_invisible(rank)
        if entry["host_calls"][0, key.call % NUM_HOST_CALLS] < key.call:
            return False
        if self.find(rank, key) is not None:
            return False
        area = self._area_of(rank)
        return not key.run or area is None or key.call not in area["plans"]

    def _is_invisible(self, rank: int) -> bool:
        """Return whether a rank has no entry for this communicator, and will not have one."""
        memory, part = self.memory, self.parts[rank]
        if memory is None or part is None or rank in self._peers:
            return False
        return bool(memory.entries[part]["area"][0])

    def find(self, rank: int, key: CallKey) -> int | None:
        """Return the slot in which a rank has published its record of a call; None if in none."""
        area = self._area_of(rank)
        if area is None:
            return None
        records = area["records"]
        is_it = (records["call"] == key.call) & (records["run"] == key.run)
        slots = np.flatnonzero(is_it & (records["generation"] > 0))
        return int(slots[0]) if len(slots) else None

    def record(self, rank: int, slot: int) -> Any:
        """Return the record in a slot."""
        return self._area_of(rank)["records"][slot]

    def arrival(self, rank: int, slot: int) -> NDArray[np.int64]:
        """Return the word, an array of one element, by which a rank makes a slot's call again."""
        words: NDArray[np.int64] = self._area_of(rank)["records"]["arrived"][slot : slot + 1]
        return words

    def arrivals_at_calls(self, rank: int) -> NDArray[np.int64]:
        """Return all words by which a rank makes calls again, without the words of plans."""
        area = self._area_of(rank)
        if area is None:
            return np.zeros(0, np.int64)
        words: NDArray[np.int64] = area["records"]["arrived"][area["records"]["run"] == 0]
        return words

    def counter(self, writer: int, slot: int, reader: int, is_read: bool) -> NDArray[np.uint32]:
        """Return a counter, an array of one element, of a slot of the rank that writes it."""
        counters = self._area_of(writer)["counters"][slot]
        counter: NDArray[np.uint32] = counters[self.parts[reader], int(is_read), :1]
        return counter

    def kernel_words(self, slot: int) -> NDArray[np.uint32]:
        """Return the words of a slot that `KernelWord` numbers."""
        me = self.parts[self.rank]
        words: NDArray[np.uint32] = self.area["counters"][slot][me, 1]  # no rank awaits itself
        return words

    def take_handed_over(self) -> bool:
        """Let other ranks hand messages over to this one; return whether they can."""
        if self.area is None:
            return False
        self.area["token"] = 1 + secrets.randbits(62)
        return True

    def token(self, rank: int) -> int:
        """Return the token of messages that are handed over to a rank; 0 if it takes none."""
        area = self._area_of(rank) if self.parts[rank] is not None else None
        return 0 if area is None else int(area["token"])

    def box(self, rank: int, number: int) -> Box:
        """Return a box of a rank."""
        return Box(*(words[:1] for words in self._area_of(rank)["boxes"][number]))

    def note_reader(self, number: int, rank: int) -> None:
        """Note for which rank the next message in a box of this rank is."""
        self.area["boxes"][number, 0, 1] = rank

    def _has_unread(self) -> bool:
        """Return whether a rank may still read a message in a box of this one."""
        for number in range(NUM_BOXES):
            reader = int(self.area["boxes"][number, 0, 1])
            if not self.box(self.rank, number).is_free and not self._is_gone(reader):
                return True
        return False

    def _is_gone(self, rank: int) -> bool:
        """Return whether a rank does not read anything any more."""
        return self._has_freed(rank) or self.is_dead(rank)

    def publish(self, key: CallKey, fields: Mapping[str, Any]) -> int | None:
        """Publish the record of a call; return its slot, or None while all are in use."""
        self._pay_acks()
        with self._lock:
            return self._publish(key, fields)

    def _publish(self, key: CallKey, fields: Mapping[str, Any]) -> int | None:
        records = self.area["records"]
        slot = next(filter(self._is_free, range(NUM_SLOTS)), None)
        if slot is None:
            return None
        record, generation = records[slot], abs(int(records[slot]["generation"])) + 1
        record["generation"] = -generation  # not published
        self.area["counters"][slot] = 0
        record["verdict"] = record["arrived"] = record["answer"] = 0
        for name, value in {"call": key.call, "run": key.run, **fields}.items():
            record[name] = value
        self.kernel_words(slot)[KernelWord.GENERATION] = generation
        record["generation"] = generation
        return slot

    @property
    def has_room(self) -> bool:
        """Whether `publish` would find a slot."""
        self._pay_acks()
        return any(map(self._is_free, range(NUM_SLOTS)))

    def _is_free(self, slot: int) -> bool:
        """Return whether no rank can still read a slot."""
        record = self.area["records"][slot]
        generation = int(record["generation"])
        if generation <= 0:
            return True
        key = CallKey(int(record["call"]), int(record["run"]))
        return all(self._has_acknowledged(rank, slot, generation, key) for rank in self.local_ranks)

    def _has_acknowledged(self, rank: int, slot: int, generation: int, key: CallKey) -> bool:
        assert self.memory is not None
        area = self._area_of(rank)
        if area is not None and area["acks"][self.memory.part, slot] >= generation:
            return True
        return self._has_freed(rank) or (rank != self.rank and self.is_on_host(rank, key))

    def _has_freed(self, rank: int) -> bool:
        """Return whether a rank has freed the communicator."""
        return rank in self._peers and self._entry_of(rank) is None

    def acknowledge(self, rank: int, key: CallKey) -> None:
        """Say that this rank no longer reads a rank's record of a call, once that is published."""
        if self._entry is None:
            return
        self._acks_due.append((rank, key))
        self._pay_acks()

    def withdraw(self, slot: int) -> None:
        """Take back a record of this rank that no rank reads."""
        self.area["records"]["generation"][slot] *= -1

    def acknowledge_refusal(self, check: int) -> None:
        """Say that this rank reads no record of the calls that a comparison has refused.

        It may have made another call than the ranks with records.  `check` is the number of the
        comparison.
        """
        for rank in self.local_ranks:
            if (area := self._area_of(rank)) is None:
                continue
            generations = area["records"]["generation"].copy()  # before a rank goes on
            refused = (area["records"]["check"] == check) & (generations > 0)
            if refused.any() and self.area is not None:
                self.area["acks"][self.parts[rank], refused] = generations[refused]

    def _pay_acks(self) -> None:
        due, self._acks_due = self._acks_due, []
        for rank, key in due:
            if (slot := self.find(rank, key)) is not None:
                generation = self.record(rank, slot)["generation"]
                self.area["acks"][self.parts[rank], slot] = generation
            elif not self.is_on_host(rank, key):
                self._acks_due.append((rank, key))


def _give_back(memory: HostMemory) -> None:
    """Give back the memory of freed communicators that no rank reads any more."""
    for board in list(memory.closing):
        if board.is_quiet:
            memory.closing.remove(board)
            board.give_back()
