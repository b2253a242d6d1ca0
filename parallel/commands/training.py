"""One training run on one rank: what it needs, its steps, and what it has sent and kept."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import collectives
from collectives import Communicator, Ledger
from collectives.console import console_for, is_quiet, unwritable
from parallel import checkpoint, text
from parallel.accounts import (
    Event,
    PredictedCall,
    RankTimes,
    Timeline,
    TrafficMonitor,
    TrafficTable,
    gather_json,
    rank_times,
)
from parallel.commands import presets
from parallel.commands.models import SpecOf, dense_spec
from parallel.commands.rank_report import RankReport, gather_reports
from parallel.commands.tables import training_progress
from parallel.nn import Model, context_positions
from parallel.run import Trainer, agreement
from parallel.sharding import Sharding
from parallel.strategies import survive


class Training:
    """One run on one rank of `comm`, with the model of `spec_of`; see `train`.

    Ranks of `job`, by default `comm`, may have died before.  Raises ValueError, on all ranks, if
    options, text, checkpoint and ranks do not go together.
    """

    def __init__(
        self,
        comm: Communicator,
        options: argparse.Namespace,
        spec_of: SpecOf = dense_spec,
        job: Communicator | None = None,
    ) -> None:
        options = argparse.Namespace(**vars(options))  # ranks may be threads that share `options`
        self.comm, self.options, self.console = comm, options, console_for(comm.rank, options)
        self.monitor = TrafficMonitor(job or comm, is_wanted=not options.no_monitor)
        self.timeline = Timeline(comm, self.monitor.phase)
        with self.together("reading the text and the options"):
            self.text = text.load(options.text)
            self.batch(0, 0, 1)  # raises if it is too short
            self.spec = spec_of(options, comm.size)
            options.mesh = self.spec.mesh
            presets.name_strategy(comm.size, options, self.spec.axes, self.spec.row_options)
            check_batch(options, comm.size)
            self.checkpoints = checkpoints_of(options)
            files = {"--trace": options.trace, "--json": options.json, **self.spec.output_files}
            check_files(files, options.text, comm.rank)
        same = vars(options) | {"length": len(self.text)}
        agreement.check_same(comm, {"text": self.text}, same)
        self.model, self.strategy = self.made()
        self.strategy.layout.check_batch(options.batch, options.context)
        self.times: list[float] = []  # at the end of each step
        self.reports: list[RankReport] = []
        self.rank_times: list[RankTimes] = []

    def together(self, doing: str) -> AbstractContextManager[None]:
        """Return a context manager that raises ValueError on all ranks if it fails on some."""
        return agreement.raise_on_all_ranks(
            self.comm, collectives.phase, "prepare", doing, ValueError
        )

    def made(self) -> tuple[Model, Trainer]:
        """Return the model and the strategy that trains it."""
        comm, options, spec = self.comm, self.options, self.spec
        mesh = presets.mesh_of(comm, options, spec.axes, spec.row_options)
        model, name = spec.make(mesh), options.strategy
        # In two parts: the second makes communicators, for which no rank may be missing.
        with self.together("preparing the strategy"):
            recipe = presets.make_recipe(comm, options)
            make = presets.trainer_factory(comm, model, recipe, name, vars(options), mesh)
        with self.together("preparing the strategy"):
            return model, make(phase=self.timeline.phase)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
        """Return a rank's rows of a step's batch.  Raise ValueError if there are none."""
        o, part = self.options, {"rank": rank, "num_ranks": ranks}
        return text.batch(
            self.text, seed=o.seed, step=step, batch_size=o.batch, context=o.context, **part
        )

    def run(self) -> TrafficTable | None:
        """Train; return all ranks' traffic on rank 0, and None on others and if ranks have died."""
        o, source = self.options, self.checkpoints.source
        self.console.print(
            f"{presets.title(o)}, ranks {self.comm.size}, {o.dtype}, seed {o.seed},"
            f" batch {o.batch}: {self.model.num_parameters} parameters,"
            f" {len(self.text)} bytes of text"
        )
        with self.monitor, self.comm.record() as ledger:
            if source is None:
                self.strategy.start()
            else:
                self.strategy.resume()
                checkpoint.load(self.strategy, source)
                self.console.print(f"continuing from step {self.checkpoints.first}")
            num_skipped = self.strategy.updates.num_skipped
            self.all_steps()
        self.num_skipped = self.strategy.updates.num_skipped - num_skipped  # in this run
        is_elastic = o.strategy == "elastic"
        return survive(self.comm, partial(self.account, ledger), is_elastic=is_elastic)

    def all_steps(self) -> None:
        """Make and time all steps, with progress on the first rank."""
        o, first = self.options, self.checkpoints.first
        with training_progress(self.console, o.steps) as show_done:

            def show(done: int, loss: float) -> None:
                self.times.append(time.perf_counter())
                self.console.quiet = is_quiet(self.strategy.rank, o)  # the first rank may have died
                show_done(done, loss)
                if done in self.checkpoints.steps_to_save and done < o.steps:
                    checkpoint.save(self.strategy, o.save, done)

            began, total = time.perf_counter(), o.batch * o.context
            self.losses = self.strategy.train(o.steps, self.batch, total, show, first)
            self.seconds = time.perf_counter() - began
            if o.save is not None:
                checkpoint.save(self.strategy, o.save, o.steps)

    # What was sent and kept

    @property
    def num_dead(self) -> int:
        """The number of ranks that have died."""
        return self.monitor.comm.size - min(self.comm.size, self.strategy.size)

    def account(self, ledger: Ledger, comm: Communicator) -> TrafficTable | None:
        """Return the result of `run`; `comm` has the ranks that are alive."""
        self.comm = comm
        self.console.quiet = is_quiet(comm.rank, self.options)
        if self.num_dead:
            return None
        if self.options.trace is not None:
            self.timeline.write(ledger, self.options.trace)
        if self.spec.finish is not None:
            self.spec.finish(self.model, comm)
        self.reports = gather_reports(comm, self.own_report()) or []
        self.rank_times = self.times_of_ranks(comm)
        whole, observed = ledger.gather(), self.monitor.gather()
        if whole is None:
            return None
        reason = self.monitor.reason
        return TrafficTable(self.traffic(), whole, observed, size=comm.size, reason=reason)

    def own_report(self) -> RankReport:
        """Return the report of this rank."""
        o, first, part = self.options, self.checkpoints.first, self.strategy.batch_part
        rows = len(self.batch(0, *part)[0]) if part[1] else 0
        updates = self.strategy.num_updates_in(o.steps - first) - self.num_skipped
        batches = [(o.batch, o.context, step) for step in range(first, o.steps)]
        return RankReport.of(self.strategy, updates, rows, o.context, batches)

    def times_of_ranks(self, comm: Communicator) -> list[RankTimes]:
        """Return the times of all ranks in the last step of a pipeline, on rank 0; else [].

        There are none on a device, whose work the host only enqueues.
        """
        mesh = self.strategy.mesh
        if mesh.axes.get("pipe", 1) == 1 or not self.strategy.is_on_host:
            return []
        events = gather_json(comm, self.strategy.micro_batches.events) or []
        by_rank = [[Event(*event) for event in of_rank] for of_rank in events]
        return rank_times(by_rank, mesh.ranks("pipe")) if by_rank else []

    def traffic(self) -> list[PredictedCall]:
        """Return the predicted traffic of the run."""
        o, (source, first, steps_to_save) = self.options, self.checkpoints
        is_resumed = source is not None
        calls = self.strategy.traffic(
            o.steps - first,
            batch=(o.batch, o.context),
            num_skipped=self.num_skipped,
            is_resumed=is_resumed,
            first=first,
        )
        loads = is_resumed * checkpoint.traffic(self.strategy, "load")
        return calls + loads + len(steps_to_save) * checkpoint.traffic(self.strategy)


