"""Write a training step as files for another simulator.

    ring export step --ranks 8 --mesh data=2,pipe=2,tensor=2 --format goal -o step.goal

goal: for LogGOPSim and ATLAHS.  smpi: for SimGrid's replay, in which a rank completes a collective
before it goes on.  chakra: for ASTRA-sim; the files are PATH.RANK.et.  There is no msccl, whose
files describe one collective.  Nothing is sent or computed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from collectives.console import Command, output_file, refusing
from collectives.export import machine_in, summary, write
from parallel.commands import presets
from parallel.layout import Layout, Recipe
from parallel.nn import gpt
from parallel.options import REQUIRED, add_gpt_options, add_shared, gpt_arguments
from parallel.predict import step_tasks


def run(options: argparse.Namespace) -> int:
    """Write the files that the options ask for; return the exit status."""
    with refusing():
        machine = machine_in(options.machine)
        tasks = step_tasks(
            layout_of(options),
            machine,
            layer_seconds=options.layer_seconds,
            batch=(options.batch, options.context),
        )
        written = write(tasks, options.format, options.output)
    sys.stderr.write(summary(written))
    return 0


def layout_of(options: argparse.Namespace) -> Layout:
    """Return how the ranks of the command line train."""
    presets.name_strategy(options.ranks, options)
    recipe = Recipe(options.dtype, num_micro_batches=options.micro_batches, clip=1.0)
    given = {"mesh": options.mesh, "schedule": options.schedule}
    return presets.layout_of(
        options.ranks,
        lambda mesh: gpt(**gpt_arguments(options), mesh=mesh),
        recipe,
        options.strategy,
        given,
        presets.model_mesh(options),
    )


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parse.add_argument
    add_shared(add, ranks=REQUIRED)
    add("--format", choices=("goal", "smpi", "chakra"), required=True)
    add("-o", "--output", type=output_file, metavar="PATH", help="default: standard output")
    add(
        "--machine",
        type=Path,
        metavar="FILE",
        help="of ring bench tune: what copies and combinations cost; default: built in",
    )
    add(
        "--layer-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="the forward of a layer for a micro-batch; backward takes twice as long; default: 0",
    )
    add("--strategy", choices=presets.SHARDINGS, help="a mesh and a sharding; default: ddp")
    texts = {"mesh": "such as data=4; or --strategy"}
    add_shared(add, texts, mesh=None, zero=None, schedule=None)
    add_shared(add, batch=16, micro_batches=1, dtype="float32")
    add_gpt_options(add)
    parse.set_defaults(group_size=None, sequence_parallel=None, attention=None)


COMMAND = Command("parallel.export", __doc__, add_options, run)


if __name__ == "__main__":
    sys.exit(COMMAND.main())
