"""The exchanges of ranks, and the work of one, from whose times a machine is fitted.

They are programs, as collectives are: the same engine runs them, and the same simulator predicts
them.  As in the benchmarks of collectives, calls follow each other without waiting.  What is sent
has just been written: data that nobody writes between calls stays in the caches of its readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import (
    Combine,
    Kind,
    Lane,
    Lanes,
    Message,
    Move,
    Program,
    Row,
    Step,
    assembled,
)
from collectives.schedule import Region
from collectives.simulation import OTHER_HOST, Machine, simulate

ITEMSIZE = 4  # bytes of a float32
BURST = 4  # messages that are sent at once
REPEATS = 16  # of work in one program
CALLS = 4  # that are simulated one after the other

# The steps of a rank, from its number among those of the pattern, all their ranks, and elements.
Steps = Callable[[int, Sequence[int], int], list[Step]]


class Sample(NamedTuple):
    """What was measured: a pattern on a class of links, the bytes of a message, and seconds.

    `num_ranks` ranks took part in the pattern.  A sample `is_quiet` if no rank lost its core.
    """

    pattern: str
    link_class: str
    num_bytes: int
    seconds: float
    num_ranks: int = 2
    is_quiet: bool = True


def ping_pong(number: int, ranks: Sequence[int], count: int) -> list[Step]:
    """Send a message there, and then the same one back."""
    message = _message(ranks[1 - number], count)
    steps = [Step(sends=(message,)), Step(receives=(message,))]
    return steps if number == 0 else steps[::-1]


def exchange(number: int, ranks: Sequence[int], count: int) -> list[Step]:
    """Send a message to the next rank around a ring, and then what was received."""
    following, previous = (ranks[(number + by) % len(ranks)] for by in (1, -1))
    return [
        Step(
            sends=(_message(following, count, place),),
            receives=(_message(previous, count, 1 - place),),
        )
        for place in range(2)
    ]


def stream(number: int, ranks: Sequence[int], count: int) -> list[Step]:
    """Write a message, and send it in one direction."""
    message = _message(ranks[1 - number], count)
    if number == 1:
        return [Step(receives=(message,))]
    written = Move(Region("input", 0, count), message.region)
    return [Step(finishing=(written,)), Step(sends=(message,))]


def burst(number: int, ranks: Sequence[int], count: int) -> list[Step]:
    """Send several messages at once there, and then the same ones back."""
    messages = tuple(_message(ranks[1 - number], count, place) for place in range(BURST))
    steps = [Step(sends=messages), Step(receives=messages)]
    return steps if number == 0 else steps[::-1]


def _message(peer: int, count: int, place: int = 0) -> Message:
    return Message(peer, Region("output", place * count, (place + 1) * count))


PATTERNS: Mapping[str, Steps] = {
    "ping-pong": ping_pong,
    "exchange": exchange,
    "stream": stream,
    "burst": burst,
}


@lru_cache(maxsize=4096)
def pattern_program(pattern: str, number: int, ranks: tuple[int, ...], num_bytes: int) -> Program:
    """Return the program of one of the ranks of a pattern."""
    return _program(PATTERNS[pattern](number, ranks, num_bytes // ITEMSIZE))


def late_program(number: int, ranks: Sequence[int], num_bytes: int) -> Program:
    """Return messages in one direction, which tell whether a send waits for its receive."""
    return _program(burst(number, ranks, num_bytes // ITEMSIZE)[:1])


def empty_program() -> Program:
    """Return a program without rows."""
    return _program([])


def work_program(kind: str, num_bytes: int) -> Program:
    """Return copies or combinations of one rank, so many that the program's start hardly counts."""
    x, y = (Region(name, 0, num_bytes // ITEMSIZE) for name in ("input", "output"))
    action = Combine(y, x, y) if kind == "combine" else Move(x, y)
    return _program([Step(finishing=(action,))] * REPEATS)


def _program(steps: list[Step]) -> Program:
    return assembled(Lanes((Lane(tuple(steps)),)), ITEMSIZE)


def predicted(samples: Sequence[Sample], machine: Machine) -> NDArray[np.float64]:
    """Return the seconds of a call of each sample's pattern on a machine, in the mean over some.

    One simulation runs all patterns, each on hosts of its own.
    """
    programs: list[Program] = []
    hosts: list[int] = []
    starts: list[int] = []
    for sample in samples:
        ranks = tuple(range(len(programs), len(programs) + sample.num_ranks))
        starts.append(ranks[0])
        hosts += ranks if sample.link_class == OTHER_HOST else len(ranks) * [ranks[0]]
        programs += [
            pattern_program(sample.pattern, number, ranks, sample.num_bytes)
            for number in range(sample.num_ranks)
        ]
    return np.maximum.reduceat(seconds_of_calls(programs, machine, hosts), starts)


def seconds_of_calls(
    programs: Sequence[Program], machine: Machine, hosts: Sequence[int]
) -> NDArray[np.float64]:
    """Return the predicted seconds of a call on each rank, in the mean over some in a row.

    The programs are those of all ranks; between calls there is a copy that takes as long as a call.
    """
    pause = _copy_rows(machine.call_seconds, machine)
    tiled = [
        replace(program, rows=np.concatenate([program.rows, *[pause, program.rows] * (CALLS - 1)]))
        for program in programs
    ]
    return simulate(tiled, machine, hosts=hosts).rank_seconds / CALLS


def after_work(program: Program, seconds: float, machine: Machine) -> Program:
    """Return a program before which the rank is busy for some seconds."""
    return replace(program, rows=np.concatenate([_copy_rows(seconds, machine), program.rows]))


def _copy_rows(seconds: float, machine: Machine) -> NDArray[np.int64]:
    """Return a copy that takes so long."""
    num_bytes = int(seconds / machine.copy_seconds_per_byte)
    return np.array([Row(Kind.COPY, 0, size=num_bytes)], np.int64)
