"""Train a small GPT with mixtures of experts; compare all bytes sent with the prediction.

    ring launch -n 4 -m moe.train --mesh data=2,expert=2 --zero 1 --moe switch
    ring launch -n 4 -m moe.train --layout expert-model-data:2 --moe switch
    ring moe train --threads 1 --strategy serial --moe switch --save-routing routing.npz
    ring moe train --threads 4 --mesh expert=4 --moe switch --routing routing.npz

It has all options of `parallel.train`, and prints and writes the same.  What mixtures send depends
on the routing: the traffic is predicted from the routing of a run on one rank, which is in a file,
or else from the routing of this run.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from collectives import Communicator
from collectives.console import Command
from moe.commands import (
    GATE_OPTIONS,
    LAYER_OPTIONS,
    add_expert_options,
    add_routing_options,
    gate_options,
    layer_options,
)
from moe.layers import mixtures
from moe.models import LAYOUTS, layout, moe_gpt
from moe.routing import RoutingLog
from parallel import Mesh
from parallel.commands import ModelSpec, add_training_options, dense_spec, gpt_options, train
from parallel.nn import Model


def run(options: argparse.Namespace) -> int:
    """Train as the options say; return the exit status."""
    return train(options, mixture_spec)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_training_options(parse)
    add = parse.add_argument_group("mixtures of experts").add_argument
    add_expert_options(add)
    add_routing_options(add)
    add(
        "--expert-dropout",
        type=float,
        metavar="RATE",
        help="in the middle of each expert; default: none",
    )
    add(
        "--layout",
        type=layout_words,
        metavar="NAME[:M]",
        help="a mesh for --moe: " + ", ".join(LAYOUTS) + "; M ranks divide each weight",
    )
    add(
        "--routing",
        type=Path,
        metavar="FILE",
        help="predict from this routing, of a run on one rank; default: that of this run",
    )
    add("--save-routing", type=Path, metavar="FILE", help="write the routing of all steps to FILE")


def layout_words(word: str) -> tuple[str, int]:
    """Return the name of a layout and the ranks that divide each weight, of ``NAME[:M]``."""
    name, _, number = word.partition(":")
    return name, int(number or 1)


def mixture_spec(options: argparse.Namespace, num_ranks: int) -> ModelSpec:
    """Return the GPT with experts that the options describe; without ``--moe`` a dense one.

    Raises ValueError for options that do not go together, and if the file of ``--routing`` has no
    routing.
    """
    dense = dense_spec(options, num_ranks)
    if options.moe is None:
        check_dense(options)
        return dense
    if options.sequence_parallel:
        raise ValueError("--moe takes no --sequence-parallel")
    if options.routing is not None:
        RoutingLog.read(options.routing)
    log = RoutingLog()  # of this rank
    return ModelSpec(
        make=partial(mixture_gpt, options, log),
        mesh=dense.mesh if options.layout is None else mesh_of_layout(options, num_ranks),
        axes=(*dense.axes, "expert"),
        row_options=("moe", *dense.row_options),
        output_files={"--save-routing": options.save_routing},
        finish=partial(expect_routing, options, log),
    )


def check_dense(options: argparse.Namespace) -> None:
    """Raise ValueError for options that need ``--moe``."""
    if "expert" in (options.mesh or {}):
        raise ValueError("--mesh with expert=N needs --moe GATE")
    for name in (*GATE_OPTIONS, *LAYER_OPTIONS, "layout", "routing", "save_routing"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --moe GATE")


def mesh_of_layout(options: argparse.Namespace, num_ranks: int) -> dict[str, int]:
    """Return the axes of ``--layout``; raise ValueError if another mesh is given, too."""
    if options.mesh is not None or options.strategy is not None:
        raise ValueError("--layout names a mesh: it takes no --mesh and no --strategy")
    name, num_model = options.layout
    return layout(name, num_ranks, num_model)


def mixture_gpt(options: argparse.Namespace, log: RoutingLog, mesh: Mesh | None) -> Model:
    """Return the model of the command line; its mixtures add their routing to `log`."""
    return moe_gpt(
        gate=options.moe,
        gate_options=gate_options(options),
        num_experts=options.experts,
        log=log,
        ranks_per_host=options.ranks_per_host,
        **layer_options(options),
        **gpt_options(options, mesh),
    )


def expect_routing(
    options: argparse.Namespace, log: RoutingLog, model: Model, comm: Communicator
) -> None:
    """Let layers predict from the routing in the file of ``--routing``, or else of this run.

    Write the routing of this run to the file of ``--save-routing``; `log` has a rank's part of it.
    """
    if options.routing is None or options.save_routing is not None:
        routing = log.gathered(comm)
    if options.save_routing is not None and comm.rank == 0:
        options.save_routing.write_bytes(routing.to_bytes())
    if options.routing is not None:
        routing = RoutingLog.read(options.routing)
    for layer in mixtures(model):
        layer.expected = routing


COMMAND = Command("moe.train", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