# Before the first step


def check_batch(options: argparse.Namespace, num_ranks: int) -> None:
    """Raise ValueError if rows or positions of the batch cannot be divided among the ranks."""
    axes = options.mesh or {}
    ranks = axes["data"] * axes.get("expert", 1) if "data" in axes else num_ranks
    # Raises if a rank would have no positions.
    context_positions(options.context, axes.get("context", 1), 0)
    if options.batch < ranks * options.micro_batches:
        raise ValueError(
            f"a global batch of {options.batch} cannot be divided among {ranks} ranks"
            f" with {options.micro_batches} micro-batches each"
        )


class Checkpoints(NamedTuple):
    """The checkpoints of a run."""

    source: Path | None  # from which it continues
    first: int  # the number of steps that were made before
    steps_to_save: list[int]


def checkpoints_of(options: argparse.Namespace) -> Checkpoints:
    """Return the checkpoints that the options ask for; make the folder to save them in.

    Raises ValueError if they are not possible, or if a checkpoint to save exists already.
    """
    check_saving(options)
    source = None if options.resume is None else checkpoint_in(options.resume, options.steps)
    first = 0 if source is None else checkpoint.num_steps_of(source)
    if options.save is None:
        return Checkpoints(source, first, [])
    every, steps = options.save_every or options.steps, range(first + 1, options.steps + 1)
    steps_to_save = [step for step in steps if step % every == 0 or step == options.steps]
    options.save.mkdir(parents=True, exist_ok=True)
    for path in (checkpoint.checkpoint_path(options.save, step) for step in steps_to_save):
        if path.exists():
            raise ValueError(f"cannot save a checkpoint in {path}: there is one already")
    return Checkpoints(source, first, steps_to_save)


