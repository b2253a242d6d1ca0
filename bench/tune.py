"""Measure which algorithms are fastest here, and write them to a file for `comm.load_decisions`.

    mpirun -n 4 python -m bench tune --output decisions.json

Run it under MPI once for each number of ranks; the tables in FILE of other numbers of ranks, and of
collectives that are not measured now, are kept.  At every size the algorithms take turns.  Those
for which the cost model predicts more than four times the shortest time are not measured.  Times
within a tenth of the fastest count as equal, and among equal ones the choice of the built-in rule
stays.  The machine that `bench fit` has written to FILE is kept.

With `--device cuda` the arrays are on GPUs, and ranks read each other's memory; a call that would
be staged ends the measurement.  Then all algorithms without segments are measured, and their tables
are apart from those of host memory.  The exit status is 2 if FILE or the options are wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from mpi4py import MPI
from rich.console import Console
from rich.table import Table

import collectives
from bench import perf, ranking, sizes
from bench.case import Case, in_place, out_of_place
from bench.cases import cases
from bench.contenders import contender
from bench.options import add_dtype, add_sizes, seconds
from bench.perf import check_output, check_schedule, ending_the_job, every_algorithm, mpi_version
from bench.ranking import HOPELESS, Times, by_rule
from bench.report import times_faster, us
from bench.side_by_side import outcomes
from bench.timing import Effort
from collectives import Communicator, ScheduleError, algorithms
from collectives.selection.decisions import Decisions, Measured, Ranks
from parallel.cli import console_of, print_table, table_with

WARMUP, SAMPLES = 3, 50


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.set_defaults(run=run, op="sum", root="0", counts=None)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add_sizes(parser)
    add_dtype(parser)
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where arrays are; cuda takes CuPy; default: %(default)s",
    )
    add(
        "--seconds",
        type=seconds,
        default=120.0,
        metavar="S",
        help="about how long it may take in all; default: %(default)s",
    )
    add(
        "--collective",
        dest="collectives",
        action="append",
        choices=algorithms.collectives(),
        metavar="NAME",
        help="measure this one; may be repeated; default: all",
    )
    add(
        "--output",
        type=Path,
        default=Path("decisions.json"),
        metavar="FILE",
        help="default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, or 2 if that is impossible."""
    comm = collectives.world(device="auto" if options.device == "cpu" else "peer")
    console, status = console_of(comm.rank), 0
    try:
        known = earlier(comm, options)
        tuner = Tuner(comm, options)
    except (TypeError, ValueError, ScheduleError) as error:
        console.print(f"bench: {error}", markup=False)
        status = 2
    else:
        with ending_the_job():
            decisions = tuner.decisions(known, console)
        if comm.rank == 0:
            options.output.write_text(decisions.to_json())
        console.print(f"Written to {options.output}", markup=False)
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 say why
    return status


def here() -> dict[str, str]:
    """The MPI, the machine and the date of a measurement."""
    return {
        "mpi": mpi_version(),
        "machine": f"{platform.node()}, {os.cpu_count()} cores",
        "when": date.today().isoformat(),
    }


def earlier(comm: Communicator, options: argparse.Namespace) -> Decisions:
    """What the file says so far.  ValueError on every rank if it is wrong, or cannot be written."""
    path = options.output
    check_output(path)
    if MPI.COMM_WORLD.bcast(path.exists()):
        comm.load_decisions(path)
    return comm.decisions or Decisions({})


