"""GOAL, the input of LogGOPSim and ATLAHS: a graph of sends, receives and computations as text.

Hoefler, Siebert and Lumsdaine 2009 ("Group Operation Assembly Language").  `txt2bin` makes a binary
file of it, which `LogGOPSim -f` reads.  `l3 requires l2`: l3 begins after the end of l2.
Computations are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.export.tasks import Task

COMPUTE_CPU = 1  # of the caller's computation; messages and the library's work are on 0


def lines(ranks: Sequence[Sequence[Task]]) -> Iterator[str]:
    """Yield the lines of a file for the tasks of all ranks.

    LogGOPSim charges a message of s bytes for s - 1 of them, in unsigned numbers, so an empty
    message is written as one byte.  That is what costs nothing for its size.  A comment at each
    rank says how many there are.
    """
    yield f"num_ranks {len(ranks)}"
    for rank, tasks in enumerate(ranks):
        yield ""
        yield f"rank {rank} {{"
        yield _summary(tasks)
        for number, task in enumerate(tasks):
            yield f"l{number}: {_statement(task)}"
            yield from (f"l{number} requires l{before}" for before in task.after)
        yield "}"


def _summary(tasks: Sequence[Task]) -> str:
    """Return a comment with what the rank sends."""
    sizes = [task.size for task in tasks if task.kind == "send"]
    return (
        f"// sends {len(sizes)} messages, {sum(sizes)} bytes; "
        f"{sizes.count(0)} empty ones are written as 1b"
    )


def _statement(task: Task) -> str:
    if not task.is_message:
        return f"calc {round(task.seconds * 1e9)} cpu {COMPUTE_CPU if task.is_compute else 0}"
    verb, word = ("send", "to") if task.kind == "send" else ("recv", "from")
    return f"{verb} {task.size_written}b {word} {task.peer} tag {task.tag} cpu 0 nic 0"
