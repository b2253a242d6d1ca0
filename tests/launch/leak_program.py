"""Run by test_leaks.py: thousands of calls of every kind in random order, and what they leave.

Every rank draws the same numbers, so all make the same calls.  From time to time everything that is
under way is brought to its end and given back; then nothing may be left, and this rank's memory is
measured.  Prints one line of JSON for each rank.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from collections import defaultdict
from functools import cache
from mmap import PAGESIZE
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import collectives
from bench.workloads.expected import expected
from collectives import Communicator
from tests import hygiene
from tests.inside import forget_runs
from tests.mpi.hygiene import MadeOverMpi, forget_completed
from tests.scenarios.jobs import ALGORITHMS, Job, call, dtype, random_rows, same

WARM_UP, NUM_STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[2]) // 8
LEAKS = sys.argv[3:] == ["leak"]  # on purpose
NUM_JOBS = 300  # more than are remembered
KINDS = ["int32", "float64", "complex64", "bfloat16"]
MAX_OPEN = 6  # under way at once, plans and groups each

draw = np.random.default_rng(11)
agreement = MPI.COMM_WORLD.Dup()
kept: list[Any] = []


class Case(NamedTuple):
    """A job with every rank's input and what each must get."""

    job: Job
    inputs: list[np.ndarray]
    wanted: list[Any]


@cache
def cases(size: int) -> list[Case]:
    """Jobs for so many ranks, of 0 to 64 KiB, and a few larger."""
    numbers = np.random.default_rng(size)
    return [case(size, numbers, is_large=n < 3) for n in range(NUM_JOBS)]


def case(size: int, numbers: np.random.Generator, is_large: bool) -> Case:
    serving = [a for a in ALGORITHMS if collectives.algorithms.info(*a).serves(size)]
    collective, algorithm = serving[numbers.integers(len(serving))]
    kind = KINDS[numbers.integers(len(KINDS))]
    most = (1 << (20 if is_large else numbers.integers(17))) // dtype(kind).itemsize
    num_rows = int(numbers.integers(most + 1)) // size
    rows = random_rows(collective, size, num_rows, bool(numbers.integers(2)))
    job = Job(
        collective,
        algorithm if numbers.integers(2) else None,
        size,
        rows,
        kind,
        root=int(numbers.integers(size)),
        is_in_place=bool(numbers.integers(2)),
    )
    inputs = job.inputs()
    return Case(job, inputs, expected(collective, inputs, root=job.root, counts=job.counts()))


# The calls of a step, at least: a plan is made and one is run.
CALLS = defaultdict(lambda: 1, plan=2, point_to_point=2)


