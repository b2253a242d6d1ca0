"""Say what a layer with experts will send for a routing, and how much of it leaves a host.

    python -m moe.plan --mesh data=2,expert=4 --hosts 2
    python -m moe.plan --mesh expert=8 --hosts 2 --moe stable --top-k 2 --padding needed
    python -m moe.plan --mesh expert=8 --hosts 2 --text --steps 20
    python -m moe.plan --mesh expert=8 --hosts 2 --routing routing.npz

The routing is drawn as if all experts were equally good for each token; or --text has one rank
train on a text, and it is that of the last step; or it is read from the file that parallel.train
writes with --save-routing.  Options with the same names have the same meaning and default there, so
that this is what such a run sends in a step.

Logical bytes are those of all rows, with what a rank has for itself; off-rank bytes are sent to
another rank, and off-host bytes to another host.  The tables are of one layer, by kind of message;
of the same layer in all ways to dispatch; and, with several hosts, of the whole model in three
layouts: ranks on all hosts divide the experts, or each host has a stage of a pipeline, or a copy of
the model, and its ranks divide the experts there.

Nothing is sent here; 64 ranks take minutes.  The exit status is 2 if the arguments do not go
together.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from moe.cli import (
    add_capacity_options,
    add_dispatch_options,
    add_number_of_experts,
    gate_options,
)
from moe.gates import GATES
from moe.log import RoutingLog
from moe.plan.amounts import Sent
from moe.plan.hosts import PARTS, Across, across_hosts
from moe.plan.job import Job
from moe.plan.layer import OfLayer, of_layer, of_ways
from moe.plan.routings import Found, from_log, on_text, uniform
from parallel import Adam, Recipe, cli, presets, text
from parallel.optim import DTYPES

ROWS, CONTEXT = 16, 64
HEADS = ("logical", "off rank", "off host", "busiest rank", "busiest, off host", "messages")


def main(arguments: list[str] | None = None) -> int:
    """Print what the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        tell(options, cli.console_of(0))
    except (OSError, ValueError) as error:
        parse.exit(2, f"{parse.prog}: {error}\n")
    return 0


def tell(options: argparse.Namespace, console: Console) -> None:
    """Print all tables."""
    check_mesh(options.mesh, options.hosts)
    found = routing_of(options)
    job = Job(
        model_of(options, found.context), found.rows, found.log, found.step,
        options.micro_batches, options.dtype,
    )  # fmt: skip
    layer = options.layer or job.layers[0].name
    per_host = math.prod(options.mesh.values()) // options.hosts
    sent = of_layer(job, layer, options.mesh, per_host)
    console.print("\n".join(about(options, job, layer, per_host)), markup=False)
    print_layer(sent, console)
    console.print("In each way to dispatch and to pad:")
    print_ways(of_ways(job, layer, options.mesh, per_host), console)
    if options.hosts > 1:
        console.print("Of the whole model, between hosts in a step:")
        print_across(across_hosts(job, options.hosts, per_host), console)


def check_mesh(axes: dict[str, int], num_hosts: int) -> None:
    """Raise ValueError unless ranks along ``expert`` can be on so many equal hosts."""
    if axes.get("expert", 1) < 2:
        raise ValueError("--mesh needs expert=N, at least 2: other ranks send no tokens to experts")
    if axes.get("pipe", 1) > 1:
        raise ValueError("a layer is on the ranks of one stage: --mesh takes no pipe")
    if (num_ranks := math.prod(axes.values())) % num_hosts:
        raise ValueError(f"{num_hosts} hosts do not have equally many of {num_ranks} ranks")


# What is planned


def model_of(options: argparse.Namespace, context: int) -> dict[str, Any]:
    """Return the options of `moe_gpt`."""
    return {
        "gate": options.moe, "gate_options": gate_options(options), "num_experts": options.experts,
        "num_layers": options.layers, "hidden": options.hidden, "num_heads": options.heads,
        "context": context, **presets.given_options(options, presets.MOE_OPTIONS),
    }  # fmt: skip


def routing_of(options: argparse.Namespace) -> Found:
    """Return the routing that the options ask for."""
    o, context = options, options.context or CONTEXT
    if o.routing is not None:
        return of_file(o)
    if o.step is not None:
        raise ValueError("--step needs --routing; the last of --steps is taken of a --text")
    model = model_of(o, context)
    if o.text is None:
        return uniform(model, o.batch or ROWS, o.seed)
    data = text.load(o.text or None)
    recipe = Recipe(dtype=o.dtype, optimizer=partial(Adam, lr=o.lr), seed=o.seed)
    return on_text(model, o.batch or ROWS, data, seed=o.seed, steps=o.steps, recipe=recipe)


def of_file(options: argparse.Namespace) -> Found:
    """Return the routing in the file of --routing."""
    log = RoutingLog.read(options.routing)
    rows_per_group = options.rows_per_group or 1
    found = from_log(log, step=options.step, rows_per_group=rows_per_group)
    for name, given, actual in (
        ("--batch", options.batch, found.rows), ("--context", options.context, found.context)
    ):  # fmt: skip
        if given not in (None, actual):
            raise ValueError(f"{name} is {given}, but the log is of {actual}")
    return found


# What is printed


