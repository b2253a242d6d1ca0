"""The operations of one rank as tasks that wait for each other, which every format writes.

What a task waits for is derived here, and nowhere else: from the order of the rows of a program,
which is the order in which the engines run them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from collectives.programs import Kind, Program, Row
from collectives.simulation import Machine, work_rates

MAX_MESSAGES = 2**16  # from one rank to another in one call
MAX_CALLS = 2**15 - 1  # so that tags are positive numbers of 32 bits


class Task(NamedTuple):
    """One operation of a rank.

    Attributes
    ----------
    kind : str
        "send", "receive", or "work", which sends nothing.
    size, peer, tag : int
        Of a message: its bytes, the rank at the other end, and the number that no other message
        from the same rank to the same rank has.
    seconds : float
        For how long work occupies the rank.
    after : tuple of int
        The numbers of the tasks that must have ended before this one begins.
    row : Row or None
        The row of a program that the task is, or the first of several.
    is_compute : bool
        Whether it is computation of the caller, beside the communication.
    """

    kind: Literal["send", "receive", "work"]
    size: int = 0
    peer: int = -1
    tag: int = 0
    seconds: float = 0.0
    after: tuple[int, ...] = ()
    row: Row | None = None
    is_compute: bool = False

    @property
    def size_written(self) -> int:
        """The bytes of a message for engines that take none without bytes: at least one."""
        return max(self.size, 1)

    @property
    def is_message(self) -> bool:
        """Whether it is a send or a receive."""
        return self.kind != "work"


class Stream:
    """What a rank does in order.  Streams of one rank add to the same list of tasks.

    Parameters
    ----------
    tasks : list of Task
        The list of the rank.
    ready : iterable of int
        The tasks that must have ended before the next task of this stream begins.
    joins_work : bool
        Whether consecutive copies and combinations are one task, as in a simulation.
    """

    def __init__(
        self, tasks: list[Task], ready: Iterable[int] = (), *, joins_work: bool = True
    ) -> None:
        self.tasks, self.ready, self.joins_work = tasks, tuple(ready), joins_work

    def post(self, task: Task) -> int:
        """Add a task that the next one does not wait for, and return its number."""
        self.tasks.append(task._replace(after=self.ready))
        return len(self.tasks) - 1

    def wait(self, numbers: Iterable[int]) -> None:
        """Let the next task begin only when these have ended."""
        numbers = tuple(numbers)
        implied = {before for number in numbers for before in self.tasks[number].after}
        kept = (number for number in self.ready if number not in implied)
        self.ready = tuple(dict.fromkeys((*kept, *numbers)))

    def work(self, seconds: float, row: Row | None = None, *, is_compute: bool = False) -> None:
        """Add work, for which the next task waits; nothing if it is no row and takes no time."""
        if self.joins_work and row is not None and self._last_is_row():
            before = self.tasks[-1]
            self.tasks[-1] = before._replace(seconds=before.seconds + seconds)
        elif seconds or row is not None:
            task = Task("work", seconds=seconds, row=row, is_compute=is_compute)
            self.ready = (self.post(task),)

    def _last_is_row(self) -> bool:
        """Return whether the next task waits only for the last one, which is work of a program."""
        if self.ready != (len(self.tasks) - 1,):
            return False
        before = self.tasks[-1]
        return not before.is_message and before.row is not None

    def run(self, program: Program, machine: Machine, ranks: Sequence[int], call: int = 0) -> None:
        """Add the rows of a program.

        Parameters
        ----------
        program : Program
        machine : Machine
        ranks : sequence of int
            The rank that each rank of the program is.
        call : int
            The number of the call, which is the same on all its ranks.

        Raises
        ------
        ValueError
            If there are more calls, or messages between two ranks, than tags.
        """
        self.work(machine.call_seconds)
        rates = work_rates(machine).tolist()
        in_flight: dict[int, int] = {}
        numbers: Counter[tuple[int, int]] = Counter()
        for row in map(Row._make, program.rows.tolist()):
            if row.kind == Kind.WAIT:
                slots = range(row.slot, row.slot + row.size)
                self.wait(in_flight.pop(slot) for slot in slots)
            elif row.kind in (Kind.SEND, Kind.RECEIVE):
                ends = row.kind, ranks[row.peer]
                in_flight[row.slot] = self.post(_message(row, ends[1], tag(call, numbers[ends])))
                numbers[ends] += 1
            else:
                self.work(rates[row.kind] * row.size, row)


def _message(row: Row, peer: int, number: int) -> Task:
    return Task("send" if row.kind == Kind.SEND else "receive", row.size, peer, number, row=row)


def tag(call: int, number: int = 0) -> int:
    """Return the tag of a message, from its number among those between two ranks in a call.

    Raises ValueError if there are more calls or messages than tags.
    """
    if call > MAX_CALLS or number >= MAX_MESSAGES:
        raise ValueError(
            f"there are tags for {MAX_CALLS + 1} calls of {MAX_MESSAGES} messages between two ranks"
        )
    return call * MAX_MESSAGES + number


def tasks_of(
    programs: Sequence[Program], machine: Machine, *, joins_work: bool = True
) -> list[list[Task]]:
    """Return the tasks of each rank in one call; `programs` are those of all ranks.

    What copies and combinations cost on `machine` is the time of the tasks that are work.
    `joins_work` is as in `Stream`.
    """
    ranks = range(len(programs))
    lists: list[list[Task]] = [[] for _ in ranks]
    for tasks, program in zip(lists, programs, strict=True):
        Stream(tasks, joins_work=joins_work).run(program, machine, ranks)
    return lists
