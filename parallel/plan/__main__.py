"""List ways to train a large model: memory, traffic, bubble and time of a step.

    ring plan
    ring plan --layers 32 --hidden 4096 --heads 32 --hosts 8x8 --gpu-memory 80G

By default the model is GPT-3, on 1024 GPUs.  Rows are the fastest layouts that fit into memory,
then the best that use ZeRO-3 alone.  The numbers are those of the rank with the most; times are of
a model in which products run at --flops and only the bubble, tensor and data messages add to them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from collectives.console import (
    Command,
    Number,
    Table,
    add_output_options,
    at_least,
    console_for,
    number,
    refusing,
    write_json,
)
from parallel.options import add_shared
from parallel.plan.candidates import Candidate, Job, Machine, candidates_for
from parallel.plan.cost import Cost, cost_of

HOSTS, ON_EACH = 128, 8  # hosts, and GPUs on each, if the user names none
YEAR = 365.25 * 24 * 3600


def run(options: argparse.Namespace) -> int:
    """Print the tables that the options ask for; return the exit status."""
    with refusing():
        job, machine = wanted(options)
        layouts = every_candidate(job, machine)
    console = console_for(0, options)
    costs = [(cost_of(job, candidate, machine), candidate) for candidate in layouts]
    fitting = sorted(
        (pair for pair in costs if pair[0].memory <= machine.memory), key=lambda x: x[0].seconds
    )
    if not fitting:
        console.print("no layout fits into memory; the one that needs least:")
        fitting = [min(costs, key=lambda x: x[0].memory)]
    console.print(
        f"{job.num_parameters / 1e9:.1f} G parameters, {job.flops:.3g} operations a step,"
        f" {len(costs)} layouts, of which {len(fitting)} fit into {machine.memory / 1e9:g} GB"
    )
    table = layout_table()
    for cost, candidate in fitting[: options.rows]:
        add_layout(table, job, machine, cost, candidate)
    console.print(
        "p x d x t: ranks along pipe, data and tensor; rows: of a micro-batch; in GB: states and"
        " activations of a rank, and what it sends along each axis.  "
        + zero_alone(job, machine, table)
    )
    table.print(console)
    years = 8 * options.tokens * job.num_parameters / options.flops / YEAR
    console.print(
        f"{options.tokens:g} tokens with full recomputation: {years:.0f} years of one GPU,"
        f" {years / machine.num_ranks * 365.25:.0f} days of all"
    )
    console.print("What each axis divides, in GB:")
    divided = divided_by_axis(job)
    divided.print(console)
    console.print(WHY)
    write_json({"layouts": table.as_dicts(), "axes": divided.as_dicts()}, options.json)
    return 0


def wanted(options: argparse.Namespace) -> tuple[Job, Machine]:
    """Return the job and the machine of the command line.  Raises ValueError for what is none."""
    (num_hosts, on_each), (within, between) = hosts_of(options), options.links
    if options.hidden % options.heads:
        raise ValueError(f"{options.heads} heads do not divide {options.hidden}")
    job = Job(
        options.layers,
        options.hidden,
        options.heads,
        options.context,
        options.vocab_size,
        options.batch,
    )
    return job, Machine(
        num_hosts, on_each, options.gpu_memory, options.flops, 1e9 * within, 1e9 * between
    )


def hosts_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of hosts and of GPUs on each: as named, or such hosts as are usual."""
    ranks = options.ranks
    if options.hosts is None:
        on_each = min(ranks or ON_EACH, ON_EACH)
        if ranks is not None and ranks % on_each:
            raise ValueError(f"{ranks} ranks do not fill hosts of {ON_EACH}: name them by --hosts")
        return (ranks // on_each if ranks else HOSTS), on_each
    num_hosts, on_each = options.hosts
    if ranks not in (None, num_hosts * on_each):
        raise ValueError(f"{num_hosts * on_each} ranks are on the hosts, not {ranks}")
    return num_hosts, on_each


def every_candidate(job: Job, machine: Machine) -> list[Candidate]:
    """Return the layouts of a job on a machine.  Raises ValueError if there are none."""
    if layouts := list(candidates_for(job, machine)):
        return layouts
    raise ValueError(
        f"{machine.num_ranks} ranks cannot divide a batch of {job.batch}, {job.num_layers} layers"
        f" and {job.num_heads} heads: the product of the ranks along data, pipe and tensor must be"
        f" {machine.num_ranks}"
    )


def zero_alone(job: Job, machine: Machine, table: Table) -> str:
    """Add the fastest candidate of ZeRO-3 alone to a table; return a sentence about it."""
    batch = -(-job.batch // machine.num_ranks) * machine.num_ranks
    larger = replace(job, batch=batch)
    of_zero = [
        x for x in candidates_for(larger, machine) if x.pipe == x.tensor == 1 and x.zero == 3
    ]
    costs = [(cost_of(larger, candidate, machine), candidate) for candidate in of_zero]
    fitting = [pair for pair in costs if pair[0].memory <= machine.memory]
    if not fitting:
        return "ZeRO-3 alone does not fit."
    add_layout(table, larger, machine, *min(fitting, key=lambda x: x[0].seconds))
    return f"The last row is ZeRO-3 alone, with a batch of {batch} rows."


def layout_table() -> Table:
    """Return a table without rows: how layouts divide the model, what they take, keep and send."""
    return Table(
        *("#", "p x d x t", Number("ZeRO"), "schedule", "recompute", Number("rows")),
        *(Number("step s", ".2f"), Number("bubble", ".1%"), Number("TFLOP/s", ".0f")),
        *(Number(what, ".2f") for what in ("states", "activations", *SENT_AXES)),
    )


def add_layout(table: Table, job: Job, machine: Machine, cost: Cost, layout: Candidate) -> None:
    """Add a row to a table of layouts."""
    table.add(
        *(str(len(table.rows) + 1), f"{layout.pipe}x{layout.data}x{layout.tensor}", layout.zero),
        *(layout.schedule if layout.pipe > 1 else "", layout.recompute, layout.micro_batch),
        *(cost.seconds, cost.bubble, job.flops / cost.seconds / machine.num_ranks / 1e12),
        *(x / 1e9 for x in (cost.states, cost.activations)),
        *(cost.sent[axis] / 1e9 for axis in SENT_AXES),
    )


SENT_AXES = ("tensor", "data", "pipe")
KEPT = ("parameters", "gradients", "master", "optimizer")


def divided_by_axis(job: Job) -> Table:
    """Return a table of what eight ranks along each axis divide, in GB of the rank with the most.

    The last column is what a rank sends along ``data`` in a step.
    """
    machine = Machine(1, 8)
    rows = {
        "one rank": Candidate(1, 1, 1, 1, 1),
        "tensor=8": Candidate(1, 1, 8, 1, 1),
        "pipe=8": Candidate(8, 1, 1, 1, 1),
        "data=8, ZeRO-1": Candidate(1, 8, 1, 1, 1),
        "data=8, ZeRO-2": Candidate(1, 8, 1, 2, 1),
        "data=8, ZeRO-3": Candidate(1, 8, 1, 3, 1),
        "pipe=8, data=8, ZeRO-1": Candidate(8, 8, 1, 1, 1),
        "pipe=8, data=8, ZeRO-2": Candidate(8, 8, 1, 2, 1),
    }
    table = Table("ranks", *(Number(head, ".1f") for head in (*KEPT, "activations", "sent")))
    for title, candidate in rows.items():
        if candidate.pipe > min(job.num_layers, candidate.num_micro_batches(job)):
            continue
        cost = cost_of(job, candidate, machine)
        parts = *(cost.kept[name] for name in KEPT), cost.activations, cost.sent["data"]
        table.add(title, *(x / 1e9 for x in parts))
    return table


WHY = (
    "ZeRO-2 saves little under a pipeline: a rank has the gradients of its stage only, two bytes of"
    " sixteen, and would send them for every micro-batch instead of once."
)


def pair(separator: str, kind: type) -> Callable[[str], tuple[Any, Any]]:
    """Return an argument type: two numbers more than 0, such as 128x8."""

    def parse(word: str) -> tuple[Any, Any]:
        try:
            first, second = map(kind, word.split(separator))
        except ValueError:
            example = f"128{separator}8"
            raise argparse.ArgumentTypeError(f"{word!r} is not two numbers as {example}") from None
        if min(first, second) <= 0:
            raise argparse.ArgumentTypeError(f"{word}: both must be more than 0")
        return first, second

    return parse


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    add_shared(add, layers=96, hidden=12288, heads=96, context=2048, vocab_size=51200, batch=1536)
    add_shared(add, {"ranks": "number of GPUs; default: those of the hosts"}, ranks=None)
    add(
        "--hosts",
        type=pair("x", int),
        metavar="HxG",
        help=f"hosts, and GPUs on each; default: {HOSTS}x{ON_EACH}, or hosts of {ON_EACH} for"
        " --ranks",
    )
    add("--gpu-memory", type=number, default=80e9, metavar="BYTES", help="default: 80G")
    add_shared(add, flops=150e12)
    add(
        "--links",
        type=pair(":", float),
        default=(250.0, 25.0),
        metavar="W:B",
        help="GB/s of a rank within a host and between hosts; default: 250:25",
    )
    add("--tokens", type=number, default=300e9, metavar="N", help="of a run; default: 300G")
    add("--rows", type=at_least(1), default=10, help="layouts to list; default: %(default)s")
    add_output_options(parse)


COMMAND = Command("parallel.plan", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
