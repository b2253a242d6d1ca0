"""Times the cases of one job of the speed command.  Run under MPI on as many ranks as it wants.

    python -m collectives.launch -n 2 -m bench.sweep pair --json times.json

Everything is float32 and out of place (a broadcast in place, as MPI does it); a size is that of the
whole vector.  Ranks that wait for each other keep their cores busy, so what they lack of the cores'
time somebody else had.  A case that lacked some is timed once more, and the less disturbed counts.

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
from bench.goals import RANKS, Timed
from bench.perf import mpi_version
from bench.side_by_side import outcomes
from bench.timing import Effort
from collectives import Communicator
from parallel.show import console_of

FP32 = np.dtype("float32")
QUICK = Effort(warmup=1, samples=3, seconds=1.0)
ENOUGH = 0.97  # of the cores
AGAIN = 40.0  # seconds for what is timed once more


def main(arguments: list[str] | None = None) -> int:
    """Time the job's cases.  0, 1 if anything is wrong."""
    parse = parser()
    options = parse.parse_args(arguments)
    comm = collectives.world()
    if comm.size != RANKS[options.job]:
        parse.error(f"{options.job} wants {RANKS[options.job]} ranks, not {comm.size}")
    found = Sweep(comm, options.job, is_quick=options.quick).run()
    if comm.rank == 0:
        result = {"mpi": mpi_version(), "cases": [timed._asdict() for timed in found]}
        options.json.write_text(json.dumps(result))
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 write
    return int(any(any(timed.wrong.values()) for timed in found))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m bench.sweep", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("job", choices=RANKS)
    parse.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the times")
    parse.add_argument("--quick", action="store_true", help="a few sizes and samples")
    return parse


class Sweep:
    """The cases of a job, one after the other."""

    def __init__(self, comm: Communicator, job: str, *, is_quick: bool) -> None:
        self.comm, self.is_quick = comm, is_quick
        is_open_mpi = MPI.get_vendor()[0] == "Open MPI"
        demands = goals.demands(is_open_mpi=is_open_mpi, is_quick=is_quick)
        self.cases = goals.cases(demands, job)

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
        end = time.perf_counter() + AGAIN
        for cores, key in sorted((timed.cores, key) for key, timed in found.items()):
            if cores >= ENOUGH or not MPI.COMM_WORLD.bcast(time.perf_counter() < end):
                return
            found[key] = goals.less_disturbed(found[key], self.timed(*key))

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
        found = outcomes(case, buffers, made, QUICK if self.is_quick else effort(size))
        seconds = {name: each.seconds for name, each in zip(names, found, strict=True)}
        wrong = {name: each.wrong or 0 for name, each in zip(names, found, strict=True)}
        label = algorithm_of(case, PLAN) or ""
        return Timed(collective, size, label, seconds, wrong, watch.cores())


def effort(size: int) -> Effort:
    """Large cases get more time, for their medians to be of enough samples."""
    return Effort(warmup=5, samples=1000, seconds=1.0 + 5.0 * size / (64 << 20))


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
