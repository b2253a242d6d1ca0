"""Measure mixtures of experts: dispatch and combine, parts that overlap, bytes between hosts.

    ring bench moe

The command starts its own jobs, on 2 and on 4 ranks.  A rank has 4,096 tokens of 1,024 float32, and
each step has another routing, by random logits.

1. Dispatch and combine, beside the same written with mpi4py's Alltoallv and NumPy's indexing.  In
   both, experts copy their rows in place of computing.
2. A forward pass with experts of two linear layers: rows in one part, and in several, of which one
   is computed while others are sent.
3. The bytes that are recorded between hosts of two ranks: each token sent to each expert, or once
   to each host.

All contenders of a case take turns; times are medians of the slowest rank.  A ratio above 1: ours
is faster, parts do not slow down, or once to each host is less.  A missed goal is reported, but is
not a failure.  The exit status is 1 if a result is wrong or could not be measured, 2 if there is no
MPI.
"""

from __future__ import annotations

import argparse

from bench.commands.jobs import Jobs, starting_jobs
from bench.commands.options import COUNT, add_jobs, add_output, option
from bench.experts import dispatch_results
from bench.experts.dispatch_results import RANKS, JobResult
from bench.provenance import provenance
from collectives.console import Command, console_for, write_json


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    about = "on so many only, 2 or 4; may be repeated"
    option(parse, "--ranks", about, type=int, action="append", choices=RANKS, metavar="N")
    about = "samples of each contender"
    option(parse, "-n --iters", about, dest="samples", default=30, **COUNT)
    add_jobs(parse, 600.0)
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0, or 1 if anything is wrong or not measured.  Raises Refused."""
    with starting_jobs(console_for(0, options), options) as jobs:
        job_results = [on_ranks(jobs, ranks, options) for ranks in options.ranks or RANKS]
    jobs.title(f"Mixtures of experts, {jobs.mpi}")
    goals = list(dispatch_results.goals(job_results))
    jobs.show(dispatch_results.tables(job_results) | {"Goals": dispatch_results.goal_table(goals)})
    result = {
        "provenance": provenance(),
        "mpi": jobs.mpi,
        "goals": [{**goal._asdict(), "met": goal.is_met} for goal in goals],
        "jobs": jobs.results,
    }
    write_json(result, options.json)
    return int(any(jobs.statuses.values()))


def on_ranks(jobs: Jobs, ranks: int, options: argparse.Namespace) -> JobResult:
    """Return what the job on so many ranks finds."""
    words = ["-m", "bench.experts.dispatch_ranks", "--samples", str(options.samples)]
    words += ["--quick"] * options.quick
    return JobResult.of(ranks, jobs.run(f"moe {ranks}", ranks, words)[1])


COMMAND = Command("bench.experts.dispatch", __doc__, add_options, run)
