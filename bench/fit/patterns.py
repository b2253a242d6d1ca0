"""The exchanges of two ranks, and the work of one, from whose times a machine is fitted.

They are programs, as collectives are: the same engine runs them, and the same simulator predicts
them.  No collective of this library consists of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.programs import Combine, Lane, Lanes, Message, Move, Program, Step, assembled
from collectives.schedule import Region
from collectives.simulation import OTHER_HOST, Machine, simulate

ITEMSIZE = 4  # bytes of a float32
BURST = 4  # messages that are sent at once

# The steps of rank 0 or 1 of a pair, from its number, the other's rank, and elements.
Steps = Callable[[int, int, int], list[Step]]


class Sample(NamedTuple):
    """What was measured: a pattern between two ranks, the bytes of a message, and seconds."""

    pattern: str
    link_class: str
    num_bytes: int
    seconds: float


def ping_pong(number: int, peer: int, count: int) -> list[Step]:
    """A message there, and then one back."""
    steps = [Step(sends=(_sent(peer, count),)), Step(receives=(_received(peer, count),))]
    return steps if number == 0 else steps[::-1]


def exchange(number: int, peer: int, count: int) -> list[Step]:
    """A message in both directions at once."""
    return [Step(sends=(_sent(peer, count),), receives=(_received(peer, count),))]


def burst(number: int, peer: int, count: int) -> list[Step]:
    """Several messages in one direction at once."""
    if number == 0:
        return [Step(sends=(_sent(peer, count),) * BURST)]
    return [Step(receives=tuple(_received(peer, count, place) for place in range(BURST)))]


def _sent(peer: int, count: int) -> Message:
    return Message(peer, Region("input", 0, count))


def _received(peer: int, count: int, place: int = 0) -> Message:
    return Message(peer, Region("output", place * count, (place + 1) * count))


PATTERNS: Mapping[str, Steps] = {"ping-pong": ping_pong, "exchange": exchange, "burst": burst}


def num_repeats(num_bytes: int) -> int:
    """How often a pattern is repeated in one program, so that its start does not count."""
    return 16 if num_bytes <= 16384 else 4


@lru_cache(maxsize=512)
def pair_program(pattern: str, number: int, peer: int, num_bytes: int) -> Program:
    """The program of rank 0 or 1 of a pair."""
    steps = PATTERNS[pattern](number, peer, num_bytes // ITEMSIZE)
    return _program(steps * num_repeats(num_bytes))


def late_program(number: int, peer: int, num_bytes: int) -> Program:
    """One message, which tells whether a send waits for its receive."""
    return _program(burst(number, peer, num_bytes // ITEMSIZE)[:1])


def empty_program() -> Program:
    """A program without rows."""
    return _program([])


def work_program(kind: str, num_bytes: int) -> Program:
    """Copies or combinations of one rank."""
    x, y = (Region(name, 0, num_bytes // ITEMSIZE) for name in ("input", "output"))
    action = Combine(y, x, y) if kind == "combine" else Move(x, y)
    return _program([Step(finishing=(action,))] * num_repeats(num_bytes))


def _program(steps: list[Step]) -> Program:
    return assembled(Lanes((Lane(tuple(steps)),)), ITEMSIZE)


def predicted(samples: Sequence[Sample], machine: Machine) -> NDArray[np.float64]:
    """The seconds of one repetition of each sample's pattern on a machine.

    One simulation runs all pairs, each on hosts of its own.
    """
    programs = [
        pair_program(sample.pattern, number, 2 * pair + 1 - number, sample.num_bytes)
        for pair, sample in enumerate(samples)
        for number in (0, 1)
    ]
    hosts = [
        2 * pair + number * (sample.link_class == OTHER_HOST)
        for pair, sample in enumerate(samples)
        for number in (0, 1)
    ]
    found = simulate(programs, machine._replace(call_seconds=0.0), hosts=hosts)
    slowest = found.rank_seconds.reshape(-1, 2).max(axis=1)
    repeats = [num_repeats(sample.num_bytes) for sample in samples]
    return np.asarray(slowest / repeats, np.float64)
