"""Measure the contenders of a collective at each size, beside other libraries.

The time of a rank is the median of its samples, and by default that of the slowest rank is
reported.  Below 64 KiB a sample is a block of many calls.  From 64 KiB on a sample is one call,
after a barrier, on an input that was just overwritten.  The first contender is measured twice in
each case: how much it differs from itself is the noise.  Afterwards one run of every contender is
checked: the inputs are small integers, so that results are exact, and the exit status is 1 if any
element is wrong.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from operator import attrgetter
from typing import Any

from rich.console import Console

from bench.commands import world
from bench.contenders.by_name import algorithm_of, contender
from bench.contenders.contender import BOUND, CALL, MEMCPY, PLAN
from bench.contenders.other_libraries import Rivals, links_of, num_devices
from bench.contenders.side_by_side import outcomes
from bench.results import summary
from bench.results.formats import FORMATS
from bench.results.measurement import REFERENCES, Measurement, Row, measurement
from bench.timing.copy_rate import copy_rate
from bench.timing.interleaved import BLOCK_CALLS, Effort
from bench.timing.quartiles import AVERAGES
from bench.workloads import sizes
from bench.workloads.algorithms import check_schedule, every_algorithm
from bench.workloads.collective import Buffers, Case, in_place, out_of_place
from bench.workloads.datatypes import ALL
from bench.workloads.from_options import every_case
from collectives import Communicator, ScheduleError, algorithms
from collectives.console import Show, console_for, progress, refusing, write_json
from collectives.selection import select


def run(options: argparse.Namespace) -> int:
    """Measure; return 0, or 1 if any element is wrong.  Raises Refused."""
    return world.on_ranks(lambda comm: measured(comm, options), options.timeout)


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Run the benchmark, with everything that rank 0 prints and writes; return the status."""
    console = console_for(comm.rank, options, is_terminal=options.live)
    with refusing(TypeError, ScheduleError):
        benchmark = Benchmark(comm, options)
    rows = benchmark.report(console)
    result = benchmark.facts() | benchmark.on_devices() | summary.as_dict(rows)
    if comm.rank == 0:
        write_json(result, options.json)
    benchmark.rivals.free()
    return int(any(row.wrong for row in rows))


class Benchmark:
    """All cases of a command line.

    TypeError or ValueError if the options do not go together, and ScheduleError if an algorithm
    that was registered is wrong on so many ranks.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        refuse(options)
        self.backend = world.backend(comm, options.device)
        every = every_case(comm, options, self.backend)
        self.names = {case: chosen for case in every if (chosen := names(case, options))}
        self.cases = list(self.names)
        for case, chosen in self.names.items():
            check_schedules(case, chosen)
        world.check_output(options.json)
        self.rate = None if self.backend.is_host else copy_rate(self.backend)
        self.rivals = Rivals(options, self.backend)
        calls = (BLOCK_CALLS, 1) if options.calls is None else (options.calls, options.calls)
        self.effort = Effort(options.warmup, options.samples, options.seconds, *calls)

    def facts(self) -> dict[str, Any]:
        """Return what was measured, for JSON and the first line."""
        effort = self.effort
        return {
            "collective": self.options.collective,
            "ranks": self.comm.size,
            "hosts": str(self.comm.topology),
            "mpi": world.mpi_version(),
            "arrays": self.cases[0].backend.kind,
            "samples": effort.samples,
            "warmup": effort.warmup,
            "calls": [effort.calls, effort.large_calls],
            "average": AVERAGES[self.options.average],
        }

    def on_devices(self) -> dict[str, Any]:
        """Return what else is known of a measurement on devices.  All ranks call this."""
        if self.rate is None:
            return {}
        return {
            "devices": num_devices(self.backend),
            "mps": "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
            "links": links_of(self.comm),
            "copy_rate": self.rate,
            "left_out": self.rivals.left_out,
        }

    def report(self, console: Console) -> list[Row]:
        """Measure, and print as it goes; return the rows."""
        options, rows = self.options, list[Row]()
        form = FORMATS[f"{options.format} --full" if options.full else options.format]

        def say(lines: Sequence[str]) -> None:
            for text in lines:
                console.print(text, soft_wrap=True)

        say(form.head(self.facts()))
        for text in [*self.rivals.news(), *self.rivals.lacking(self.cases)]:
            say(form.comment(text))
        with progress(console, 2 * len(self.cases), refresh=False) as show:
            steps = count()
            for collective, group in groupby(self.cases, attrgetter("collective")):
                if options.collective == ALL:
                    say(form.comment(collective))
                for case in group:
                    rows += (measured_rows := self.rows(case, show, steps))
                    say(form.lines(measured_rows))
                    for text in self.rivals.news():
                        say(form.comment(text))
        say(form.tail(rows))
        if options.format == "nccl" and len({row.name for row in rows} - {*REFERENCES}) > 1:
            say(["", "Best algorithm and call of ours against the fastest of the others:"])
            summary.summary_table(summary.summaries(rows)).print(console)
        return rows

    def rows(self, case: Case, show: Show, steps: Iterator[int]) -> list[Row]:
        """Return every contender at one size."""
        forms = []
        for buffers_of in (out_of_place, in_place):
            where = buffers_of.__name__.replace("_", " ")
            show(next(steps), f"{case.collective}, {sizes.text(case.num_bytes)}, {where}")
            forms.append(self.form(case, buffers_of))
        apart, inside = forms
        return [
            Row(case, name, algorithm_of(self.comm, case, name), apart.get(name), inside.get(name))
            for name in dict.fromkeys([*apart, *inside])
        ]

    def form(
        self, case: Case, buffers_of: Callable[[Case], Buffers | None]
    ) -> dict[str, Measurement]:
        """Return every contender that does not fail, timed on the same buffers and checked."""
        if (buffers := buffers_of(case)) is None:
            return {}
        ours = self.names[case]
        made = {name: contender(self.comm, case, buffers, name) for name in ours}
        made |= self.rivals.contenders(case, buffers)
        again = contender(self.comm, case, buffers, ours[0])
        everybody = [*made.values(), again]
        *kept, second = outcomes(case, buffers, everybody, self.effort, checks=self.options.checks)
        first = kept[0].seconds
        noise = abs(second.seconds - first) / min(second.seconds, first)
        return {
            name: measurement(
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


def refuse(options: argparse.Namespace) -> None:
    """Raise ValueError for options that do not go together."""
    if options.full and options.format != "osu":
        raise ValueError("--full adds columns to --format osu, and has no meaning without it")
    for dtype in options.dtypes:
        if options.native and not dtype.isnative:
            raise ValueError(f"--native: MPI has no numbers of another byte order ({dtype.str})")


def names(case: Case, options: argparse.Namespace) -> list[str]:
    """Return ours of a case, with the limits; the library's choice, if the user names none."""
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
