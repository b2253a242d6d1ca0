"""Measure how much of an all-reduce is hidden behind other work: a product, a sleep, a Python loop.

    ring launch -n 2 -m bench overlap
    ring launch -n 2 -m bench overlap --beside sleep --beside loop

It times an all-reduce and other work that takes about as long, one after the other and at the same
time: start the all-reduce with async_op=True, do the other work, then wait().  Meanwhile
nothing advances the all-reduce, or a thread does (progress="thread"), or the program calls test()
after each slice of the work.  All variants take turns on the same buffers; the result is the
median of the slowest rank.  The hidden share is the time saved, as a fraction of the all-reduce's.

The other work is a float32 matrix product, which uses a core; a sleep, which uses nothing; or a
loop of Python instructions, which uses a core and the interpreter lock.

With mpirun set OMP_NUM_THREADS=1, as the launcher does.  The exit status is 1 if any element of a
result is wrong, 2 if there is only one rank.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

from mpi4py import MPI

import collectives
from bench.commands import world
from bench.commands.options import BYTES, COUNT, add_output, option
from bench.contenders.contender import Contender, nothing
from bench.contenders.side_by_side import Outcome, outcomes
from bench.overlap.other_work import FP32, KINDS, SLICES, Other, Product
from bench.overlap.results import Overlap, show
from bench.timing.interleaved import Effort, times
from bench.workloads.collective import Buffers, Case, out_of_place
from bench.workloads.sizes import whole_blocks
from collectives import Communicator
from collectives.console import Command, Refused, console_for, write_json

TRIAL = Effort(warmup=2, samples=5, seconds=5.0)
MAX_SECONDS = 30.0


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option(parse, "--size", "bytes to all-reduce", default="64M", **BYTES)
    about = f"{', '.join(KINDS)}; may be repeated; default: {Product.name}"
    option(parse, "--beside", about, action="append", choices=KINDS, metavar="WHAT")
    option(parse, "-n --iters", "samples of each", dest="samples", default=20, **COUNT)
    add_output(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Measure; return 0, or 1 if any element is wrong.  Raises Refused."""
    return world.on_ranks(lambda comm: measured(comm, options))


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Measure all ways, and let rank 0 print and write them; return the exit status."""
    if comm.size == 1:
        raise Refused("one rank alone has nothing to communicate")
    world.check_output(options.json)
    num_elements = whole_blocks(options.size, FP32.itemsize, num_blocks=1)
    case = Case("all_reduce", comm.rank, comm.size, num_elements, FP32)
    ways = every_way(comm, case, options.beside or [Product.name])
    overlaps = overlaps_of(case, ways, options.samples)
    facts = {"mpi": world.mpi_version(), "ranks": comm.size, "size": case.num_bytes}
    facts |= {"amounts": {way.other.name: way.other.amount for way in ways}, **cores()}
    show(facts, overlaps, console_for(comm.rank, options))
    if comm.rank == 0:
        write_json(facts | {"ways": [overlap.as_dict() for overlap in overlaps]}, options.json)
    return int(any(overlap.wrong for overlap in overlaps))


def every_way(comm: Communicator, case: Case, beside: list[str]) -> list[Way]:
    """Return ways with and without a thread, in one piece and in slices, on the same buffers."""
    buffers = out_of_place(case)
    assert buffers is not None, "an all-reduce can be out of place"
    others = [matching(KINDS[name], comm, buffers) for name in dict.fromkeys(beside)]
    comms = {None: comm, "thread": collectives.world(progress="thread")}
    return [
        Way(progress, way_comm, buffers, other, slices)
        for other in others
        for slices in (1, SLICES)
        for progress, way_comm in comms.items()
    ]


def overlaps_of(case: Case, ways: list[Way], samples: int) -> list[Overlap]:
    """Measure all ways side by side."""
    effort = Effort(TRIAL.warmup, samples, MAX_SECONDS)
    made = [contender for way in ways for contender in way.contenders()]
    results = iter(outcomes(case, ways[0].buffers, made, effort))
    return [way.overlap([next(results) for _ in way.contenders()]) for way in ways]


class Way(NamedTuple):
    """A way to overlap an all-reduce, on a communicator with this `progress`."""

    progress: str | None
    comm: Communicator
    buffers: Buffers
    other: Other
    slices: int

    def contenders(self) -> list[Contender]:
        """Return what is timed, in the order of `Overlap`."""
        y = self.buffers.y
        runs = [(self.all_reduce, y), (self.do_other, None), (self.in_turn, y), (self.at_once, y)]
        return [Contender(run, nothing, result) for run, result in runs]

    def all_reduce(self, **more: Any) -> Any:
        """Make the all-reduce."""
        return self.comm.all_reduce(self.buffers.x, out=self.buffers.y, **more)

    def do_other(self) -> None:
        """Do the other work alone."""
        self.other.run(self.slices)

    def in_turn(self) -> None:
        """Do one after the other."""
        self.all_reduce()
        self.do_other()

    def at_once(self) -> None:
        """Do the other work while the all-reduce goes on, if anybody lets it."""
        work = self.all_reduce(async_op=True)
        self.other.run(self.slices, work.test)
        work.wait()

    def overlap(self, results: list[Outcome]) -> Overlap:
        """Return what came of the contenders."""
        all_reduce, other, in_turn, at_once = (result.seconds for result in results)
        wrong = sum(result.wrong or 0 for result in results)
        way = self.other.name, self.progress, self.slices
        return Overlap(*way, all_reduce, other, in_turn, at_once, wrong)


def matching(kind: type[Other], comm: Communicator, buffers: Buffers) -> Other:
    """Return the amount of other work that takes about as long as the all-reduce."""
    other = kind(kind.trial)
    for _ in range(2):  # the second trial is almost of the right amount, and so more exact
        trial = Way(None, comm, buffers, other, slices=1)
        runs = [trial.all_reduce, trial.do_other]
        wanted, taken = times(runs, buffers.x, is_small=False, effort=TRIAL)
        growth = float((wanted / taken) ** (1 / kind.power))
        other = kind(max(1, round(other.amount * growth / SLICES)) * SLICES)
    return other


def cores() -> dict[str, int]:
    """Return the cores that the ranks of this host may run on, and how many ranks these are."""
    is_known = hasattr(os, "sched_getaffinity")
    mine = os.sched_getaffinity(0) if is_known else set(range(os.cpu_count() or 1))
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    counts = {"cores": len(set.union(*host.allgather(mine))), "ranks_per_host": host.size}
    host.Free()
    return counts


COMMAND = Command("bench.overlap.all_reduce", __doc__, add_options, run)
