"""Run by test_strategies.py: every strategy in one process, each as the training program runs it.

Rank 0 prints a line for each: what was compared.  The first that differs ends the job.  Arguments
are options of the training program, for all of them.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from rich.console import Console

import collectives
from collectives import Communicator
from parallel import TrafficMismatch, TrafficTable, Trainer
from parallel.commands.rank_report import differences
from parallel.commands.ranks import with_progress
from parallel.commands.training import Training
from parallel.train import COMMAND

SMALL = (
    "--text",
    argparse.__file__,
    "--layers",
    "1",
    "--hidden",
    "8",
    "--heads",
    "2",
    "--context",
    "4",
    "--batch",
    "19",
    "--steps",
    "2",
    "--micro-batches",
    "2",
)
EXACT = (
    "server-sync",
    "ddp",
    "ddp --bucket-bytes 1",
    "ddp --dtype float16",
    "zero1",
    "zero2",
    "zero2 --dtype float16 --clip 1",
    "zero3",
    "zero3 --keep-after-forward --tied",
    "hsdp",
    "hsdp --group-size 1",
    "zero3 --progress thread",
)
ROUNDED = (
    "server-async --staleness-bound 0",
    "ddp --hook int8",
    "ddp --hook powersgd:2",
    "zeropp",
    "zeropp --gradient-bits 4",
    "local-updates --every 2",
)
Leak = Callable[[Communicator], None]
ALONE: dict[tuple[object, ...], list[float]] = {}  # losses, by what one rank trains
CLOSE = {"float64": 1e-12, "float16": 1e-5}  # of the losses, relative


def training(comm: Communicator, words: str, kind: Callable[..., Training] = Training) -> Training:
    """A run of the program, which is not heard."""
    options = COMMAND.parser().parse_args([*SMALL, *sys.argv[1:], "--strategy", *words.split()])
    run = kind(with_progress(comm, options.progress), options)
    run.console = Console(file=io.StringIO())
    return run


def serial_losses(like: Training) -> list[float]:
    """What one rank finds on the same batches.  Nothing is sent."""
    o = like.options
    key = o.dtype, o.clip, o.tied
    if key not in ALONE:
        one = Trainer(None, like.model, like.strategy.recipe)
        ALONE[key] = one.train(o.steps, like.batch, o.batch * o.context, lambda *_: None)
    return ALONE[key]


def verdict(run: Training, table: TrafficTable, *, is_exact: bool) -> str:
    """On rank 0: what was compared.  Exits if anything differs."""
    sentence = table.check()
    if wrong := differences(run.reports):
        sys.exit(f"{run.options.strategy}: {'; '.join(wrong)}")
    if is_exact:
        close = CLOSE[run.options.dtype]
        np.testing.assert_allclose(run.losses, serial_losses(run), rtol=close)
        return f"{sentence}; losses of one rank"
    return sentence


def verdicts(comm: Communicator) -> Iterator[str]:
    """Of every strategy; nothing on the other ranks."""
    for words in (*EXACT, *ROUNDED):
        run = training(comm, words)
        table = run.run()
        if table is not None:
            yield f"{words}: {verdict(run, table, is_exact=words in EXACT)}"


class Leaking(Training):
    """The negative control: after the last step rank 0 sends rank 1 something more."""

    def __init__(self, *args: Any, leak: Leak) -> None:
        super().__init__(*args)
        self.leak = leak

    def all_steps(self) -> None:
        super().all_steps()
        self.leak(self.comm)


def unpredicted(comm: Communicator) -> None:
    """A message that the library records."""
    if comm.rank == 0:
        comm.send(np.zeros(3, np.uint8), 1)
    if comm.rank == 1:
        comm.recv(np.zeros(3, np.uint8), 0)


def unrecorded(comm: Communicator) -> None:
    """One of MPI alone, which the ledger does not know of."""
    from mpi4py import MPI  # it starts MPI, which the test itself must not

    if comm.rank == 0:
        MPI.COMM_WORLD.Send(np.zeros(5, np.uint8), 1)
    if comm.rank == 1:
        MPI.COMM_WORLD.Recv(np.zeros(5, np.uint8), 0)


def controls(comm: Communicator) -> Iterator[str]:
    """What is said of such messages."""
    for leak in (unpredicted, unrecorded):
        table = training(comm, "zero2", partial(Leaking, leak=leak)).run()
        if table is not None:
            try:
                yield f"{leak.__name__}: {table.check()}"
            except TrafficMismatch as mismatch:
                yield f"{leak.__name__}: {mismatch}"


if __name__ == "__main__":
    world = collectives.world()
    for line in chain(verdicts(world), controls(world)):
        print(line)
