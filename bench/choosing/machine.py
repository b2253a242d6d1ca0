"""What messages, copies and calls cost here: measured, and fitted as a machine.

Two ranks on the same host, and two on different hosts, exchange messages.  Ranks that have no part
in a pattern sleep.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np
from mpi4py import MPI

from bench.choosing.fitting import fitted_links, link_errors, rate, refuse_few, undisturbed
from bench.choosing.patterns import (
    BURST,
    ITEMSIZE,
    PATTERNS,
    REPEATS,
    Sample,
    empty_program,
    late_program,
    pattern_program,
    work_program,
)
from bench.choosing.sampling import REST, Run, Steps, Time, after_writing, sampled, sleep_until_all
from bench.workloads import sizes
from collectives import Communicator
from collectives.arrays import HOST
from collectives.arrays.operators import operator
from collectives.console import Number, Table
from collectives.engines.mpi import MpiTransport
from collectives.engines.transport import Operands
from collectives.programs import Program
from collectives.simulation import OTHER_HOST, SAME_HOST, Link, Machine

T = TypeVar("T")

SIZES = tuple(8 * 4**power for power in range(10))  # bytes, up to 2 MiB
WORK_SIZES = tuple(4096 * 4**power for power in range(6))  # up to 4 MiB
LARGEST_BURST = 256 << 10  # bytes of a message of a burst
# Seconds by which a receive comes late, to see whether its send waits, and how often.
LATE, LATE_TRIES = 2e-2, 4
LARGEST_EAGER = 4 << 20  # bytes; if a send does not wait even then, none does
_TURN = 1e-3  # seconds that an advance may take before Python runs
_TAG = 1


class Group(NamedTuple):
    """Ranks with the same kind of link between them.

    The `pairs` exchange at the same time.  The `rings` are those that exchange around a ring.  On
    one host they are the pairs.  Between hosts they are one rank of each: there two ranks may share
    a connection in both directions, which collectives mostly use in one.
    """

    link_class: str
    pairs: tuple[tuple[int, ...], ...]
    rings: tuple[tuple[int, ...], ...]


class Fit(NamedTuple):
    """A fitted machine, and what it was fitted to.

    `base` has the seconds of a call of a pattern, in addition to its operations, and no links.
    `left_out` are samples in which ranks lost their cores.  `work` has the seconds of copies and
    combinations of WORK_SIZES.
    """

    machine: Machine
    base: Machine
    samples: list[Sample]
    left_out: list[Sample]
    work: Mapping[str, list[float]]


class MachineMeasurement:
    """Measures messages, copies and calls; all ranks call the same methods alike.

    Parameters
    ----------
    comm : Communicator
        All ranks of the job.
    samples : int
        The samples of each time.
    at_once : bool
        Whether all ranks exchange in pairs at once, as they do in collectives.  They always do if
        they outnumber the cores of a host.
    """

    def __init__(self, comm: Communicator, samples: int, *, at_once: bool) -> None:
        self._comm, self._world, self._samples = comm, MPI.COMM_WORLD, samples
        self._is_crowded = comm.topology.max_per_host > len(os.sched_getaffinity(0))
        at_once = at_once or self._is_crowded
        self._groups = groups_of(comm.topology.host_of, at_once=at_once)
        self._transport = MpiTransport(self._world.Dup())

    @property
    def num_steps(self) -> int:
        """The number of steps: for each group, an eager limit and patterns; work; and calls."""
        return len(self._groups) * (1 + len(PATTERNS)) + 4

    def fit(self, steps: Steps) -> Fit:
        """Measure and fit, once.  All ranks raise ValueError if no machine has such times."""
        overhead = self._overhead(steps)
        work = {kind: self._work(kind, overhead, steps) for kind in ("copy", "combine")}
        rates = [rate(WORK_SIZES, times) for times in work.values()]
        base = Machine({}, overhead, *rates)
        links, used, left_out = {}, list[Sample](), list[Sample]()
        for group in self._groups:
            steps.begin(f"{group.link_class}: from which size sends wait")
            limit = self._eager_limit(group.pairs[0])
            quiet = list[Sample]()
            for samples in self._patterns(group, limit, steps):
                kept = undisturbed(samples) if self._needs_quiet(group) else samples
                left_out += [sample for sample in samples if sample not in kept]
                quiet += kept
                refuse_few(quiet, limit)  # the first pattern decides
            links[group.link_class] = fitted_links(quiet, limit, base)
            used += quiet
        machine = Machine(links, self._call(steps), *rates)
        self._transport.free()
        return Fit(machine, base, used, left_out, work)

    def _needs_quiet(self, group: Group) -> bool:
        """Return whether every rank has a core, so that it should have kept it."""
        return group.link_class == SAME_HOST and not self._is_crowded

    def _overhead(self, steps: Steps) -> float:
        """Return the seconds of running a program from Python, without any row."""
        seconds = steps.begin("a program without messages")
        return self._sampled([self._run(empty_program(), 0)], self._world, seconds)[0].seconds

    def _work(self, kind: str, overhead: float, steps: Steps) -> list[float]:
        """Return the seconds of a copy or a combination of WORK_SIZES, on all ranks at once."""
        seconds = steps.begin(f"to {kind} arrays")
        runs = [self._run(work_program(kind, size), size) for size in WORK_SIZES]
        times = self._sampled(runs, self._world, seconds)
        return [(time.seconds - overhead) / REPEATS for time in times]

    def _call(self, steps: Steps) -> float:
        """Return the seconds of a call that does nothing, after an array is written."""
        seconds = steps.begin("a call that does nothing")
        alone = self._comm.split(self._comm.rank)
        assert alone is not None
        plan = alone.plan.barrier()
        writing, both = self._sampled(after_writing(np.zeros(1), plan.run), self._world, seconds)
        plan.free()
        alone.free()
        return both.seconds - writing.seconds

    def _patterns(self, group: Group, limit: int | None, steps: Steps) -> Iterator[list[Sample]]:
        """Yield the samples of each pattern between ranks of a group."""
        around = () if limit is None else (limit, limit + 16 * ITEMSIZE, 2 * limit // 8 * 8)
        every = sorted({*SIZES, *around})
        for pattern in PATTERNS:
            seconds = steps.begin(f"{group.link_class}: {pattern}")
            sizes_of = [size for size in every if pattern != "burst" or size <= LARGEST_BURST]
            yield self.pattern(group, pattern, sizes_of, seconds)

    def pattern(
        self, group: Group, pattern: str, num_bytes: Sequence[int], seconds: float
    ) -> list[Sample]:
        """Return the times of a pattern in the first pair, or ring, for messages of some bytes."""

        def measured(ranks: tuple[int, ...], comm: MPI.Comm) -> list[Time]:
            runs = [
                self._run(pattern_program(pattern, comm.rank, ranks, size), BURST * size)
                for size in num_bytes
            ]
            return self._sampled(runs, comm, seconds, group.link_class)

        where = group.rings if pattern == "exchange" else group.pairs
        times, num_ranks = self._among(where, measured), len(where[0])
        return [
            Sample(pattern, group.link_class, size, time.seconds, num_ranks, time.is_quiet)
            for size, time in zip(num_bytes, times, strict=True)
        ]

    def _eager_limit(self, pair: tuple[int, ...]) -> int | None:
        """Return the largest message that is sent before its receive is posted; None: any."""
        low, high = 0, LARGEST_EAGER
        if not self._waits_for_receive(pair, high):
            return None
        while high - low > ITEMSIZE:
            middle = (low + high) // 2 // ITEMSIZE * ITEMSIZE
            low, high = (low, middle) if self._waits_for_receive(pair, middle) else (middle, high)
        return low

    def _waits_for_receive(self, pair: tuple[int, ...], num_bytes: int) -> bool:
        """Return whether a send of so many bytes waits until its receive is posted."""

        def measured(ranks: tuple[int, ...], comm: MPI.Comm) -> list[float]:
            run = self._run(late_program(comm.rank, ranks, num_bytes), BURST * num_bytes)
            for _ in range(LATE_TRIES):
                seconds = float(comm.bcast(_late(run, comm)))
                if seconds < LATE:  # a busy machine makes some sends late that do not wait
                    break
            return [seconds]

        return self._among([pair], measured)[0] >= LATE

    def _among(
        self,
        groups: Sequence[tuple[int, ...]],
        measure: Callable[[tuple[int, ...], MPI.Comm], list[T]],
    ) -> list[T]:
        """Return what the first group measures, on all ranks; ranks of no group sleep meanwhile."""
        times: list[T] = []
        mine = next((group for group in groups if self._world.rank in group), None)
        comm = self._world.Split(MPI.UNDEFINED if mine is None else mine[0], self._world.rank)
        if mine is not None:
            times = measure(mine, comm)
            comm.Free()
        sleep_until_all(self._world)
        return list(self._world.bcast(times, groups[0][0]))

    def _sampled(
        self, runs: Sequence[Run], comm: MPI.Comm, seconds: float, link_class: str = SAME_HOST
    ) -> list[Time]:
        return sampled(runs, comm, self._samples, seconds, link_class)

    def _run(self, program: Program, num_bytes: int) -> Run:
        """Return what runs a program on arrays of float32."""
        count = max(num_bytes // ITEMSIZE, 1)
        x, y = (np.full(count, 0, np.float32) for _ in range(2))  # written, so that memory is there
        nothing, function = np.empty(0, np.float32), operator("sum", "all_reduce").function
        operands = Operands(HOST, x, y, nothing, function, 1)
        return partial(_complete, self._transport.execution(program, operands, _TAG))


def groups_of(host_of: Sequence[int], *, at_once: bool) -> list[Group]:
    """Return ranks of the same host, and of different hosts; one pair of each, or `at_once` all."""
    pairs: dict[str, list[tuple[int, int]]] = {}
    for first, second in combinations(range(len(host_of)), 2):
        name = SAME_HOST if host_of[first] == host_of[second] else OTHER_HOST
        chosen = pairs.setdefault(name, [])
        if not {first, second} & set(chain(*chosen)):
            chosen.append((first, second))
    first_ranks = tuple(host_of.index(host) for host in dict.fromkeys(host_of))
    groups = []
    for name, all_pairs in pairs.items():
        chosen_pairs = tuple(all_pairs if at_once else all_pairs[:1])
        rings = (first_ranks,) if name == OTHER_HOST else chosen_pairs
        groups.append(Group(name, chosen_pairs, rings))
    return groups


def _complete(execution: Any) -> None:
    execution.restart(0)
    while not execution.advance(_TURN):
        pass


def _late(run: Run, comm: MPI.Comm) -> float:
    """Return the seconds of a send, by rank 0, whose receive is posted LATE seconds after it.

    They are at least LATE if the send waits for the receive, however busy the machine is.
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


