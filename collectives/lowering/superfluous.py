"""Leave out awaits and signals without which every read still has its place in the order.

A device must read a peer's data after it was written and before it is overwritten: within the call,
or by the peer's caller before and after the call.
"""

from __future__ import annotations

from collections import Counter as Multiset
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush
from itertools import permutations
from typing import NamedTuple

import numpy as np

from collectives.lowering.operations import (
    SYNCHRONIZING,
    Counter,
    DeviceKind,
    DeviceOperation,
    Place,
)
from collectives.lowering.order import Clock, Clocks, Operations, in_order
from collectives.lowering.spans import Span, Spans
from collectives.schedule import ScheduleError


def without_superfluous(
    ranks: Operations, memories: Sequence[Spans], *, is_barrier: bool
) -> list[list[DeviceOperation]]:
    """Return the operations without the awaits that no required order needs, one after another.

    Raises ScheduleError if the operations do not have all orders that they need.
    """
    clocks = Clocks(ranks)
    search = _Search(clocks, _requirements(clocks, memories, is_barrier=is_barrier))
    for rank, at, operation, _ in clocks.events:
        if operation.kind == DeviceKind.AWAIT:
            search.try_without(rank, at)
    return _renumbered(ranks, search.ignored)


class Before(NamedTuple):
    """An operation of one rank that must come before one of another; see `Clocks.precedes`."""

    rank: int
    at: int
    other: int
    other_at: int


def _requirements(
    clocks: Clocks, memories: Sequence[Spans], *, is_barrier: bool
) -> dict[Before, None]:
    """Return the orders between ranks that a call needs, and that its operations have."""
    written = [
        [*_written(operations, memory)]
        for operations, memory in zip(clocks.ranks, memories, strict=True)
    ]
    needed = dict.fromkeys(
        order
        for rank, at, operation, _ in clocks.events
        for place in operation.operands
        if place.rank != rank
        for order in _around(
            rank, at, _span(place, operation.size, memories), place.rank, written, clocks
        )
    )
    if is_barrier:
        for rank, other in permutations(range(len(clocks.ranks)), 2):
            needed[Before(rank, -1, other, len(clocks.ranks[other]))] = None
    return needed


def _span(place: Place, size: int, memories: Sequence[Spans]) -> Span:
    return memories[place.rank].span(place.buffer, place.offset, size)


def _written(operations: Sequence[DeviceOperation], memory: Spans) -> Iterator[tuple[int, Span]]:
    """Yield the operations that write, with what they write."""
    for at, operation in enumerate(operations):
        if operation.target is not None:
            _, buffer, offset = operation.target
            yield at, memory.span(buffer, offset, operation.size)


def _around(
    rank: int,
    at: int,
    span: Span,
    owner: int,
    written: Sequence[Sequence[tuple[int, Span]]],
    clocks: Clocks,
) -> Iterator[Before]:
    """Yield the orders of a read: after the owner's last write there, and before the next one."""
    earlier, later = -1, len(clocks.ranks[owner])
    for writer, target in written[owner]:
        if target.overlaps(span):
            if not clocks.precedes(owner, writer, rank, at):
                later = writer
                break
            earlier = writer
    yield Before(owner, earlier, rank, at)
    yield Before(rank, at, owner, later)


class _Search:
    """Leaves out awaits as long as all required orders hold.

    Attributes
    ----------
    ignored : set of (rank, index)
        The awaits that are left out.
    """

    def __init__(self, clocks: Clocks, needed: dict[Before, None]) -> None:
        self.ignored: set[tuple[int, int]] = set()
        self._clocks = clocks
        self._turns = {event[:2]: turn for turn, event in enumerate(clocks.events)}
        self._waiters = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        for rank, at, _, cause in clocks.events:
            if cause is not None:
                self._waiters[cause].append((rank, at))
        self._needed_at = defaultdict[tuple[int, int], list[tuple[int, int]]](list)
        for order in needed:
            if not clocks.precedes(*order):
                raise ScheduleError(f"nothing orders what two ranks do: {order}")
            last = min(order.other_at, len(clocks.ranks[order.other]) - 1)
            self._needed_at[order.other, last].append((order.rank, order.at + 2))

    def try_without(self, rank: int, at: int) -> None:
        """Leave out an await if all required orders hold without it.

        Only the clocks that change are computed anew, in the order of the operations.
        """
        self.ignored.add((rank, at))
        before: dict[tuple[int, int], Clock] = {}
        turns = [self._turns[rank, at]]
        while turns:
            where = self._clocks.events[heappop(turns)][:2]
            clock, known = self._clock(*where), self._clocks.of(*where)
            if np.array_equal(clock, known):
                continue
            before[where] = known.copy()
            known[:] = clock
            if any(clock[other] < least for other, least in self._needed_at.get(where, ())):
                self._restore(rank, at, before)
                return
            for later in ((where[0], where[1] + 1), *self._waiters.get(where, ())):
                if later in self._turns:
                    heappush(turns, self._turns[later])

    def _clock(self, rank: int, at: int) -> Clock:
        """Return the clock of an operation, from those before it."""
        cause = self._clocks.events[self._turns[rank, at]].cause
        clock = self._clocks.of(rank, at - 1).copy()
        clock[rank] = at + 2
        if cause is not None and (rank, at) not in self.ignored:
            np.maximum(clock, self._clocks.of(*cause), out=clock)
        return clock

    def _restore(self, rank: int, at: int, before: dict[tuple[int, int], Clock]) -> None:
        self.ignored.remove((rank, at))
        for where, clock in before.items():
            self._clocks.of(*where)[:] = clock


def _renumbered(
    ranks: Operations, ignored: Container[tuple[int, int]]
) -> list[list[DeviceOperation]]:
    """Return the operations without some awaits, and without signals that none of the others needs.

    The signals of each counter then have the values 1, 2, ..., and the last one is awaited.
    """
    used = {event.cause for event in in_order(ranks, ignored) if event.cause is not None}
    values: dict[tuple[int, int], int] = {}
    raised = Multiset[Counter]()
    for rank, at in sorted(used):
        counter = ranks[rank][at].counter
        assert counter is not None
        raised[counter] += 1
        values[rank, at] = raised[counter]
    kept: list[list[DeviceOperation]] = [[] for _ in ranks]
    for rank, at, operation, cause in in_order(ranks, ignored):
        signal = (rank, at) if operation.kind == DeviceKind.SIGNAL else cause
        if operation.kind not in SYNCHRONIZING:
            kept[rank].append(operation)
        elif signal in values:
            kept[rank].append(operation._replace(value=values[signal]))
    return kept
