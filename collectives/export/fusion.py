"""Join a receive and the combination of what it has received into one task, where that is safe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collectives.export.tasks import Task
from collectives.programs import Kind, Row


class Place(NamedTuple):
    """The bytes from `start` up to `stop` of a buffer of a program."""

    buffer: int
    start: int
    stop: int

    def overlaps(self, other: Place) -> bool:
        """Return whether the two have a byte in common."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


def target(row: Row) -> Place:
    """Return what a row sends, or else writes."""
    return Place(row.buffer, row.offset, row.offset + row.size)


def left(row: Row) -> Place:
    """Return the first operand of a copy or a combination."""
    return Place(row.left, row.left_offset, row.left_offset + row.size)


def right(row: Row) -> Place:
    """Return the second operand of a combination."""
    return Place(row.right, row.right_offset, row.right_offset + row.size)


class Joined(NamedTuple):
    """A receive that combines what it receives with `own` and stores the result at `into`.

    Attributes
    ----------
    extra : tuple of int
        Earlier receives of the same round that must have ended, because they write there as well.
    """

    receive: int
    own: Place
    into: Place
    extra: tuple[int, ...] = ()


def joined(tasks: Sequence[Task]) -> dict[int, Joined]:
    """Return the combinations, by their numbers, that are joined with a receive.

    The joined task runs where the receive is posted, which is earlier than the combination in the
    program, and what was received is nowhere but in the result.  So between the two nothing may use
    the result's place or write the operand, and nothing may read what was received later on.
    """
    joins: dict[int, Joined] = {}
    arrivals: dict[Place, int] = {}  # the last receive into a place
    for number, task in enumerate(tasks):
        if task.kind == "receive":
            arrivals[target(_row(task))] = number
        elif _row(task).kind == Kind.COMBINE:
            candidate = _candidate(tasks, number, arrivals, joins)
            if candidate is not None:
                joins[number] = candidate
    return joins


def _candidate(
    tasks: Sequence[Task], number: int, arrivals: dict[Place, int], joins: dict[int, Joined]
) -> Joined | None:
    """Return how a combination can be joined with a receive; None if it cannot.

    Either operand may have come.
    """
    row = _row(tasks[number])
    into, operands = target(row), (left(row), right(row))
    for arrived, own in (operands, operands[::-1]):
        receive = arrivals.get(arrived)
        if receive is not None and (into == arrived or _is_unread(tasks[number + 1 :], arrived)):
            return _if_safe(tasks, number, Joined(receive, own, into), joins)
    return None


def _is_unread(tasks: Sequence[Task], place: Place) -> bool:
    """Return whether no task reads a place before one writes to it."""
    for task in tasks:
        if any(map(place.overlaps, _read(task))):
            return False
        if place.overlaps(_written(task)):
            return True
    return True


def _if_safe(
    tasks: Sequence[Task], number: int, candidate: Joined, joins: dict[int, Joined]
) -> Joined | None:
    """Return the candidate with the other joined tasks to wait for.

    None if something is in the way.
    """
    arrived = target(_row(tasks[candidate.receive]))
    receives = {other.receive for other in joins.values()} | {candidate.receive}
    first = max(tasks[candidate.receive].after, default=-1) + 1  # what is before it has ended
    between = range(first, number)
    others = [n for n in between if n not in joins and n not in receives]
    if any(_is_in_the_way(tasks[other], arrived, candidate) for other in others):
        return None
    earlier = [joins[n] for n in between if n in joins]
    places = (candidate.own, candidate.into)
    extra = tuple(x.receive for x in earlier if any(map(x.into.overlaps, places)))
    return candidate._replace(extra=extra) if max(extra, default=-1) < candidate.receive else None


def _is_in_the_way(task: Task, arrived: Place, candidate: Joined) -> bool:
    """Return whether a task between the two needs what was received, or the places of before."""
    written, read = _written(task), list(_read(task))
    return (
        candidate.own.overlaps(written)
        or any(map(candidate.into.overlaps, (written, *read)))
        or any(map(arrived.overlaps, read))
    )


def _read(task: Task) -> Iterator[Place]:
    """Yield what a task reads."""
    row = _row(task)
    if task.kind == "send":
        yield target(row)
    elif row.kind in (Kind.COPY, Kind.COMBINE):
        yield left(row)
        if row.kind == Kind.COMBINE:
            yield right(row)


def _written(task: Task) -> Place:
    """Return what a task writes; nothing if it sends."""
    place = target(_row(task))
    return place._replace(stop=place.start) if task.kind == "send" else place


def _row(task: Task) -> Row:
    assert task.row is not None, "only programs have places"
    return task.row
