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
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from bench.commands.jobs import Jobs, starting_jobs
from bench.commands.options import add_jobs, add_output, as_words, option
from bench.overlap.results import Overlap, overlaps
from bench.provenance import provenance
from bench.speed import first_call, goals, tables
from bench.speed.goals import ALONE, AT_ONCE, BESIDE, IN_TURN, OVERLAP, RANKS, WITH_GLOO
from bench.speed.timed_case import Timed
from collectives.console import Command, console_for, positive_number, write_json

NO_TORCH = "torch is not installed"
NOT_CHOSEN = "not chosen by --job"
START = "start"


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    names = [*RANKS, START]
    about = f"only this one of {', '.join(names)}; may be repeated"
    more = {"dest": "jobs", "action": "append", "choices": names, "metavar": "NAME"}
    option(parse, "--job", about, **more)
    about = "X times the usual seconds for each case; 0.1 takes about two minutes"
    option(parse, "--effort", about, type=positive_number, default=1.0, metavar="X")
    add_jobs(parse, 600.0)
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Measure everything; return 0, or 1 if anything is wrong or could not be measured."""
    began = time.perf_counter()
    with starting_jobs(console_for(0, options), options) as jobs:
        reasons = run_jobs(jobs, options)
        start = {} if is_left_out(START, options) else start_times(jobs, is_quick=options.quick)
    cores, times = os.cpu_count() or 1, times_of(jobs.results)
    wanted = goals.goals(is_quick=options.quick)
    findings = [goals.finding(goal, times, reasons, cores) for goal in wanted]
    jobs.title(f"Speed, measured in {time.perf_counter() - began:.0f} s")
    tables.show(findings, times, start, jobs)
    limit = tables.limit_of(times)
    result = {
        "mpi": jobs.mpi,
        "provenance": provenance(),
        "goals": [goals.as_dict(finding) for finding in findings],
        "limit": None if limit is None else limit.as_dict(),
        "start": start,
        "jobs": jobs.results,
        "statuses": jobs.statuses,
    }
    write_json(result, options.json)
    return int(any(jobs.statuses.values()))


def run_jobs(jobs: Jobs, options: argparse.Namespace) -> dict[str, str]:
    """Run the jobs; return why the times of a job are missing or worth nothing, if they are."""
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
    """Return whether the user has chosen others."""
    return options.jobs is not None and job not in options.jobs


def command(job: str, options: argparse.Namespace) -> list[str]:
    """Return what the ranks of a job run."""
    if job != OVERLAP:
        quick = ["--quick"] * options.quick
        return ["-m", "bench.speed.ranks", job, "--effort", f"{options.effort:g}", *quick]
    (size,) = goals.HUGE if not options.quick else [goals.QUICK_MOST]
    samples = max(3, round((1 if options.quick else 12) * options.effort))
    beside = as_words("--beside", ["sleep", "loop"])
    return ["-m", "bench", "overlap", "--size", str(size), "-n", str(samples), *beside]


def failure(status: int, result: Mapping[str, Any]) -> str:
    """Return what is wrong with a job that failed."""
    wrong = sum(sum(case["wrong"].values()) for case in result.get("cases", []))
    wrong += sum(way["wrong"] for way in result.get("ways", []))
    return f"{wrong} elements were wrong" if wrong else f"exit status {status}"


def start_times(jobs: Jobs, *, is_quick: bool) -> dict[str, dict[str, float]]:
    """Return median seconds of imports in fresh processes, and of first calls in fresh jobs."""
    num_imports, num_jobs = (1, 1) if is_quick else (first_call.IMPORTS, first_call.JOBS)
    medians = {"1 process": first_call.imports(num_imports)}
    for ranks in first_call.RANKS:
        names = [f"{START} {ranks} {number}" for number in range(num_jobs)]
        times = [jobs.run(name, ranks, ["-m", "bench.speed.first_call"])[1] for name in names]
        if all(times):
            medians[f"{ranks} rank" + "s" * (ranks > 1)] = first_call.medians(times)
    return medians


def times_of(results: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str, int], Timed]:
    """Return every case of every job."""
    timed_cases = {
        (job, case["collective"], case["size"]): Timed(**case)
        for job, result in results.items()
        for case in result.get("cases", [])
    }
    overlapped = results.get(OVERLAP) or {}
    for way in overlaps(overlapped):
        if way.progress == "thread" and way.slices == 1:
            timed = of_way(way, overlapped["size"])
            timed_cases[OVERLAP, way.beside, timed.size] = timed
    return timed_cases


def of_way(way: Overlap, size: int) -> Timed:
    """Return an overlap as a case, whose contenders are its parts."""
    seconds = {ALONE: way.all_reduce, BESIDE: way.other}
    seconds |= {IN_TURN: way.in_turn, AT_ONCE: way.at_once}
    return Timed(way.beside, size, "", seconds, {AT_ONCE: way.wrong}, cores=1.0)


COMMAND = Command("bench.speed.command", __doc__, add_options, run)
