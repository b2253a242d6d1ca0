"""Train a small GPT over bytes by any of the strategies, and account for every byte that is sent.

    python -m collectives.launch -n 4 -m parallel.train --strategy zero2 --micro-batches 2
    python -m parallel.train --strategy serial --json serial.json
    python -m parallel.train --threads 2 --strategy zero3 --device cuda
    python -m collectives.launch -n 4 -m parallel.train --strategy ddp --hook powersgd:4
    python -m collectives.launch -n 4 --fault-tolerant -m parallel.train --strategy elastic

Rank 0 prints the loss, then the memory of every rank, counted and by formula, and the traffic:
predicted, recorded and observed.  The exit status is 1 if columns differ.  A run is a function of
its arguments and the text: losses repeat to the last bit, but for server-async, where the order in
which ranks come decides.  If ranks of an elastic run die the others go on, and no traffic is shown:
the dead took with them what they had recorded.

Under a bare mpirun set OMP_NUM_THREADS=1, as the launcher does: otherwise every rank computes with
as many threads as there are cores, and they stand in each other's way.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import mpi4py.run

import collectives
from collectives import Communicator
from parallel import agreement, checkpoint, choices, text
from parallel.account import Account, differences, gather
from parallel.gpt import gpt
from parallel.precision import DTYPES
from parallel.show import console_of, print_accounts, print_curve, print_traffic, progress
from parallel.timeline import Timeline
from parallel.traffic import PredictedCall, TrafficMismatch, TrafficTable, Witness

if TYPE_CHECKING:
    from rich.console import Console


def main(arguments: list[str] | None = None) -> int:
    """Train as told on the command line.  0, 1 if columns differ, 2 if the run cannot be."""
    parse = parser()
    options = parse.parse_args(arguments)
    is_first = options.threads is not None or collectives.world().rank == 0
    try:
        if options.threads is None:
            return trained(collectives.world(), options)
        return collectives.run(partial(trained, options=options), options.threads, timeout=None)[0]
    except Refused as error:
        parse.exit(2, f"{parse.prog}: {error}\n" if is_first else None)


class Refused(Exception):  # noqa: N818
    """The run cannot be, which all ranks say in the same words."""


def trained(comm: Communicator, options: argparse.Namespace) -> int:
    """What `main` does, on one rank."""
    try:
        training = Training(comm, options, console_of(comm.rank))
    except ValueError as error:
        raise Refused(str(error)) from error
    with ending_all():
        table = training.run()
        training.strategy.close()
    return training.report(table) if training.is_first else 0


@contextmanager
def ending_all() -> Iterator[None]:
    """What fails on one rank ends the job: the others would wait for it for ever."""
    try:
        yield
    except BaseException as error:
        if "mpi4py.MPI" in sys.modules:
            mpi4py.run.set_abort_status(error)  # heeded when Python ends
        raise


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m parallel.train", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parse.add_argument
    add("--strategy", choices=choices.STRATEGIES, default="ddp", help="default: %(default)s")
    add("--text", metavar="PATH", help="file or directory; default: Python's own library")
    add("--steps", type=at_least(1), default=100, help="default: %(default)s")
    add("--batch", type=at_least(1), default=16, help="rows of all ranks together; %(default)s")
    add("--micro-batches", type=at_least(1), default=1, metavar="K",
        help="parts of a rank's rows, one after the other; default: %(default)s")  # fmt: skip
    add("--seed", type=at_least(0), default=0, help="default: %(default)s")
    add("--threads", type=at_least(1), metavar="N", help="ranks are N threads, without MPI")

    add = parse.add_argument_group("model").add_argument
    add("--layers", type=at_least(1), default=4, help="blocks, default: %(default)s")
    add("--hidden", type=at_least(1), default=256, help="width, default: %(default)s")
    add("--heads", type=at_least(1), default=4, help="default: %(default)s")
    add("--context", type=at_least(1), default=64, help="in bytes, default: %(default)s")
    add("--tied", action="store_true", help="the head's table is the embedding's")
    add("--recompute", action="store_true", help="keep only the input of each block")

    add = parse.add_argument_group("update").add_argument
    add("--dtype", choices=DTYPES, default="float64",
        help="of parameters, gradients and messages; default: %(default)s")  # fmt: skip
    add("--optimizer", choices=choices.OPTIMIZERS, default="adam", help="default: %(default)s")
    add("--lr", type=float, default=2e-3, help="default: %(default)s")
    add("--clip", type=float, metavar="NORM", help="the greatest norm of the whole gradient")
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the model is; cuda takes CuPy; default: %(default)s")  # fmt: skip
    add("--offload", metavar="PLACE", help="update in host memory (host) or on disk (disk:FOLDER)")

    add = parse.add_argument_group("what some strategies take").add_argument
    add(
        "--algorithm", metavar="NAME", help="of their large collectives; ring, or linear of servers"
    )
    add("--bucket-bytes", type=at_least(1), help="ddp: gradients that travel together")
    add("--hook", metavar="NAME", help=f"ddp: how they do, {', '.join(choices.HOOKS)}")
    add("--keep-after-forward", action="store_true", default=None,
        help="zero3, hsdp: free parameters after backward only")  # fmt: skip
    add("--group", type=at_least(1), help="hsdp, zeropp: ranks of a group")
    add("--bound", type=at_least(0), help="server-async: steps that a worker may be ahead")
    add("--kill", type=rank_and_step, metavar="RANK:STEP",
        help="elastic: this rank kills itself (-9) in the middle of this step")  # fmt: skip

    add = parse.add_argument_group("files").add_argument
    add("--save", type=Path, metavar="DIR", help="save checkpoints there, one at the end")
    add("--save-every", type=at_least(1), metavar="STEPS", help="and one after every so many steps")
    add("--resume", type=Path, metavar="DIR", help="go on from the last checkpoint there")
    add("--trace", type=Path, metavar="FILE", help="write a timeline, for chrome://tracing")
    add("--json", type=Path, metavar="FILE", help="write losses, memory and traffic to FILE")
    add("--no-monitor", action="store_true", help="leave MPI's own counters alone")
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: an integer not below `least`."""

    def integer(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def can_be_written(path: Path) -> bool:
    """Whether there can be a file of that name."""
    return os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()


def rank_and_step(word: str) -> tuple[int, int]:
    """An argument's type: "2:50" is rank 2 and step 50."""
    rank, step = word.split(":")
    return int(rank), int(step)


class Training:
    """One run.  ValueError if arguments, text, checkpoint and ranks do not go together."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, console: Console) -> None:
        self.comm, self.options, self.console = comm, options, console
        self.witness = Witness(comm, is_wanted=not options.no_monitor)
        self.timeline = Timeline(comm, self.witness.phase)
        with self.together("reading the text and the options"):
            self.text = text.load(options.text)
            self.check()
        self.compare()
        self.entropy = text.unigram_entropy(self.text)
        self.model = gpt(
            layers=options.layers, hidden=options.hidden, heads=options.heads,
            context=options.context, is_tied=options.tied,
        )  # fmt: skip
        # In two parts: who fails in the first does not come to the groups made in the second.
        with self.together("preparing the strategy"):
            make = choices.maker(comm, self.model, options)
        with self.together("preparing the strategy"):
            self.strategy = make(phase=self.timeline.phase)
        self.losses: list[float] = []
        self.seconds, self.skipped_before = 0.0, 0
        self.times: list[float] = []
        self.accounts: list[Account] = []

    def together(self, doing: str) -> AbstractContextManager[None]:
        """ValueError on all ranks for what fails inside on one."""
        return agreement.together(self.comm, collectives.phase, "prepare", doing, ValueError)

    def compare(self) -> None:
        """ModelsDiffer, which is a ValueError, unless all ranks have the same text and options."""
        told = {name: agreement.digest(value) for name, value in vars(self.options).items()}
        texts = {"text": agreement.digest(self.text)}
        agreement.check_alike(self.comm, texts, told | {"length": agreement.digest(len(self.text))})

    def check(self) -> None:
        """ValueError for what cannot be divided, is too short or could not be written."""
        self.check_batch()
        choices.check_saving(self.options)
        self.source = self.checkpoint()
        self.first = 0 if self.source is None else checkpoint.steps_of(self.source)
        self.saves = self.steps_to_save()
        self.check_files()

    def steps_to_save(self) -> list[int]:
        """After how many steps there is to be a checkpoint."""
        o = self.options
        if o.save is None:
            return []
        often = range(self.first + 1, o.steps) if o.save_every is not None else ()
        return [*(step for step in often if step % o.save_every == 0), o.steps]

    def check_files(self) -> None:
        """ValueError for what would be lost at the end: there already, or nowhere to go."""
        o = self.options
        if o.save is not None:
            o.save.mkdir(parents=True, exist_ok=True)
        for place in (checkpoint.place_of(o.save, step) for step in self.saves):
            if place.exists():
                raise ValueError(f"there is a checkpoint already where one is to be: {place}")
        for path in (o.trace, o.json):
            if self.comm.rank == 0 and path is not None and not can_be_written(path):
                raise ValueError(f"{path} cannot be written")

    def check_batch(self) -> None:
        """ValueError for what cannot be divided, or is too short."""
        o, ranks = self.options, self.comm.size
        self.batch(0, 0, 1)
        if o.batch < ranks * o.micro_batches:
            raise ValueError(
                f"a global batch of {o.batch} cannot be divided among {ranks} ranks"
                f" with {o.micro_batches} micro-batches each"
            )

    def begin(self) -> None:
        """From the initial values, or from the last checkpoint if the run is to go on."""
        if self.source is None:
            self.strategy.start()
            return
        self.strategy.resume()
        checkpoint.load(self.strategy, self.source)
        self.skipped_before = self.strategy.num_skipped
        self.console.print(f"from step {self.first} on")

    def checkpoint(self) -> Path | None:
        """What to go on from, if so asked.  ValueError if it is not there, or has nothing to do."""
        if self.options.resume is None:
            return None
        path = checkpoint.latest(self.options.resume)
        if path is None:
            raise ValueError(f"no checkpoint in {self.options.resume}")
        if (done := checkpoint.steps_of(path)) >= self.options.steps:
            raise ValueError(f"{path} has done {done} steps already, of {self.options.steps}")
        return path

    def run(self) -> TrafficTable | None:
        """Train, recording; then bring the columns together: a table on rank 0, None elsewhere.

        None if ranks have died, for what these have sent nobody knows.
        """
        self.announce()
        with self.witness, self.comm.record() as ledger:
            self.begin()
            self.all_steps()
        if self.num_dead:
            return None
        if self.options.trace is not None:
            self.timeline.write(ledger, self.options.trace)
        rows = len(self.batch(0, *self.strategy.part)[0]) if self.strategy.part[1] else 0
        updates = self.strategy.updates_in(self.options.steps - self.first) - self.skipped
        account = Account.of(self.strategy, updates, rows, self.options.context)
        self.accounts = gather(self.comm, account) or []
        whole, observed = ledger.gather(), self.witness.gather()
        if whole is None:
            return None
        size, reason = self.comm.size, self.witness.reason
        return TrafficTable(self.traffic(), whole, observed, size=size, reason=reason)

    def traffic(self) -> list[PredictedCall]:
        """What the run was to send."""
        o, is_resumed = self.options, self.source is not None
        calls = self.strategy.traffic(
            o.steps - self.first, batch=(o.batch, o.context), skipped=self.skipped,
            is_resumed=is_resumed,
        )  # fmt: skip
        loads = is_resumed * checkpoint.traffic(self.strategy, "load")
        return calls + loads + len(self.saves) * checkpoint.traffic(self.strategy)

    @property
    def skipped(self) -> int:
        """The updates of this run that an overflow prevented: what nobody can know before."""
        return self.strategy.num_skipped - self.skipped_before

    def announce(self) -> None:
        """What is about to run, in one line."""
        o = self.options
        self.console.print(
            f"{o.strategy}, ranks {self.comm.size}, {o.dtype}, seed {o.seed}, batch {o.batch}:"
            f" {self.model.num_parameters} parameters, {len(self.text)} bytes of text"
        )

    def all_steps(self) -> None:
        """Every step, timed together, with progress on the first rank."""
        o = self.options
        with progress(self.console, self.options.steps) as show_done:

            def show(done: int, loss: float) -> None:
                self.times.append(time.perf_counter())
                self.console.quiet = not self.is_first  # the first one may have died
                show_done(done, loss)
                if done in self.saves and done < o.steps:
                    self.save(done)

            began = time.perf_counter()
            total = o.batch * o.context
            self.losses = self.strategy.train(o.steps, self.batch, total, show, self.first)
            self.seconds = time.perf_counter() - began
            if o.save is not None:
                self.save(o.steps)

    def save(self, done: int) -> None:
        """A checkpoint after so many steps."""
        checkpoint.save(self.strategy, self.options.save, done)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: the first of those that are alive."""
        return self.strategy.rank == 0

    @property
    def num_dead(self) -> int:
        """How many ranks have died."""
        return self.comm.size - self.strategy.size

    def batch(self, step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
        """A rank's rows of a step's batch.  ValueError if there are none."""
        o, where = self.options, {"rank": rank, "ranks": ranks}
        return text.batch(
            self.text, seed=o.seed, step=step, size=o.batch, context=o.context, **where
        )

    def report(self, table: TrafficTable | None) -> int:
        """Everything the first rank has to say at the end; the exit status."""
        print_curve(self.losses, self.console)
        self.console.print(
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} nats per byte,"
            f" unigram entropy {self.entropy:.4f}; {self.seconds:.2f} s,"
            f" {self.rate():.0f} tokens/s"
        )
        self.console.print("\n".join([*self.strategy.remarks(), ""]), markup=False)
        status = self.report_bytes(table)
        self.write_json(table)
        return status

    def report_bytes(self, table: TrafficTable | None) -> int:
        """Memory and traffic; the exit status."""
        if table is None:
            self.console.print(
                f"{self.num_dead} of {self.comm.size} ranks died; the others ended with the same"
                " parameters, to the last bit.  What the dead have sent nobody knows: no traffic."
            )
            return 0
        print_accounts([account.kept | account.moved for account in self.accounts], self.console)
        print_traffic(table, self.console)
        return self.verdict(table)

    def verdict(self, table: TrafficTable) -> int:
        """Say what was compared, or what differs; the exit status."""
        try:
            self.console.print(table.check())
        except TrafficMismatch as mismatch:
            self.console.print(f"TrafficMismatch: {mismatch}", markup=False)
            return 1
        if wrong := differences(self.accounts):
            self.console.print("these differ: " + "; ".join(wrong), markup=False)
            return 1
        self.console.print("memory: formula = counted, to the byte; parameters: equal, to the bit")
        return 0

    def rate(self) -> float:
        """Tokens per second, all ranks together."""
        steps = self.options.steps - self.first
        return float(self.options.batch * self.options.context * steps / self.seconds)

    def seconds_per_step(self) -> float:
        """The median time from the end of a step to that of the next."""
        gaps = [end - start for start, end in pairwise(self.times)]
        return median(gaps or [self.seconds])

    def write_json(self, table: TrafficTable | None) -> None:
        """Arguments, losses, speed, memory and traffic to the file named by --json, if one was."""
        if self.options.json is None:
            return
        paths = {k: str(v) for k, v in vars(self.options).items() if isinstance(v, Path)}
        result: dict[str, Any] = vars(self.options) | paths
        result |= {"ranks": self.comm.size, "losses": self.losses, "first_step": self.first}
        result |= {
            "parameters": self.model.num_parameters, "unigram_entropy": self.entropy,
            "seconds": self.seconds, "seconds_per_step": self.seconds_per_step(),
            "tokens_per_second": self.rate(),
            "ranks_kept": [account.kept for account in self.accounts],
            "ranks_moved": [account.moved for account in self.accounts],
            "traffic": None if table is None else table.as_dict(),
        }  # fmt: skip
        self.options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
