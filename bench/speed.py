"""Is it as fast as is demanded?  Every goal, beside the MPI library that it runs under.

Three jobs on two cores, in at most six minutes: 2 ranks, 4 ranks, and 2 ranks beside PyTorch's
Gloo, which is left out where torch is not installed.  All contenders of a case take turns on the
same buffers, in float32, out of place (a broadcast in place), with the input overwritten before;
medians, of which the slowest rank's counts.  "plan" is comm.plan.X(...).run, "call" is
comm.X(x, out=y), both by the algorithm that the library selects.  A ratio is the other's time over
ours: above 1 ours is faster.

A goal that is missed is told and is no failure.  The exit status is 1 if anything is wrong or could
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

from rich.console import Console
from rich.table import Table

from bench import goals
from bench.case import MEMCPY
from bench.goals import OURS, RANKS, WITH_GLOO, Finding, Overhead, Timed, Times
from bench.jobs import Jobs, has_mpi
from bench.limit import Limit
from bench.report import times_faster, us
from bench.sizes import text
from collectives.mpirun import find_mpirun
from parallel.show import console_of, print_table, table_with

NO_TORCH = "torch is not installed"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    add("--timeout", type=float, default=300.0, metavar="S",
        help="seconds for each of its jobs; default: %(default)s")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")
    add("--quick", action="store_true", help="a few sizes and samples, to try the command itself")


def run(options: argparse.Namespace) -> int:
    """Everything.  0, 1 if anything is wrong or could not be measured, 2 if there is no MPI."""
    console, began = console_of(0), time.perf_counter()
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        reasons = run_jobs(jobs, is_quick=options.quick)
    is_open_mpi, times = find_mpirun().vendor == "openmpi", times_of(jobs.results)
    demands = goals.demands(is_open_mpi=is_open_mpi, is_quick=options.quick)
    found = [goals.finding(demand, times, reasons) for demand in demands]
    jobs.title(f"Speed, measured in {time.perf_counter() - began:.0f} s")
    show(found, times, jobs.results, console)
    if options.json is not None:
        options.json.write_text(json.dumps(as_dict(found, times, jobs), indent=1) + "\n")
    return int(any(jobs.statuses.values()))


# The jobs, and what they found


def run_jobs(jobs: Jobs, *, is_quick: bool) -> dict[str, str]:
    """Run them; why a job's times are missing or worth nothing, for those of which they are."""
    reasons: dict[str, str] = {}
    for name, ranks in RANKS.items():
        if name == WITH_GLOO and find_spec("torch") is None:
            reasons[name] = NO_TORCH
            continue
        command = ["-m", "bench.sweep", name, *["--quick"] * is_quick]
        status, result = jobs.run(name, ranks, command)
        if status:
            reasons[name] = failure(status, result)
    return reasons


def failure(status: int, result: Mapping[str, Any]) -> str:
    """What is wrong with a job that failed."""
    wrong = sum(sum(case["wrong"].values()) for case in result.get("cases", []))
    return f"{wrong} elements were wrong" if wrong else f"exit status {status}"


def times_of(results: Mapping[str, Mapping[str, Any]]) -> dict[tuple[str, str, int], Timed]:
    """Every case of every job."""
    return {
        (job, case["collective"], case["size"]): Timed(**case)
        for job, result in results.items()
        for case in result.get("cases", [])
    }


def limit_of(times: Times) -> Limit | None:
    """Of the case in which a copy was timed, if it was."""
    for (job, *_), timed in times.items():
        if MEMCPY in timed.seconds:
            return Limit(RANKS[job], timed)
    return None


# What is shown of it


def show(
    found: Sequence[Finding], times: Times, results: Mapping[str, Any], console: Console
) -> None:
    """The goals, and the medians that they are judged by."""
    mpi = next((result["mpi"] for result in results.values() if result), "no MPI")
    console.print(f"{mpi}, {os.cpu_count()} cores, float32, out of place; ratios: its time / ours")
    print_table(goal_table(found), console)
    console.print(
        "\nMedians, of the slowest rank; sizes are those of the whole vector; cores: the fraction "
        "of them that the ranks used (MPI's ranks wait busily, Gloo's sleep)"
    )
    print_table(median_table(times), console)
    if (limit := limit_of(times)) is not None:
        console.print("\n" + "\n".join(limit.lines()))


def goal_table(found: Sequence[Finding]) -> Table:
    """One line for each goal; those missed in red."""
    table = table_with("what", "sizes", "plan ratio", "call ratio", "target", "met: plan / call",
        numbers=())  # fmt: skip
    for each in found:
        is_good = each.reason is None and all(each.met.values())
        table.add_row(*cells(each), style=None if is_good else "bold red")
    return table


def cells(each: Finding) -> list[str]:
    """A line of the table as text."""
    demand, sizes = each.demand, list(map(text, each.demand.sizes))
    values = [_value(each, name) for name in OURS]
    span = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return [demand.what, span, *values, demand.target, met_in_words(each)]


def _value(each: Finding, name: str) -> str:
    found = each.found.get(name)
    if found is None:
        return "-"
    return f"+{us(found)} us" if isinstance(each.demand, Overhead) else f"{found:.3f}"


def met_in_words(each: Finding) -> str:
    """By the plan, and by the call; "-" where it is not judged."""
    if each.reason is not None:
        return f"not measured: {each.reason}"
    words = {True: "yes", False: "NO", None: "-"}
    return " / ".join(words[each.met.get(name)] for name in OURS)


def median_table(times: Times) -> Table:
    """Every case, beside each that it was timed with."""
    table = table_with("collective", "algorithm", "beside", numbers=["ranks", "size", "its us",
        "plan us", "ratio", "call us", "ratio", "cores", "wrong"])  # fmt: skip
    for (job, collective, size), timed in times.items():
        for other in [name for name in timed.seconds if name not in OURS]:
            ours = [each for name in OURS for each in _beside(timed, other, name)]
            numbers = [str(RANKS[job]), text(size), us(timed.seconds[other]), *ours]
            checks = [f"{timed.cores:.2f}", str(sum(timed.wrong.values()))]
            table.add_row(collective, timed.algorithm, other, *numbers, *checks)
    return table


def _beside(timed: Timed, other: str, name: str) -> tuple[str, str]:
    """The time of one of ours, and the other's over it."""
    seconds = timed.seconds[name]
    return us(seconds), times_faster(timed.seconds[other] / seconds)


def as_dict(found: Sequence[Finding], times: Times, jobs: Jobs) -> dict[str, Any]:
    """Everything, for JSON; times in seconds."""
    limit = limit_of(times)
    return {
        "goals": [goal_dict(each) for each in found],
        "limit": None if limit is None else limit.as_dict(),
        "jobs": jobs.results,
        "statuses": jobs.statuses,
    }


def goal_dict(each: Finding) -> dict[str, Any]:
    """One goal: numbers, and the words of the table."""
    demand = each.demand
    words = {"what": demand.what, "sizes": list(demand.sizes), "target": demand.target}
    return words | {"found": each.found, "met": each.met, "reason": each.reason}
