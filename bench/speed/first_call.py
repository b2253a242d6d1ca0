"""Measure how long a program takes to import the library and to make its first collective.

    ring launch -n 2 -m bench.speed.first_call --json times.json

Each import has its own process, and each first collective its own job, because only the first of a
process counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

import numpy as np

from bench.commands.jobs import ROOT
from collectives.console import Command, add_json, write_json

IMPORTS, JOBS = 9, 5  # how often
RANKS = 1, 2
SIZE = 8  # bytes of the first all-reduce
PATIENCE = 60.0  # seconds for an import

_IMPORT = """
import time
begin = time.perf_counter()
import numpy
middle = time.perf_counter()
import collectives
print(middle - begin, time.perf_counter() - begin)
"""


def imports(count: int) -> dict[str, float]:
    """Return median seconds to import the library, and NumPy in it, in so many processes."""
    seconds = [_import() for _ in range(count + 1)][1:]  # the first one fills the caches
    numpy, library = (median(column) for column in zip(*seconds, strict=True))
    return {"import collectives": library, "of which NumPy": numpy}


def _import() -> list[float]:
    command = [sys.executable, "-c", _IMPORT]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    return [float(word) for word in done.stdout.split()]


def medians(jobs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each time over jobs."""
    return {name: median(job[name] for job in jobs) for name in jobs[0]}


def run(options: argparse.Namespace) -> int:
    """Time the first calls of this job; return 0."""
    calls = first_calls()
    from mpi4py import MPI  # noqa: PLC0415 - when MPI starts is what is measured

    world = MPI.COMM_WORLD
    slowest = {name: world.allreduce(seconds, MPI.MAX) for name, seconds in calls.items()}
    if world.rank == 0:
        write_json(slowest, options.json)
    return 0


def first_calls() -> dict[str, float]:
    """Return the seconds of the first calls of this process."""
    import collectives  # noqa: PLC0415 - the launcher has imported it

    begin = time.perf_counter()
    comm = collectives.world()
    middle = time.perf_counter()
    from mpi4py import MPI  # noqa: PLC0415

    x = np.ones(SIZE // 4, np.float32)
    y = np.empty_like(x)
    calls = {"world(), with the start of MPI": middle - begin}
    for name in ("first all-reduce", "second all-reduce", "third all-reduce"):
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        comm.all_reduce(x, out=y)
        calls[name] = time.perf_counter() - begin
    return calls


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the ranks."""
    add_json(parse, is_local=False)


COMMAND = Command("bench.speed.first_call", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