def link_table(fit: Fit) -> Table:
    """Return the links, with the median errors of the fit for each pattern."""
    table = Table(
        "link",
        "sends",
        Number("up to bytes", ".0f"),
        Number("o us", ".2f"),
        Number("O ns/B", ".4f"),
        Number("L us", ".2f"),
        Number("g us", ".2f"),
        Number("G ns/B", ".4f"),
        Number("GB/s", ".1f"),
        *(Number(pattern, ".0%") for pattern in PATTERNS),
    )
    for name, links in fit.machine.links.items():
        lowest = -1.0
        for link in links:
            inside = [
                sample
                for sample in fit.samples
                if sample.link_class == name and lowest < sample.num_bytes <= link.up_to_bytes
            ]
            lowest = link.up_to_bytes
            table.add(
                name.replace("_", " "),
                "rendezvous" if link.is_rendezvous else "eager",
                link.up_to_bytes,
                link.overhead_seconds * 1e6,
                link.overhead_seconds_per_byte * 1e9,
                link.latency_seconds * 1e6,
                link.gap_seconds * 1e6,
                link.seconds_per_byte * 1e9,
                1e-9 / link.seconds_per_byte if link.seconds_per_byte else None,
                *(_error(inside, pattern, link, fit.base) for pattern in PATTERNS),
            )
    return table


