"""Simulate a training step of a GPT on ranks and a network that need not exist.

    ring simulate step --mesh pipe=8,data=16,tensor=8 --layers 96 --hidden 12288 \
        --heads 96 --topology hosts:128x8,nics=8,island=8

Prints, for each index along ``pipe``, for how long its ranks compute and wait for each axis.
Nothing is sent or computed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from rich.console import Console

from collectives.console import (
    Command,
    Number,
    Show,
    Table,
    add_output_options,
    at_least,
    console_for,
    in_units,
    output_file,
    progress,
    refusing,
    write_json,
)
from collectives.export import machine_in
from collectives.simulation import TOPOLOGIES, network_of
from parallel import plan
from parallel.layout import Layout, Recipe
from parallel.mesh import ROW_AXES, Mesh
from parallel.nn import context_positions, gpt
from parallel.options import REQUIRED, add_shared
from parallel.plan import forward_flops
from parallel.predict import Prices, StepTime, simulate_step, step_picture
from parallel.sharding import Sharding

AXES = ("pipe", "data", "context", "tensor")


def run(options: argparse.Namespace) -> int:
    """Print what the options ask for; return the exit status."""
    console = console_for(0, options)
    with refusing():
        step, layout = simulated(options, console)
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.axes.items())
    title = f"{layout.mesh.size} ranks, {mesh}, {options.topology}: {step.seconds:.4g} s a step"
    console.print(title)
    rows = table(step)
    rows.print(console)
    if options.picture:
        options.picture.write_text(step_picture(step, title))
        console.print(f"the step in time: {options.picture}")
    write_json({"seconds": step.seconds, "stages": rows.as_dicts()}, options.json)
    return 0


def simulated(options: argparse.Namespace, console: Console) -> tuple[StepTime, Layout]:
    """Return the step that the command line asks for, and its layout; show the progress."""
    mesh = Mesh(None, **{axis: options.mesh.get(axis, 1) for axis in (*options.mesh, "data")})
    if unknown := [axis for axis in mesh.axes if axis not in AXES]:
        raise ValueError(f"a mesh has the axes {', '.join(AXES)}, not {unknown[0]}")
    pipe, data, context, tensor = (mesh.axes.get(axis, 1) for axis in AXES)
    context_positions(options.context, context, 0)  # raises if a rank would have none
    batch = options.micro_batch * options.micro_batches * data
    job = plan.Job(
        options.layers, options.hidden, options.heads, options.context, options.vocab_size, batch
    )
    model = gpt(
        num_layers=job.num_layers,
        hidden=job.hidden,
        num_heads=job.num_heads,
        context=job.context,
        vocab_size=job.vocab_size,
        mesh=mesh,
        recompute=("block*",) if options.recompute else (),
        attention=options.attention,
        sequence_parallel="gather" if tensor > 1 else None,
    )
    layout = Layout(
        mesh,
        model,
        Recipe("float16", num_micro_batches=options.micro_batches),
        sharding=sharding_of(options.zero, mesh),
        schedule=options.schedule,
        algorithm=options.algorithm,
    )
    machine = machine_in(options.machine)
    prices = Prices(machine, network_of(options.topology, machine, mesh.size))
    divided = plan.Candidate(pipe, data, tensor, options.zero, options.micro_batch)

    def forward_seconds(layer: str) -> float:
        whole = sum(forward_flops(job, divided, model, layer))
        return float(whole / context / options.flops)  # ranks along context compute equally much

    shape = job.batch, job.context
    with progress(console) as show:
        count = partial(counted, show)
        return simulate_step(layout, shape, forward_seconds, prices, count), layout


def counted(show: Show, done: int, total: int) -> None:
    """Show how many calls have been simulated."""
    show(done, "calls", total)


def sharding_of(stage: int, mesh: Mesh) -> Sharding:
    """Return the sharding of a ZeRO stage, 0 for none, along all axes with different tokens."""
    axes = tuple(axis for axis in ROW_AXES if axis in mesh.axes)
    return Sharding.zero(stage, axes=axes) if stage else Sharding.ddp(axes=axes)


def table(step: StepTime) -> Table:
    """Return a row for each index along ``pipe``."""
    indices = range(len(step.spans))
    axes = list(dict.fromkeys(axis for i in indices for axis in step.exposed(i)))
    time, multiple = in_units("computes", "s", [step.computing(i) for i in indices], digits=3)
    unit = time.head.removeprefix("computes")
    waits = (Number(f"{axis}{unit}", time.form) for axis in axes)
    rows = Table("pipe", time, *waits, Number("of the step", ".0%"))
    for i in indices:
        busy, exposed = step.computing(i), step.exposed(i)
        waited = (exposed.get(axis, 0.0) / multiple for axis in axes)
        rows.add(str(i), busy / multiple, *waited, busy / step.seconds)
    return rows


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parse.epilog = f"topologies:\n\n{TOPOLOGIES}"
    add = parse.add_argument
    texts = {"mesh": f"of {', '.join(AXES)}, slowest first"}
    add_shared(add, texts, mesh=REQUIRED)
    add("--topology", required=True, metavar="TEXT", help="see below")
    add("--machine", type=Path, metavar="FILE", help="written by `ring bench tune`")
    add_shared(add, layers=REQUIRED, hidden=REQUIRED, heads=REQUIRED, context=2048)
    texts = {"micro_batches": "of a rank in a step"}
    add_shared(add, texts, vocab_size=51200, micro_batches=16, zero=1)
    add("--micro-batch", type=at_least(1), default=1, help="rows of one; default: %(default)s")
    add_shared(add, attention="ring", schedule="1f1b")
    add("--recompute", action="store_true", help="compute blocks again in backward")
    add("--algorithm", default="ring", help="of what layers do not name; default: %(default)s")
    add_shared(add, flops=150e12)
    add("--picture", type=output_file, metavar="FILE.svg", help="write the step in time")
    add_output_options(parse)


COMMAND = Command("parallel.simulate", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
