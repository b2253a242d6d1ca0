"""Train a small transformer of images with experts; compare all bytes sent with the prediction.

    python -m moe.images --model v --steps 200
    python -m collectives.launch -n 4 -m moe.images --model swin --mesh data=2,expert=2
    python -m moe.images --threads 4 --mesh pipe=2,expert=2 --micro-batches 4

The images are drawn shapes.  A smaller model learns from a larger one (`moe.students`) that was
saved before:

    python -m moe.images --layers 4 --save teacher
    python -m moe.images --layers 2 --teacher teacher --teacher-layers 4 --stop 60

Rank 0 prints the loss, the memory of every rank (by formula, and counted) and the traffic
(predicted, recorded and observed).  The exit status is 1 if columns differ, and 2 if the arguments
do not go together.
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives import Communicator
from moe.gates import GATES
from moe.images import CLASSES, batch, swin_moe, v_moe
from moe.layer import mixtures
from moe.log import RoutingLog
from moe.students import Distillation, Teacher, distilled, sizes
from parallel import (
    Adam,
    Mesh,
    Recipe,
    Sharding,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
    Trainer,
    checkpoint,
    cli,
    raise_on_all_ranks,
)
from parallel.job import on_ranks, preparing, running
from parallel.nn import Model
from parallel.rank_report import RankReport, differences, gather
from parallel.runtime import BatchSize

ROW_AXES = ("data", "expert")  # along which ranks compute different images
STAGES = 2  # of Swin-MoE, which divide its blocks


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    return on_ranks(parse, options, partial(train, options=options))


def train(comm: Communicator, options: argparse.Namespace) -> int:
    """Train on one rank; return the exit status.  Raise InvalidRun before the first step."""
    with preparing():
        run = Run(comm, options)
    with running(options):
        return run.all()


class Run:
    """One run, on one rank of `comm`.  Raises ValueError, on all ranks, if `options` do not fit."""

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self.comm, self.options, self.console = comm, options, cli.console_of(comm.rank)
        axes = options.mesh or {"expert": comm.size}
        mesh, self.logs = Mesh(comm, **axes), [RoutingLog()]
        model = self.model_of(options.layers, mesh, self.logs[0])
        self.models = [model]
        if options.teacher is not None:
            model = self._taught(model, mesh)
        check(options, mesh.size_of([axis for axis in ROW_AXES if axis in axes]))
        with raise_on_all_ranks(
            comm, collectives.phase, "prepare", "looking at --save", ValueError
        ):
            check_saving(options)
        self.monitor = TrafficMonitor(comm)
        recipe = Recipe(
            dtype=options.dtype, optimizer=partial(Adam, lr=options.lr),
            num_micro_batches=options.micro_batches, seed=options.seed,
        )  # fmt: skip
        self.trainer = Trainer(
            mesh, model, recipe, sharding=sharding_of(axes, options.zero), phase=self.monitor.phase
        )
        self.trainer.check_batch(options.batch, 1)

    def model_of(self, num_layers: int, mesh: Mesh, log: RoutingLog) -> Model:
        """Return a model of so many blocks, of which every second one has experts."""
        o = self.options
        common: dict[str, Any] = {
            "num_classes": len(CLASSES), "hidden": o.hidden, "num_experts": o.experts,
            "mesh": mesh, "log": log, "gate": o.moe,
        }  # fmt: skip
        if o.model == "v":
            return v_moe(num_layers=num_layers, num_heads=o.heads, **common)
        depths = collectives.even_counts(num_layers, STAGES)
        return swin_moe(num_layers=depths, num_heads=[o.heads] * STAGES, **common)

    def _taught(self, student: Model, mesh: Mesh) -> Model:
        """Return the student of a teacher in a checkpoint."""
        o, log = self.options, RoutingLog()
        path = checkpoint.latest(o.teacher)
        if path is None:
            raise ValueError(f"there is no checkpoint in {o.teacher}")
        its = self.model_of(o.teacher_layers or o.layers, mesh, log)
        self.logs.append(log)
        self.models.append(its)
        stop = o.steps if o.stop is None else o.stop
        try:
            parameters = checkpoint.load_parameters(path, its, self.comm, o.dtype)
        except checkpoint.LoadFailed as error:
            raise ValueError(
                f"the teacher cannot be loaded as a model of {o.teacher_layers or o.layers} blocks"
                " (--teacher-layers) with the other options of the student"
                f" (--model, --hidden, --heads, --experts): {error}"
            ) from error
        return distilled(student, Teacher(its, parameters), stop=stop, alpha=o.alpha)

    def batch(self, step: int, rank: int, ranks: int) -> Any:
        """Return a rank's images of a step, and their classes."""
        where = {"rank": rank, "num_ranks": ranks}
        return batch(seed=self.options.seed, step=step, batch_size=self.options.batch, **where)

    def all(self) -> int:
        """Train, and print what it was like; return the exit status."""
        o, trainer = self.options, self.trainer
        self.console.print(
            f"{o.model}, {', '.join(f'{axis}={n}' for axis, n in trainer.mesh.axes.items())}, gate"
            f" {o.moe}, batch {o.batch}: {trainer.model.num_parameters} parameters"
        )
        if o.teacher is not None:
            self.console.print(sizes(self.models[1], self.models[0]))
        with self.monitor, self.comm.record() as ledger:
            trainer.start()
            with cli.progress(self.console, o.steps) as show:
                losses = trainer.train(o.steps, self.batch, o.batch, show)
            if o.save is not None:
                checkpoint.save(trainer, o.save, o.steps)
        whole, observed = ledger.gather(), self.monitor.gather()
        self._expect_routing()
        reports = gather(self.comm, self._report())
        saved = checkpoint.traffic(trainer) if o.save is not None else []
        calls = trainer.traffic(o.steps, batch=(o.batch, 1)) + saved
        trainer.close()
        if whole is None or reports is None:
            return 0
        last = float(np.mean(losses[-10:]))
        self.console.print(
            f"loss {losses[0]:.4f} -> {last:.4f} nats per image (of the last 10 steps); by a"
            f" constant guess {math.log(len(CLASSES)):.4f}"
        )
        table = TrafficTable(
            calls, whole, observed, size=self.comm.size, reason=self.monitor.reason
        )
        return self._show(table, reports)

    def _expect_routing(self) -> None:
        """Let layers predict from the routing of this run."""
        for model, log in zip(self.models, self.logs, strict=True):
            found = log.gathered(self.comm)
            for layer in mixtures(model):
                layer.expected = found

    def _report(self) -> RankReport:
        """Return the report of this rank."""
        o, trainer = self.options, self.trainer
        rows = len(self.batch(0, *trainer.batch_part)[0])
        batches = [BatchSize(o.batch, 1, step) for step in range(o.steps)]
        updates = trainer.num_updates_in(o.steps) - trainer.num_skipped
        return RankReport.of(trainer, updates, rows, 1, batches)

    def _show(self, table: TrafficTable, reports: list[RankReport]) -> int:
        """Print memory and traffic, and what differs; return the exit status."""
        cli.print_rank_reports([each.memory | each.moved for each in reports], self.console)
        loss = self.trainer.model.layers["loss"]
        if isinstance(loss, Distillation):
            self.console.print(f"and on rank 0 {loss.teacher.nbytes} bytes of its teacher")
        cli.print_traffic(table, self.console)
        try:
            self.console.print(table.check())
        except TrafficMismatch as mismatch:
            self.console.print(f"TrafficMismatch: {mismatch}", markup=False)
            return 1
        wrong = "; ".join(differences(reports))
        good = "memory: formula = counted, to the byte; parameters: equal, to the bit"
        self.console.print(f"these differ: {wrong}" if wrong else good, markup=False)
        return 1 if wrong else 0


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


