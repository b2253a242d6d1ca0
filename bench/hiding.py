"""The measurement behind `bench overlap`: all-reduces and matrix products, in turn and at once."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import collectives
from bench import overlap
from bench.case import Buffers, Case, out_of_place
from bench.contenders import Contender, nothing
from bench.overlap import SLICES, Overlap
from bench.perf import mpi_version
from bench.side_by_side import Outcome, outcomes
from bench.sizes import whole_blocks
from bench.timing import Effort, times
from collectives import Communicator
from parallel.show import console_of

FP32 = np.dtype("float32")
TRIAL = Effort(warmup=2, samples=5, seconds=5.0)
TRIAL_ORDER = 512  # of the first matrices tried
MOST_SECONDS = 30.0


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if any element is wrong, 2 if there is nobody to communicate with."""
    comm = collectives.world()
    console = console_of(comm.rank)
    if comm.size == 1:
        console.print("bench overlap: one rank alone has nothing to communicate")
        return 2
    num_elements = whole_blocks(options.size, FP32.itemsize, num_blocks=1)
    case = Case("all_reduce", comm.rank, comm.size, num_elements, FP32)
    ways = every_way(comm, case)
    found = measured(case, ways, options.samples)
    facts = {"mpi": mpi_version(), "ranks": comm.size, "size": case.num_bytes}
    facts |= {"order": ways[0].product.order, **cores()}
    overlap.show(facts, found, console)
    if options.json is not None and comm.rank == 0:
        result = facts | {"ways": [each.as_dict() for each in found]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 report
    return int(any(each.wrong for each in found))


def every_way(comm: Communicator, case: Case) -> list[Way]:
    """With and without a thread, in one piece and in slices, all on the same buffers."""
    buffers = out_of_place(case)
    assert buffers is not None, "an all-reduce can be out of place"
    product = Product(matching_order(comm, buffers))
    comms = {None: comm, "thread": collectives.world(progress="thread")}
    return [
        Way(progress, each, buffers, product, slices)
        for slices in (1, SLICES)
        for progress, each in comms.items()
    ]


def measured(case: Case, ways: list[Way], samples: int) -> list[Overlap]:
    """All of them side by side."""
    effort = Effort(TRIAL.warmup, samples, MOST_SECONDS)
    made = [contender for way in ways for contender in way.contenders()]
    found = iter(outcomes(case, ways[0].buffers, made, effort))
    return [way.overlap([next(found) for _ in way.contenders()]) for way in ways]


class Product:
    """The product of two square matrices of this order."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.left, self.right = np.ones((2, order, order), FP32)
        self.out = np.empty_like(self.left)

    def run(self, slices: int = 1, after: Callable[[], object] = nothing) -> None:
        """Compute it in so many slices of rows, and call `after` each."""
        for left, out in zip(np.split(self.left, slices), np.split(self.out, slices), strict=True):
            np.matmul(left, self.right, out=out)
            after()


class Way(NamedTuple):
    """A way to overlap them.  `progress`: of the communicator, as `collectives.world` takes it."""

    progress: str | None
    comm: Communicator
    buffers: Buffers
    product: Product
    slices: int

    def contenders(self) -> list[Contender]:
        """In the order of `Overlap`."""
        y = self.buffers.y
        runs = [(self.all_reduce, y), (self.multiply, None), (self.in_turn, y), (self.at_once, y)]
        return [Contender(run, nothing, result) for run, result in runs]

    def all_reduce(self, **more: Any) -> Any:
        """The all-reduce."""
        return self.comm.all_reduce(self.buffers.x, out=self.buffers.y, **more)

    def multiply(self) -> None:
        """The product."""
        self.product.run(self.slices)

    def in_turn(self) -> None:
        """One after the other."""
        self.all_reduce()
        self.multiply()

    def at_once(self) -> None:
        """The product while the all-reduce goes on, if anybody lets it."""
        work = self.all_reduce(async_op=True)
        self.product.run(self.slices, work.test)
        work.wait()

    def overlap(self, found: list[Outcome]) -> Overlap:
        """What came of the contenders."""
        all_reduce, product, in_turn, at_once = (outcome.seconds for outcome in found)
        wrong = sum(outcome.wrong or 0 for outcome in found)
        return Overlap(self.progress, self.slices, all_reduce, product, in_turn, at_once, wrong)


def matching_order(comm: Communicator, buffers: Buffers) -> int:
    """Of the matrices whose product takes about as long as the all-reduce; whole slices of rows."""
    order = TRIAL_ORDER
    for _ in range(2):  # the second trial is almost of the right order, and so more exact
        trial = Way(None, comm, buffers, Product(order), slices=1)
        runs = [trial.all_reduce, trial.multiply]
        wanted, taken = times(runs, buffers.x, is_small=False, effort=TRIAL)
        order = max(1, round(order * math.cbrt(wanted / taken) / SLICES)) * SLICES
    return order


def cores() -> dict[str, int]:
    """The cores that the ranks of this host may run on, and how many ranks these are."""
    is_known = hasattr(os, "sched_getaffinity")
    mine = os.sched_getaffinity(0) if is_known else set(range(os.cpu_count() or 1))
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = {"cores": len(set.union(*host.allgather(mine))), "ranks_per_host": host.size}
    host.Free()
    return found
