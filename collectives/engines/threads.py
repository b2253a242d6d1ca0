"""The engine without MPI: all ranks are threads of one process.

A send copies its bytes into the receiver's mailbox at once.  If every running rank waits for a
message that is not there, the ranks are deadlocked, and the engine raises an error that says who
waits for whom.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Backend, Bytes
from collectives.diagnostics import FlightRecorder, Waiting
from collectives.engines.board import Board
from collectives.engines.host_memory import HostMemory, of_threads
from collectives.engines.interpreter import Interpreted
from collectives.engines.staging import PageLockedMemory, Staged
from collectives.engines.transport import (
    Execution,
    MessageMemory,
    Operands,
    PendingCall,
    Waiter,
    wrong_length,
)
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerFailed
from collectives.programs import Program

_GRACE = 5.0  # seconds that the other ranks have to end after one has failed

Address = tuple[Hashable, int, int, int]  # context, source, destination, tag
Watched = tuple[tuple[int, ...], Waiter]  # with the members of its communicator
_LOOK = 1e-4  # seconds between two looks at waiters, which nobody notifies


class Wait:
    """What a rank waits for: messages, or what waiters of a communicator's members wait for.

    Another thread may advance the calls of the rank meanwhile, so this is never a copy.
    """

    def __init__(self, pending: Sequence[ThreadMessages], waiters: Sequence[Watched]) -> None:
        self._pending, self._waiters = pending, waiters

    @property
    def addresses(self) -> list[Address]:
        """The addresses at which it waits for messages."""
        return [address for messages in list(self._pending) for address in messages.addresses()]

    @property
    def waiters(self) -> list[Watched]:
        """The executions that wait for something else."""
        return list(self._waiters)

    def can_move(self, mail: Container[Address]) -> bool:
        """Return whether the rank can go on."""
        has_mail = any(address in mail for address in self.addresses)
        return has_mail or any(waiter.can_move for _, waiter in self.waiters)

    def is_stuck(self, mail: Container[Address]) -> bool:
        """Return whether the rank can only go on after another one."""
        has_mail = any(address in mail for address in self.addresses)
        return not has_mail and all(waiter.is_stuck for _, waiter in self.waiters)

    @property
    def sources(self) -> list[int]:
        """The ranks of the world that it waits for."""
        of_messages = [source for _, source, _, _ in self.addresses]
        return of_messages + [members[r] for members, w in self.waiters for r in w.missing]


class World:
    """What the ranks of one process share: mailboxes, and what each rank waits for."""

    def __init__(self, size: int) -> None:
        self.size, self.memory = size, of_threads(size)
        self.lock = threading.RLock()
        self.arrived = [threading.Condition(self.lock) for _ in range(size)]  # of each rank
        self.mail: defaultdict[Address, deque[Bytes]] = defaultdict(deque)
        self.running = set(range(size))
        self.waiting: dict[int, Wait] = {}
        # The thread that calls the function of each rank.  If another one waits for messages to a
        # rank, too, nobody knows whether that rank can go on.
        self.threads: dict[int, int] = {}
        self.has_other_threads = False
        self.failure: CollectiveError | None = None
        # How often a call of each rank has collected a message for another call of the rank, and
        # how often that was when a thread last looked at the calls of a rank.
        self.num_served = [0] * size
        self._num_seen: dict[tuple[int, int], int] = {}

    def post(self, address: Address, data: Bytes) -> None:
        with self.lock:
            self.mail[address].append(data.copy())
            self.arrived[address[2]].notify_all()  # waking all others would take long

    def collect(self, address: Address) -> Bytes | None:
        """Return the oldest message at an address, or None.  Raises if a rank has failed."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            mailbox = self.mail.get(address)
            if not mailbox:
                return None
            data = mailbox.popleft()
            if not mailbox:
                del self.mail[address]
            return data

    def note_served(self, rank: int) -> None:
        """Note that a call of a rank has collected a message for another call, which can go on."""
        with self.lock:
            self.num_served[rank] += 1
            self.waiting.pop(rank, None)
            self.arrived[rank].notify_all()

    def _was_served(self, rank: int, thread: int) -> bool:
        """Return whether that has happened since this thread last asked."""
        before = self._num_seen.get((rank, thread), 0)
        self._num_seen[rank, thread] = now = self.num_served[rank]
        return now != before

    def leave(self, rank: int) -> None:
        """Note that the function of a rank has ended."""
        with self.lock:
            self.running.discard(rank)
            self._notice_deadlock()

    def fail(self, failure: CollectiveError) -> None:
        """Make every wait raise `failure`, or the failure that came before it."""
        with self.lock:
            self.failure = self.failure or failure
            for condition in self.arrived:
                condition.notify_all()

    def wait_for_any(self, rank: int, wait: Wait, deadline: float | None) -> bool:
        """Wait until a rank can go on; return False if the deadline comes first."""
        this = threading.get_ident()
        is_other = self.threads.get(rank, this) != this
        with self.lock:
            if deadline is None:  # a wait with a deadline ends by itself
                self.has_other_threads |= is_other
                self.waiting[rank] = wait
            try:
                while not (self._was_served(rank, this) or wait.can_move(self.mail)):
                    self._notice_deadlock()
                    if self.failure is not None:
                        raise self.failure
                    left = math.inf if deadline is None else deadline - time.monotonic()
                    if left <= 0:
                        return False
                    left = min(left, _LOOK) if wait.waiters else left
                    self.arrived[rank].wait(None if left == math.inf else left)
                return True
            finally:
                if self.waiting.get(rank) is wait:
                    del self.waiting[rank]

    def _notice_deadlock(self) -> None:
        """Fail if all running ranks wait, and none has a message where it waits."""
        if self.has_other_threads or not self.running <= set(self.waiting):
            return
        is_stuck = all(wait.is_stuck(self.mail) for wait in self.waiting.values())
        if self.running and is_stuck:
            waits = "; ".join(
                f"rank {rank} waits for rank {', '.join(map(str, wait.sources[:1]))}"
                for rank, wait in sorted(self.waiting.items())
            )
            self.fail(CollectiveMismatch(f"deadlock, the ranks' calls do not match: {waits}"))


