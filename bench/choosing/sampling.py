"""Takes times while nothing disturbs them, and divides the time that a measurement may take.

A time is that of the slowest rank in one sample, and of the samples the 5 % quantile: what it takes
if nothing else disturbs it.

On one host short exchanges have two modes.  If both ranks keep their cores, a message takes some
microseconds.  If one loses its core, to the other or to another program, both wait until it runs
again, a hundred microseconds or more, and they may stay in step like that for many calls.  Only the
first mode is that of a machine in which every rank has a core of its own.  Therefore a sample is
quiet if the system has switched no rank off its core, and others count only where few are quiet.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from bench.choosing.patterns import CALLS
from bench.contenders.contender import nothing
from bench.workloads.expected import Array
from collectives.simulation import OTHER_HOST, SAME_HOST

Run = Callable[[], object]

QUANTILE = 0.05
FEWEST_QUIET = 4  # undisturbed samples; if there are fewer, all samples count
# How long a sample should take.  Between hosts a network may let bursts through before it slows
# them down, which must not be all that is measured.
SAMPLE_SECONDS = {SAME_HOST: 1e-4, OTHER_HOST: 1e-2}
LEAST_SECONDS = 2e-6  # what a shorter call counts as, so that a sample has not too many
BLOCKS, TURN_SECONDS = 8, 0.1  # a turn has so many samples, or fewer if they take longer, but two
REST = 1e-3  # seconds of sleep, after which the system gives a process its processor at once


class Steps:
    """The steps of a measurement.  The time that is left is divided evenly among those left.

    Parameters
    ----------
    number : int
        The number of steps.
    seconds : float
        How long all of them may take.
    show : function
        Called with the number of steps that are done, the next step as text, and the seconds that
        are left.
    """

    def __init__(
        self, number: int, seconds: float, show: Callable[[int, str, float], None]
    ) -> None:
        self._number, self._end, self._show = number, time.perf_counter() + seconds, show
        self._done = 0

    def begin(self, text: str) -> float:
        """Show what the next step is; return the seconds that it may take."""
        left = max(self._end - time.perf_counter(), 0.0)
        self._show(self._done, text, left)
        share = left / max(self._number - self._done, 1)
        self._done += 1
        return share


class Time(NamedTuple):
    """Seconds of a call, and whether they are of quiet samples alone."""

    seconds: float
    is_quiet: bool


class Taken(NamedTuple):
    """A sample on this rank: seconds of a call, and how often the rank has lost its core."""

    seconds: float
    switches: int


def sampled(
    runs: Sequence[Run], comm: MPI.Comm, samples: int, seconds: float, link_class: str = SAME_HOST
) -> list[Time]:
    """Return the time of a call of each of `runs`, the same on all ranks.

    They take turns in random order.  A turn is a sample that brings the ranks into step and does
    not count, and then some samples, each of a number of calls.

    Parameters
    ----------
    runs : sequence of function
        What is timed.  All ranks of `comm` call `sampled` with as many.
    comm : MPI.Comm
        The ranks.
    samples : int
        The samples of each of `runs`.
    seconds : float
        After so many seconds on rank 0 no new turns begin.
    link_class : str
        The class of the slowest link between the ranks.
    """
    end = time.perf_counter() + seconds
    plans = [_turn(run, comm, SAMPLE_SECONDS[link_class]) for run in runs]
    taken: list[list[Taken]] = [[] for _ in runs]
    turns, shuffle = list(range(len(runs))), Random(0).shuffle  # the same on every rank
    for number in range(-(-samples // BLOCKS)):
        if number > 0 and not comm.bcast(time.perf_counter() < end):
            break
        shuffle(turns)
        for turn in turns:
            taken[turn] += _samples(runs[turn], comm, *plans[turn])
    return [least(samples_of_run, comm) for samples_of_run in taken]


def least(taken: Sequence[Taken], comm: MPI.Comm) -> Time:
    """Return the time of the slowest rank where little disturbs it."""
    slowest = np.array(taken, float)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    seconds, switches = slowest.T
    quiet = seconds[switches == 0]
    is_quiet = len(quiet) >= FEWEST_QUIET
    return Time(float(np.quantile(quiet if is_quiet else seconds, QUANTILE)), is_quiet)


def _turn(run: Run, comm: MPI.Comm, seconds: float) -> tuple[int, int]:
    """Return the calls of a sample, no fewer than are simulated, and the samples of a turn."""
    first = min(sample.seconds for sample in _samples(run, comm, 1, 2))
    slowest = max(comm.allreduce(first, op=MPI.MAX), LEAST_SECONDS)
    calls = max(CALLS, int(seconds / slowest))
    return calls, int(np.clip(TURN_SECONDS / (calls * slowest), 2, BLOCKS))


def _samples(run: Run, comm: MPI.Comm, calls: int, blocks: int) -> list[Taken]:
    """Return some times of a call, each the mean over some calls, all one after the other."""
    time.sleep(REST)
    comm.Barrier()
    marks = []
    for _ in range(1 + blocks):
        for _ in range(calls):
            run()
        marks.append((time.perf_counter(), _switches()))
    return [Taken((t2 - t1) / calls, s2 - s1) for (t1, s1), (t2, s2) in pairwise(marks)]


def _switches() -> int:
    """Return how often this thread has been switched off its core."""
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return usage.ru_nvcsw + usage.ru_nivcsw


def after_writing(x: Array | None, *runs: Run) -> list[Run]:
    """Return a run that writes an array, and `runs` with the array written before each call."""
    write = nothing if x is None else partial(np.copyto, x, x.copy())
    return [partial(_in_turn, write, run) for run in (nothing, *runs)]


def _in_turn(first: Run, second: Run) -> None:
    first()
    second()


def sleep_until_all(world: MPI.Intracomm) -> None:
    """Wait for all ranks, without keeping a processor busy."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
