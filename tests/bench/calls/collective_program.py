"""Run under mpirun by the tests beside it: benchmarks, right or made wrong.

Arguments: a folder for the JSON files, and "right" or "wrong" (all collectives, or an all-reduce),
"device" (all collectives, in memory that looks like a GPU's), "late" (a rank calls nothing), or
"swept" and a job of the speed command, which is made wrong.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from bench.__main__ import main
from bench.commands import world as commands_world
from bench.speed import ranks
from bench.timing import copy_rate, interleaved
from bench.workloads.collective import JOINS, SPLITS
from collectives import algorithms
from collectives.arrays import kernels
from collectives.arrays.backends import NumpyBackend
from tests.fakes.device import BACKEND

FEW = ["-n", "2", "-w", "1"]


def spoil_reductions() -> None:
    """Let every combination of two arrays be wrong in its first element."""

    def binary(self, ufunc, dtype):
        def wrong(left, right, out):
            getattr(np, ufunc)(left, right, out)
            out[:1] += 1

        return wrong

    NumpyBackend.binary = binary
    kernels.combine = lambda *_: None  # so that compiled code asks Python


def measure(collective: str, folder: Path, others: str = "--native --call") -> int:
    sweep = "-b 8 -e 64K -f 8192" if collective != "barrier" else ""
    command = [collective, *sweep.split(), *FEW, "--algorithm", "all", *others.split()]
    return main([*command, "-J", str(folder / f"{collective}.json")])


def measure_uneven(collective: str, folder: Path) -> int:
    """With a block that is empty."""
    counts = folder / "counts"
    counts.write_text("3 0\n5, 4\n" if collective == "all_to_all" else "0 70000\n")
    command = [
        collective,
        "--counts",
        str(counts),
        "-n",
        "1",
        "-w",
        "0",
        "--algorithm",
        "all",
        "--native",
    ]
    return main([*command, "-J", str(folder / f"{collective} uneven.json")])


def measure_late(folder: Path) -> int:
    """With a rank that makes no calls where the other begins to take samples."""
    world = MPI.COMM_WORLD
    if world.rank == 1:
        interleaved.block_of_calls = lambda *_: (world.Barrier(), time.sleep(60))
    return main(["all_reduce", "-b", "8", "-e", "8", *FEW, "-T", "2"])


if __name__ == "__main__":
    folder, manner = Path(sys.argv[1]), sys.argv[2]
    if manner == "device":
        commands_world.backend = lambda comm, device: {"cuda": BACKEND}[device]
        copy_rate.NUM_BYTES = 1 << 16
        measured = set(algorithms.collectives()) - {"barrier"}
        # Calls on the fake GPU take milliseconds, and a sample of less than 64 KB is many calls.
        sizes = dict.fromkeys(measured, "64K") | {"all_reduce": "4K"}
        others = "--device cuda --limits -n 1 -w 1"
        statuses = [
            measure(collective, folder, f"{others} -b {size} -e {size}")
            for collective, size in sorted(sizes.items())
        ]
        sys.exit(max(statuses))
    if manner == "late":
        sys.exit(measure_late(folder))
    if manner != "right":
        spoil_reductions()
    if manner == "swept":
        sys.exit(ranks.COMMAND.main([sys.argv[3], "--quick", "--json", str(folder / "swept.json")]))
    if manner == "wrong":
        sys.exit(measure("all_reduce", folder))
    blocks = sorted(SPLITS | JOINS)
    statuses = [measure(collective, folder) for collective in algorithms.collectives()]
    statuses += [measure_uneven(collective, folder) for collective in blocks]
    links = ["-b", "8", "-e", "64K", "-f", "8192", *FEW, "-J", str(folder / "links.json")]
    sys.exit(max(*statuses, main(["pingpong", "--pairs", "1-0", *links])))