def sharding_of(axes: dict[str, int], zero: int) -> Sharding:
    """Return the sharding, by stage of ZeRO, along those axes along which images differ."""
    shared = tuple(axis for axis in ROW_AXES if axis in axes)
    if not shared:
        return Sharding()
    return Sharding.zero(zero, axes=shared) if zero else Sharding.ddp(axes=shared)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m moe.images", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    natural, positive = cli.at_least(0), cli.at_least(1)
    add = parse.add_argument
    add("--model", choices=("v", "swin"), default="v", help="V-MoE or Swin-MoE; default: v")
    add("--mesh", type=cli.mesh_axes, metavar="AXIS=N,...",
        help="of pipe, data, expert, tensor; default: all ranks along expert")  # fmt: skip
    add("--zero", type=int, choices=range(4), default=1, help="stage of ZeRO; default: 1")
    add("--threads", type=positive, metavar="N", help="run N ranks as threads, without MPI")
    add("--steps", type=positive, default=100, help="default: %(default)s")
    add("--batch", type=positive, default=32, help="images of all ranks; default: %(default)s")
    add("--micro-batches", type=positive, default=1, metavar="K", help="default: %(default)s")
    add("--lr", type=float, default=0.003, help="of Adam; default: %(default)s")
    add("--dtype", choices=("float64", "float32"), default="float32", help="default: %(default)s")
    add("--seed", type=natural, default=0, help="default: %(default)s")
    add("--layers", type=positive, default=4, help="number of blocks; default: %(default)s")
    add("--hidden", type=positive, default=32, help="width; default: %(default)s")
    add("--heads", type=positive, default=2, help="attention heads; default: %(default)s")
    add("--moe", choices=GATES, default="v-moe", help="the gate; default: %(default)s")
    add("--experts", type=positive, default=4, help="number of experts; default: %(default)s")
    add("--save", type=Path, metavar="DIR", help="save a checkpoint at the end")
    add("--teacher", type=Path, metavar="DIR", help="learn from the model in a checkpoint")
    add("--teacher-layers", type=positive, metavar="N", help="its blocks; default: as --layers")
    add("--stop", type=natural, metavar="STEP", help="learn alone from then on; default: never")
    add("--alpha", type=float, default=1.0, help="weight of imitation; default: %(default)s")
    return parse


if __name__ == "__main__":
    sys.exit(main())
