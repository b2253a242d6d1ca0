"""Measure how long a program takes to import the library and to make its first collective.

    python -m collectives.launch -n 2 -m bench.starting --json times.json

Each import has its own process, and each first collective its own job, because only the first of a
process counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.jobs import ROOT

IMPORTS, JOBS, QUICK = 9, 5, 1  # how often
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
    """Median seconds to import the library, and NumPy in it, in so many fresh processes."""
    found = [_import() for _ in range(count + 1)][1:]  # the first one fills the caches
    numpy, library = (median(column) for column in zip(*found, strict=True))
    return {"import collectives": library, "of which NumPy": numpy}


def _import() -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    return [float(word) for word in done.stdout.split()]


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Of each time, over jobs."""
    return {name: median(each[name] for each in found) for name in found[0]}


def main(arguments: list[str] | None = None) -> int:
    """Time the first calls of this job; the exit status."""
    parse = argparse.ArgumentParser("python -m bench.starting", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--json", type=Path, required=True, metavar="FILE", help="for the times")
    path = parse.parse_args(arguments).json
    found = first_calls()
    from mpi4py import MPI  # noqa: PLC0415 - when MPI starts is what is measured

    world = MPI.COMM_WORLD
    slowest = {name: world.allreduce(seconds, MPI.MAX) for name, seconds in found.items()}
    if world.rank == 0:
        path.write_text(json.dumps(slowest))
    return 0


def first_calls() -> dict[str, Any]:
    """Seconds of the first calls of this process."""
    import collectives  # noqa: PLC0415 - the launcher has imported it

    begin = time.perf_counter()
    comm = collectives.world()
    middle = time.perf_counter()
    from mpi4py import MPI  # noqa: PLC0415

    x = np.ones(SIZE // 4, np.float32)
    y = np.empty_like(x)
    found = {"world(), with the start of MPI": middle - begin}
    for name in ("first all-reduce", "second all-reduce", "third all-reduce"):
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        comm.all_reduce(x, out=y)
        found[name] = time.perf_counter() - begin
    return found


if __name__ == "__main__":
    sys.exit(main())
