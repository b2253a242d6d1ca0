"""Simulate a training step of a GPT on ranks and a network that need not exist.

    python -m parallel.simulate --mesh pipe=8,data=16,tensor=8 --layers 96 --hidden 12288 \
        --heads 96 --topology hosts:128x8,nics=8,island=8

Prints, for each index along ``pipe``, for how long its ranks compute and wait for each axis.
Nothing is sent or computed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from collectives.export import machine_in, output_file
from collectives.simulation import TOPOLOGIES, network_of
from parallel import cli, plan
from parallel.layout import Layout, Recipe
from parallel.mesh import ROW_AXES, Mesh
from parallel.nn import ATTENTION, context_positions, gpt
from parallel.pipeline import SCHEDULES
from parallel.plan import forward_flops
from parallel.predict import Prices, StepTime, simulate_step, step_picture
from parallel.sharding import Sharding

AXES = ("pipe", "data", "context", "tensor")


def main(arguments: list[str] | None = None) -> int:
    """Print what the command line asks for; return the exit status."""
    parse = parser()
    options, console = parse.parse_args(arguments), cli.console_of(0)
    try:
        step, layout = simulated(options, console)
    except (OSError, ValueError) as error:
        parse.exit(2, f"{parse.prog}: {error}\n")
    mesh = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.axes.items())
    title = f"{layout.mesh.size} ranks, {mesh}, {options.topology}: {step.seconds:.4g} s a step"
    console.print(title)
    cli.print_table(table(step), console)
    if options.picture:
        options.picture.write_text(step_picture(step, title))
        console.print(f"the step in time: {options.picture}")
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
    with progress_bar(console, "calls") as show:
        return simulate_step(layout, shape, forward_seconds, prices, show), layout


@contextmanager
def progress_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """Return a context manager with a function of (done, total) that shows the progress."""
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def sharding_of(stage: int, mesh: Mesh) -> Sharding:
    """Return the sharding of a ZeRO stage, 0 for none, along all axes with different tokens."""
    axes = tuple(axis for axis in ROW_AXES if axis in mesh.axes)
    return Sharding.zero(stage, axes=axes) if stage else Sharding.ddp(axes=axes)


def table(step: StepTime) -> Table:
    """Return a row for each index along ``pipe``."""
    indices = range(len(step.spans))
    axes = list(dict.fromkeys(axis for i in indices for axis in step.exposed(i)))
    heads = ("computes s", *(f"{axis} s" for axis in axes), "of the step")
    rows = cli.table_with("pipe", numbers=heads)
    for i in indices:
        busy, exposed = step.computing(i), step.exposed(i)
        cells = (f"{exposed.get(axis, 0.0):.4g}" for axis in axes)
        rows.add_row(str(i), f"{busy:.4g}", *cells, f"{busy / step.seconds:.0%}")
    return rows


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.simulate", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.epilog = f"topologies:\n\n{TOPOLOGIES}"
    add, positive = parse.add_argument, cli.at_least(1)
    add(
        "--mesh",
        type=cli.mesh_axes,
        required=True,
        metavar="AXIS=N,...",
        help=f"of {', '.join(AXES)}, slowest first",
    )
    add("--topology", required=True, metavar="TEXT", help="see below")
    add("--machine", type=Path, metavar="FILE", help="written by `python -m bench fit`")
    add("--layers", type=positive, required=True, help="number of blocks")
    add("--hidden", type=positive, required=True, help="width")
    add("--heads", type=positive, required=True, help="attention heads")
    add("--context", type=positive, default=2048, help="tokens of a row; default: %(default)s")
    add("--vocab-size", type=positive, default=51200, help="default: %(default)s")
    add("--micro-batch", type=positive, default=1, help="rows of one; default: %(default)s")
    add(
        "--micro-batches",
        type=positive,
        default=16,
        metavar="K",
        help="of a rank in a step; default: %(default)s",
    )
    add("--zero", type=int, choices=range(4), default=1, help="stage; default: %(default)s")
    add(
        "--attention",
        choices=ATTENTION,
        default="ring",
        help="of the ranks along context; default: %(default)s",
    )
    add("--schedule", choices=SCHEDULES, default="1f1b", help="default: %(default)s")
    add("--recompute", action="store_true", help="compute blocks again in backward")
    add("--algorithm", default="ring", help="of what layers do not name; default: %(default)s")
    add(
        "--flops",
        type=cli.number,
        default=150e12,
        metavar="N",
        help="operations a second that a GPU reaches; default: 150T",
    )
    add("--picture", type=output_file, metavar="FILE.svg", help="write the step in time")
    return parse


if __name__ == "__main__":
    sys.exit(main())
