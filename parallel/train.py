"""Train a small GPT over bytes by any strategy; compare all bytes sent with the prediction.

    python -m collectives.launch -n 4 -m parallel.train --strategy zero2 --micro-batches 2
    python -m parallel.train --strategy serial --json serial.json
    python -m parallel.train --threads 2 --strategy zero3 --device cuda
    python -m collectives.launch -n 4 -m parallel.train --strategy ddp --hook powersgd:4
    python -m collectives.launch -n 8 -m parallel.train --mesh pipe=2,data=2,tensor=2 --zero 1 \\
        --schedule zb-v --micro-batches 4 --sequence-parallel
    python -m collectives.launch -n 4 -m parallel.train --mesh data=2,expert=2 --moe switch
    python -m collectives.launch -n 4 --fault-tolerant -m parallel.train --strategy elastic

Rank 0 prints the loss, the memory of every rank (by formula, and counted) and the traffic
(predicted, recorded and observed).  The exit status is 1 if columns differ, and 2 if the arguments
do not go together.  A run is a function of its arguments and the text, bitwise, except for
server-async, whose result depends on the order in which gradients arrive.  If ranks of an elastic
run die, the others continue; no traffic is shown then, because the records of dead ranks are lost.

Under plain mpirun set OMP_NUM_THREADS=1, as the launcher does: otherwise every rank uses as many
threads as there are cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import zlib
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import collectives
from collectives import Communicator, Ledger
from collectives.export import unwritable
from moe import RoutingLog, layout, mixtures, moe_gpt
from moe.cli import (
    add_capacity_options,
    add_dispatch_options,
    add_expert_options,
    gate_options,
)
from moe.layouts import LAYOUTS
from parallel import checkpoint, cli, presets, text
from parallel.accounts import (
    Event,
    PredictedCall,
    RankTimes,
    Timeline,
    TrafficMismatch,
    TrafficMonitor,
    TrafficTable,
    gather_json,
    rank_times,
)
from parallel.elastic import survive
from parallel.job import InvalidRun, on_ranks, preparing, running
from parallel.mesh import Mesh
from parallel.nn import Model, context_positions
from parallel.nn.gpt import ATTENTION, SEQUENCE_PARALLEL, gpt
from parallel.optim import DTYPES
from parallel.pipeline import SCHEDULES, simulate
from parallel.rank_report import RankReport, differences, gather
from parallel.runtime import BatchSize, agreement


def main(arguments: list[str] | None = None) -> int:
    """Train as the command line says; return the exit status."""
    parse = parser()
    options = parse.parse_args(arguments)
    is_auto = options.progress == "auto" and options.strategy == "elastic"
    wanted = "none" if is_auto else options.progress  # elastic sums are blocking
    return on_ranks(
        parse, options, partial(run_training, options=options),
        partial(world_of, options, wanted),
    )  # fmt: skip


def world_of(options: argparse.Namespace, wanted: str) -> Communicator:
    """Return the communicator of all ranks.  All ranks call this.

    Arrays on GPUs are staged in host memory if MPI's counters are read, for MPI does not see what
    ranks read from each other's GPUs.  `wanted`: see `with_progress`.
    """
    comm = collectives.world()
    if options.device == "cpu" or options.no_monitor or not has_counters(comm):
        return with_progress(comm, wanted)
    cli.console_of(comm.rank).print(
        "Messages are staged in host memory, where MPI counts them; with --no-monitor ranks read"
        " each other's GPUs."
    )
    return with_progress(collectives.world(device="staged"), wanted, is_staged=True)


def has_counters(comm: Communicator) -> bool:
    """Return whether MPI's counters can be read on some rank.  All ranks call this."""
    with TrafficMonitor(comm) as monitor:
        mine = np.array([monitor.reason is None])
    return bool(comm.all_gather(mine).any())


def with_progress(comm: Communicator, wanted: str, *, is_staged: bool = False) -> Communicator:
    """Return `comm`, or one whose calls continue in a thread, as is `wanted` (``--progress``).

    `is_staged`: whether arrays on GPUs are staged in host memory.  All ranks call this.  Raises
    InvalidRun if the MPI cannot be called from several threads.
    """
    if wanted == "auto":
        are_free = comm.all_gather(np.array([has_free_core(comm)])).all()
        wanted = "thread" if are_free and comm.size > 1 else "none"
    if wanted == "none":
        return comm
    try:
        return collectives.world(progress="thread", device="staged" if is_staged else "auto")
    except RuntimeError as error:
        raise InvalidRun(str(error)) from error


