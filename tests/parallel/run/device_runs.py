"""Training on a device by every strategy, mesh, schedule and gate, as command lines.

`test_device_waits.py` runs them on the fake device, and `tests/gpu/test_training.py` on a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any, NamedTuple

import collectives
from bench.gpu.__main__ import LAYOUTS
from bench.training.strategies import KINDS
from collectives import Communicator
from moe.gates import GATES
from moe.train import COMMAND, mixture_spec
from parallel.commands.program import report
from parallel.commands.training import Training
from parallel.pipeline import SCHEDULES
from tests.fakes.arrays import waits

STEPS, MICRO_BATCHES = 2, 2
MODEL = (
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
    "8",
    "--steps",
    str(STEPS),
    "--micro-batches",
    str(MICRO_BATCHES),
)
EXPERTS = "--experts 4 --moe-every 1"
MORE = {
    "ulysses": "--mesh context=2 --attention ulysses",
    "clip": "--strategy zero2 --clip 0.1",
    "float16": "--strategy zero1 --dtype float16",
    "dropout": "--mesh context=2 --dropout 0.2",
    "recompute": "--mesh tensor=2 --recompute",
    "every axis": "--mesh pipe=2,context=2,tensor=2",
    "hierarchical": f"--mesh expert=2 {EXPERTS} --moe stable --dispatch hierarchical"
    " --ranks-per-host 1",
    "weights": f"--mesh expert=2 {EXPERTS} --moe switch --dispatch weights",
    "cheaper": f"--mesh expert=2 {EXPERTS} --moe switch --dispatch cheaper",
    "capacity": f"--mesh expert=2 {EXPERTS} --moe switch --padding capacity",
}
RUNS: dict[str, list[str]] = {
    **{kind.name: list(kind.words) for kind in KINDS},
    **{name: words.split() for name, words in (LAYOUTS | MORE).items()},
    **{
        name: f"--mesh pipe=2 --layers 2 --micro-batches 4 --schedule {name}".split()
        for name in SCHEDULES
    },
    **{name: f"--mesh expert=2 {EXPERTS} --moe {name}".split() for name in GATES},
}
NUM_RANKS = {"hsdp": 4, "zeropp": 4, "every axis": 8}  # else 2


class Done(NamedTuple):
    """A run on one rank; `waits`: for the fake device, while it trained."""

    losses: list[float]
    waits: Counter[str]


def trained(name: str, *words: str) -> list[Done]:
    """Train on threads; AssertionError unless traffic and memory are as predicted."""
    options = COMMAND.parser().parse_args([*MODEL, *RUNS[name], *words])

    def fn(comm: Communicator) -> Done:
        training, seen = Training(comm, options, mixture_spec), Counter[str]()
        train = training.strategy.train

        def counted(*given: Any) -> list[float]:
            waits().clear()
            losses = train(*given)
            seen.update(waits())
            return losses

        training.strategy.train = counted  # type: ignore[method-assign]
        table = training.run()
        assert comm.rank or report(training, table) == 0
        return Done(training.losses, seen)

    done: list[Done] = collectives.run(fn, size=NUM_RANKS.get(name, 2), timeout=60)
    return done
