"""Run by test_elastic.py: ranks are killed in the middle of training, or leave as agreed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import collectives
from collectives import Communicator, PeerFailed
from parallel import Mesh, RankView, Recipe, Sharding, Trainer, text
from parallel.nn import Model, gpt
from parallel.step import LayerBackward
from parallel.strategies import Elastic, ReplicaMismatch, digest

STEPS, BATCH, CONTEXT = 6, 24, 4
DEATHS = {2: 2, 0: 4}  # rank of the world: step
FOLDER = Path(sys.argv[2])
DATA = text.load(__file__)


class Killed(Elastic):
    """Dies as DEATHS says, between two sums of the backward pass."""

    def __init__(self, comm: Communicator, model: Any, recipe: Recipe) -> None:
        super().__init__(comm, model, recipe, bucket_bytes=1)
        self.me = comm.rank
        self.delays: list[float] = []
        self.failed: list[list[int]] = []
        self.functions[LayerBackward] = self.backward_or_die

    def backward_or_die(self, action: LayerBackward) -> None:
        self.micro_batches.backward(action)
        if action.layer == "block1" and DEATHS.get(self.me) == self.num_steps:
            (FOLDER / f"died-{len(self.delays)}").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, *batch: Any) -> float:
        try:
            return super().step(*batch)
        except PeerFailed as failure:
            died = float((FOLDER / f"died-{len(self.delays)}").read_text())
            self.delays.append(time.time() - died)
            self.failed.append(list(failure.ranks))
            raise


def batch(step: int, rank: int, ranks: int) -> Any:
    return text.batch(
        DATA, seed=0, step=step, batch_size=BATCH, context=CONTEXT, rank=rank, num_ranks=ranks
    )


def model() -> Model:
    return gpt(num_layers=2, hidden=32, context=CONTEXT)


def killed(comm: Communicator) -> None:
    strategy = Killed(comm, model(), Recipe(seed=comm.rank))
    strategy.start()
    losses = strategy.train(STEPS, batch, BATCH * CONTEXT, lambda step, loss: None)
    write(
        comm.rank,
        losses=losses,
        digest=digest(strategy.optimizer).hex(),
        delays=strategy.delays,
        failed=strategy.failed,
        noticed=alter(strategy),
    )


def alter(strategy: Elastic) -> str:
    """What is said when one rank differs in one bit."""
    if strategy.comm.rank == 1:
        first = strategy.parameters["head"]
        first[0] = np.nextafter(first[0], np.inf)
    try:
        strategy.check()
    except ReplicaMismatch as differ:
        return str(differ)
    return ""


def left(comm: Communicator) -> None:
    """The reference: who is killed there leaves here, before the same step."""
    sharding, losses = Sharding.ddp(bucket_bytes=1), []
    strategy = Trainer(Mesh(comm), model(), sharding=sharding)
    strategy.start()
    for step in range(STEPS):
        if step in DEATHS.values():
            color = None if DEATHS.get(comm.rank) == step else 0
            rest = strategy.comm.split(color, name="data")
            if rest is None:
                return
            mesh = Mesh(rest)
            strategy.set_view(RankView(strategy.layout.on(mesh), mesh.rank))
        losses.append(strategy.step(*batch(step, *strategy.batch_part), BATCH * CONTEXT))
    write(comm.rank, losses=losses, digest=digest(strategy.optimizer).hex())


def write(rank: int, **results: Any) -> None:
    (FOLDER / f"{rank}.json").write_text(json.dumps({"rank": rank, **results}))


{"killed": killed, "left": left}[sys.argv[1]](collectives.world())
