"""The order of the operations of all ranks: which certainly come before which.

An operation comes after those before it in its program, and one that waits after the one that lets
it pass: the signal that it awaits, or the send of what it receives.  Nothing else orders two ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.operations import RAISING, WAITING, Counter, DeviceOperation
from collectives.schedule import ScheduleError

Operations = Sequence[Sequence[DeviceOperation]]  # of each rank
Clock = NDArray[np.int64]


class Event(NamedTuple):
    """An operation of a rank, and its index; `cause`: those of what lets it pass, if it waits."""

    rank: int
    at: int
    operation: DeviceOperation
    cause: tuple[int, int] | None


def in_order(
    ranks: Operations, ignored: Container[tuple[int, int]] = frozenset()
) -> Iterator[Event]:
    """Yield all operations of all ranks, each after those that certainly come before it.

    `ignored` has (rank, index) of awaits that let everything pass.

    Raises ScheduleError if ranks wait for each other in a circle, or for what nobody signals.
    """
    causes = _causes(ranks)
    reached = [0] * len(ranks)
    has_moved = True
    while has_moved:
        has_moved = False
        for rank, operations in enumerate(ranks):
            while reached[rank] < len(operations):
                operation, cause = operations[reached[rank]], None
                if operation.kind in WAITING and (rank, reached[rank]) not in ignored:
                    cause = _cause_of(operation, causes)
                    if cause is None or reached[cause[0]] <= cause[1]:
                        break
                yield Event(rank, reached[rank], operation, cause)
                reached[rank] += 1
                has_moved = True
    stuck = [
        f"rank {rank} at {operations[at]}"
        for rank, (at, operations) in enumerate(zip(reached, ranks, strict=True))
        if at < len(operations)
    ]
    if stuck:
        raise ScheduleError(f"devices wait for each other forever: {'; '.join(stuck)}")


def _causes(ranks: Operations) -> dict[Counter, tuple[list[int], list[int]]]:
    """Return what raises each counter.

    For each, they are the values that it takes, and the indices of the operations that raise it.
    """
    causes: dict[Counter, tuple[list[int], list[int]]] = {}
    for operations in ranks:
        for index, operation in enumerate(operations):
            if operation.kind in RAISING:
                assert operation.counter is not None
                values, indices = causes.setdefault(operation.counter, ([], []))
                if values and values[-1] >= operation.value:
                    raise ScheduleError(f"the counter {operation.counter} goes back")
                values.append(operation.value)
                indices.append(index)
    return causes


def _cause_of(
    operation: DeviceOperation, causes: dict[Counter, tuple[list[int], list[int]]]
) -> tuple[int, int] | None:
    """Return the first operation that lets one pass that waits."""
    counter = operation.counter
    assert counter is not None
    values, indices = causes.get(counter, ([], []))
    at = bisect_left(values, operation.value)
    return (counter.writer, indices[at]) if at < len(values) else None


class Clocks:
    """How many operations of each rank certainly come before an operation, or are it.

    The beginning of a call counts as the first operation of its rank.

    Attributes
    ----------
    events : list
        All operations in order.
    """

    def __init__(self, ranks: Operations) -> None:
        self.ranks, self.events = ranks, [*in_order(ranks)]
        size = len(ranks)
        self._at = [np.zeros((len(operations) + 1, size), np.int64) for operations in ranks]
        for rank, clocks in enumerate(self._at):
            clocks[:, rank] = np.arange(1, len(clocks) + 1)
        for rank, at, _, cause in self.events:
            clock = self.of(rank, at)
            np.maximum(clock, self.of(rank, at - 1), out=clock)
            if cause is not None:
                np.maximum(clock, self.of(*cause), out=clock)

    def of(self, rank: int, at: int) -> Clock:
        """Return the clock of an operation; at -1, of the beginning of the call."""
        clock: Clock = self._at[rank][at + 1]
        return clock

    def precedes(self, rank: int, at: int, other: int, other_at: int) -> bool:
        """Return whether an operation of one rank certainly comes before one of another.

        An index of -1 is the beginning of the call; one behind the last operation, its end.
        """
        last = min(other_at, len(self.ranks[other]) - 1)
        return bool(self.of(other, last)[rank] >= at + 2)
