"""Say what a layer with experts will send for a routing, and how much of it leaves a host.

    ring moe plan --mesh data=2,expert=4 --hosts 2
    ring moe plan --mesh expert=8 --hosts 2 --moe stable --top-k 2 --padding needed
    ring moe plan --mesh expert=8 --hosts 2 --text --steps 20
    ring moe plan --mesh expert=8 --hosts 2 --routing routing.npz

The routing is drawn as if all experts were equally good for each token; or --text has one rank
train on a text, and the last step makes the routing; or it is read from the file that moe.train
writes with --save-routing.  Options with the same names have the same meaning and default there, so
that this is what such a run sends in a step.

Logical bytes are the bytes of all rows, with what a rank has for itself; off-rank bytes are sent to
another rank, and off-host bytes to another host.  The tables are of one layer, by kind of message;
of the same layer with every dispatch; and, with several hosts, of the whole model in three layouts:
ranks on all hosts divide the experts, or each host has a stage of a pipeline, or a copy of the
model, and its ranks divide the experts there.

Nothing is sent here; 64 ranks take about ten seconds.  The exit status is 2 if the arguments do not
go together.
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

from collectives.console import (
    Command,
    add_output_options,
    at_least,
    console_for,
    refusing,
    write_json,
)
from moe.commands import add_expert_options, add_routing_options, gate_options, layer_options
from moe.plan.across_hosts import compare_layouts
from moe.plan.one_layer import TITLES, compare_dispatch, layer_amounts
from moe.plan.routings import BatchRouting, from_log, on_text, uniform
from moe.plan.tables import dispatch_table, layer_table, layout_table, print_refused
from moe.plan.training_step import TrainingStep
from moe.routing import RoutingLog
from parallel import Adam, Recipe, text
from parallel.options import REQUIRED, add_shared

ROWS, CONTEXT = 16, 64


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for; return the exit status."""
    with refusing():
        tell(options, console_for(0, options))
    return 0


def tell(options: argparse.Namespace, console: Console) -> None:
    """Print all tables."""
    check_mesh(options.mesh, options.hosts)
    routing = routing_of(options)
    step = TrainingStep(
        model_of(options, routing.context),
        routing.rows,
        routing.log,
        routing.step,
        options.micro_batches,
        options.dtype,
    )
    layer = options.layer or step.layers[0].name
    per_host = math.prod(options.mesh.values()) // options.hosts
    compared = compare_dispatch(step, layer, options.mesh, per_host)
    asked = compared.get((options.dispatch or "flat", options.padding or "none"))
    if asked is None:  # neither goes with the other, which this says
        asked = layer_amounts(step, layer, options.mesh, per_host)
    if isinstance(asked, str):
        raise ValueError(asked)
    for line in about(options, step, layer, per_host):
        console.print(line)
    tables = {"layer": layer_table(asked)}
    tables["layer"].print(console)
    console.print("With each dispatch and padding:")
    by_title = {TITLES.get(key, key[0]): amounts for key, amounts in compared.items()}
    tables["dispatch"] = dispatch_table(by_title)
    tables["dispatch"].print(console)
    print_refused(by_title, console)
    if options.hosts > 1:
        console.print("What the whole model sends between hosts in a step:")
        layouts = compare_layouts(step, options.hosts, per_host)
        tables["layouts"] = layout_table(layouts)
        tables["layouts"].print(console)
        print_refused(layouts, console)
    write_json({name: table.as_dicts() for name, table in tables.items()}, options.json)


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
        "gate": options.moe,
        "gate_options": gate_options(options),
        "num_experts": options.experts,
        "num_layers": options.layers,
        "hidden": options.hidden,
        "num_heads": options.heads,
        "context": context,
        **layer_options(options),
    }


def routing_of(options: argparse.Namespace) -> BatchRouting:
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


def of_file(options: argparse.Namespace) -> BatchRouting:
    """Return the routing in the file of --routing."""
    log = RoutingLog.read(options.routing)
    rows_per_group = options.rows_per_group or 1
    routing = from_log(log, step=options.step, rows_per_group=rows_per_group)
    for name, given, actual in (
        ("--batch", options.batch, routing.rows),
        ("--context", options.context, routing.context),
    ):
        if given not in (None, actual):
            raise ValueError(f"{name} is {given}, but the log is of {actual}")
    return routing


def about(
    options: argparse.Namespace, step: TrainingStep, layer: str, per_host: int
) -> Iterator[str]:
    """Yield sentences on what is planned."""
    o, gate = options, next(mixture.gate for mixture in step.layers if mixture.name == layer)
    axes = ",".join(f"{axis}={size}" for axis, size in o.mesh.items())
    yield (
        f"{gate.num_experts} experts of width {o.hidden}, gate {o.moe} with k = {gate.k};"
        f" {axes}, hosts x ranks {o.hosts} x {per_host}"
    )
    yield (
        f"a batch of {step.rows} rows of {step.model['context']} tokens, micro-batches"
        f" {step.num_micro_batches}; {o.dtype}, payload {o.payload or 'same'}"
    )
    routing = step.log.whole(step.number, layer)
    yield (
        f"routing {source(o)}: largest load {routing.imbalance:.2f} times the mean,"
        f" {routing.drop_rate:.1%} of choices dropped"
    )
    dispatch = f"dispatch {o.dispatch or 'flat'}, padding {o.padding or 'none'}"
    yield f"Bytes that all ranks send for {layer} in a step; {dispatch}:"


def source(options: argparse.Namespace) -> str:
    """Return where the routing comes from, in words."""
    if options.routing is not None:
        return f"of {options.routing}"
    if options.text is not None:
        return f"of step {options.steps} on {options.text or 'the standard library'}"
    return f"drawn with seed {options.seed} as if all experts were equally good for each token"


# The command line


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    add_shared(add, {"mesh": "such as data=2,expert=4"}, mesh=REQUIRED)
    add(
        "--hosts",
        type=at_least(1),
        default=1,
        metavar="N",
        help="each with equally many consecutive ranks; default: %(default)s",
    )
    texts = {"batch": f"rows of all ranks; default: {ROWS}, or those of the log"}
    add_shared(add, texts, batch=None, micro_batches=1, dtype="float64")

    add = parse.add_argument_group("routing").add_argument
    add("--routing", type=Path, metavar="FILE", help="of ring moe train --save-routing")
    add("--step", type=at_least(0), metavar="N", help="of the file, from 0 on; default: the last")
    add("--layer", metavar="NAME", help="such as block1; default: the first with experts")
    add(
        "--text",
        nargs="?",
        const="",
        metavar="PATH",
        help="train on this on one rank; without PATH on Python's standard library",
    )
    texts = {"steps": "of a --text, the last of which is taken; 1: initial values"}
    add_shared(add, texts, steps=1, lr=2e-3, seed=0)

    add = parse.add_argument_group("model").add_argument
    texts = {"context": f"tokens of a row; default: {CONTEXT}, or those of the log"}
    add_shared(add, texts, layers=4, hidden=256, heads=4, context=None)

    add = parse.add_argument_group("experts").add_argument
    add_expert_options(add, gate="switch")
    add_routing_options(add)
    add_output_options(parse)


COMMAND = Command("moe.plan", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
