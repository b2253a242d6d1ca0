"""The demo: how fast it is, and that no byte is unaccounted for.  Two cores, at most three minutes.

1. Bandwidth: all-reduce from 8 B to 64 MiB on 2 ranks, every algorithm beside MPI's own call.
2. Traffic: a small language model trained on 4 ranks; what it sends is predicted, recorded, and,
   with Open MPI, observed by MPI itself.  One rank then trains on the same batches: the losses must
   agree.

The exit status is 1 if anything is wrong, unequal or late.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from bench import verdict
from bench.verdict import TOLERANCES, Verdict
from collectives.launch import MpiNotFound, find_mpirun, launch
from collectives.monitor import MPIRUN_ARGS
from parallel.show import console_of, print_table

ROOT = Path(__file__).resolve().parent.parent
STEPS = {"float64": 200, "float32": 20}
# A few that differ on 2 ranks.  The best of many would be the luckiest of many.
CONTENDERS = ("recursive_doubling", "ring", "reduce_broadcast")
QUICK_STEPS = {"float64": 4, "float32": 2}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--text", metavar="PATH", help="file or directory to learn; default: Python's own library")
    add("--timeout", type=float, default=120.0, metavar="S",
        help="seconds for each of its jobs; default: %(default)s")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all results to FILE")
    add("--quick", action="store_true", help="a few sizes and steps, to try the demo itself")


def run(options: argparse.Namespace) -> int:
    """Everything, and the verdict.  0, 1 if a check fails, 2 if there is no MPI."""
    console = console_of(0)
    try:
        find_mpirun()
    except MpiNotFound as error:
        console.print(str(error), markup=False)
        return 2
    with TemporaryDirectory() as folder:
        demo = Demo(options, console, Path(folder))
        verdicts = demo.run()
    if options.json is not None:
        results = demo.results | {"verdicts": [verdict._asdict() for verdict in verdicts]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


class Demo:
    """The jobs, one after the other, and what they found."""

    def __init__(self, options: argparse.Namespace, console: Console, folder: Path) -> None:
        self.options, self.console, self.folder = options, console, folder
        self.steps = QUICK_STEPS if options.quick else STEPS
        self.results: dict[str, Any] = {}
        self.statuses: dict[str, int] = {}

    def run(self) -> list[Verdict]:
        """All jobs and all checks."""
        began = time.perf_counter()
        verdicts = [self.bandwidth(), *self.traffic(), *map(self.equality, TOLERANCES)]
        verdicts.append(verdict.jobs(self.statuses))
        self.title(f"Verdict, after {time.perf_counter() - began:.0f} s")
        print_table(verdict.table(verdicts), self.console)
        return verdicts

    def bandwidth(self) -> Verdict:
        """All-reduce on 2 ranks, at all sizes."""
        self.title("Bandwidth of all-reduce on 2 ranks")
        sweep = "-b 8 -e 64K -f 64 -n 3" if self.options.quick else "-b 8 -e 64M -f 8 --seconds 1"
        command = ["-m", "bench", "all_reduce", *sweep.split(), "--native", "--call"]
        command += [word for name in CONTENDERS for word in ("--algorithm", name)]
        return verdict.bandwidth(*self.job("bandwidth", 2, command, json_option="-J"))

    def traffic(self) -> list[Verdict]:
        """Data parallel on 4 ranks, watched by MPI where it can."""
        self.title("Traffic of data-parallel training on 4 ranks")
        is_watched = find_mpirun().vendor == "openmpi"
        status, result = self.train("ddp", "float64", mpi_args=MPIRUN_ARGS if is_watched else ())
        found = [verdict.traffic(status, result, is_watched=is_watched)]
        return found if self.options.quick else [*found, verdict.learning(result)]

    def equality(self, dtype: str) -> Verdict:
        """The losses of 4 ranks against those of one."""
        self.title(f"The same on one rank, {dtype}")
        names = [f"{strategy} {dtype}" for strategy in ("ddp", "serial")]
        for name in names:
            if name not in self.results:
                self.train(*name.split(), is_quiet=True)
        losses = [self.results[name].get("losses", []) for name in names]
        return verdict.equality(dtype, *losses, steps=self.steps[dtype])

    def train(
        self, strategy: str, dtype: str, *, mpi_args: Sequence[str] = (), is_quiet: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """A training run: on 4 ranks, or serially on one."""
        command = ["-m", "parallel.train", "--strategy", strategy, "--dtype", dtype]
        command += ["--steps", str(self.steps[dtype])]
        command += ["--text", self.options.text] if self.options.text is not None else []
        command += ["--no-monitor"] if is_quiet else []
        size = 1 if strategy == "serial" else 4
        return self.job(f"{strategy} {dtype}", size, command, mpi_args, is_quiet=is_quiet)

    def job(
        self,
        name: str,
        size: int,
        command: Sequence[str],
        mpi_args: Sequence[str] = (),
        *,
        json_option: str = "--json",
        is_quiet: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Run a command on so many ranks: its exit status, and what it wrote to its JSON file.

        A quiet job is only heard if it fails.
        """
        self.console.print("$ " + shlex.join(shown(size, command, mpi_args)), markup=False)
        path = self.folder / f"{name}.json"
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        done = launch(
            size,
            [*command, json_option, str(path)],
            mpi_args=mpi_args,
            timeout=self.options.timeout,
            env={"PYTHONPATH": os.pathsep.join(paths)},
            capture=is_quiet,
        )
        if is_quiet and done.returncode:
            self.console.print(f"{done.stdout}{done.stderr}", markup=False)
        self.results[name] = json.loads(path.read_text()) if path.exists() else {}
        self.statuses[name] = done.returncode
        return done.returncode, self.results[name]

    def title(self, text: str) -> None:
        """A heading."""
        self.console.print(f"\n[bold]== {text} ==[/bold]\n")


def shown(size: int, command: Sequence[str], mpi_args: Sequence[str]) -> list[str]:
    """The command with which the user can repeat a job."""
    args = ["--mpi-args", shlex.join(mpi_args)] if mpi_args else []
    return ["python", "-m", "collectives.launch", "-n", str(size), *args, *command]
