"""The microbenchmark: every algorithm of a collective at each size, beside MPI's own call.

The time of a rank is the median of its samples, and the time of the slowest rank is reported.
Below 64 KiB a sample is a block of many calls.  From 64 KiB on a sample is one call, after a
barrier, on an input that was just overwritten.  Afterwards one run of every contender is checked:
the inputs are small integers, so that results are exact, and the exit status is 1 if any element is
wrong.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI
from rich.console import Console

import collectives
from bench import report, sizes
from bench.case import CALL, JOINS, NATIVE, SPLITS, Buffers, Case, in_place, out_of_place
from bench.contenders import algorithm_of, contender, native_lacks
from bench.report import Measurement, Row
from bench.side_by_side import outcomes
from bench.timing import Effort
from collectives import Communicator, ScheduleError, algorithms
from collectives.arrays import validation
from collectives.arrays.backends import HOST, Backend, backend_of_kind
from collectives.arrays.operators import operator
from collectives.schedule.contracts import SPECS
from collectives.selection import select
from parallel import raise_on_all_ranks
from parallel.cli import can_be_written, console_of, device_namespace, print_table


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if any element is wrong, 2 if it cannot be measured."""
    comm = collectives.world()
    status = measured(comm, options, console_of(comm.rank))
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 say why
    return status


def measured(comm: Communicator, options: argparse.Namespace, console: Console) -> int:
    """The whole benchmark, with everything that rank 0 prints and writes; the exit status."""
    try:
        benchmark = Benchmark(comm, options)
    except (TypeError, ValueError, ScheduleError) as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    rows = benchmark.report(console)
    if options.json is not None and comm.rank == 0:
        found = benchmark.facts() | report.as_dict(rows)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(row.wrong for row in rows) else 0


class Benchmark:
    """One collective at every size.

    TypeError or ValueError if the options do not go together, and ScheduleError if an algorithm
    that was registered is wrong on so many ranks.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        if options.native and options.device != "cpu":
            raise ValueError("--native: the MPI library's own call gets no arrays of a GPU")
        self.cases = cases(comm, options, backend(comm, options.device))
        wanted = options.names or every_algorithm(options.collective, comm.size)
        self.names = list(dict.fromkeys(wanted))
        for name in self.names:
            select.check(options.collective, name, comm.size)
            for case in self.cases:
                check_schedule(case, name)
        check_output(options.json)
        if options.native and not options.dtype.isnative:
            raise ValueError(
                f"--native: MPI has no numbers of another byte order ({options.dtype.str})"
            )
        self.lacking = native_lacks(self.cases[0]) if options.native else None
        self.names += [CALL] * options.call
        self.names += [NATIVE] * (options.native and self.lacking is None)

    def facts(self) -> dict[str, Any]:
        """What was measured, for JSON and the first line."""
        case = self.cases[0]
        return {
            "collective": case.collective,
            "ranks": case.size,
            "mpi": mpi_version(),
            "dtype": case.dtype.name,
            "arrays": case.backend.kind,
            **case.settings,
            "samples": self.options.samples,
            "warmup": self.options.warmup,
        }

    def report(self, console: Console) -> list[Row]:
        """Measure, and print as it goes; the rows."""

        def say(text: str) -> None:
            console.print(text, markup=False)

        say("# " + ", ".join(f"{key} {value}" for key, value in self.facts().items()))
        if self.lacking is not None:
            say(f"# native: not measured, MPI has no {self.lacking}")
        say(report.HEADER)
        rows: list[Row] = []
        for case in self.cases:
            rows += (found := self.rows(case))
            say("\n".join(map(report.line, found)))
        form = "in place" if rows[0].out_of_place is None else "out of place"
        say(f"\nBest algorithm and one-shot call against the MPI library's own, {form}:")
        print_table(report.summary_table(report.summaries(rows)), console)
        return rows

    def rows(self, case: Case) -> list[Row]:
        """Every contender at one size."""
        apart, inside = (self.form(case, buffers_of) for buffers_of in (out_of_place, in_place))
        return [
            Row(case, name, algorithm_of(case, name), *found)
            for name, *found in zip(self.names, apart, inside, strict=True)
        ]

    def form(
        self, case: Case, buffers_of: Callable[[Case], Buffers | None]
    ) -> list[Measurement | None]:
        """Every contender, timed side by side on the same buffers and then checked."""
        if (buffers := buffers_of(case)) is None:
            return [None] * len(self.names)
        made = [contender(self.comm, case, buffers, name) for name in self.names]
        effort = Effort(self.options.warmup, self.options.samples, self.options.seconds)
        found = outcomes(case, buffers, made, effort, is_checked=bool(self.options.check))
        algorithms_run = [algorithm_of(case, name) for name in self.names]
        both = zip(algorithms_run, found, strict=True)
        return [report.measurement(case, algorithm, *outcome) for algorithm, outcome in both]


def backend(comm: Communicator, device: str) -> Backend:
    """What serves arrays on this device.  ValueError on all ranks if one has none."""
    phase, doing = collectives.phase, "preparing the device"
    with raise_on_all_ranks(comm, phase, "prepare", doing, ValueError):
        device_namespace(device, comm.rank)
        return backend_of_kind({"cpu": "numpy", "cuda": "cupy"}[device])


def cases(comm: Communicator, options: argparse.Namespace, backend: Backend = HOST) -> list[Case]:
    """What to measure, by size.  Sizes are rounded up to equal blocks, so some may coincide."""
    collective, dtype = options.collective, options.dtype
    root = validation.rank(options.root, comm.size, "root")
    if SPECS[collective].is_reduction:
        operator(options.op, collective).check(dtype)
    make = partial(
        Case, collective, comm.rank, comm.size,
        dtype=dtype, op=options.op, root=root, backend=backend, topology=comm.topology,
    )  # fmt: skip
    if collective == "barrier":
        return [make(0)]
    num_blocks = comm.size if collective in SPLITS | JOINS else 1
    wanted = sizes.series(options.first, options.last, options.factor)
    counts = (sizes.whole_blocks(size, dtype.itemsize, num_blocks) for size in wanted)
    return [make(count) for count in dict.fromkeys(counts)]


def check_schedule(case: Case, name: str) -> None:
    """Raise ValueError or ScheduleError if an algorithm cannot run this case after all."""
    algorithm, options, *_ = select.choose(
        case.collective, name, case.size, case.num_bytes, topology=case.topology
    )
    root = case.root if SPECS[case.collective].is_rooted else None
    algorithm.schedule(case.rank, case.size, root, **options)


def check_output(path: Path | None) -> None:
    """Raise ValueError, on every rank, if rank 0 cannot write this file."""
    if path is not None and not MPI.COMM_WORLD.bcast(can_be_written(path)):
        raise ValueError(f"{path} cannot be written")


def every_algorithm(collective: str, size: int) -> list[str]:
    """The names of those that can run on so many ranks."""
    names = algorithms.names(collective)
    return [name for name in names if algorithms.info(collective, name).serves(size)]


def mpi_version() -> str:
    """The MPI library's name and version."""
    name, version = MPI.get_vendor()
    return " ".join([name, ".".join(map(str, version))])
