"""Measure training steps with DualPipe-V and experts, with and without turns in overlapping slots.

    ring launch -n 4 -m bench dualpipe
    ring launch -n 4 -m bench dualpipe --delay 5

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
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.commands import world
from bench.commands.options import COUNT, add_output, option
from collectives import Communicator
from collectives.console import Command, Number, Refused, Table, console_for, write_json
from moe import moe_gpt
from parallel import Mesh, Recipe, Sharding, Trainer, text
from parallel.nn import Array, Step

MICRO_BATCHES = 8
WARM_UP = 2  # steps of each kind
KINDS = {"without turns": False, "with turns": True}


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option(parse, "-n --iters", "steps of each kind", dest="samples", default=20, **COUNT)
    option(parse, "--hidden", "width", default=128, **COUNT)
    option(parse, "--context", "bytes of a row", default=64, **COUNT)
    about = "least duration of an exchange"
    option(parse, "--delay", about, type=float, default=0.0, metavar="MS")
    add_output(parse, is_local=False)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0.  Raises Refused."""
    return world.on_ranks(lambda comm: measured(comm, options))


def measured(comm: Communicator, options: argparse.Namespace) -> int:
    """Train, and let rank 0 print and write the times; return 0."""
    if comm.size % 2 or comm.size < 4:
        raise Refused(f"{comm.size} ranks are not pipe=2,expert=N with N of 2 or more")
    world.check_output(options.json)
    trainer = make(comm, options)
    if options.delay:
        Step.wait = delayed_wait(1e-3 * options.delay)  # type: ignore[method-assign, assignment]
    times = times_of(comm, trainer, options)
    medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
    slots = len({action.slot for action in trainer.actions} - {None})
    console, mpi = console_for(comm.rank, options), world.mpi_version()
    console.print(
        f"{mpi}, {comm.size} ranks, pipe=2,expert={comm.size // 2}, dualpipe-v of"
        f" {MICRO_BATCHES} micro-batches, {slots} overlapping slots; exchanges take"
        f" {options.delay:g} ms or more"
    )
    table = Table("steps", Number("median ms", ".2f"), Number("without / with", ".2f"))
    for name, median in medians.items():
        table.add(name, 1e3 * median, medians["without turns"] / median)
    table.print(console)
    if comm.rank == 0:
        facts = {"mpi": mpi, "ranks": comm.size, "delay_ms": options.delay}
        write_json(facts | {"seconds": times}, options.json)
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


def times_of(
    comm: Communicator, trainer: Trainer, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of the steps of each kind, of the slowest rank."""
    data, rows = text.load(), comm.size // 2 * MICRO_BATCHES
    seconds_by_kind: dict[str, list[float]] = {name: [] for name in KINDS}
    step = 0
    while min(map(len, seconds_by_kind.values())) < options.samples + WARM_UP:
        for name, takes_turns in KINDS.items():
            trainer.takes_turns = takes_turns
            part, parts = trainer.batch_part
            where: dict[str, Any] = {"batch_size": rows, "context": options.context}
            batch = text.batch(data, seed=0, step=step, rank=part, num_ranks=parts, **where)
            comm.barrier()
            began = time.perf_counter()
            trainer.step(*batch, rows * options.context)
            seconds = comm.all_reduce(np.array([time.perf_counter() - began]), op="max")
            if not trainer.overlap.is_reference:  # in which there are no turns
                seconds_by_kind[name].append(float(seconds[0]))
            step += 1
    return {name: seconds[WARM_UP:] for name, seconds in seconds_by_kind.items()}


def delayed_wait(seconds: float) -> Callable[[Step, Callable[[], Array]], Array]:
    """Return a method that waits as `Step.wait` does, and at least so long."""

    def wait(step: Step, finish: Callable[[], Array]) -> Array:
        end = time.perf_counter() + seconds
        step.pass_turn()
        result = finish()
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return wait


COMMAND = Command("bench.overlap.dualpipe", __doc__, add_options, run)
