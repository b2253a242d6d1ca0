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
import time
from collections.abc import Sequence
from typing import Any

from bench.commands.jobs import Jobs, starting_jobs
from bench.commands.options import add_jobs, add_output, option
from bench.demo import checks
from bench.demo.checks import TOLERANCES, Verdict
from collectives.console import Command, console_for, write_json
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch.mpirun import find_mpirun

STEPS = {"float64": 200, "float32": 20}
# A few that differ on 2 ranks.  The best of many would be the luckiest of many.
CONTENDERS = ("recursive_doubling", "ring", "reduce_broadcast")
QUICK_STEPS = {"float64": 4, "float32": 2}
MODEL = "--layers 2 --hidden 64 --context 32 --batch 32"
MESH = "--mesh pipe=2,data=2,tensor=2 --zero 1 --schedule 1f1b --micro-batches 4"
MESH_STEPS = 20
BUCKETS = "--bucket-bytes 600000"


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    about = "file or directory to learn; default: Python's own library"
    option(parse, "--text", about, metavar="PATH")
    add_jobs(parse, 120.0)
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0, or 1 if a check fails.  Raises Refused if there is no MPI."""
    with starting_jobs(console_for(0, options), options) as jobs:
        verdicts = Demo(options, jobs).run()
    results = jobs.results | {"verdicts": [verdict._asdict() for verdict in verdicts]}
    write_json(results, options.json)
    return 0 if all(verdict.is_good for verdict in verdicts) else 1


class Demo:
    """The jobs of the demo, one after the other, and their results."""

    def __init__(self, options: argparse.Namespace, jobs: Jobs) -> None:
        self.options, self.jobs = options, jobs
        self.steps = QUICK_STEPS if options.quick else STEPS
        self.is_watched = find_mpirun().vendor == "openmpi"
        self.mpi_args = MPIRUN_ARGS if self.is_watched else ()

    def run(self) -> list[Verdict]:
        """Run all jobs and all checks."""
        began = time.perf_counter()
        verdicts = [self.bandwidth(), *self.traffic(), *map(self.equality, TOLERANCES)]
        verdicts += [*self.mesh(), checks.jobs(self.jobs.statuses)]
        self.jobs.title(f"Verdict, after {time.perf_counter() - began:.0f} s")
        checks.table(verdicts).print(self.jobs.console)
        return verdicts

    def bandwidth(self) -> Verdict:
        """Measure the all-reduce on 2 ranks, at all sizes."""
        self.jobs.title("Bandwidth of all-reduce on 2 ranks")
        sweep = "-b 8 -e 32K -f 64 -n 3" if self.options.quick else "-b 4 -e 64M -f 8 --seconds 1"
        command = ["-m", "bench", "all_reduce", *sweep.split(), "--native", "--call"]
        command += ["--algorithm", ",".join(CONTENDERS)]
        return checks.bandwidth(*self.jobs.run("bandwidth", 2, command))

    def traffic(self) -> list[Verdict]:
        """Train on 4 ranks with data parallelism, observed by MPI if it can."""
        self.jobs.title("Traffic of data-parallel training on 4 ranks")
        status, result = self.train("ddp", "float64", mpi_args=self.mpi_args)
        verdicts = [checks.traffic(status, result, is_watched=self.is_watched)]
        return verdicts if self.options.quick else [*verdicts, checks.learning(result)]

    def equality(self, dtype: str) -> Verdict:
        """Judge the losses of 4 ranks against those of one."""
        self.jobs.title(f"The same on one rank, {dtype}")
        names = [f"{strategy} {dtype}" for strategy in ("ddp", "serial")]
        for name in names:
            if name not in self.jobs.results:
                self.train(*name.split(), is_quiet=True)
        losses = [self.jobs.results[name].get("losses", []) for name in names]
        return checks.equality(dtype, *losses, steps=self.steps[dtype])

    def mesh(self) -> list[Verdict]:
        """Train on 8 ranks along three axes; judge the traffic, and the losses."""
        self.jobs.title("Traffic of 8 ranks: 2 x 2 x 2 along pipe, data and tensor")
        steps = min(MESH_STEPS, self.steps["float64"])
        status, result = self.job("mesh float64", 8, MESH.split(), steps, self.mpi_args)
        one = self.jobs.results["serial float64"].get("losses", [])[:steps]
        return [
            checks.traffic(status, result, is_watched=self.is_watched, what="2 x 2 x 2"),
            checks.equality("float64", result.get("losses", []), one, steps=steps, ranks=8),
        ]

    def train(
        self, strategy: str, dtype: str, *, mpi_args: Sequence[str] = (), is_quiet: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """Train on 4 ranks, or serially on one."""
        words = ["--strategy", strategy, "--dtype", dtype]
        words += BUCKETS.split() if strategy == "ddp" else []
        words += ["--no-monitor"] if is_quiet else []
        size, name = 1 if strategy == "serial" else 4, f"{strategy} {dtype}"
        return self.job(name, size, words, self.steps[dtype], mpi_args, is_quiet=is_quiet)

    def job(
        self,
        name: str,
        size: int,
        words: Sequence[str],
        steps: int,
        mpi_args: Sequence[str],
        *,
        is_quiet: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Run a training job; return its status and what it wrote."""
        command = ["-m", "parallel.train", *words, *MODEL.split(), "--steps", str(steps)]
        command += ["--text", self.options.text] if self.options.text is not None else []
        return self.jobs.run(name, size, command, mpi_args, is_quiet=is_quiet)


COMMAND = Command("bench.demo.command", __doc__, add_options, run)