def has_free_core(comm: Communicator) -> bool:
    """Return whether this rank's cores are more than the ranks that use them."""
    host = comm.all_gather(np.array([zlib.crc32(platform.node().encode())]))
    cores = len(os.sched_getaffinity(0))
    is_bound = cores < (os.cpu_count() or 1)  # then they are its own
    return cores > (1 if is_bound else int((host == host[comm.rank]).sum()))


def run_training(comm: Communicator, options: argparse.Namespace) -> int:
    """Train on one rank; return the exit status.  Raise InvalidRun before the first step."""
    make, is_elastic = partial(Training, options=options, job=comm), options.strategy == "elastic"
    with preparing():
        training = survive(comm, make, is_elastic=is_elastic)
    with running(options):
        try:
            table = training.run()
            training.strategy.close()
        except checkpoint.LoadFailed as error:  # on all ranks: none waits
            raise InvalidRun(str(error)) from error
    return training.report(table) if training.comm.rank == 0 else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parse = argparse.ArgumentParser("python -m parallel.train", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    natural, positive = cli.at_least(0), cli.at_least(1)
    add = parse.add_argument
    add("--strategy", choices=presets.STRATEGIES, help="a mesh and a sharding; default: ddp")
    add("--mesh", type=cli.mesh_axes, metavar="AXIS=N,...", help="such as data=4; or --strategy")
    add("--layout", type=layout_words, metavar="NAME[:M]",
        help="a mesh for --moe: " + ", ".join(LAYOUTS) + "; M ranks divide each weight",
    )  # fmt: skip
    add("--zero", type=int, choices=range(4), help="stage of ZeRO on the mesh; 0: sum gradients")
    add("--text", metavar="PATH", help="file or directory; default: Python's standard library")
    add("--steps", type=positive, default=100, help="default: %(default)s")
    add("--batch", type=positive, default=16, help="rows of all ranks; default: %(default)s")
    add("--micro-batches", type=positive, default=1, metavar="K",
        help="parts in which a rank computes its rows; default: %(default)s")  # fmt: skip
    add("--schedule", choices=SCHEDULES, help="of the pipeline along the axis pipe; default: 1f1b")
    add("--sequence-parallel", nargs="?", const="keep", choices=SEQUENCE_PARALLEL[1:],
        help="also divide rows along tensor; keep what is gathered, or gather again")  # fmt: skip
    add("--attention", choices=ATTENTION, help="of the ranks along context; default: ring")
    add("--ranks-per-host", type=positive, metavar="N",
        help="hosts of N consecutive ranks; default: as MPI reports them")  # fmt: skip
    add("--seed", type=natural, default=0, help="default: %(default)s")
    add("--threads", type=positive, metavar="N", help="run N ranks as threads, without MPI")
    add("--progress", choices=("auto", "thread", "none"), default="auto",
        help="whether calls continue in a thread; auto: if each rank has a free core")  # fmt: skip

    add = parse.add_argument_group("model").add_argument
    cli.add_gpt_options(add)
    add("--dropout", type=float, default=0.0, metavar="RATE",
        help="behind attention and MLP; default: none")  # fmt: skip
    add("--recompute", nargs="?", const="all", default="none", choices=presets.RECOMPUTE,
        help="keep only the inputs of all blocks, or of attention; default: none")  # fmt: skip

    add = parse.add_argument_group("mixtures of experts").add_argument
    add_expert_options(add)
    add_capacity_options(add)
    add("--rows-per-group", type=positive, metavar="N",
        help="rows of the batch that are routed together; default: 1")  # fmt: skip
    add("--expert-dropout", type=float, metavar="RATE",
        help="in the middle of each expert; default: none")  # fmt: skip
    add_dispatch_options(add)
    add("--routing", type=Path, metavar="FILE",
        help="predict from this routing, of a run on one rank; default: that of this run",
    )  # fmt: skip
    add("--save-routing", type=Path, metavar="FILE", help="write the routing of all steps to FILE")

    add = parse.add_argument_group("update").add_argument
    add("--dtype", choices=DTYPES, default="float64",
        help="of parameters, gradients and messages; default: %(default)s")  # fmt: skip
    add("--reduce-dtype", choices=DTYPES, help="in which gradients are summed; default: --dtype")
    add("--optimizer", choices=presets.OPTIMIZERS, default="adam", help="default: %(default)s")
    add("--lr", type=float, default=2e-3, help="default: %(default)s")
    add("--clip", type=float, metavar="NORM", help="largest norm of the whole gradient")
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the model is; cuda needs CuPy; default: %(default)s")  # fmt: skip
    add("--offload", metavar="PLACE", help="update in host memory (host) or on disk (disk:FOLDER)")
    add("--offload-activations", metavar="PLACE", help="move activations there until backward")

    add = parse.add_argument_group("options of some strategies").add_argument
    add("--algorithm", metavar="NAME", help="of collectives; default: ring, or linear for server-*")
    add("--bucket-bytes", type=positive, help="ddp, elastic: gradients summed together")
    add("--hook", metavar="NAME", help=f"ddp: how gradients are summed: {', '.join(presets.HOOKS)}")
    add("--keep-after-forward", action="store_true", default=None,
        help="zero3, hsdp: free parameters after backward only")  # fmt: skip
    add("--group-size", type=positive, help="hsdp, zeropp: number of ranks in a group")
    add("--every", type=positive, metavar="STEPS",
        help="local-updates: steps that ranks make alone; default: 10")  # fmt: skip
    add("--outer-lr", type=float, help="local-updates: of the common model; default: 0.7")
    add("--outer-momentum", type=float, help="local-updates: of the common model; default: 0.9")
    add("--gradient-bits", type=int, choices=(4, 8), help="zeropp: of an element of a gradient")
    add("--staleness-bound", type=natural, help="server-async: steps ahead of the slowest worker")
    add("--kill", type=rank_and_step, metavar="RANK:STEP",
        help="elastic: this rank kills its process (-9) in the middle of this step")  # fmt: skip

    add = parse.add_argument_group("files").add_argument
    add("--save", type=Path, metavar="DIR", help="save a checkpoint in DIR at the end")
    add("--save-every", type=positive, metavar="STEPS", help="also save one every STEPS steps")
    add("--resume", type=Path, metavar="DIR", help="continue from the last checkpoint in DIR")
    add("--trace", type=Path, metavar="FILE", help="write a timeline for chrome://tracing")
    add("--json", type=Path, metavar="FILE", help="write losses, memory and traffic to FILE")
    add("--no-monitor", action="store_true", help="do not read MPI's own counters")
    return parse


def rank_and_step(word: str) -> tuple[int, int]:
    """Return rank 2 and step 50 for "2:50"; an argument type."""
    rank, _, step = word.partition(":")
    if not (rank.isdecimal() and step.isdecimal()):
        raise argparse.ArgumentTypeError(f"{word!r} is not RANK:STEP, such as 2:50")
    return int(rank), int(step)


def layout_words(word: str) -> tuple[str, int]:
    """Return the name of a layout and the ranks that divide each weight, of ``NAME[:M]``."""
    name, _, number = word.partition(":")
    return name, int(number or 1)


def model_of(options: argparse.Namespace, mesh: Mesh | None, log: RoutingLog) -> Model:
    """Return the model of the command line; mixtures of experts add their routing to `log`."""
    of_gpt: dict[str, Any] = {
        **cli.gpt_options(options), "mesh": mesh,
        "recompute": presets.RECOMPUTE[options.recompute], "dropout": options.dropout,
        "sequence_parallel": options.sequence_parallel, "attention": options.attention or "ring",
    }  # fmt: skip
    if options.moe is None:
        return gpt(**of_gpt)
    of_layer = presets.given_options(options, presets.MOE_OPTIONS)
    return moe_gpt(
        gate=options.moe, gate_options=gate_options(options), num_experts=options.experts, log=log,
        ranks_per_host=options.ranks_per_host, **of_layer, **of_gpt,
    )  # fmt: skip


class Training:
    """One run, on one rank of `comm`; ranks of `job`, by default `comm`, may have died before.

    Raises ValueError, on all ranks, if options, text, checkpoint and ranks do not go together.
    """

    def __init__(
        self, comm: Communicator, options: argparse.Namespace, job: Communicator | None = None
    ) -> None:
        options = argparse.Namespace(**vars(options))  # ranks may be threads that share `options`
        self.comm, self.options, self.console = comm, options, cli.console_of(comm.rank)
        self.monitor = TrafficMonitor(job or comm, is_wanted=not options.no_monitor)
        self.timeline = Timeline(comm, self.monitor.phase)
        together = partial(
            agreement.raise_on_all_ranks, comm, collectives.phase, "prepare", failure=ValueError
        )
        with together("reading the text and the options"):
            self.text = text.load(options.text)
            self.use_layout()
            presets.name_strategy(comm, options)
            self.check_options()
        same = vars(options) | {"length": len(self.text)}
        agreement.check_same(comm, {"text": self.text}, same)
        mesh = presets.mesh_of(comm, options)
        self.routing = RoutingLog()  # of this rank
        self.model = model_of(options, mesh, self.routing)
        # In two parts: the second makes communicators, for which no rank may be missing.
        with together("preparing the strategy"):
            recipe, given = presets.make_recipe(comm, options), vars(options)
            make = presets.trainer_factory(comm, self.model, recipe, options.strategy, given, mesh)
        with together("preparing the strategy"):
            self.strategy = make(phase=self.timeline.phase)
        self.strategy.check_batch(options.batch, options.context)
        self.times: list[float] = []  # at the end of each step
        self.reports: list[RankReport] = []
        self.rank_times: list[RankTimes] = []

    # Before the first step

    def use_layout(self) -> None:
        """Set the mesh that ``--layout`` names.

        Raises ValueError if there is none, or beside another mesh.
        """
        o = self.options
        if o.layout is None:
            return
        if o.mesh is not None or o.strategy is not None or o.moe is None:
            raise ValueError(
                "--layout names a mesh for --moe: it takes no --mesh and no --strategy"
            )
        o.mesh = layout(o.layout[0], self.comm.size, o.layout[1])

    def check_options(self) -> None:
        """Raise ValueError if the batch, the text, the checkpoints or the files are impossible."""
        o = self.options
        self.check_batch()
        presets.check_saving(o)
        self.source = None if o.resume is None else self.checkpoint_in(o.resume)
        self.first = 0 if self.source is None else checkpoint.num_steps_of(self.source)
        steps = range(self.first + 1, o.steps + 1) if o.save is not None else ()
        every = o.save_every or o.steps
        self.steps_to_save = [x for x in steps if x % every == 0 or x == o.steps]
        self.check_files()

    def check_batch(self) -> None:
        """Raise ValueError if the batch cannot be divided, or if the text is too short."""
        o = self.options
        axes = o.mesh or {}
        ranks = axes["data"] * axes.get("expert", 1) if "data" in axes else self.comm.size
        self.batch(0, 0, 1)
        context_positions(o.context, axes.get("context", 1), 0)  # raises if a rank would have none
        if o.batch < ranks * o.micro_batches:
            raise ValueError(
                f"a global batch of {o.batch} cannot be divided among {ranks} ranks"
                f" with {o.micro_batches} micro-batches each"
            )

    def checkpoint_in(self, folder: Path) -> Path:
        """Return the checkpoint to continue from; ValueError if there is none, or nothing to do."""
        path = checkpoint.latest(folder)
        if path is None:
            raise ValueError(f"there is no checkpoint in {folder}")
        if (done := checkpoint.num_steps_of(path)) >= self.options.steps:
            raise ValueError(f"{path} is after step {done}: --steps must be more")
        return path

    def check_files(self) -> None:
        """Raise ValueError if a checkpoint exists already or a file cannot be written."""
        o = self.options
        if o.save is not None:
            o.save.mkdir(parents=True, exist_ok=True)
        for path in (checkpoint.checkpoint_path(o.save, step) for step in self.steps_to_save):
            if path.exists():
                raise ValueError(f"cannot save a checkpoint in {path}: there is one already")
        named = {"--trace": o.trace, "--json": o.json, "--save-routing": o.save_routing}
        outputs = {name: path for name, path in named.items() if path is not None}
        if o.routing is not None:
            RoutingLog.read(o.routing)  # raises if it cannot be read
        for path in outputs.values():
            if self.comm.rank == 0 and (reason := unwritable(path)):
                raise ValueError(reason)
            if o.text is not None and path.resolve() == Path(o.text).resolve():
                raise ValueError(f"{path} is the text: it would be overwritten")
        for (one, path), (other, same) in combinations(outputs.items(), 2):
            if path.resolve() == same.resolve():
                raise ValueError(f"{one} and {other} name the same file, {path}")

    # The run

    def run(self) -> TrafficTable | None:
        """Train; return all ranks' traffic on rank 0, and None on others and if ranks have died."""
        o = self.options
        self.console.print(
            f"{presets.title(o)}, ranks {self.comm.size}, {o.dtype}, seed {o.seed},"
            f" batch {o.batch}: {self.model.num_parameters} parameters,"
            f" {len(self.text)} bytes of text"
        )
        with self.monitor, self.comm.record() as ledger:
            if self.source is None:
                self.strategy.start()
            else:
                self.strategy.resume()
                checkpoint.load(self.strategy, self.source)
                self.console.print(f"continuing from step {self.first}")
            num_skipped = self.strategy.num_skipped
            self.all_steps()
        self.num_skipped = self.strategy.num_skipped - num_skipped  # in this run
        is_elastic = o.strategy == "elastic"
        return survive(self.comm, partial(self.account, ledger), is_elastic=is_elastic)

    def all_steps(self) -> None:
        """Make and time all steps, with progress on the first rank."""
        o = self.options
        with cli.progress(self.console, o.steps) as show_done:

            def show(done: int, loss: float) -> None:
                self.times.append(time.perf_counter())
                self.console.quiet = self.strategy.rank != 0  # the first rank may have died
                show_done(done, loss)
                if done in self.steps_to_save and done < o.steps:
                    checkpoint.save(self.strategy, o.save, done)

            began, total = time.perf_counter(), o.batch * o.context
            self.losses = self.strategy.train(o.steps, self.batch, total, show, self.first)
            self.seconds = time.perf_counter() - began
            if o.save is not None:
                checkpoint.save(self.strategy, o.save, o.steps)

    def batch(self, step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
        """Return a rank's rows of a step's batch.  Raise ValueError if there are none."""
        o, part = self.options, {"rank": rank, "num_ranks": ranks}
        return text.batch(
            self.text, seed=o.seed, step=step, batch_size=o.batch, context=o.context, **part
        )

    # Results

    @property
    def num_dead(self) -> int:
        """The number of ranks that have died."""
        return self.monitor.comm.size - min(self.comm.size, self.strategy.size)

    def account(self, ledger: Ledger, comm: Communicator) -> TrafficTable | None:
        """Return what `run` returns; `comm` is of the ranks that are alive."""
        self.comm = comm
        self.console.quiet = comm.rank != 0
        if self.num_dead:
            return None
        if self.options.trace is not None:
            self.timeline.write(ledger, self.options.trace)
        part = self.strategy.batch_part
        rows = len(self.batch(0, *part)[0]) if part[1] else 0
        updates = self.strategy.num_updates_in(self.options.steps - self.first) - self.num_skipped
        self.expect_routing(comm)
        steps = range(self.first, self.options.steps)
        batches = [BatchSize(self.options.batch, self.options.context, step) for step in steps]
        report = RankReport.of(self.strategy, updates, rows, self.options.context, batches)
        self.reports = gather(comm, report) or []
        self.rank_times = self.times_of_ranks(comm)
        whole, observed = ledger.gather(), self.monitor.gather()
        if whole is None:
            return None
        reason = self.monitor.reason
        return TrafficTable(self.traffic(), whole, observed, size=comm.size, reason=reason)

    def expect_routing(self, comm: Communicator) -> None:
        """Let layers predict from the routing in the file of --routing, or else of this run.

        Write that of this run to the file of --save-routing.
        """
        o = self.options
        if o.moe is None:
            return
        if o.routing is None or o.save_routing is not None:
            found = self.routing.gathered(comm)
        if o.save_routing is not None and comm.rank == 0:
            o.save_routing.write_bytes(found.to_bytes())
        if o.routing is not None:
            found = RoutingLog.read(o.routing)
        for layer in mixtures(self.model):
            layer.expected = found

    def times_of_ranks(self, comm: Communicator) -> list[RankTimes]:
        """Return the times of all ranks in the last step of a pipeline, on rank 0; else none.

        None on a device, whose work the host only enqueues.
        """
        mesh = self.strategy.mesh
        if mesh.axes.get("pipe", 1) == 1 or not self.strategy.is_on_host:
            return []
        events = gather_json(comm, self.strategy.micro_batches.events) or []
        each = [[Event(*event) for event in of_rank] for of_rank in events]
        return rank_times(each, mesh.ranks("pipe")) if each else []

    def traffic(self) -> list[PredictedCall]:
        """Return the predicted traffic of the run."""
        o, is_resumed = self.options, self.source is not None
        calls = self.strategy.traffic(
            o.steps - self.first, batch=(o.batch, o.context), num_skipped=self.num_skipped,
            is_resumed=is_resumed, first=self.first,
        )  # fmt: skip
        loads = is_resumed * checkpoint.traffic(self.strategy, "load")
        return calls + loads + len(self.steps_to_save) * checkpoint.traffic(self.strategy)

    def report(self, table: TrafficTable | None) -> int:
        """Print the results, and write them to the file of --json; return the exit status."""
        result = self.result(table)
        self.console.print(
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} nats per byte,"
            f" unigram entropy {result['unigram_entropy']:.4f}; {self.seconds:.2f} s,"
            f" {result['tokens_per_second']:.0f} tokens/s"
        )
        self.console.print("\n".join([*self.strategy.summary_lines(), ""]), markup=False)
        status = self.report_bytes(table)
        if self.options.json is not None:
            # JSON has no numbers that are not finite: null stands for them.
            words = json.dumps(result, default=os.fspath)
            result = json.loads(words, parse_constant=lambda number: None)
            self.options.json.write_text(json.dumps(result, indent=1) + "\n")
        return status

    def result(self, table: TrafficTable | None) -> dict[str, Any]:
        """Return the options, losses, speed, memory and traffic, for JSON."""
        o = self.options
        return vars(o) | {
            "ranks": self.monitor.comm.size,
            "losses": self.losses,
            "first_step": self.first,
            "parameters": self.model.num_parameters,
            "unigram_entropy": text.unigram_entropy(self.text),
            "seconds": self.seconds,
            "seconds_per_step": median([b - a for a, b in pairwise(self.times)] or [self.seconds]),
            "tokens_per_second": o.batch * o.context * (o.steps - self.first) / self.seconds,
            "ranks_kept": [report.memory for report in self.reports],
            "rank_times": [each._asdict() for each in self.rank_times],
            "ranks_moved": [report.moved for report in self.reports],
            "traffic": None if table is None else table.as_dict(),
        }

    def report_bytes(self, table: TrafficTable | None) -> int:
        """Print memory and traffic, and what differs; return the exit status."""
        if table is None:
            self.console.print(
                f"{self.num_dead} of {self.monitor.comm.size} ranks died; the others ended with the"
                " same parameters, bitwise.  No traffic: the records of dead ranks are lost."
                f"{' No timeline, for the same reason.' if self.options.trace else ''}"
            )
            return 0
        kept = [report.memory | report.moved for report in self.reports]
        cli.print_rank_reports(kept, self.console)
        cli.print_traffic(table, self.console)
        mesh = self.strategy.mesh
        hosts = mesh.hosts(self.options.ranks_per_host)
        if hosts.num_hosts > 1:
            cli.print_hosts(table, mesh.axes, hosts, self.console)
        if self.rank_times:
            bubble = simulate(self.strategy.stages.schedule).fractions[0]
            cli.print_pipeline(self.rank_times, float(bubble), self.console)
        try:
            self.console.print(table.check())
        except TrafficMismatch as mismatch:
            self.console.print(f"TrafficMismatch: {mismatch}", markup=False)
            return 1
        wrong = "; ".join(differences(self.reports))
        good = "memory: formula = counted, to the byte; parameters: equal, to the bit"
        self.console.print(f"these differ: {wrong}" if wrong else good, markup=False)
        return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
