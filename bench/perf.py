"""The microbenchmark: contenders of a collective at each size, beside other libraries.

The time of a rank is the median of its samples, and by default that of the slowest rank is
reported.  Below 64 KiB a sample is a block of many calls.  From 64 KiB on a sample is one call,
after a barrier, on an input that was just overwritten.  The first contender is measured twice in
each case: how much it differs from itself is the noise.  Afterwards one run of every contender is
checked: the inputs are small integers, so that results are exact, and the exit status is 1 if any
element is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import mpi4py.run
from mpi4py import MPI
from rich.console import Console

import collectives
from bench import report, sizes, summary
from bench.case import BOUND, CALL, MEMCPY, PLAN, Buffers, Case, in_place, out_of_place
from bench.cases import every_case
from bench.contenders import algorithm_of, contender
from bench.copy_rate import copy_rate
from bench.formats import FORMATS, Format
from bench.guard import StuckError
from bench.live import Show, live
from bench.names import ALL
from bench.report import REFERENCES, Measurement, Row
from bench.rivals import Rivals, links_of, num_devices
from bench.samples import AVERAGES
from bench.side_by_side import outcomes
from bench.timing import BLOCK_CALLS, Effort
from collectives import CollectiveError, Communicator, ScheduleError, algorithms
from collectives.arrays.backends import Backend, backend_of_kind
from collectives.export import unwritable
from collectives.schedule.contracts import SPECS
from collectives.selection import select
from parallel import raise_on_all_ranks
from parallel.cli import console_of, device_namespace, print_table


def run(options: argparse.Namespace) -> int:
    """Measure as told.  0, 1 if any element is wrong, 2 if it cannot be measured."""
    comm = communicator(options.timeout)
    with ending_the_job():
        status = measured(comm, options, console_of(comm.rank, is_terminal=options.live))
    comm.barrier()  # a launcher may end the job at the first failing rank; let rank 0 say why
    return status


def communicator(timeout: float | None) -> Communicator:
    """All ranks of the job, with a time limit of each of their calls."""
    if timeout is None:
        return collectives.world()
    return collectives.wrap(MPI.COMM_WORLD, timeout=timeout)


@contextmanager
def ending_the_job() -> Iterator[None]:
    """Let an error of a call end the job, because the other ranks would wait for ever.

    Not at once: MPICH's mpirun can lose what was printed just before an MPI_Abort.
    """
    try:
        yield
    except CollectiveError as error:
        print(f"bench: {error}", file=sys.stderr, flush=True)
        mpi4py.run.set_abort_status(1)  # takes effect when Python exits
        sys.exit(1)
    except StuckError as error:
        if MPI.COMM_WORLD.rank == 0:
            print(f"bench: {error}", file=sys.stderr, flush=True)
        time.sleep(1)  # or the launcher could lose what was printed
        os._exit(1)  # because Python would wait for the device


def measured(comm: Communicator, options: argparse.Namespace, console: Console) -> int:
    """The whole benchmark, with everything that rank 0 prints and writes; the exit status."""
    try:
        benchmark = Benchmark(comm, options)
    except (TypeError, ValueError, ScheduleError) as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    rows = benchmark.report(console)
    found = benchmark.facts() | benchmark.on_devices() | summary.as_dict(rows)
    if options.json is not None and comm.rank == 0:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    benchmark.rivals.free()
    return 1 if any(row.wrong for row in rows) else 0


class Benchmark:
    """All cases of a command line.

    TypeError or ValueError if the options do not go together, and ScheduleError if an algorithm
    that was registered is wrong on so many ranks.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        refuse(options)
        self.backend = backend(comm, options.device)
        every = every_case(comm, options, self.backend)
        self.names = {case: chosen for case in every if (chosen := names(case, options))}
        self.cases = list(self.names)
        for case, chosen in self.names.items():
            check_schedules(case, chosen)
        check_output(options.json)
        self.rate = None if self.backend.is_host else copy_rate(self.backend)
        self.rivals = Rivals(options, self.backend)

    def facts(self) -> dict[str, Any]:
        """What was measured, for JSON and the first line."""
        options, effort = self.options, self.effort
        return {
            "collective": options.collective,
            "ranks": self.comm.size,
            "hosts": str(self.comm.topology),
            "mpi": mpi_version(),
            "arrays": self.cases[0].backend.kind,
            "samples": effort.samples,
            "warmup": effort.warmup,
            "calls": [effort.calls, effort.large_calls],
            "average": AVERAGES[options.average],
        }

    def on_devices(self) -> dict[str, Any]:
        """What else is known of a measurement on devices, for JSON.  All ranks call this."""
        if self.rate is None:
            return {}
        return {
            "devices": num_devices(self.backend),
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "links": links_of(self.comm),
            "copy_rate": self.rate,
            "left_out": self.rivals.left_out,
        }

    @property
    def effort(self) -> Effort:
        """How many samples of how many calls."""
        options, given = self.options, self.options.calls
        calls = (BLOCK_CALLS, 1) if given is None else (given, given)
        return Effort(options.warmup, options.samples, options.seconds, *calls)

    def report(self, console: Console) -> list[Row]:
        """Measure, and print as it goes; the rows."""
        form, rows = format_of(self.options), list[Row]()
        say(console, form.head(self.facts()))
        for text in [*self.rivals.news(), *self.rivals.lacking(self.cases)]:
            say(console, form.comment(text))
        with live(console, 2 * len(self.cases)) as show:
            for collective, group in groupby(self.cases, attrgetter("collective")):
                if self.options.collective == ALL:
                    say(console, form.comment(collective))
                for case in group:
                    rows += (found := self.rows(case, self.names[case], show))
                    say(console, form.lines(found))
                    for text in self.rivals.news():
                        say(console, form.comment(text))
        say(console, form.tail(rows))
        if self.options.format == "nccl" and len({row.name for row in rows} - {*REFERENCES}) > 1:
            say(console, ["", "Best algorithm and call of ours against the fastest of the others:"])
            print_table(summary.summary_table(summary.summaries(rows)), console)
        return rows

    def rows(self, case: Case, ours: Sequence[str], show: Show) -> list[Row]:
        """Every contender at one size."""
        apart, inside = (
            self.form(case, ours, buffers_of, show) for buffers_of in (out_of_place, in_place)
        )
        return [
            Row(case, name, algorithm_of(self.comm, case, name), apart.get(name), inside.get(name))
            for name in dict.fromkeys([*apart, *inside])
        ]

    def form(
        self,
        case: Case,
        ours: Sequence[str],
        buffers_of: Callable[[Case], Buffers | None],
        show: Show,
    ) -> dict[str, Measurement]:
        """Every contender that does not fail, timed on the same buffers and then checked."""
        show(f"{case.collective}, {sizes.text(case.num_bytes)}, {buffers_of.__name__}")
        if (buffers := buffers_of(case)) is None:
            return {}
        made = {name: contender(self.comm, case, buffers, name) for name in ours}
        made |= self.rivals.contenders(case, buffers)
        again = contender(self.comm, case, buffers, ours[0])
        everybody = [*made.values(), again]
        *kept, second = outcomes(case, buffers, everybody, self.effort, checks=self.options.checks)
        first = kept[0].seconds
        noise = abs(second.seconds - first) / min(second.seconds, first)
        return {
            name: report.measurement(
                case,
                name,
                algorithm_of(self.comm, case, name),
                outcome.samples,
                outcome.wrong,
                average=self.options.average,
                noise=noise,
                rate=self.rate,
            )
            for name, outcome in zip(made, kept, strict=True)
            if outcome.samples is not None
        }


