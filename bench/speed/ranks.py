"""Time the cases of one job of the speed command, under MPI on the number of ranks of the job.

    ring launch -n 2 -m bench.speed.ranks pair --json times.json

Everything is float32 and out of place (a broadcast in place, as in MPI); sizes are of the whole
vector.  Ranks that wait keep their cores busy, so a missing share of the cores' time was used by
other programs.  A case with a missing share is timed once more, and the less disturbed timing
counts.

The exit status is 1 if any element of a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import groupby
from operator import itemgetter

import numpy as np
from mpi4py import MPI

from bench.commands import world
from bench.commands.options import option
from bench.contenders.by_name import algorithm_of, contender
from bench.contenders.contender import PLAN
from bench.contenders.side_by_side import outcomes
from bench.speed import goals
from bench.speed.goals import OVERLAP, RANKS
from bench.speed.timed_case import ENOUGH, Timed, less_disturbed
from bench.timing.cpu_share import Watch
from bench.timing.interleaved import FEWEST, Effort
from bench.workloads import sizes
from bench.workloads.collective import JOINS, SPLITS, Case, in_place, out_of_place
from collectives import Communicator
from collectives.console import Command, Refused, add_json, console_for, positive_number, write_json

FP32 = np.dtype("float32")
QUICK = Effort(warmup=1, samples=FEWEST, seconds=1.0)
AGAIN = 60.0  # seconds for what is timed once more
CALLS = 200  # that make a sample of a small case: reading the clock takes as long as a call


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the ranks."""
    parse.add_argument("job", choices=sorted(RANKS.keys() - {OVERLAP}))
    option(parse, "--quick", "a few sizes and samples", action="store_true")
    about = "X times the usual seconds for each case"
    option(parse, "--effort", about, type=positive_number, default=1.0, metavar="X")
    add_json(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Time the job's cases; return 0, or 1 if anything is wrong."""
    return world.on_ranks(lambda comm: measured(comm, options))


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Time the job's cases, and let rank 0 write them; return the exit status."""
    if comm.size != RANKS[options.job]:
        raise Refused(f"{options.job} wants {RANKS[options.job]} ranks, not {comm.size}")
    world.check_output(options.json)
    timed_cases = JobOfCases(comm, options).run()
    if comm.rank == 0:
        cases = [timed._asdict() for timed in timed_cases]
        write_json({"mpi": world.mpi_version(), "cases": cases}, options.json)
    return int(any(any(timed.wrong.values()) for timed in timed_cases))


class JobOfCases:
    """The cases of a job, one after the other."""

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.cases = goals.cases(goals.goals(is_quick=options.quick), options.job)

    def run(self) -> list[Timed]:
        """Time all of them, and once more those that were disturbed."""
        say = console_for(self.comm.rank).print
        timed_cases: dict[tuple[str, int], Timed] = {}
        for collective, group in groupby(self.cases, key=itemgetter(0)):
            say(f"{goals.in_words(collective)} on {self.comm.size} ranks")
            timed_cases |= {key: self.timed(*key) for key in group}
        if not self.options.quick:
            self.repeat(timed_cases)
        return list(timed_cases.values())

    def repeat(self, timed_cases: dict[tuple[str, int], Timed]) -> None:
        """Time the disturbed cases again while there is time, the worst first."""
        end = time.perf_counter() + AGAIN * self.options.effort
        for cores, key in sorted((timed.cores, key) for key, timed in timed_cases.items()):
            if cores >= ENOUGH or not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
                return
            timed_cases[key] = less_disturbed(timed_cases[key], self.timed(*key))

    def timed(self, collective: str, size: int) -> Timed:
        """Time one case: all contenders side by side."""
        comm, names = self.comm, self.cases[collective, size]
        num_blocks = comm.size if collective in SPLITS | JOINS else 1
        num_elements = sizes.whole_blocks(size, FP32.itemsize, num_blocks)
        case = Case(collective, comm.rank, comm.size, num_elements, FP32)
        buffers = out_of_place(case) or in_place(case)
        assert buffers is not None, "only a barrier has no buffers"
        made = [contender(comm, case, buffers, name) for name in names]
        watch = Watch()
        results = outcomes(case, buffers, made, self.effort(size, len(names)))
        seconds = {name: result.seconds for name, result in zip(names, results, strict=True)}
        wrong = {name: result.wrong or 0 for name, result in zip(names, results, strict=True)}
        label = algorithm_of(comm, case, PLAN) or ""
        return Timed(collective, size, label, seconds, wrong, watch.cores())

    def effort(self, size: int, num_contenders: int) -> Effort:
        """Return more time for large cases, for their medians to be of enough samples."""
        if self.options.quick:
            return QUICK
        seconds = self.options.effort * num_contenders * (0.35 + 1.6 * size / (64 << 20))
        return Effort(warmup=5, samples=1000, seconds=seconds, calls=CALLS)


COMMAND = Command("bench.speed.ranks", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