class Tuner:
    """Every collective at every size.

    TypeError or ValueError if the options do not fit, and ScheduleError if an algorithm that was
    registered is wrong on so many ranks.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        if comm.size == 1:
            raise ValueError("on one rank there is nothing to choose; run it under mpirun")
        self.comm, self.options = comm, options
        self.on_device = options.device != "cpu"
        if self.on_device and comm.topology.num_hosts > 1:
            raise ValueError(
                "--device cuda: ranks on several hosts send messages; what was "
                "measured in host memory chooses their algorithms"
            )
        options.dtypes = [options.dtype]
        backend = perf.backend(comm, options.device)
        self.cases = {name: cases(comm, name, options, backend) for name in self._measured()}
        for case in (each for its_cases in self.cases.values() for each in its_cases):
            for name in every_algorithm(case.collective, case.size):
                if not algorithms.info(case.collective, name).is_built_in:
                    check_schedule(case, name)
        self._num_left = sum(map(len, self.cases.values()))
        self._end = time.perf_counter() + options.seconds

    def _measured(self) -> list[str]:
        """The collectives; a barrier has no arrays that could be on a device."""
        names = self.options.collectives or algorithms.collectives()
        if not self.on_device:
            return list(names)
        if with_arrays := [name for name in names if name != "barrier"]:
            return with_arrays
        raise ValueError("--device cuda: a barrier has no arrays")

    def decisions(self, known: Decisions, console: Console) -> Decisions:
        """What is known, and what these ranks find; rank 0 shows it as it goes."""
        facts = self.facts()
        console.print(", ".join(f"{key} {value}" for key, value in facts.items()), markup=False)
        times, hosts = dict(self.times(console)), self.comm.topology
        tables = {
            name: ranking.rows(name, hosts, each, on_device=self.on_device)
            for name, each in times.items()
        }
        add = known.including_devices if self.on_device else known.including
        return add(Ranks(hosts.size, hosts.num_hosts), Measured(facts, tables))

    def facts(self) -> dict[str, str]:
        """What was measured where and when."""
        backend = next(iter(self.cases.values()))[0].backend
        return here() | {"arrays": backend.kind, "dtype": self.options.dtype.name}

    def times(self, console: Console) -> Iterator[tuple[str, Times]]:
        """Of each collective."""
        for collective, its_cases in self.cases.items():
            times = {case.num_bytes: self.times_of(case) for case in its_cases}
            console.print(f"\n{collective} on {self.comm.size} ranks")
            print_table(self.winners(collective, times), console)
            if not self.on_device and (names := left_out(collective, self.comm.size, times)):
                console.print(
                    f"Not measured where predicted to take over {HOPELESS} times the "
                    f"least: {', '.join(names)}"
                )
            yield collective, times

    def times_of(self, case: Case) -> dict[str, float]:
        """Seconds of every promising algorithm, out of place where there is such a form."""
        names = self.names(case)
        buffers = out_of_place(case) or in_place(case)
        assert buffers is not None, "every collective has one form or the other"
        made = [contender(self.comm, case, buffers, name) for name in names]
        share = (self._end - time.perf_counter()) / self._num_left
        self._num_left -= 1
        found = outcomes(case, buffers, made, Effort(WARMUP, SAMPLES, share), checks=0)
        return {name: outcome.seconds for name, outcome in zip(names, found, strict=True)}

    def names(self, case: Case) -> list[str]:
        """The algorithms that are measured."""
        if self.on_device:
            return ranking.for_devices(case.collective, self.comm.topology, case.num_bytes)
        return ranking.promising(case.collective, self.comm.topology, case.num_bytes)

    def winners(self, collective: str, times: Times) -> Table:
        """Size by size what is best, and how many times slower the built-in rule's choice is."""
        table = table_with(
            "best", "built-in", numbers=["size", "us", "built-in us", "times slower"]
        )
        hosts, on_device = self.comm.topology, self.on_device
        rankings = ranking.rankings(collective, hosts, times, on_device=on_device)
        for (num_bytes, found), (best, *_) in zip(times.items(), rankings, strict=True):
            rule = by_rule(collective, hosts, num_bytes, on_device=on_device)
            slower = found[rule] / found[best] if rule in found else None
            numbers = [us(found[best]), us(found.get(rule)), times_faster(slower)]
            table.add_row(best, rule, sizes.text(num_bytes) if num_bytes else "-", *numbers)
        return table


def left_out(collective: str, size: int, times: Times) -> list[str]:
    """The algorithms that were hopeless at some size."""
    names = every_algorithm(collective, size)
    return [name for name in names if not all(name in each for each in times.values())]
