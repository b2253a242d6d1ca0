"""Train a model of images on the ranks of a mesh, and compare what it sends with the prediction."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

import collectives
from collectives import Communicator
from collectives.console import add_output_options, at_least, console_for, refusing, write_json
from examples.images.models import swin_moe, v_moe
from examples.images.shapes import CLASSES, batch
from moe import GATES, RoutingLog, mixtures
from parallel import (
    Adam,
    Mesh,
    PredictedCall,
    Recipe,
    Sharding,
    TrafficMonitor,
    TrafficTable,
    Trainer,
    checkpoint,
    commands,
    raise_on_all_ranks,
)
from parallel.commands import print_rank_reports, print_traffic, training_progress
from parallel.nn import Model
from parallel.options import add_shared

ROW_AXES = ("data", "expert")  # along which ranks compute different images
STAGES = 2  # of Swin-MoE, which divide its blocks


class Task(NamedTuple):
    """What is trained: a model, all models that route tokens, with their logs, and what to say."""

    model: Model
    routed: list[tuple[Model, RoutingLog]]
    about: str = ""

    def expect_routing(self, comm: Communicator) -> None:
        """Let layers predict from the routing of this run.  All ranks call this."""
        for model, log in self.routed:
            whole = log.gathered(comm)
            for layer in mixtures(model):
                layer.expected = whole


MakeTask: TypeAlias = Callable[[argparse.Namespace, Mesh], Task]


def train(options: argparse.Namespace, make: MakeTask) -> int:
    """Train what `make` makes of the options, on all ranks; return the exit status."""
    return commands.on_ranks(options, partial(train_on_rank, options=options, make=make))


def train_on_rank(comm: Communicator, options: argparse.Namespace, make: MakeTask) -> int:
    """Train on one rank; return the exit status.  Raise Refused before the first step."""
    with refusing():
        run = Run(comm, options, make)
    with commands.running(options):
        return run.all()


class Run:
    """One run, on one rank of `comm`.  Raises ValueError, on all ranks, if `options` do not fit."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, make: MakeTask) -> None:
        self.comm, self.options, self.console = comm, options, console_for(comm.rank, options)
        axes = options.mesh or {"expert": comm.size}
        mesh = Mesh(comm, **axes)
        self.task = make(options, mesh)
        check(options, mesh.size_of([axis for axis in ROW_AXES if axis in axes]))
        with raise_on_all_ranks(
            comm, collectives.phase, "prepare", "looking at --save", ValueError
        ):
            check_saving(options)
        self.monitor = TrafficMonitor(comm)
        self.trainer = Trainer(
            mesh,
            self.task.model,
            recipe_of(options),
            sharding=sharding_of(axes, options.zero),
            phase=self.monitor.phase,
        )
        self.trainer.layout.check_batch(options.batch, 1)

    def all(self) -> int:
        """Train, and print what it was like; return the exit status."""
        self._print_task()
        with self.monitor, self.comm.record() as ledger:
            losses = self._train()
        recorded, observed = ledger.gather(), self.monitor.gather()
        self.task.expect_routing(self.comm)
        reports = commands.gather_reports(self.comm, self._report())
        predicted = self._predicted()
        self.trainer.close()
        if recorded is None or reports is None:
            return 0  # rank 0 has them
        self._print_losses(losses)
        table = TrafficTable(
            predicted, recorded, observed, size=self.comm.size, reason=self.monitor.reason
        )
        write_json({"losses": losses, "traffic": table.as_dict()}, self.options.json)
        return self._show(table, reports)

    def _train(self) -> list[float]:
        """Return the loss of each step; save the model behind the last one."""
        o, trainer = self.options, self.trainer
        trainer.start()
        with training_progress(self.console, o.steps) as show:
            losses = trainer.train(o.steps, self._batch, o.batch, show)
        if o.save is not None:
            checkpoint.save(trainer, o.save, o.steps)
        return losses

    def _batch(self, step: int, rank: int, ranks: int) -> Any:
        """Return a rank's images of a step, and their classes."""
        o = self.options
        return batch(seed=o.seed, step=step, batch_size=o.batch, rank=rank, num_ranks=ranks)

    def _predicted(self) -> list[PredictedCall]:
        """Return all calls that the run makes."""
        o, trainer = self.options, self.trainer
        saved = checkpoint.traffic(trainer) if o.save is not None else []
        return trainer.traffic(o.steps, batch=(o.batch, 1)) + saved

    def _report(self) -> commands.RankReport:
        """Return the report of this rank."""
        o, trainer = self.options, self.trainer
        rows = len(self._batch(0, *trainer.batch_part)[0])
        batches = [(o.batch, 1, step) for step in range(o.steps)]
        updates = trainer.num_updates_in(o.steps) - trainer.updates.num_skipped
        return commands.RankReport.of(trainer, updates, rows, 1, batches)

    def _print_task(self) -> None:
        o, trainer = self.options, self.trainer
        self.console.print(
            f"{o.model}, {', '.join(f'{axis}={n}' for axis, n in trainer.mesh.axes.items())}, gate"
            f" {o.moe}, batch {o.batch}: {trainer.model.num_parameters} parameters"
        )
        if self.task.about:
            self.console.print(self.task.about)

    def _print_losses(self, losses: list[float]) -> None:
        last = float(np.mean(losses[-10:]))
        self.console.print(
            f"loss {losses[0]:.4f} -> {last:.4f} nats per image (of the last 10 steps); by a"
            f" constant guess {math.log(len(CLASSES)):.4f}"
        )

    def _show(self, table: TrafficTable, reports: list[commands.RankReport]) -> int:
        """Print memory and traffic, and what differs; return the exit status."""
        print_rank_reports([report.memory | report.moved for report in reports], self.console)
        print_traffic(table, self.console)
        return commands.print_verdict(table, reports, self.console)


