"""Times the cases of one job of the speed command, under MPI on the number of ranks of the job.

    python -m collectives.launch -n 2 -m bench.sweep pair --json times.json

Everything is float32 and out of place (a broadcast in place, as in MPI); sizes are of the whole
vector.  Ranks that wait keep their cores busy, so a missing share of the cores' time was used by
other programs.  A case with a missing share is timed once more, and the less disturbed timing
counts.

The exit status is 1 if any element of a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
from mpi4py import MPI

import collectives
from bench import goals, sizes
from bench.case import JOINS, PLAN, SPLITS, Case, in_place, out_of_place
from bench.contenders import algorithm_of, contender
from bench.goals import OVERLAP, RANKS
from bench.perf import check_output, mpi_version
from bench.side_by_side import outcomes
from bench.timed import ENOUGH, Timed, less_disturbed
from bench.timing import FEWEST, Effort
from collectives import Communicator
from parallel.cli import console_of

FP32 = np.dtype("float32")
QUICK = Effort(warmup=1, samples=FEWEST, seconds=1.0)
AGAIN = 60.0  # seconds for what is timed once more
CALLS = 200  # that make a sample of a small case: reading the clock takes as long as a call


def main(arguments: list[str] | None = None) -> int:
    """Time the job's cases.  0, 1 if anything is wrong."""
    parse = parser()
    options = parse.parse_args(arguments)
    comm = collectives.world()
    if comm.size != RANKS[options.job]:
        parse.error(f"{options.job} wants {RANKS[options.job]} ranks, not {comm.size}")
    try:
        check_output(options.json)
    except ValueError as error:
        parse.error(str(error))
    found = Sweep(comm, options.job, options.effort, is_quick=options.quick).run()
    if comm.rank == 0:
        result = {"mpi": mpi_version(), "cases": [timed._asdict() for timed in found]}
        options.json.write_text(json.dumps(result))
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 write
    return int(any(any(timed.wrong.values()) for timed in found))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.sweep", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("job", choices=sorted(RANKS.keys() - {OVERLAP}))
    parse.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the times")
    parse.add_argument("--quick", action="store_true", help="a few sizes and samples")
    parse.add_argument(
        "--effort",
        type=float,
        default=1.0,
        metavar="X",
        help="X times the usual seconds for each case",
    )
    return parse


class Sweep:
    """The cases of a job, one after the other."""

    def __init__(self, comm: Communicator, job: str, share: float, *, is_quick: bool) -> None:
        """`share`: of the usual seconds for each case."""
        self.comm, self.share, self.is_quick = comm, share, is_quick
        self.cases = goals.cases(goals.goals(is_quick=is_quick), job)

    def run(self) -> list[Timed]:
        """All of them, and once more those that were disturbed."""
        say = console_of(self.comm.rank).print
        found: dict[tuple[str, int], Timed] = {}
        for collective, group in groupby(self.cases, key=itemgetter(0)):
            say(f"{goals.in_words(collective)} on {self.comm.size} ranks")
            found |= {key: self.timed(*key) for key in group}
        if not self.is_quick:
            self.repeat(found)
        return list(found.values())

    def repeat(self, found: dict[tuple[str, int], Timed]) -> None:
        """Time the disturbed cases again while there is time, the worst first."""
        end = time.perf_counter() + AGAIN * self.share
        for cores, key in sorted((timed.cores, key) for key, timed in found.items()):
            if cores >= ENOUGH or not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
                return
            found[key] = less_disturbed(found[key], self.timed(*key))

    def timed(self, collective: str, size: int) -> Timed:
        """One case: all contenders side by side."""
        comm, names = self.comm, self.cases[collective, size]
        num_blocks = comm.size if collective in SPLITS | JOINS else 1
        num_elements = sizes.whole_blocks(size, FP32.itemsize, num_blocks)
        case = Case(collective, comm.rank, comm.size, num_elements, FP32)
        buffers = out_of_place(case) or in_place(case)
        assert buffers is not None, "only a barrier has no buffers"
        made = [contender(comm, case, buffers, name) for name in names]
        watch = Watch()
        spent = QUICK if self.is_quick else effort(size, len(names), self.share)
        found = outcomes(case, buffers, made, spent)
        seconds = {name: each.seconds for name, each in zip(names, found, strict=True)}
        wrong = {name: each.wrong or 0 for name, each in zip(names, found, strict=True)}
        label = algorithm_of(comm, case, PLAN) or ""
        return Timed(collective, size, label, seconds, wrong, watch.cores())


def effort(size: int, num_contenders: int, share: float) -> Effort:
    """Large cases get more time, for their medians to be of enough samples."""
    seconds = num_contenders * (0.35 + 1.6 * size / (64 << 20))
    return Effort(warmup=5, samples=1000, seconds=share * seconds, calls=CALLS)


class Watch:
    """How much of the cores the ranks have from now on."""

    def __init__(self) -> None:
        self.wall, self.mine = time.perf_counter(), time.process_time()

    def cores(self) -> float:
        """The fraction, of those cores that so many ranks can use; the same on every rank."""
        world = MPI.COMM_WORLD
        mine = (time.process_time() - self.mine) / (time.perf_counter() - self.wall)
        return float(world.allreduce(mine)) / min(world.size, os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
