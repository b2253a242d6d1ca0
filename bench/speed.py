"""Measure all goals for the library's speed, beside the MPI library that it runs under.

The command starts its own jobs, on two cores, for about ten minutes: the collectives on 2 ranks and
the all-reduce on 4 ("pair", "crowd"); other ways to make a small all-reduce ("ways"), including
those of the drop-in ("mpi4py"); PyTorch's Gloo ("gloo"), if torch is installed; an all-reduce
beside a sleep and beside a Python loop ("overlap"); and fresh processes ("start").

All contenders of a case take turns, in float32, out of place (a broadcast in place), with the input
overwritten before.  Times are medians of the slowest rank.  Below 64 KiB a sample is 200 calls
after a barrier.  "plan" is comm.plan.X(...).run, and "call" is comm.X(x, out=y), both by the
algorithm that the library selects.  "fresh" calls get another x every time and make a new array
for the result: comm.all_reduce(x), beside MPI's Allreduce(x, np.empty_like(x)).  A ratio is the
time of the other divided by ours: above 1 ours is faster.

A missed goal is reported, but is not a failure.  The exit status is 1 if a result is wrong or could
not be measured, 2 if there is no MPI.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import goals, speed_tables, starting
from bench.docs.provenance import provenance
from bench.goals import OVERLAP, RANKS, WITH_GLOO, Finding
from bench.jobs import Jobs, has_mpi
from bench.measures import ALONE, AT_ONCE, BESIDE, IN_TURN
from bench.options import seconds
from bench.timed import Overlap, Timed, Times, overlaps
from collectives.export import output_file
from parallel.cli import console_of

NO_TORCH = "torch is not installed"
NOT_CHOSEN = "not chosen by --job"
START = "start"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [*RANKS, START]
    add(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for each of its jobs; default: %(default)s",
    )
    add("--json", type=output_file, metavar="FILE", help="write everything to FILE")
    add(
        "--job",
        dest="jobs",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"only this one of {', '.join(names)}; may be repeated",
    )
    add(
        "--effort",
        type=positive,
        default=1.0,
        metavar="X",
        help="X times the usual seconds for each case; 0.1 takes about two minutes",
    )
    add("--quick", action="store_true", help="a few sizes and samples, to try the command itself")


def positive(word: str) -> float:
    """An argument's type: a number greater than 0."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number greater than 0")
    return value


def run(options: argparse.Namespace) -> int:
    """Everything.  0, 1 if anything is wrong or could not be measured, 2 if there is no MPI."""
    console, began = console_of(0), time.perf_counter()
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        reasons = run_jobs(jobs, options)
        start = {} if is_left_out(START, options) else start_times(jobs, is_quick=options.quick)
    cores, times = os.cpu_count() or 1, times_of(jobs.results)
    wanted = goals.goals(is_quick=options.quick)
    found = [goals.finding(goal, times, reasons, cores) for goal in wanted]
    jobs.title(f"Speed, measured in {time.perf_counter() - began:.0f} s")
    speed_tables.show(found, times, start, jobs.results, console)
    if options.json is not None:
        result = as_dict(found, times, start, jobs)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(jobs.statuses.values()))


# The jobs, and what they found


def run_jobs(jobs: Jobs, options: argparse.Namespace) -> dict[str, str]:
    """Run them; why a job's times are missing or worth nothing, for those of which they are."""
    reasons: dict[str, str] = {}
    for name, ranks in RANKS.items():
        if is_left_out(name, options):
            reasons[name] = NOT_CHOSEN
        elif name == WITH_GLOO and find_spec("torch") is None:
            reasons[name] = NO_TORCH
        else:
            status, result = jobs.run(name, ranks, command(name, options))
            if status:
                reasons[name] = failure(status, result)
    return reasons


def is_left_out(job: str, options: argparse.Namespace) -> bool:
    """Whether the user has chosen others."""
    return options.jobs is not None and job not in options.jobs


def command(job: str, options: argparse.Namespace) -> list[str]:
    """What its ranks run."""
    if job != OVERLAP:
        quick = ["--quick"] * options.quick
        return ["-m", "bench.sweep", job, "--effort", f"{options.effort:g}", *quick]
    size = goals.QUICK_MOST if options.quick else 64 << 20
    beside = [word for name in ("sleep", "loop") for word in ("--beside", name)]
    samples = max(3, round((1 if options.quick else 12) * options.effort))
    return ["-m", "bench", "overlap", "--size", str(size), "-n", str(samples), *beside]


def failure(status: int, result: Mapping[str, Any]) -> str:
    """What is wrong with a job that failed."""
    wrong = sum(sum(case["wrong"].values()) for case in result.get("cases", []))
    wrong += sum(way["wrong"] for way in result.get("ways", []))
    return f"{wrong} elements were wrong" if wrong else f"exit status {status}"


def start_times(jobs: Jobs, *, is_quick: bool) -> dict[str, dict[str, float]]:
    """Median seconds of imports in fresh processes, and of first calls in fresh jobs."""
    found = {"1 process": starting.imports(starting.QUICK if is_quick else starting.IMPORTS)}
    for ranks in starting.RANKS:
        names = [
            f"{START} {ranks} {number}"
            for number in range(starting.QUICK if is_quick else starting.JOBS)
        ]
        each = [jobs.run(name, ranks, ["-m", "bench.starting"])[1] for name in names]
        if all(each):
            found[f"{ranks} rank" + "s" * (ranks > 1)] = starting.medians(each)
    return found


def times_of(results: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str, int], Timed]:
    """Every case of every job."""
    found = {
        (job, case["collective"], case["size"]): Timed(**case)
        for job, result in results.items()
        for case in result.get("cases", [])
    }
    overlapped = results.get(OVERLAP) or {}
    for way in overlaps(overlapped):
        if way.progress == "thread" and way.slices == 1:
            timed = of_way(way, overlapped["size"])
            found[OVERLAP, way.beside, timed.size] = timed
    return found


def of_way(way: Overlap, size: int) -> Timed:
    """An overlap as a case, whose contenders are its parts."""
    seconds = {ALONE: way.all_reduce, BESIDE: way.other}
    seconds |= {IN_TURN: way.in_turn, AT_ONCE: way.at_once}
    return Timed(way.beside, size, "", seconds, {AT_ONCE: way.wrong}, cores=1.0)


def as_dict(
    found: Sequence[Finding], times: Times, start: Mapping[str, Any], jobs: Jobs
) -> dict[str, Any]:
    """Everything, for JSON; times in seconds."""
    limit = speed_tables.limit_of(times)
    return {
        "mpi": speed_tables.mpi_of(jobs.results),
        "provenance": provenance(["collectives"]),
        "goals": [speed_tables.goal_dict(each) for each in found],
        "limit": None if limit is None else limit.as_dict(),
        "start": start,
        "jobs": jobs.results,
        "statuses": jobs.statuses,
    }
