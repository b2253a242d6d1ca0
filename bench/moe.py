"""Measure mixtures of experts: dispatch and combine, parts that overlap, bytes between hosts.

    python -m bench moe

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
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import moe_cases
from bench.docs.provenance import provenance
from bench.jobs import Jobs, has_mpi
from bench.moe_cases import RANKS, Found
from bench.options import seconds
from bench.speed_tables import mpi_of
from collectives.export import output_file
from parallel.cli import at_least, console_of, print_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add(
        "--ranks",
        type=int,
        action="append",
        choices=RANKS,
        metavar="N",
        help="on so many only, 2 or 4; may be repeated",
    )
    add(
        "-n",
        dest="samples",
        type=at_least(1),
        default=30,
        metavar="N",
        help="samples of each contender; default: %(default)s",
    )
    add(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds for each of its jobs; default: %(default)s",
    )
    add("--json", type=output_file, metavar="FILE", help="write everything to FILE")
    add("--quick", action="store_true", help="few tokens and samples, to try the command itself")


def run(options: argparse.Namespace) -> int:
    """Measure and print.  0, 1 if anything is wrong or not measured, 2 if there is no MPI."""
    console = console_of(0)
    if not has_mpi(console):
        return 2
    with TemporaryDirectory() as folder:
        jobs = Jobs(console, Path(folder), options.timeout)
        found = [on_ranks(jobs, ranks, options) for ranks in options.ranks or RANKS]
    jobs.title(f"Mixtures of experts, {mpi_of(jobs.results)}")
    goals = list(moe_cases.goals(found))
    for title, table in [*moe_cases.tables(found), ("Goals", moe_cases.goal_table(goals))]:
        console.print(f"\n{title}")
        print_table(table, console)
    if options.json is not None:
        result = {
            "provenance": provenance(["collectives", "parallel", "moe"]),
            "mpi": mpi_of(jobs.results),
            "goals": [{**goal._asdict(), "met": goal.is_met} for goal in goals],
            "jobs": jobs.results,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(jobs.statuses.values()))


def on_ranks(jobs: Jobs, ranks: int, options: argparse.Namespace) -> Found:
    """What the job on so many ranks finds."""
    words = ["-m", "bench.moe_ranks", "--samples", str(options.samples)]
    words += ["--quick"] * options.quick
    return Found.of(ranks, jobs.run(f"moe {ranks}", ranks, words)[1])