def say(console: Console, lines: Sequence[str]) -> None:
    """Print lines as they are."""
    for text in lines:
        console.print(text, markup=False)


def format_of(options: argparse.Namespace) -> Format:
    """How lines are printed."""
    return FORMATS[f"{options.format} --full" if options.full else options.format]


def refuse(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if options.full and options.format != "osu":
        raise ValueError("--full adds columns to --format osu, and has no meaning without it")
    for dtype in options.dtypes:
        if options.native and not dtype.isnative:
            raise ValueError(f"--native: MPI has no numbers of another byte order ({dtype.str})")


def names(case: Case, options: argparse.Namespace) -> list[str]:
    """Ours of a case, with the limits; the library's own choice, if the user names none."""
    wanted = list(dict.fromkeys(options.names or []))
    if ALL in wanted:
        wanted = every_algorithm(case.collective, case.size)
    elif options.collective == ALL:
        known = set(algorithms.names(case.collective))
        wanted = [name for name in wanted if name.partition("(")[0] in known]
    others = {
        PLAN: options.plan or not (options.names or options.call),
        CALL: options.call,
        MEMCPY: options.limits and case.collective != "barrier",
        BOUND: options.limits,
    }
    return wanted + [name for name, is_wanted in others.items() if is_wanted]


def check_schedules(case: Case, chosen: Sequence[str]) -> None:
    """Raise ValueError or ScheduleError if an algorithm among them cannot run this case."""
    for name in set(chosen) - {PLAN, CALL, MEMCPY, BOUND}:
        select.check(case.collective, name, case.size)
        check_schedule(case, name)


def backend(comm: Communicator, device: str) -> Backend:
    """What serves arrays on this device.  ValueError on all ranks if one has none."""
    phase, doing = collectives.phase, "preparing the device"
    with raise_on_all_ranks(comm, phase, "prepare", doing, ValueError):
        device_namespace(device, comm)
        return backend_of_kind({"cpu": "numpy", "cuda": "cupy"}[device])


def check_schedule(case: Case, name: str) -> None:
    """Raise ValueError or ScheduleError if an algorithm cannot run this case after all."""
    algorithm, options, *_ = select.choose(
        case.collective, name, case.size, case.num_bytes, topology=case.topology
    )
    root = case.root if SPECS[case.collective].is_rooted else None
    algorithm.schedule(case.rank, case.size, root, **options)


def check_output(path: Path | None) -> None:
    """Raise ValueError, on every rank, if rank 0 cannot write this file."""
    if path is not None and (reason := MPI.COMM_WORLD.bcast(unwritable(path))):
        raise ValueError(reason)


def can_write(path: Path | None, comm: Communicator, console: Console) -> bool:
    """Whether rank 0 can write this file; if it cannot, it prints why."""
    try:
        check_output(path)
    except ValueError as error:
        console.print(f"bench: {error}", markup=False)
        comm.barrier()  # let rank 0 say it before the launcher ends the job
        return False
    return True


def every_algorithm(collective: str, size: int) -> list[str]:
    """The names of those that can run on so many ranks."""
    names = algorithms.names(collective)
    return [name for name in names if algorithms.info(collective, name).serves(size)]


def mpi_version() -> str:
    """The MPI library's name and version."""
    name, version = MPI.get_vendor()
    return " ".join([name, ".".join(map(str, version))])