def about(options: argparse.Namespace, job: Job, layer: str, per_host: int) -> Iterator[str]:
    """Yield sentences on what is planned."""
    o, gate = options, next(each.gate for each in job.layers if each.name == layer)
    axes = ",".join(f"{axis}={size}" for axis, size in o.mesh.items())
    yield (
        f"{gate.num_experts} experts of width {o.hidden}, gate {o.moe} with k = {gate.k};"
        f" {axes}, hosts x ranks {o.hosts} x {per_host}"
    )
    yield (
        f"a batch of {job.rows} rows of {job.model['context']} tokens, micro-batches"
        f" {job.num_micro_batches}; {o.dtype}, payload {o.payload or 'same'}"
    )
    routing = job.log.whole(job.step, layer)
    yield (
        f"routing {source(o)}: largest load {routing.imbalance:.2f} times the mean,"
        f" {routing.drop_rate:.1%} of choices dropped"
    )
    way = f"dispatch {o.dispatch or 'flat'}, padding {o.padding or 'none'}"
    yield f"Bytes that all ranks send for {layer} in a step; {way}:"


def source(options: argparse.Namespace) -> str:
    """Return where the routing comes from, in words."""
    if options.routing is not None:
        return f"of {options.routing}"
    if options.text is not None:
        return f"of step {options.steps} on {options.text or 'the standard library'}"
    return f"drawn with seed {options.seed} as if all experts were equally good for each token"


def print_layer(found: OfLayer, console: Console) -> None:
    """Print a row for each kind of message, their sum, and what sums gradients."""
    table = cli.table_with("phase", "what", numbers=HEADS)
    for kind in found.kinds:
        table.add_row(kind.phase, kind.about, *numbers(kind.sent))
    table.add_row("all", "the layer", *numbers(found.total))
    table.add_row("sums", "gradients of router and experts", *numbers(found.sums))
    cli.print_table(table, console)


def print_ways(found: dict[str, Sent | str], console: Console) -> None:
    """Print a row for each way, and why others cannot be."""
    table = cli.table_with("way", numbers=(*HEADS, "messages, off host"))
    for name, each in found.items():
        if isinstance(each, Sent):
            table.add_row(name, *numbers(each), str(each.messages_off_host))
    cli.print_table(table, console)
    print_refused(found, console)


def print_across(found: dict[str, Across | str], console: Console) -> None:
    """Print what experts, a pipeline and copies of the model send between hosts."""
    heads = [*(f"{part} bytes" for part in PARTS), "all bytes", "messages"]
    table = cli.table_with("across hosts", "mesh", numbers=heads)
    for name, each in found.items():
        if isinstance(each, Across):
            axes = ",".join(f"{axis}={size}" for axis, size in each.axes.items() if size > 1)
            sums = sum(each.bytes.values()), sum(each.messages.values())
            table.add_row(name, axes, *(str(n) for n in (*each.bytes.values(), *sums)))
    cli.print_table(table, console)
    print_refused(found, console)


def print_refused(found: dict[str, Any], console: Console) -> None:
    """Print why some rows are missing."""
    for name, why in found.items():
        if isinstance(why, str):
            console.print(f"{name}: not possible here: {why}", markup=False)


def numbers(sent: Sent) -> list[str]:
    """Return the numbers of a row."""
    return [str(n) for n in sent[: len(HEADS)]]


# The command line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m moe.plan", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    natural, positive = cli.at_least(0), cli.at_least(1)
    add = parse.add_argument
    add("--mesh", type=cli.mesh_axes, required=True, metavar="AXIS=N,...",
        help="such as data=2,expert=4")  # fmt: skip
    add("--hosts", type=positive, default=1, metavar="N",
        help="each with equally many consecutive ranks; default: %(default)s")  # fmt: skip
    add("--batch", type=positive, help=f"rows of all ranks; default: {ROWS}, or those of the log")
    add("--micro-batches", type=positive, default=1, metavar="K", help="default: %(default)s")
    add("--dtype", choices=DTYPES, default="float64", help="default: %(default)s")

    add = parse.add_argument_group("routing").add_argument
    add("--routing", type=Path, metavar="FILE", help="of parallel.train --save-routing")
    add("--step", type=natural, metavar="N", help="of the file, from 0 on; default: the last")
    add("--layer", metavar="NAME", help="such as block1; default: the first with experts")
    add("--text", nargs="?", const="", metavar="PATH",
        help="train on this on one rank; without PATH on Python's standard library")  # fmt: skip
    add("--steps", type=positive, default=1, metavar="N",
        help="of a --text, the last of which is taken; 1: initial values; default: %(default)s",
    )  # fmt: skip
    add("--lr", type=float, default=2e-3, help="of them; default: %(default)s")
    add("--seed", type=natural, default=0, help="default: %(default)s")

    add = parse.add_argument_group("model").add_argument
    add("--layers", type=positive, default=4, help="number of blocks; default: %(default)s")
    add("--hidden", type=positive, default=256, help="width; default: %(default)s")
    add("--heads", type=positive, default=4, help="attention heads; default: %(default)s")
    add("--context", type=positive, help=f"tokens; default: {CONTEXT}, or those of the log")

    add = parse.add_argument_group("experts").add_argument
    add("--moe", choices=GATES, default="switch", metavar="GATE",
        help=f"one of {', '.join(GATES)}; default: %(default)s")  # fmt: skip
    add_number_of_experts(add)
    add("--top-k", type=positive, metavar="K", help="experts for each token; default: the gate's")
    add_capacity_options(add)
    add("--moe-every", type=positive, metavar="N",
        help="of N consecutive blocks the last has experts; default: 2")  # fmt: skip
    add("--rows-per-group", type=positive, metavar="N",
        help="rows that are routed together; default: 1")  # fmt: skip
    add_dispatch_options(add)
    return parse


if __name__ == "__main__":
    sys.exit(main())