def _error(samples: Sequence[Sample], pattern: str, link: Link, base: Machine) -> float | None:
    """Return the median relative error of a pattern's samples."""
    of_pattern = [sample for sample in samples if sample.pattern == pattern]
    if not of_pattern:
        return None
    return float(np.median(np.abs(np.expm1(link_errors(of_pattern, link, base)))))


def work_table(fit: Fit) -> Table:
    """Return the speed of copies and combinations by size, and the speed that was fitted."""
    table = Table("bytes", Number("copy GB/s", ".1f"), Number("combine GB/s", ".1f"))
    for place, num_bytes in enumerate(WORK_SIZES):
        table.add(
            sizes.text(num_bytes), *(num_bytes / times[place] / 1e9 for times in fit.work.values())
        )
    machine = fit.machine
    fitted = machine.copy_seconds_per_byte, machine.combine_seconds_per_byte
    table.add("fitted", *(1e-9 / seconds for seconds in fitted))
    return table


def left_out(fit: Fit) -> str:
    """Return which samples were left out, as text; nothing if none was."""
    texts = {
        pattern: ", ".join(
            sizes.text(sample.num_bytes) for sample in fit.left_out if sample.pattern == pattern
        )
        for pattern in PATTERNS
    }
    return "; ".join(f"{pattern} of {words}" for pattern, words in texts.items() if words)
