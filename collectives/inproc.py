"""The engine without MPI: all ranks in one process, one thread each.

A send copies its bytes into the receiver's mailbox at once.  When every rank that still runs waits
for a message that is not there, the engine knows that nothing can ever happen and says who waits
for whom, instead of hanging.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from collectives.arrays import Bytes
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    PeerFailed,
)
from collectives.transport import Parcels, wrong_length

if TYPE_CHECKING:
    from collectives.plan import Plan

Address = tuple[Hashable, int, int, int]  # context, source, destination, tag


class World:
    """What the ranks of one process share: mailboxes, and who is waiting for what."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()  # its lock is re-entrant
        self.mail: defaultdict[Address, deque[Bytes]] = defaultdict(deque)
        self.running = set(range(size))
        self.waiting: dict[int, Sequence[Address]] = {}
        self.failure: CollectiveError | None = None

    def post(self, address: Address, data: Bytes) -> None:
        with self.changed:
            self.mail[address].append(data.copy())
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """The function of a rank has ended."""
        with self.changed:
            self.running.discard(rank)
            self._notice_deadlock()

    def fail(self, failure: CollectiveError) -> None:
        """Make every wait raise `failure`; the first failure is the one that counts."""
        with self.changed:
            self.failure = self.failure or failure
            self.changed.notify_all()

    def wait_for_any(
        self, rank: int, addresses: Sequence[Address], deadline: float | None
    ) -> bool:
        """Wait until mail is at one of the addresses; False if the deadline came first."""
        with self.changed:
            if deadline is None:  # with a deadline it will go on by itself
                self.waiting[rank] = addresses
            try:
                while not any(self.mail[address] for address in addresses):
                    self._notice_deadlock()
                    if self.failure is not None:
                        raise self.failure
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self.changed.wait(left)
                return True
            finally:
                self.waiting.pop(rank, None)

    def _notice_deadlock(self) -> None:
        """Nobody can go on if all that still run wait, and none has mail where it waits."""
        is_stuck = self.running <= set(self.waiting) and not any(
            self.mail[address] for addresses in self.waiting.values() for address in addresses
        )
        if self.running and is_stuck:
            waits = "; ".join(
                f"rank {rank} waits for rank {addresses[0][1]}"
                for rank, addresses in sorted(self.waiting.items())
            )
            self.fail(CollectiveMismatch(f"deadlock, the ranks' calls do not match: {waits}"))


class InprocTransport:
    """One rank's end of a communicator among threads.

    `members` are the ranks of the world that take part, in order; `context` keeps the messages of
    different communicators apart.
    """

    num_tags = 1 << 30

    def __init__(
        self,
        world: World,
        members: Sequence[int],
        rank: int,
        context: Hashable = (),
        in_flight: list[Plan] | None = None,
    ) -> None:
        self.world, self.members, self.context = world, tuple(members), context
        self.rank, self.size = rank, len(members)
        self.in_flight: list[Plan] = [] if in_flight is None else in_flight
        self._num_subgroups: defaultdict[tuple[int, ...], int] = defaultdict(int)

    def exchange(
        self, sends: Parcels, receives: Parcels, tag: int, is_kept: bool
    ) -> InprocExchange:
        return InprocExchange(self, sends, receives, tag)

    def address(self, src: int, dst: int, tag: int) -> Address:
        return self.context, self.members[src], self.members[dst], tag

    def subgroup(self, ranks: Sequence[int]) -> InprocTransport:
        members = tuple(self.members[rank] for rank in ranks)
        self._num_subgroups[members] += 1
        context = (self.context, members, self._num_subgroups[members])
        return InprocTransport(
            self.world, members, list(ranks).index(self.rank), context, self.in_flight
        )

    def split(self, ranks: Sequence[int] | None) -> InprocTransport | None:
        return None if ranks is None else self.subgroup(ranks)

    def free(self) -> None:
        """Nothing to give back: the mailboxes go with the world."""


class InprocExchange:
    """The messages of one round between threads."""

    def __init__(
        self, transport: InprocTransport, sends: Parcels, receives: Parcels, tag: int
    ) -> None:
        self._transport, self._sends, self._receives, self._tag = transport, sends, receives, tag
        self._pending: list[tuple[int, Bytes]] = []

    def start(self) -> None:
        transport = self._transport
        self._pending = list(self._receives)
        for peer, data in self._sends:
            transport.world.post(transport.address(transport.rank, peer, self._tag), data)

    def test(self) -> bool:
        """Take what has arrived.  Several messages from one peer come in the order posted."""
        world, still_pending, blocked = self._transport.world, [], set()
        with world.changed:
            for peer, buffer in self._pending:
                mailbox = world.mail[self._address(peer)]
                if mailbox and peer not in blocked:
                    self._take(peer, mailbox.popleft(), buffer)
                else:
                    blocked.add(peer)
                    still_pending.append((peer, buffer))
        self._pending = still_pending
        return not still_pending

    def wait(self, deadline: float | None) -> bool:
        world, rank = self._transport.world, self._transport.members[self._transport.rank]
        while not self.test():
            addresses = [self._address(peer) for peer, _ in self._pending]
            if not world.wait_for_any(rank, addresses, deadline):
                return False
        return True

    def _address(self, peer: int) -> Address:
        return self._transport.address(peer, self._transport.rank, self._tag)

    def _take(self, peer: int, data: Bytes, buffer: Bytes) -> None:
        if data.size != buffer.size:
            me = self._transport.rank
            raise CollectiveMismatch(wrong_length(me, peer, data.size, buffer.size))
        buffer[...] = data

    def waiting_for(self) -> list[str]:
        return [f"a message from rank {peer}" for peer, _ in self._pending]

    def free(self) -> None:
        """Nothing is held."""


def run_threads(
    function: Callable[[InprocTransport], Any], size: int, timeout: float | None
) -> list[Any]:
    """Run `function(transport)` on `size` threads and return what each returned, in rank order.

    Raises what the first failing rank raised.  Raises CollectiveTimeout if a rank is still running
    after `timeout` seconds.
    """
    world = World(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = function(InprocTransport(world, range(size), rank))
        except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
            errors.append(error)
            world.fail(PeerFailed(f"rank {rank} raised {type(error).__name__}: {error}"))
        finally:
            world.leave(rank)

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    _join(threads, timeout, world)
    if errors:
        raise errors[0]
    return results


def _join(threads: Sequence[threading.Thread], timeout: float | None, world: World) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    for rank, thread in enumerate(threads):
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            late = CollectiveTimeout(f"rank {rank} is still running after {timeout} s")
            world.fail(late)
            raise late