class Mixture:
    """Calls at random.  What is None on this rank concerns others only."""

    def __init__(self, world: Communicator) -> None:
        self.num_calls = 0  # of this rank, at least
        self.groups: list[Communicator | None] = [world]
        self.works: list[tuple[Any, Any, str] | None] = []
        self.plans: list[tuple[Any, np.ndarray, float] | None] = []
        self.steps = [self.blocking] * 6 + [self.asynchronous] * 4 + [self.plan] * 2
        self.steps += [self.point_to_point, self.group, self.recorded]

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            step = self.steps[draw.integers(len(self.steps))]
            comm = self.groups[draw.integers(len(self.groups))]
            self.num_calls += comm is not None and CALLS[step.__name__]
            step(comm, int(draw.integers(NUM_JOBS)))
            if number % 100 == 0:
                forget_completed()

    def blocking(self, comm: Communicator | None, number: int) -> None:
        if comm is not None:
            job, inputs, wanted = cases(comm.size)[number]
            got = call(comm, job, inputs[comm.rank].copy())
            same(got, wanted[comm.rank], job)
            if LEAKS:
                kept.append(np.ones(8192, np.uint8))

    def asynchronous(self, comm: Communicator | None, number: int) -> None:
        if len(self.works) >= MAX_OPEN:
            self.wait(int(draw.integers(len(self.works))))
        self.works.append(None if comm is None else self.started(comm, number))

    def started(self, comm: Communicator, number: int) -> tuple[Any, Any, str]:
        x = np.full(number * 4, number + comm.rank)
        total = comm.size * number + comm.size * (comm.size - 1) // 2
        if number % 2:
            return comm.all_reduce(x, async_op=True), np.full_like(x, total), "all_reduce"
        wanted = np.repeat(number + np.arange(comm.size), x.size)
        return comm.all_gather(x, async_op=True), wanted, "all_gather"

    def wait(self, which: int) -> None:
        work = self.works.pop(which)
        if work is not None:
            same(work[0].wait(), *work[1:])

    def plan(self, comm: Communicator | None, number: int) -> None:
        """Make one, and run an earlier one that may have run before; free the oldest."""
        if len(self.plans) >= MAX_OPEN:
            self.free_plan(0)
        made = None
        if comm is not None:
            x = np.ones(number)
            made = comm.plan.all_reduce(x), x, float(comm.size)
        self.plans.append(made)
        chosen = self.plans[draw.integers(len(self.plans))]
        if chosen is not None:
            same(chosen[0].run(), chosen[1] * chosen[2], "a plan")

    def free_plan(self, which: int) -> None:
        plan = self.plans.pop(which)
        if plan is not None and not LEAKS:
            plan[0].free()

    def point_to_point(self, comm: Communicator | None, number: int) -> None:
        if comm is None:
            return
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        x = np.full(number, comm.rank)
        work = comm.send_recv(x, right, left, tag=number, async_op=True)
        if comm.size > 1:
            sent = comm.send(x, right, async_op=True)
            same(comm.recv(np.empty_like(x), left), np.full(number, left), "recv")
            sent.wait()
        same(work.wait(), np.full(number, left), "send_recv")

    def group(self, comm: Communicator | None, number: int) -> None:
        """Make one of the ranks of another, or of the world's; or free all when there are many."""
        if len(self.groups) >= MAX_OPEN:
            self.end()
            return
        world = self.groups[0]
        assert world is not None
        if number % 2:
            made = None if comm is None else comm.split(None if number % 7 == 0 else comm.rank % 2)
        else:
            members = [r for r in range(world.size) if r != number % (world.size + 1)][::-1]
            made = world.subgroup(members) if world.rank in members else None
        self.groups.append(made)

    def recorded(self, comm: Communicator | None, number: int) -> None:
        if comm is not None:
            with comm.record():
                self.blocking(comm, number)

    def end(self) -> None:
        """Bring everything under way to its end and give all back."""
        while self.works:
            self.wait(int(draw.integers(len(self.works))))
        while self.plans:
            self.free_plan(0)
        while len(self.groups) > 1:
            group = self.groups.pop()
            if group is not None and not LEAKS:
                group.free()


def bounded_caches() -> list[Any]:
    """The library's functions that remember a limited number of results."""
    modules = [vars(m) for name, m in sys.modules.items() if name.startswith("collectives")]
    kept = {id(f): f for names in modules for f in names.values() if hasattr(f, "cache_parameters")}
    return [f for f in kept.values() if f.cache_parameters()["maxsize"] is not None]


def memory() -> dict[str, int]:
    """Bytes of memory that this process occupies, and blocks that Python's objects do."""
    for bounded in bounded_caches():
        bounded.cache_clear()  # what they keep differs in size, and they may still fill
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # glibc gives back what it keeps for later
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * PAGESIZE, "blocks": sys.getallocatedblocks()}


def main() -> None:
    made = MadeOverMpi(agreement)
    hygiene.SOURCES.insert(0, made)
    hygiene.begin()
    mixture = Mixture(made.worlds[0])
    samples: list[dict[str, int]] = []
    left: list[str] = []
    for num_steps in [WARM_UP, *[EVERY] * (NUM_STEPS // EVERY)]:
        mixture.run(num_steps)
        mixture.end()
        left += hygiene.left()
        hygiene.begin()
        forget_runs(made.worlds[0])  # logs forget some hundreds of programs at a time
        samples.append(memory())
    report = {"rank": agreement.rank, "calls": mixture.num_calls, "left": left, "samples": samples}
    for line in agreement.gather(json.dumps(report)) or []:
        print(line, flush=True)


main()
