"""The training program: what all ranks do, and what rank 0 prints and writes of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from rich.console import Console

from collectives import Communicator
from collectives.console import Refused, refusing, write_json
from parallel import checkpoint, text
from parallel.accounts import TrafficMismatch, TrafficTable
from parallel.commands.models import SpecOf, dense_spec
from parallel.commands.rank_report import RankReport, differences
from parallel.commands.ranks import on_ranks, running, training_world
from parallel.commands.tables import print_hosts, print_pipeline, print_rank_reports, print_traffic
from parallel.commands.training import Training
from parallel.pipeline import simulate
from parallel.strategies import survive


def train(options: argparse.Namespace, spec_of: SpecOf = dense_spec) -> int:
    """Train as a command line says, on all ranks; print the results and return the exit status.

    Parameters
    ----------
    options : Namespace
        The options of `add_training_options`, and others.
    spec_of : function
        Called on each rank with the options and the number of ranks; returns the model that they
        describe, or raises ValueError if they do not go together.
    """
    run = partial(train_on_rank, options=options, spec_of=spec_of)
    return on_ranks(options, run, partial(training_world, options))


def train_on_rank(comm: Communicator, options: argparse.Namespace, spec_of: SpecOf) -> int:
    """Train on one rank; return the exit status.  Raise Refused before the first step."""
    make = partial(Training, options=options, spec_of=spec_of, job=comm)
    with refusing():
        training = survive(comm, make, is_elastic=options.strategy == "elastic")
    with running(options):
        try:
            table = training.run()
            training.strategy.close()
        except checkpoint.LoadFailed as error:  # on all ranks: none waits
            raise Refused(str(error)) from error
    return report(training, table) if training.comm.rank == 0 else 0


def report(training: Training, table: TrafficTable | None) -> int:
    """Print the results, and write them to the file of --json; return the exit status."""
    console, losses, outcome = training.console, training.losses, result(training, table)
    console.print(
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per byte,"
        f" unigram entropy {outcome['unigram_entropy']:.4f}; {training.seconds:.2f} s,"
        f" {outcome['tokens_per_second']:.0f} tokens/s"
    )
    console.print("\n".join([*training.strategy.summary_lines(), ""]))
    status = report_bytes(training, table)
    write_json(outcome, training.options.json)
    return status


def result(training: Training, table: TrafficTable | None) -> dict[str, Any]:
    """Return the options, losses, speed, memory and traffic, for JSON."""
    o, first, seconds = training.options, training.checkpoints.first, training.seconds
    steps = [b - a for a, b in pairwise(training.times)]
    return vars(o) | {
        "ranks": training.monitor.comm.size,
        "losses": training.losses,
        "first_step": first,
        "parameters": training.model.num_parameters,
        "unigram_entropy": text.unigram_entropy(training.text),
        "seconds": seconds,
        "seconds_per_step": median(steps or [seconds]),
        "tokens_per_second": o.batch * o.context * (o.steps - first) / seconds,
        "ranks_kept": [report.memory for report in training.reports],
        "rank_times": [times._asdict() for times in training.rank_times],
        "ranks_moved": [report.moved for report in training.reports],
        "traffic": None if table is None else table.as_dict(),
    }


def report_bytes(training: Training, table: TrafficTable | None) -> int:
    """Print memory and traffic, and what differs; return the exit status."""
    console, options = training.console, training.options
    if table is None:
        console.print(
            f"{training.num_dead} of {training.monitor.comm.size} ranks died; the others ended with"
            " the same parameters, bitwise.  No traffic: the records of dead ranks are lost."
            f"{' No timeline, for the same reason.' if options.trace else ''}"
        )
        return 0
    print_rank_reports([report.memory | report.moved for report in training.reports], console)
    print_traffic(table, console)
    mesh = training.strategy.mesh
    hosts = mesh.hosts(options.ranks_per_host)
    if hosts.num_hosts > 1:
        print_hosts(table, mesh.axes, hosts, console)
    if training.rank_times:
        bubble = simulate(training.strategy.stages.schedule).fractions[0]
        print_pipeline(training.rank_times, float(bubble), console)
    return print_verdict(table, training.reports, console)


def print_verdict(table: TrafficTable, reports: Sequence[RankReport], console: Console) -> int:
    """Print whether traffic and memory are as predicted, and parameters equal on all ranks.

    Returns the exit status: 1 if something differs in `table`, or in the `reports` of all ranks.
    Only rank 0 calls this; `console` is where it prints.
    """
    if not print_check(table, console):
        return 1
    wrong = "; ".join(differences(reports))
    good = "memory: formula = counted, to the byte; parameters: equal, to the bit"
    console.print(f"these differ: {wrong}" if wrong else good)
    return 1 if wrong else 0


def print_check(table: TrafficTable, console: Console) -> bool:
    """Print whether the traffic in `table` is as predicted; return True if it is.

    Only rank 0 calls this; `console` is where it prints.
    """
    try:
        console.print(table.check())
    except TrafficMismatch as mismatch:
        console.print(f"TrafficMismatch: {mismatch}")
        return False
    return True