def model_of(options: argparse.Namespace, num_layers: int, mesh: Mesh, log: RoutingLog) -> Model:
    """Return a model of so many blocks, of which every second one has experts."""
    common: dict[str, Any] = {
        "num_classes": len(CLASSES),
        "hidden": options.hidden,
        "num_experts": options.experts,
        "mesh": mesh,
        "log": log,
        "gate": options.moe,
    }
    if options.model == "v":
        return v_moe(num_layers=num_layers, num_heads=options.heads, **common)
    depths = collectives.even_counts(num_layers, STAGES)
    return swin_moe(num_layers=depths, num_heads=[options.heads] * STAGES, **common)


def check(options: argparse.Namespace, num_parts: int) -> None:
    """Raise ValueError if ranks would have no images.

    `num_parts` is the number of ranks that compute different images.
    """
    if options.batch < num_parts * options.micro_batches:
        raise ValueError(
            f"a batch of {options.batch} images is too small for {num_parts} ranks with"
            f" {options.micro_batches} micro-batches each"
        )


def check_saving(options: argparse.Namespace) -> None:
    """Make the folder of the checkpoint; ValueError or OSError if that must not or cannot be."""
    if (save := options.save) is None:
        return
    save.mkdir(parents=True, exist_ok=True)
    if checkpoint.checkpoint_path(save, options.steps).exists():
        raise ValueError(f"there is a checkpoint after {options.steps} steps in {save} already")


def recipe_of(options: argparse.Namespace) -> Recipe:
    """Return how the parameters are updated."""
    return Recipe(
        dtype=options.dtype,
        optimizer=partial(Adam, lr=options.lr),
        num_micro_batches=options.micro_batches,
        seed=options.seed,
    )


def sharding_of(axes: dict[str, int], zero: int) -> Sharding:
    """Return the sharding, by stage of ZeRO, along those axes along which images differ."""
    shared = tuple(axis for axis in ROW_AXES if axis in axes)
    if not shared:
        return Sharding()
    return Sharding.zero(zero, axes=shared) if zero else Sharding.ddp(axes=shared)


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of a run."""
    add, positive = parse.add_argument, at_least(1)
    add("--model", choices=("v", "swin"), default="v", help="V-MoE or Swin-MoE; default: v")
    texts = {
        "mesh": "of pipe, data, expert, tensor; default: all ranks along expert",
        "batch": "images of all ranks",
    }
    add_shared(add, texts, mesh=None, zero=1, threads=None, steps=100, batch=32, micro_batches=1)
    add_shared(add, lr=0.003, dtype="float32", seed=0, layers=4, hidden=32, heads=2)
    add("--moe", choices=GATES, default="v-moe", help="the gate; default: %(default)s")
    add("--experts", type=positive, default=4, help="number of experts; default: %(default)s")
    add("--save", type=Path, metavar="DIR", help="save a checkpoint at the end")
    add_output_options(parse, is_local=False)
