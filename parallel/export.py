"""Write a training step as files for another simulator.

    python -m parallel.export --ranks 8 --mesh data=2,pipe=2,tensor=2 --format goal -o step.goal

goal: for LogGOPSim and ATLAHS.  smpi: for SimGrid's replay, in which a rank completes a collective
before it goes on.  chakra: for ASTRA-sim; the files are PATH.RANK.et.  There is no msccl, whose
files describe one collective.  Nothing is sent or computed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from collectives.export import machine_in, output_file, summary, write
from parallel import cli
from parallel.commands import presets
from parallel.layout import Layout, Recipe
from parallel.nn import gpt
from parallel.optim import DTYPES
from parallel.pipeline import SCHEDULES
from parallel.predict import step_tasks


def main(arguments: list[str] | None = None) -> int:
    """Write the files that the command line asks for; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    try:
        machine = machine_in(options.machine)
        tasks = step_tasks(
            layout_of(options),
            machine,
            layer_seconds=options.layer_seconds,
            batch=(options.batch, options.context),
        )
        written = write(tasks, options.format, options.output)
    except (ValueError, OSError) as error:
        parse.exit(2, f"{parse.prog}: {error}\n")
    sys.stderr.write(summary(written))
    return 0


def layout_of(options: argparse.Namespace) -> Layout:
    """Return how the ranks of the command line train."""
    presets.name_strategy(options.ranks, options)
    recipe = Recipe(options.dtype, num_micro_batches=options.micro_batches, clip=1.0)
    given = {"mesh": options.mesh, "schedule": options.schedule}
    return presets.layout_of(
        options.ranks,
        lambda mesh: gpt(**cli.gpt_options(options), mesh=mesh),
        recipe,
        options.strategy,
        given,
        presets.model_mesh(options),
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.export", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add, positive = parse.add_argument, cli.at_least(1)
    add("--ranks", type=positive, required=True)
    add("--format", choices=("goal", "smpi", "chakra"), required=True)
    add("-o", "--output", type=output_file, metavar="PATH", help="default: standard output")
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help="of bench fit: what copies and combinations cost; default: built in",
    )
    add(
        "--layer-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="the forward of a layer for a micro-batch; backward takes twice as long; default: 0",
    )
    add("--strategy", choices=presets.SHARDINGS, help="a mesh and a sharding; default: ddp")
    add("--mesh", type=cli.mesh_axes, metavar="AXIS=N,...", help="such as data=4; or --strategy")
    add("--zero", type=int, choices=range(4), help="stage of ZeRO on the mesh; 0: sum gradients")
    add("--schedule", choices=SCHEDULES, help="of the pipeline along the axis pipe; default: 1f1b")
    add("--batch", type=positive, default=16, help="rows of all ranks; default: %(default)s")
    add("--micro-batches", type=positive, default=1, metavar="K", help="default: %(default)s")
    add("--dtype", choices=DTYPES, default="float32", help="default: %(default)s")
    cli.add_gpt_options(add)
    parse.set_defaults(group_size=None, sequence_parallel=None, attention=None)
    return parse


if __name__ == "__main__":
    sys.exit(main())
