"""Measure training steps with DualPipe-V and experts, with and without turns in overlapping slots.

    python -m collectives.launch -n 4 -m bench turns
    python -m collectives.launch -n 4 -m bench turns --delay 5

The mesh is pipe=2,expert=N.  Where a forward and a backward overlap, with turns each goes on while
the other waits for its exchange of tokens; without, their layers follow each other, and every
exchange is waited for where it is started.  Steps of both kinds alternate; the time of a step
is that of the slowest rank, and steps are compared by their medians.

On one host an exchange is a copy by the cores that also compute, of which little can be hidden.
With --delay, each exchange of a layer takes at least so long, as on a slower network: meanwhile the
rank that waits for it sleeps.

With mpirun set OMP_NUM_THREADS=1, as the launcher does.  The exit status is 2 if the number of
ranks is odd or less than 4.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from bench.perf import can_write, mpi_version
from collectives import Communicator
from moe import moe_gpt
from parallel import Mesh, Recipe, Sharding, Trainer, text
from parallel.cli import at_least, console_of, print_table, table_with
from parallel.nn import Array, Step

MICRO_BATCHES = 8
WARM_UP = 2  # steps of each kind


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    parser.set_defaults(run=run)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add(
        "-n",
        dest="samples",
        type=at_least(1),
        default=20,
        metavar="N",
        help="steps of each kind; default: %(default)s",
    )
    add("--hidden", type=at_least(1), default=128, help="width; default: %(default)s")
    add("--context", type=at_least(1), default=64, help="default: %(default)s")
    add(
        "--delay",
        type=float,
        default=0.0,
        metavar="MS",
        help="least duration of an exchange; default: %(default)s",
    )
    add("--json", type=Path, metavar="FILE", help="write everything to FILE")


def run(options: argparse.Namespace) -> int:
    """Measure and print; return the exit status."""
    comm = collectives.world()
    console = console_of(comm.rank)
    if comm.size % 2 or comm.size < 4:
        console.print(f"bench turns: {comm.size} ranks are not pipe=2,expert=N with N of 2 or more")
        return 2
    if not can_write(options.json, comm, console):
        return 2
    trainer = make(comm, options)
    if options.delay:
        Step.wait = partial_method(delayed, 1e-3 * options.delay)  # type: ignore[method-assign]
    times = measured(comm, trainer, options)
    medians = {name: float(np.median(each)) for name, each in times.items()}
    slots = len({action.slot for action in trainer.actions} - {None})
    console.print(
        f"{mpi_version()}, {comm.size} ranks, pipe=2,expert={comm.size // 2}, dualpipe-v of"
        f" {MICRO_BATCHES} micro-batches, {slots} overlapping slots; exchanges take"
        f" {options.delay:g} ms or more"
    )
    table = table_with("steps", numbers=["median ms", "without / with"])
    for name, median in medians.items():
        ratio = medians["without turns"] / median
        table.add_row(name, f"{1e3 * median:.2f}", f"{ratio:.2f}")
    print_table(table, console)
    if options.json is not None and comm.rank == 0:
        facts = {"mpi": mpi_version(), "ranks": comm.size, "delay_ms": options.delay}
        options.json.write_text(json.dumps(facts | {"seconds": times}, indent=1) + "\n")
    trainer.close()
    return 0


def make(comm: Communicator, options: argparse.Namespace) -> Trainer:
    """Make a training run of a model with experts in all of its blocks."""
    mesh = Mesh(comm, pipe=2, expert=comm.size // 2)
    model = moe_gpt(
        gate="stable",
        num_experts=comm.size,
        every=1,
        num_layers=4,
        num_heads=4,
        hidden=options.hidden,
        context=options.context,
        mesh=mesh,
    )
    recipe = Recipe("float32", num_micro_batches=MICRO_BATCHES)
    sharding = Sharding.zero(1, axes=("expert",))
    trainer = Trainer(mesh, model, recipe, sharding=sharding, schedule="dualpipe-v")
    trainer.start()
    return trainer


def measured(
    comm: Communicator, trainer: Trainer, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of the steps of each kind, of the slowest rank."""
    data, rows = text.load(), comm.size // 2 * MICRO_BATCHES
    kinds = {"without turns": False, "with turns": True}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    step = 0
    while min(map(len, found.values())) < options.samples + WARM_UP:
        for name, takes_turns in kinds.items():
            trainer.takes_turns = takes_turns
            part, parts = trainer.batch_part
            where: dict[str, Any] = {"batch_size": rows, "context": options.context}
            batch = text.batch(data, seed=0, step=step, rank=part, num_ranks=parts, **where)
            comm.barrier()
            began = time.perf_counter()
            trainer.step(*batch, rows * options.context)
            seconds = comm.all_reduce(np.array([time.perf_counter() - began]), op="max")
            if not trainer.overlap.is_reference:  # in which there are no turns
                found[name].append(float(seconds[0]))
            step += 1
    return {name: each[WARM_UP:] for name, each in found.items()}


def delayed(seconds: float, step: Step, finish: Callable[[], Array]) -> Array:
    """Wait as `Step.wait` does, and at least so many `seconds` from now on."""
    end = time.perf_counter() + seconds
    step.pass_turn()
    result = finish()
    time.sleep(max(0.0, end - time.perf_counter()))
    return result


def partial_method(function: Callable[..., Any], *first: Any) -> Any:
    """Return a method that calls `function` with the arguments `first` before its own."""

    def method(self: Any, *arguments: Any) -> Any:
        return function(*first, self, *arguments)

    return method
