"""Run under mpirun by test_perf.py: the benchmark of all collectives, right or made wrong.

Arguments: a folder for the JSON files, and "right" or "wrong".
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench.__main__ import main
from collectives import algorithms
from collectives.arrays import NumpyBackend


def spoil_reductions() -> None:
    """Let every combination of two arrays be wrong in its first element."""

    def binary(self, ufunc):
        def wrong(left, right, out):
            getattr(np, ufunc)(left, right, out)
            out[:1] += 1

        return wrong

    NumpyBackend.binary = binary


def measure(collective: str, folder: Path) -> int:
    sweep = "-b 8 -e 64K -f 9000" if collective != "barrier" else ""
    command = [collective, *sweep.split(), "-n", "2", "-w", "1", "--native", "--call"]
    return main([*command, "-J", str(folder / f"{collective}.json")])


if __name__ == "__main__":
    if sys.argv[2] == "wrong":
        spoil_reductions()
        sys.exit(measure("all_reduce", Path(sys.argv[1])))
    sys.exit(max(measure(each, Path(sys.argv[1])) for each in algorithms.collectives()))