class ThreadTransport:
    """One rank's end of a communicator among threads.

    Parameters
    ----------
    world : World
        What the ranks of the process share.
    members : sequence of int
        The ranks of the world that the communicator has, in order.
    rank : int
        This rank of the communicator.
    context : hashable
        What separates the messages of different communicators.
    parent : ThreadTransport, optional
        The end of the communicator from which this one is made.
    """

    num_tags = 1 << 30
    max_wait = 0.0
    why_interpreted = "the ranks are threads"

    def __init__(
        self,
        world: World,
        members: Sequence[int],
        rank: int,
        context: Hashable = (),
        parent: ThreadTransport | None = None,
    ) -> None:
        self.world, self.members, self.context = world, tuple(members), context
        self.rank, self.size = rank, len(members)
        # The calls of a rank in all its communicators.
        self.in_flight: list[PendingCall] = parent.in_flight if parent else []
        self.failed: list[Any] = parent.failed if parent else []
        self.pending: list[ThreadMessages] = parent.pending if parent else []
        # The program may call from several threads, which collect each other's messages.
        self.pending_lock: threading.RLock = parent.pending_lock if parent else threading.RLock()
        self.flight: FlightRecorder = (
            parent.flight if parent else FlightRecorder(rank, len(members))
        )
        self._num_subgroups: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._num_alike: Counter[tuple[int, ...]] = parent._num_alike if parent else Counter()
        self._num_alike[self.members] += 1
        self.identity = self.members, self._num_alike[self.members]
        self.log = self.flight.log(*self.identity)
        me = self.members[rank]
        memory = (
            parent.board.memory
            if parent
            else HostMemory(world.memory, world.size, me, is_of_threads=True)
        )
        self.board: Board = Board(memory, self.members, rank, self.identity)
        self._waiters: list[Watched] = parent._waiters if parent else []
        self.message_memory: Callable[[Backend], MessageMemory] = PageLockedMemory

    def execution(
        self,
        program: Program,
        operands: Operands,
        tag: int,
        host_calls: NDArray[np.int64] | None = None,
    ) -> Execution:
        if operands.backend.is_host:
            return Interpreted(program, operands, self.messages(tag), host_calls)
        return Staged(program, operands, self, tag, host_calls)

    def messages(self, tag: int) -> ThreadMessages:
        return ThreadMessages(self, tag)

    def probe(self, tag: int) -> int | None:
        with self.world.lock:
            senders = range(self.size)
            return next(
                (r for r in senders if self.address(r, self.rank, tag) in self.world.mail), None
            )

    def address(self, src: int, dst: int, tag: int) -> Address:
        return self.context, self.members[src], self.members[dst], tag

    def subgroup(self, ranks: Sequence[int], deadline: float | None) -> ThreadTransport:
        members = tuple(self.members[rank] for rank in ranks)
        self._num_subgroups[members] += 1
        context = (self.context, members, self._num_subgroups[members])
        return ThreadTransport(
            self.world, members, list(ranks).index(self.rank), context, parent=self
        )

    def pause(self, deadline: float | None, num_tries: int) -> None:
        wait = Wait(self.pending, self._waiters)
        self.world.wait_for_any(self.world_rank, wait, deadline)

    @property
    def world_rank(self) -> int:
        """The rank in the world of all threads."""
        return self.members[self.rank]

    def split(self, ranks: Sequence[int] | None, deadline: float | None) -> ThreadTransport | None:
        return None if ranks is None else self.subgroup(ranks, deadline)

    can_shrink, can_use_threads = False, True

    def translate_error(self, error: BaseException) -> BaseException:
        return error

    def shrink(self, deadline: float | None, interrupt: bool) -> tuple[ThreadTransport, list[int]]:
        raise CollectiveError("threads of one process fail together: there is nothing to shrink to")

    def watch(self, waiter: Waiter) -> None:
        self._waiters.append((self.members, waiter))

    def unwatch(self, waiter: Waiter) -> None:
        if (self.members, waiter) in self._waiters:
            self._waiters.remove((self.members, waiter))

    def free(self) -> None:
        """Do nothing: the mailboxes end with the world."""


