"""Joins a receive and the combination of what it has received into one task, where that is safe."""

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
        """Whether the two have a byte in common."""
        return self.buffer == other.buffer and self.start < other.stop and other.start < self.stop


def target(row: Row) -> Place:
    """What a row sends, or else writes."""
    return Place(row.buffer, row.offset, row.offset + row.size)


def left(row: Row) -> Place:
    """The first operand of a copy or a combination."""
    return Place(row.left, row.left_offset, row.left_offset + row.size)


def right(row: Row) -> Place:
    """The second operand of a combination."""
    return Place(row.right, row.right_offset, row.right_offset + row.size)


class Joined(NamedTuple):
    """A receive that combines what it receives with `own` and stores the result at `into`.

    `extra`: earlier ones of the same round that must have ended, because they write there as well.
    """

    receive: int
    own: Place
    into: Place
    extra: tuple[int, ...] = ()


def joined(tasks: Sequence[Task]) -> dict[int, Joined]:
    """The combinations, by their numbers, that are joined with a receive.

    The joined task runs where the receive is posted, which is earlier than the combination in the
    program, and what was received is nowhere but in the result.  So between the two nothing may use
    the result's place or write the operand, and nothing may read what was received later on.
    """
    found: dict[int, Joined] = {}
    arrivals: dict[Place, int] = {}  # the last receive into a place
    for number, task in enumerate(tasks):
        if task.kind == "receive":
            arrivals[target(_row(task))] = number
        elif _row(task).kind == Kind.COMBINE:
            each = _candidate(tasks, number, arrivals, found)
            if each is not None:
                found[number] = each
    return found


def _candidate(
    tasks: Sequence[Task], number: int, arrivals: dict[Place, int], found: dict[int, Joined]
) -> Joined | None:
    """How a combination can be joined with a receive, if it can.  Either operand may have come."""
    row = _row(tasks[number])
    into, operands = target(row), (left(row), right(row))
    for arrived, own in (operands, operands[::-1]):
        receive = arrivals.get(arrived)
        if receive is not None and (into == arrived or _is_unread(tasks[number + 1 :], arrived)):
            return _if_safe(tasks, number, Joined(receive, own, into), found)
    return None


def _is_unread(tasks: Sequence[Task], place: Place) -> bool:
    """Whether no task reads a place before one writes to it."""
    for task in tasks:
        if any(map(place.overlaps, _read(task))):
            return False
        if place.overlaps(_written(task)):
            return True
    return True


def _if_safe(
    tasks: Sequence[Task], number: int, each: Joined, found: dict[int, Joined]
) -> Joined | None:
    """The same with the other joined tasks to wait for; None if something is in the way."""
    arrived = target(_row(tasks[each.receive]))
    receives = {other.receive for other in found.values()} | {each.receive}
    first = max(tasks[each.receive].after, default=-1) + 1  # what is before it has ended
    between = range(first, number)
    others = [n for n in between if n not in found and n not in receives]
    if any(_is_in_the_way(tasks[other], arrived, each) for other in others):
        return None
    earlier = [found[n] for n in between if n in found]
    places = (each.own, each.into)
    extra = tuple(x.receive for x in earlier if any(map(x.into.overlaps, places)))
    return each._replace(extra=extra) if max(extra, default=-1) < each.receive else None


def _is_in_the_way(task: Task, arrived: Place, each: Joined) -> bool:
    """Whether a task between the two needs what was received, or the places of before."""
    written, read = _written(task), list(_read(task))
    return (
        each.own.overlaps(written)
        or any(map(each.into.overlaps, (written, *read)))
        or any(map(arrived.overlaps, read))
    )


def _read(task: Task) -> Iterator[Place]:
    """What a task reads."""
    row = _row(task)
    if task.kind == "send":
        yield target(row)
    elif row.kind in (Kind.COPY, Kind.COMBINE):
        yield left(row)
        if row.kind == Kind.COMBINE:
            yield right(row)


def _written(task: Task) -> Place:
    """What a task writes; nothing if it sends."""
    place = target(_row(task))
    return place._replace(stop=place.start) if task.kind == "send" else place


def _row(task: Task) -> Row:
    assert task.row is not None, "only programs have places"
    return task.row
