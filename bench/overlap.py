"""Measure how much of an all-reduce is hidden behind other work: a product, a sleep, a Python loop.

    python -m collectives.launch -n 2 -m bench overlap
    python -m collectives.launch -n 2 -m bench overlap --beside sleep --beside loop

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
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from mpi4py import MPI

import collectives
from bench import sizes
from bench.case import Buffers, Case, out_of_place
from bench.others import FP32, KINDS, SLICES, Other, Product
from bench.overlap_table import show
from bench.perf import can_write, mpi_version
from bench.side_by_side import Outcome, outcomes
from bench.sizes import whole_blocks
from bench.timed import Overlap
from bench.timing import Effort, times
from bench.ways import Contender, nothing
from collectives import Communicator
from parallel.cli import at_least, console_of

TRIAL = Effort(warmup=2, samples=5, seconds=5.0)
MAX_SECONDS = 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--size", type=sizes.parse, default="64M", help="bytes to all-reduce; default: %(default)s")
    add(
        "--beside",
        action="append",
        choices=KINDS,
        metavar="WHAT",
        help=f"{', '.join(KINDS)}; may be repeated; default: {Product.name}",
    )
    add(
        "-n",
        dest="samples",
        type=at_least(1),
        default=20,
        metavar="N",
        help="samples of each; default: %(default)s",
    )
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if any element is wrong, 2 if it cannot be measured or written."""
    comm = collectives.world()
    console = console_of(comm.rank)
    if comm.size == 1:
        console.print("bench overlap: one rank alone has nothing to communicate")
        return 2
    if not can_write(options.json, comm, console):
        return 2
    num_elements = whole_blocks(options.size, FP32.itemsize, num_blocks=1)
    case = Case("all_reduce", comm.rank, comm.size, num_elements, FP32)
    ways = every_way(comm, case, options.beside or [Product.name])
    found = measured(case, ways, options.samples)
    facts = {"mpi": mpi_version(), "ranks": comm.size, "size": case.num_bytes}
    facts |= {"amounts": {way.other.name: way.other.amount for way in ways}, **cores()}
    show(facts, found, console)
    if options.json is not None and comm.rank == 0:
        result = facts | {"ways": [each.as_dict() for each in found]}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 report
    return int(any(each.wrong for each in found))


def every_way(comm: Communicator, case: Case, beside: list[str]) -> list[Way]:
    """With and without a thread, in one piece and in slices, all on the same buffers."""
    buffers = out_of_place(case)
    assert buffers is not None, "an all-reduce can be out of place"
    others = [matching(KINDS[name], comm, buffers) for name in dict.fromkeys(beside)]
    comms = {None: comm, "thread": collectives.world(progress="thread")}
    return [
        Way(progress, each, buffers, other, slices)
        for other in others
        for slices in (1, SLICES)
        for progress, each in comms.items()
    ]


def measured(case: Case, ways: list[Way], samples: int) -> list[Overlap]:
    """All of them side by side."""
    effort = Effort(TRIAL.warmup, samples, MAX_SECONDS)
    made = [contender for way in ways for contender in way.contenders()]
    found = iter(outcomes(case, ways[0].buffers, made, effort))
    return [way.overlap([next(found) for _ in way.contenders()]) for way in ways]


class Way(NamedTuple):
    """A way to overlap them.  `progress`: of the communicator, as `collectives.world` takes it."""

    progress: str | None
    comm: Communicator
    buffers: Buffers
    other: Other
    slices: int

    def contenders(self) -> list[Contender]:
        """In the order of `Overlap`."""
        y = self.buffers.y
        runs = [(self.all_reduce, y), (self.do_other, None), (self.in_turn, y), (self.at_once, y)]
        return [Contender(run, nothing, result) for run, result in runs]

    def all_reduce(self, **more: Any) -> Any:
        """The all-reduce."""
        return self.comm.all_reduce(self.buffers.x, out=self.buffers.y, **more)

    def do_other(self) -> None:
        """The other alone."""
        self.other.run(self.slices)

    def in_turn(self) -> None:
        """One after the other."""
        self.all_reduce()
        self.do_other()

    def at_once(self) -> None:
        """The other while the all-reduce goes on, if anybody lets it."""
        work = self.all_reduce(async_op=True)
        self.other.run(self.slices, work.test)
        work.wait()

    def overlap(self, found: list[Outcome]) -> Overlap:
        """What came of the contenders."""
        all_reduce, other, in_turn, at_once = (outcome.seconds for outcome in found)
        wrong = sum(outcome.wrong or 0 for outcome in found)
        way = self.other.name, self.progress, self.slices
        return Overlap(*way, all_reduce, other, in_turn, at_once, wrong)


def matching(kind: type[Other], comm: Communicator, buffers: Buffers) -> Other:
    """The amount of it that takes about as long as the all-reduce."""
    other = kind(kind.trial)
    for _ in range(2):  # the second trial is almost of the right amount, and so more exact
        trial = Way(None, comm, buffers, other, slices=1)
        runs = [trial.all_reduce, trial.do_other]
        wanted, taken = times(runs, buffers.x, is_small=False, effort=TRIAL)
        growth = float((wanted / taken) ** (1 / kind.power))
        other = kind(max(1, round(other.amount * growth / SLICES)) * SLICES)
    return other


def cores() -> dict[str, int]:
    """The cores that the ranks of this host may run on, and how many ranks these are."""
    is_known = hasattr(os, "sched_getaffinity")
    mine = os.sched_getaffinity(0) if is_known else set(range(os.cpu_count() or 1))
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    found = {"cores": len(set.union(*host.allgather(mine))), "ranks_per_host": host.size}
    host.Free()
    return found
