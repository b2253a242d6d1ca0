"""Measures what a machine is fitted from: patterns of messages, local work, and a call.

A time is that of the slowest rank in one sample, and of the samples the 5 % quantile: what it takes
if nothing else disturbs it.  Ranks that have no part in a pattern sleep.

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
from itertools import chain, combinations, pairwise
from random import Random
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from bench.fit.patterns import (
    BURST,
    CALLS,
    ITEMSIZE,
    REPEATS,
    Sample,
    empty_program,
    late_program,
    pattern_program,
    work_program,
)
from bench.oracle import Array
from bench.ways import nothing
from collectives import Communicator
from collectives.arrays import HOST
from collectives.arrays.operators import operator
from collectives.engines.mpi import MpiTransport
from collectives.engines.transport import Operands
from collectives.programs import Program
from collectives.simulation import OTHER_HOST, SAME_HOST

Run = Callable[[], object]
T = TypeVar("T")

QUANTILE = 0.05
FEWEST_QUIET = 4  # undisturbed samples; if there are fewer, all samples count
# How long a sample should take.  Between hosts a network may let bursts through before it slows
# them down, which must not be all that is measured.
SAMPLE_SECONDS = {SAME_HOST: 1e-4, OTHER_HOST: 1e-2}
LEAST_SECONDS = 2e-6  # what a shorter call counts as, so that a sample has not too many
BLOCKS, TURN_SECONDS = 8, 0.1  # a turn has so many samples, or fewer if they take longer, but two
# Seconds by which a receive comes late, to see whether its send waits, and how often.
LATE, LATE_TRIES = 2e-2, 4
LARGEST_EAGER = 4 << 20  # bytes; if a send does not wait even then, none does
REST = 1e-3  # seconds of sleep, after which the system gives a process its processor at once
_TURN = 1e-3  # seconds that an advance may take before Python runs
_TAG = 1


class Time(NamedTuple):
    """Seconds of a call, and whether they are of quiet samples alone."""

    seconds: float
    is_quiet: bool


class Group(NamedTuple):
    """Ranks with the same kind of link between them.

    `pairs`: some of them, which exchange at the same time.  `rings`: those that exchange around a
    ring.  On one host they are the pairs.  Between hosts they are one rank of each: there two ranks
    may share a connection in both directions, which collectives mostly use in one.
    """

    link_class: str
    pairs: tuple[tuple[int, ...], ...]
    rings: tuple[tuple[int, ...], ...]


def groups_of(host_of: Sequence[int], *, at_once: bool) -> list[Group]:
    """Ranks on the same host, and ranks on different hosts; with one pair of each, or `at_once`."""
    found: dict[str, list[tuple[int, int]]] = {}
    for first, second in combinations(range(len(host_of)), 2):
        name = SAME_HOST if host_of[first] == host_of[second] else OTHER_HOST
        chosen = found.setdefault(name, [])
        if not {first, second} & set(chain(*chosen)):
            chosen.append((first, second))
    first_ranks = tuple(host_of.index(host) for host in dict.fromkeys(host_of))
    groups = []
    for name, pairs in found.items():
        chosen_pairs = tuple(pairs if at_once else pairs[:1])
        rings = (first_ranks,) if name == OTHER_HOST else chosen_pairs
        groups.append(Group(name, chosen_pairs, rings))
    return groups


def sampled(
    runs: Sequence[Run], comm: MPI.Comm, samples: int, end: float, link_class: str = SAME_HOST
) -> list[Time]:
    """The time of a call of each of `runs`, the same on all ranks.

    They take turns in random order.  A turn is a sample that brings the ranks into step and does
    not count, and then some samples, each of a number of calls.  No new turns begin after the time
    `end` of the clock of rank 0.  `link_class`: that of the slowest link.
    """
    plans = [_turn(run, comm, SAMPLE_SECONDS[link_class]) for run in runs]
    taken: list[list[Taken]] = [[] for _ in runs]
    turns, shuffle = list(range(len(runs))), Random(0).shuffle  # the same on every rank
    for number in range(-(-samples // BLOCKS)):
        if number > 0 and not comm.bcast(time.perf_counter() < end):
            break
        shuffle(turns)
        for turn in turns:
            taken[turn] += _samples(runs[turn], comm, *plans[turn])
    return [_least(each, comm) for each in taken]


class Taken(NamedTuple):
    """A sample on this rank: seconds of a call, and how often the rank has lost its core."""

    seconds: float
    switches: int


def _least(taken: Sequence[Taken], comm: MPI.Comm) -> Time:
    """The time of the slowest rank where little disturbs it."""
    slowest = np.array(taken, float)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    seconds, switches = slowest.T
    quiet = seconds[switches == 0]
    is_quiet = len(quiet) >= FEWEST_QUIET
    return Time(float(np.quantile(quiet if is_quiet else seconds, QUANTILE)), is_quiet)


def _turn(run: Run, comm: MPI.Comm, seconds: float) -> tuple[int, int]:
    """The calls of a sample, no fewer than are simulated, and the samples of a turn."""
    first = min(each.seconds for each in _samples(run, comm, 1, 2))
    slowest = max(comm.allreduce(first, op=MPI.MAX), LEAST_SECONDS)
    calls = max(CALLS, int(seconds / slowest))
    return calls, int(np.clip(TURN_SECONDS / (calls * slowest), 2, BLOCKS))


def _samples(run: Run, comm: MPI.Comm, calls: int, blocks: int) -> list[Taken]:
    """Some times of a call, each the mean over some calls, all one after the other."""
    time.sleep(REST)
    comm.Barrier()
    marks = []
    for _ in range(1 + blocks):
        for _ in range(calls):
            run()
        marks.append((time.perf_counter(), _switches()))
    return [Taken((t2 - t1) / calls, s2 - s1) for (t1, s1), (t2, s2) in pairwise(marks)]


def _switches() -> int:
    """How often this thread has been switched off its core."""
    usage = resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF))
    return usage.ru_nvcsw + usage.ru_nivcsw


class Measurement:
    """Measures patterns on the ranks of `world`; all ranks call the same methods alike."""

    def __init__(self, world: MPI.Intracomm, samples: int, seconds: float = np.inf) -> None:
        """`seconds`: about how long the samples of one method may take."""
        self._world, self._samples, self._seconds = world, samples, seconds
        self._transport = MpiTransport(world.Dup())
        # What it takes to run a program from Python, without any row.
        ((self.overhead, _),) = self._sampled([self._run(empty_program(), 0)], world)

    def free(self) -> None:
        """Free the communicator."""
        self._transport.free()

    def pattern(self, group: Group, pattern: str, sizes: Sequence[int]) -> list[Sample]:
        """The times of a pattern in the first pair, or the ring, for messages of some bytes."""

        def measured(ranks: tuple[int, ...], comm: MPI.Comm) -> list[Time]:
            runs = [
                self._run(pattern_program(pattern, comm.rank, ranks, size), BURST * size)
                for size in sizes
            ]
            return self._sampled(runs, comm, group.link_class)

        where = group.rings if pattern == "exchange" else group.pairs
        times, num_ranks = self._among(where, measured), len(where[0])
        return [
            Sample(pattern, group.link_class, size, seconds, num_ranks, is_quiet)
            for size, (seconds, is_quiet) in zip(sizes, times, strict=True)
        ]

    def waits_for_receive(self, pair: tuple[int, ...], num_bytes: int) -> bool:
        """Whether a send of so many bytes waits until its receive is posted."""

        def measured(ranks: tuple[int, ...], comm: MPI.Comm) -> list[float]:
            run = self._run(late_program(comm.rank, ranks, num_bytes), BURST * num_bytes)
            for _ in range(LATE_TRIES):
                seconds = float(comm.bcast(_late(run, comm)))
                if seconds < LATE:  # a busy machine makes some sends late that do not wait
                    break
            return [seconds]

        return self._among([pair], measured)[0] >= LATE

    def eager_limit(self, pair: tuple[int, ...]) -> int | None:
        """The largest message that is sent before its receive is posted; None: any."""
        low, high = 0, LARGEST_EAGER
        if not self.waits_for_receive(pair, high):
            return None
        while high - low > ITEMSIZE:
            middle = (low + high) // 2 // ITEMSIZE * ITEMSIZE
            low, high = (low, middle) if self.waits_for_receive(pair, middle) else (middle, high)
        return low

    def _among(
        self,
        groups: Sequence[tuple[int, ...]],
        measure: Callable[[tuple[int, ...], MPI.Comm], list[T]],
    ) -> list[T]:
        """What the first group measures, on all ranks; ranks of no group sleep meanwhile."""
        times: list[T] = []
        mine = next((group for group in groups if self._world.rank in group), None)
        comm = self._world.Split(MPI.UNDEFINED if mine is None else mine[0], self._world.rank)
        if mine is not None:
            times = measure(mine, comm)
            comm.Free()
        sleep_until_all(self._world)
        return list(self._world.bcast(times, groups[0][0]))

    def _sampled(
        self, runs: Sequence[Run], comm: MPI.Comm, link_class: str = SAME_HOST
    ) -> list[Time]:
        end = time.perf_counter() + self._seconds
        return sampled(runs, comm, self._samples, end, link_class)

    def work(self, kind: str, sizes: Sequence[int]) -> list[float]:
        """Seconds of a copy or a combination of so many bytes, on all ranks at once."""
        runs = [self._run(work_program(kind, size), size) for size in sizes]
        times = self._sampled(runs, self._world)
        return [(each.seconds - self.overhead) / REPEATS for each in times]

    def call(self, comm: Communicator) -> float:
        """Seconds of a call that does nothing, a barrier of one rank, after an array is written."""
        alone = comm.split(comm.rank)
        assert alone is not None
        plan, write = alone.plan.barrier(), writer(np.zeros(1))
        runs = [partial(in_turn, write, run) for run in (nothing, plan.run)]
        writing, both = self._sampled(runs, self._world)
        plan.free()
        alone.free()
        return both.seconds - writing.seconds

    def _run(self, program: Program, num_bytes: int) -> Run:
        """Runs a program on arrays of float32."""
        count = max(num_bytes // ITEMSIZE, 1)
        x, y = (np.full(count, 0, np.float32) for _ in range(2))  # written, so that memory is there
        nothing, function = np.empty(0, np.float32), operator("sum", "all_reduce").function
        operands = Operands(HOST, x, y, nothing, function, 1)
        return partial(_complete, self._transport.execution(program, operands, _TAG))


def writer(x: Array | None) -> Run:
    """Writes an array anew, as programs do between calls."""
    return nothing if x is None else partial(np.copyto, x, x.copy())


def in_turn(first: Run, second: Run) -> None:
    """Run both."""
    first()
    second()


def _complete(execution: Any) -> None:
    execution.restart(0)
    while not execution.advance(_TURN):
        pass


def _late(run: Run, comm: MPI.Comm) -> float:
    """Seconds of a send, by rank 0, whose receive is posted `LATE` seconds after it began.

    They are at least `LATE` if the send waits for the receive, however busy the machine is.
    Meanwhile the receiver makes progress, as in a collective: an MPI library may need it to empty
    its buffers.
    """
    if comm.rank == 1:
        comm.recv()
        end = time.perf_counter() + LATE
        while time.perf_counter() < end:
            comm.Iprobe()
    else:
        time.sleep(REST)
    begin = time.perf_counter()
    if comm.rank == 0:
        comm.send(None, 1)
    run()
    return time.perf_counter() - begin


def sleep_until_all(world: MPI.Intracomm) -> None:
    """Wait for all ranks, without keeping a processor busy."""
    request = world.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)