class ThreadMessages:
    """The messages of one execution between threads."""

    def __init__(self, transport: ThreadTransport, tag: int) -> None:
        self._transport, self.tag = transport, tag
        self.lengths: dict[int, int] = {}
        self._pending: dict[int, tuple[int, Bytes]] = {}  # receives, by slot
        self._may_be_shorter = set[int]()
        self._failure: CollectiveMismatch | None = None

    def receive(self, slot: int, peer: int, data: Bytes, *, may_be_shorter: bool = False) -> None:
        (self._may_be_shorter.add if may_be_shorter else self._may_be_shorter.discard)(slot)
        with self._transport.pending_lock:
            if not self._pending:
                self._transport.pending.append(self)
            self._pending[slot] = peer, data

    def send(self, slot: int, peer: int, data: Bytes) -> None:
        transport = self._transport
        transport.world.post(transport.address(transport.rank, peer, self.tag), data)

    def test(self, slots: range, num_receives: int) -> bool:
        """Collect the messages that have arrived; return whether those in `slots` have."""
        with self._transport.pending_lock:
            self._collect_in_order()
        if self._failure is not None:
            self.abandon()
            raise self._failure
        return not any(slot in self._pending for slot in slots[:num_receives])

    def _collect_in_order(self) -> None:
        """Collect the messages that have arrived, for receives in the order posted."""
        pending, claimed = self._transport.pending, set[Address]()  # by receives posted before
        for one in list(pending) if self in pending else ():
            if one is self or not set(one.addresses()).isdisjoint(self.addresses()):
                if one.collect(claimed) and one is not self:
                    self._transport.world.note_served(self._transport.world_rank)
                claimed.update(one.addresses())
            if one is self:
                break

    def collect(self, claimed: Container[Address]) -> bool:
        """Collect the messages that have arrived, except at addresses that others claimed.

        Return whether there was any.
        """
        still_pending: dict[int, tuple[int, Bytes]] = {}
        for slot, (peer, buffer) in self._pending.items():
            is_blocked = any(peer == other for other, _ in still_pending.values())
            is_blocked |= self._address(peer) in claimed
            data = None if is_blocked else self._transport.world.collect(self._address(peer))
            if data is None:
                still_pending[slot] = peer, buffer
            else:
                self._take(slot, peer, data, buffer)
        has_collected = len(still_pending) < len(self._pending)
        self._pending = still_pending
        if not still_pending:
            self._transport.pending.remove(self)
        return has_collected

    def addresses(self) -> list[Address]:
        """Return the addresses at which it waits for messages."""
        return [self._address(peer) for peer, _ in list(self._pending.values())]

    def _address(self, peer: int) -> Address:
        return self._transport.address(peer, self._transport.rank, self.tag)

    def _take(self, slot: int, peer: int, data: Bytes, buffer: Bytes) -> None:
        if slot in self._may_be_shorter:
            buffer[: data.size], self.lengths[slot] = data[: buffer.size], data.size
        elif data.size == buffer.size:
            buffer[...] = data
        else:
            me = self._transport.rank
            self._failure = CollectiveMismatch(wrong_length(me, peer, data.size, buffer.size))

    def note_completed(self) -> None:
        """Do nothing: `waiting_for` sees what was collected."""

    def waiting_for(self) -> list[Waiting]:
        return [Waiting(peer, is_receive=True) for peer, _ in list(self._pending.values())]

    def abandon(self) -> bool:
        with self._transport.pending_lock:
            self._pending = {}
            if self in self._transport.pending:
                self._transport.pending.remove(self)
        return True  # later messages stay in the mailbox: only `test` writes into the buffers


def run_threads(
    function: Callable[[ThreadTransport], Any], size: int, timeout: float | None
) -> list[Any]:
    """Run `function(transport)` on `size` threads; return their results in rank order.

    Raises the error of the rank that failed first, and CollectiveTimeout if a rank is still running
    after `timeout` seconds.
    """
    world = World(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        world.threads[rank] = threading.get_ident()
        try:
            results[rank] = function(ThreadTransport(world, range(size), rank))
        except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
            errors.append(error)
            world.fail(PeerFailed(f"rank {rank} raised {type(error).__name__}: {error}", (rank,)))
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    _join(threads, world, errors, timeout)
    if errors:
        raise errors[0]
    return results


def _join(
    threads: Sequence[threading.Thread],
    world: World,
    errors: Sequence[BaseException],
    timeout: float | None,
) -> None:
    """Wait for all threads; after one has failed, wait `_GRACE` seconds for the others."""
    deadline = time.monotonic() + (math.inf if timeout is None else timeout)
    for rank, thread in enumerate(threads):
        while thread.is_alive():
            thread.join(0.1)
            if errors:
                deadline = min(deadline, time.monotonic() + _GRACE)
            if time.monotonic() > deadline:
                late = CollectiveTimeout(f"rank {rank} is still running after {timeout} s")
                world.fail(late)
                raise errors[0] if errors else late
