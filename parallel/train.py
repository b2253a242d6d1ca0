"""Train a small language model over bytes, and account for every byte that it sends.

    python -m collectives.launch -n 4 -m parallel.train --strategy ddp
    python -m parallel.train --strategy serial --json serial.json
    python -m collectives.launch -n 4 --fault-tolerant -m parallel.train --strategy elastic

Rank 0 prints the loss, then the traffic: predicted, recorded and observed.  The exit status is 1 if
these differ.  A run is a function of its arguments and the text: losses repeat to the last bit.
If ranks of an elastic run die the others go on, and no traffic is shown: the dead took with them
what they had recorded.

Under a bare mpirun set OMP_NUM_THREADS=1, as the launcher does: otherwise every rank computes with
as many threads as there are cores, and they stand in each other's way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import collectives
from collectives import Communicator
from parallel import text
from parallel.data import DataParallel, Serial
from parallel.elastic import Doomed, Elastic
from parallel.nn import Model, byte_model, num_elements
from parallel.show import console_of, print_traffic, progress
from parallel.traffic import TrafficMismatch, TrafficTable, Witness

if TYPE_CHECKING:
    from rich.console import Console

Phase: TypeAlias = Callable[[str], AbstractContextManager[None]]


def serial(comm: Communicator, model: Model, options: argparse.Namespace, phase: Phase) -> Serial:
    """The reference.  ValueError on more than one rank: they would all do the same."""
    if comm.size > 1:
        raise ValueError(f"the serial strategy runs on one rank, not on {comm.size}")
    return Serial(model, lr=options.lr)


def ddp(comm: Communicator, model: Model, options: argparse.Namespace, phase: Phase) -> Serial:
    """Data parallel.  ValueError if the algorithm does not run on so many ranks."""
    require_algorithm(options.algorithm, comm.size)
    return DataParallel(comm, model, lr=options.lr, algorithm=options.algorithm, phase=phase)


def elastic(comm: Communicator, model: Model, options: argparse.Namespace, phase: Phase) -> Serial:
    """Data parallel over the ranks that are alive.  ValueError where all must live."""
    if not comm.can_shrink:
        raise ValueError(
            "the elastic strategy needs an Open MPI that was started with fault tolerance: "
            "python -m collectives.launch --fault-tolerant"
        )
    for size in range(1, comm.size + 1):
        require_algorithm(options.algorithm, size)
    victim, last_step = options.kill
    kind = Doomed if comm.rank == victim else Elastic
    strategy = kind(comm, model, lr=options.lr, algorithm=options.algorithm, phase=phase)
    if isinstance(strategy, Doomed):
        strategy.last_step = last_step
    return strategy


def require_algorithm(name: str, size: int) -> None:
    """ValueError if this algorithm of all-reduce does not run on so many ranks."""
    if not collectives.algorithms.info("all_reduce", name).serves(size):
        raise ValueError(f"all_reduce.{name} does not run on {size} ranks")


STRATEGIES = {"serial": serial, "ddp": ddp, "elastic": elastic}


def main(arguments: list[str] | None = None) -> int:
    """Train as told on the command line.  0, 1 if the traffic differs, 2 if the run cannot be."""
    parse = parser()
    options = parse.parse_args(arguments)
    comm = collectives.world()
    try:
        training = Training(comm, options, console_of(comm.rank))
    except ValueError as error:
        parse.exit(2, f"{parse.prog}: {error}\n" if comm.rank == 0 else None)
    table = training.run()
    return training.report(table) if training.is_first else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser("python -m parallel.train", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    names = collectives.algorithms.names("all_reduce")
    add = parse.add_argument
    add("--strategy", choices=STRATEGIES, default="ddp", help="default: %(default)s")
    add("--text", metavar="PATH", help="file or directory; default: Python's own library")
    add("--steps", type=at_least(1), default=200, help="default: %(default)s")
    add("--batch", type=at_least(1), default=256, help="of all ranks together; %(default)s")
    add("--hidden", type=at_least(1), default=256, help="default: %(default)s")
    add("--context", type=at_least(1), default=16, help="in bytes, default: %(default)s")
    add("--dtype", choices=("float64", "float32"), default="float64", help="default: %(default)s")
    add("--seed", type=at_least(0), default=0, help="default: %(default)s")
    add("--lr", type=float, default=2e-3, help="default: %(default)s")
    add("--algorithm", choices=names, default="ring", help="of all-reduce, default: %(default)s")
    add(
        "--kill", type=rank_and_step, default=(-1, -1), metavar="RANK:STEP",
        help="elastic only: this rank kills itself (-9) in the middle of this step",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write losses and traffic to FILE")
    add("--no-monitor", action="store_true", help="leave MPI's own counters alone")
    return parse


def at_least(least: int) -> Callable[[str], int]:
    """An argument's type: an integer not below `least`."""

    def integer(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def rank_and_step(word: str) -> tuple[int, int]:
    """An argument's type: "2:50" is rank 2 and step 50."""
    rank, step = word.split(":")
    return int(rank), int(step)


class Training:
    """One run.  ValueError if arguments, text and number of ranks do not go together."""

    def __init__(self, comm: Communicator, options: argparse.Namespace, console: Console) -> None:
        self.comm, self.options, self.console = comm, options, console
        self.text = text.load(options.text)
        # What cannot be divided, or is too short, is refused before all else.
        self.batch(0, comm.rank, comm.size)
        self.entropy = text.unigram_entropy(self.text)
        self.witness = Witness(comm, is_wanted=not options.no_monitor)
        self.model = byte_model(
            context=options.context, hidden=options.hidden, seed=options.seed, dtype=options.dtype
        )
        make = STRATEGIES[options.strategy]
        self.strategy = make(comm, self.model, options, self.witness.phase)
        self.losses: list[float] = []
        self.seconds = 0.0

    def run(self) -> TrafficTable | None:
        """Train, recording; then bring the columns together: a table on rank 0, None elsewhere.

        None if ranks have died, for what these have sent nobody knows.
        """
        self.announce()
        with self.witness, self.comm.record() as ledger:
            self.strategy.start()
            self.all_steps()
        if self.num_dead:
            return None
        whole, observed = ledger.gather(), self.witness.gather()
        if whole is None:
            return None
        calls = self.strategy.traffic(self.options.steps)
        size, reason = self.comm.size, self.witness.reason
        return TrafficTable(calls, whole, observed, size=size, reason=reason)

    def announce(self) -> None:
        """What is about to run, in one line."""
        o, parameters = self.options, num_elements(self.model.specs())
        self.console.print(
            f"{o.strategy}, ranks {self.comm.size}, {o.dtype}, seed {o.seed}, batch {o.batch}:"
            f" {parameters} parameters, {len(self.text)} bytes of text"
        )

    def all_steps(self) -> None:
        """Every step, timed together, with progress on the first rank."""
        with progress(self.console, self.options.steps) as show_done:

            def show(done: int, loss: float) -> None:
                self.console.quiet = not self.is_first  # the first one may have died
                show_done(done, loss)

            o, began = self.options, time.perf_counter()
            self.losses = self.strategy.train(o.steps, self.batch, o.batch, show)
            self.seconds = time.perf_counter() - began

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: the first of those that are alive."""
        return self.strategy.part[0] == 0

    @property
    def num_dead(self) -> int:
        """How many ranks have died."""
        return self.comm.size - self.strategy.part[1]

    def batch(self, step: int, rank: int, ranks: int) -> tuple[text.Tokens, text.Tokens]:
        """A rank's rows of a step's batch.  ValueError if there are none."""
        o, where = self.options, {"rank": rank, "ranks": ranks}
        return text.batch(
            self.text, seed=o.seed, step=step, size=o.batch, context=o.context, **where
        )

    def report(self, table: TrafficTable | None) -> int:
        """Everything the first rank has to say at the end; the exit status."""
        self.console.print(
            f"loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f} nats per byte,"
            f" unigram entropy {self.entropy:.4f}; {self.seconds:.2f} s,"
            f" {self.rate():.0f} tokens/s\n"
        )
        self.write_json(table)
        if table is None:
            self.console.print(
                f"{self.num_dead} of {self.comm.size} ranks died; the others ended with the same"
                " parameters, to the last bit.  What the dead have sent nobody knows: no traffic."
            )
            return 0
        print_traffic(table, self.console)
        try:
            self.console.print(table.check())
        except TrafficMismatch as mismatch:
            self.console.print(f"TrafficMismatch: {mismatch}", markup=False)
            return 1
        return 0

    def rate(self) -> float:
        """Predicted bytes per second, all ranks together."""
        return float(self.options.batch * len(self.losses) / self.seconds)

    def write_json(self, table: TrafficTable | None) -> None:
        """Arguments, losses, speed and traffic to the file named by --json, if one was."""
        if self.options.json is None:
            return
        arguments = {k: v for k, v in vars(self.options).items() if k != "json"}
        result = arguments | {"ranks": self.comm.size, "losses": self.losses} | {
            "unigram_entropy": self.entropy, "seconds": self.seconds,
            "tokens_per_second": self.rate(),
            "traffic": None if table is None else table.as_dict(),
        }  # fmt: skip
        self.options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