def check_saving(options: argparse.Namespace) -> None:
    """Raise ValueError if the strategy cannot save the checkpoints that the options ask for."""
    if options.save_every is not None and options.save is None:
        raise ValueError("--save-every needs --save, the directory of the checkpoints")
    if options.save_every is not None and options.strategy == "server-async":
        raise ValueError(
            "server-async takes no --save-every: its ranks have made the same steps at the end only"
        )
    every = options.every or Sharding.local_updates().every
    if options.strategy == "local-updates" and every and (options.save_every or 0) % every:
        raise ValueError(
            f"--save-every {options.save_every} is no multiple of --every {every}: between, ranks"
            " have different parameters"
        )
    if options.strategy == "elastic" and (options.save or options.resume):
        raise ValueError("the elastic strategy takes no --save or --resume")


def checkpoint_in(folder: Path, num_steps: int) -> Path:
    """Return the checkpoint to continue from.  Raise ValueError if none, or no step, is left."""
    path = checkpoint.latest(folder)
    if path is None:
        raise ValueError(f"there is no checkpoint in {folder}")
    if (done := checkpoint.num_steps_of(path)) >= num_steps:
        raise ValueError(f"{path} is after step {done}: --steps must be more")
    return path


def check_files(files: Mapping[str, Path | None], source: str | None, rank: int) -> None:
    """Raise ValueError if an output file cannot be written, on rank 0, or is named twice.

    `files` has paths by option, and `source` is the path of the text.
    """
    outputs = {option: path for option, path in files.items() if path is not None}
    for path in outputs.values():
        if rank == 0 and (reason := unwritable(path)):
            raise ValueError(reason)
        if source is not None and path.resolve() == Path(source).resolve():
            raise ValueError(f"{path} is the text: it would be overwritten")
    for (one, path), (other, same) in combinations(outputs.items(), 2):
        if path.resolve() == same.resolve():
            raise ValueError(f"{one} and {other} name the same file, {path}")
