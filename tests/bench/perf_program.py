"""Run under mpirun by the tests beside it: benchmarks, right or made wrong.

Arguments: a folder for the JSON files, and "right" or "wrong" (all collectives, or an all-reduce),
"device" (all collectives, in memory that looks like a GPU's), or "swept" and a job of the speed
command, which is made wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench import perf, sweep
from bench.__main__ import main
from collectives import algorithms
from collectives.arrays import kernels
from collectives.arrays.backends import NumpyBackend
from tests.fake_device import BACKEND


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
    sweep = "-b 8 -e 64K -f 9000" if collective != "barrier" else ""
    command = [collective, *sweep.split(), "-n", "2", "-w", "1", *others.split()]
    return main([*command, "-J", str(folder / f"{collective}.json")])


if __name__ == "__main__":
    folder, manner = Path(sys.argv[1]), sys.argv[2]
    if manner == "device":
        perf.backend = lambda comm, device: {"cuda": BACKEND}[device]
        measured = set(algorithms.collectives()) - {"barrier"}
        sys.exit(max(measure(each, folder, "--device cuda") for each in sorted(measured)))
    if manner != "right":
        spoil_reductions()
    if manner == "swept":
        sys.exit(sweep.main([sys.argv[3], "--quick", "--json", str(folder / "swept.json")]))
    if manner == "wrong":
        sys.exit(measure("all_reduce", folder))
    sys.exit(max(measure(each, folder) for each in algorithms.collectives()))
