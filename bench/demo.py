"""The demo: it shows the speed, and accounts for every byte.  Two cores, at most three minutes.

1. Bandwidth: all-reduce from 4 B to 64 MiB on 2 ranks, some algorithms beside MPI's own call.
2. Traffic: a small language model is trained on 4 ranks.  Its messages are predicted, recorded,
   and, with Open MPI, observed by MPI itself.  One rank then trains on the same batches, and the
   losses must agree.
3. Axes: the same model is trained on 8 ranks, 2 x 2 x 2 along pipe, data and tensor.

The exit status is 1 if a result is wrong, if bytes differ, or after the time limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import verdict
from bench.jobs import Jobs, has_mpi
from bench.options import seconds
from bench.verdict import TOLERANCES, Verdict
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.export import output_file
from collectives.launch.mpirun import find_mpirun
from parallel.cli import console_of, print_table

STEPS = {"float64": 200, "float32": 20}
# A few that differ on 2 ranks.  The best of many would be the luckiest of many.
CONTENDERS = ("recursive_doubling", "ring", "reduce_broadcast")
QUICK_STEPS = {"float64": 4, "float32": 2}
MODEL = "--layers 2 --hidden 64 --context 32 --batch 32"
MESH = "--mesh pipe=2,data=2,tensor=2 --zero 1 --schedule 1f1b --micro-batches 4"
MESH_STEPS = 20
BUCKETS = "--bucket-bytes 600000"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--text", metavar="PATH", help="file or directory to learn; default: Python's own library")
    add(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds for each of its jobs; default: %(default)s",
    )
    add("--json", type=output_file, metavar="FILE", help="write all results to FILE")
    add("--quick", action="store_true", help="a few sizes and steps, to try the demo itself")


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0, 1 if a check fails, 2 if there is no MPI."""
    console = console_of(0)
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        verdicts = Demo(options, jobs).run()
    if options.json is not None:
        results = jobs.results | {"verdicts": [verdict._asdict() for verdict in verdicts]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


class Demo:
    """The jobs of the demo, one after the other, and their results."""

    def __init__(self, options: argparse.Namespace, jobs: Jobs) -> None:
        self.options, self.jobs = options, jobs
        self.steps = QUICK_STEPS if options.quick else STEPS

    def run(self) -> list[Verdict]:
        """Run all jobs and all checks."""
        began = time.perf_counter()
        verdicts = [self.bandwidth(), *self.traffic(), *map(self.equality, TOLERANCES)]
        verdicts += self.mesh()
        verdicts.append(verdict.jobs(self.jobs.statuses))
        self.jobs.title(f"Verdict, after {time.perf_counter() - began:.0f} s")
        print_table(verdict.table(verdicts), self.jobs.console)
        return verdicts

    def bandwidth(self) -> Verdict:
        """All-reduce on 2 ranks, at all sizes."""
        self.jobs.title("Bandwidth of all-reduce on 2 ranks")
        sweep = "-b 8 -e 32K -f 64 -n 3" if self.options.quick else "-b 4 -e 64M -f 8 --seconds 1"
        command = ["-m", "bench", "all_reduce", *sweep.split(), "--native", "--call"]
        command += ["--algorithm", ",".join(CONTENDERS)]
        return verdict.bandwidth(*self.jobs.run("bandwidth", 2, command, json_option="-J"))

    def traffic(self) -> list[Verdict]:
        """Data parallelism on 4 ranks, observed by MPI if it can."""
        self.jobs.title("Traffic of data-parallel training on 4 ranks")
        is_watched = find_mpirun().vendor == "openmpi"
        status, result = self.train("ddp", "float64", mpi_args=MPIRUN_ARGS if is_watched else ())
        found = [verdict.traffic(status, result, is_watched=is_watched)]
        return found if self.options.quick else [*found, verdict.learning(result)]

    def equality(self, dtype: str) -> Verdict:
        """The losses of 4 ranks against those of one."""
        self.jobs.title(f"The same on one rank, {dtype}")
        names = [f"{strategy} {dtype}" for strategy in ("ddp", "serial")]
        for name in names:
            if name not in self.jobs.results:
                self.train(*name.split(), is_quiet=True)
        losses = [self.jobs.results[name].get("losses", []) for name in names]
        return verdict.equality(dtype, *losses, steps=self.steps[dtype])

    def mesh(self) -> list[Verdict]:
        """The same on 8 ranks along three axes: its traffic, and its losses against one rank's."""
        self.jobs.title("Traffic of 8 ranks: 2 x 2 x 2 along pipe, data and tensor")
        is_watched = find_mpirun().vendor == "openmpi"
        steps = min(MESH_STEPS, self.steps["float64"])
        command = ["-m", "parallel.train", *MESH.split(), *MODEL.split(), "--steps", str(steps)]
        command += ["--text", self.options.text] if self.options.text is not None else []
        mpi_args = MPIRUN_ARGS if is_watched else ()
        status, result = self.jobs.run("mesh float64", 8, command, mpi_args)
        one = self.jobs.results["serial float64"].get("losses", [])[:steps]
        return [
            verdict.traffic(status, result, is_watched=is_watched, what="2 x 2 x 2"),
            verdict.equality("float64", result.get("losses", []), one, steps=steps, ranks=8),
        ]

    def train(
        self, strategy: str, dtype: str, *, mpi_args: Sequence[str] = (), is_quiet: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """A training run: on 4 ranks, or serially on one."""
        command = ["-m", "parallel.train", "--strategy", strategy, "--dtype", dtype]
        command += [*MODEL.split(), "--steps", str(self.steps[dtype])]
        command += BUCKETS.split() if strategy == "ddp" else []
        command += ["--text", self.options.text] if self.options.text is not None else []
        command += ["--no-monitor"] if is_quiet else []
        size = 1 if strategy == "serial" else 4
        return self.jobs.run(f"{strategy} {dtype}", size, command, mpi_args, is_quiet=is_quiet)
