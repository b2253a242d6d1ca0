"""Run under mpirun by the tests beside it: benchmarks, right or made wrong.

Arguments: a folder for the JSON files, and "right" or "wrong" (all collectives, or an all-reduce),
or "swept" (what the speed command runs on so many ranks, made wrong).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bench import sweep
from bench.__main__ import main
from collectives import algorithms
from collectives.arrays import NumpyBackend


def spoil_reductions() -> None:
    """Let every combination of two arrays be wrong in its first element."""

    def binary(self, ufunc, dtype):
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
    folder, manner = Path(sys.argv[1]), sys.argv[2]
    if manner != "right":
        spoil_reductions()
    if manner == "swept":
        sys.exit(sweep.main(["crowd", "--quick", "--json", str(folder / "swept.json")]))
    if manner == "wrong":
        sys.exit(measure("all_reduce", folder))
    sys.exit(max(measure(each, folder) for each in algorithms.collectives()))
