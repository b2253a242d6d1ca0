"""Data parallelism: every rank has the whole model and a part of every batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import collectives
from collectives import Communicator
from parallel.nn import Array, Model, cross_entropy
from parallel.optim import Adam
from parallel.text import Tokens
from parallel.traffic import PredictedCall

Batches: TypeAlias = Callable[[int, int, int], tuple[Tokens, Tokens]]
"""(step, rank, number of ranks) -> this rank's rows of that step's batch."""

Show: TypeAlias = Callable[[int, float], object]
"""Called with the number of steps done and the last loss."""


class Serial:
    """The whole batch on one rank: the reference that every strategy must reproduce."""

    def __init__(self, model: Model, *, lr: float = 1e-3) -> None:
        self.model = model
        self.optimizer = Adam(model.flat_parameters, model.flat_gradients, lr=lr)

    def start(self) -> None:
        """What is to be done once, before the first step."""

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch is ours: (rank, number of ranks)."""
        return 0, 1

    def train(self, steps: int, batch: Batches, total: int, show: Show) -> list[float]:
        """So many steps, after `start`, on batches of `total` rows; their losses."""
        losses = []
        for step in range(steps):
            losses.append(self.step(*batch(step, *self.part), total))
            show(step + 1, losses[-1])
        return losses

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """One update from this rank's rows of a batch of `total` rows; the batch's mean loss.

        `inputs` (rows, context) and `targets` (rows,) are int64; the loss is in nats.
        """
        model = self.model
        model.zero_gradients()
        logits, saved = model.forward(model.xp.asarray(inputs))
        loss, slope = cross_entropy(logits, model.xp.asarray(targets), total)
        model.backward(slope, saved, self.layer_done)
        self.update()
        return float(self.whole_loss(loss)[0])

    def update(self) -> None:
        """Called when all gradients are complete."""
        self.optimizer.step()

    def layer_done(self, layer: str) -> None:
        """Called during backward when this layer's gradients are complete."""

    def whole_loss(self, loss: Array) -> Array:
        """The loss of the whole batch, of the part of it that this rank computed (1 element)."""
        return loss

    def traffic(self, steps: int) -> list[PredictedCall]:
        """What this strategy sends in `start` and `steps` steps."""
        return []


class DataParallel(Serial):
    """The gradients of each layer are summed over the ranks as soon as backward has made them.

    With n(l) the bytes of layer l, e the bytes of one element and S steps, all ranks together send

    | phase          | collective | calls    | bytes a call (binomial, ring) |
    |----------------|------------|----------|-------------------------------|
    | start          | broadcast  | 1 per l  | (p-1) n(l)                    |
    | backward/<l>   | all_reduce | S        | 2 (p-1) n(l)                  |
    | loss           | all_reduce | S        | 2 (p-1) e                     |

    which `traffic` says as data.  Each rank's loss is the sum over its own rows divided by the rows
    of the whole batch, and ranks are combined by a sum: exact for uneven parts too.  Every rank
    then makes the same update of the same parameters, so that nothing else has to be sent.  By
    layer, in reverse, as in Li et al. 2020 (PyTorch DDP).
    """

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        *,
        lr: float = 1e-3,
        algorithm: str = "ring",
        broadcast_algorithm: str = "binomial",
        phase: Callable[[str], AbstractContextManager[None]] = collectives.phase,
    ) -> None:
        super().__init__(model, lr=lr)
        self.comm, self.phase = comm, phase
        self.algorithm, self.broadcast_algorithm = algorithm, broadcast_algorithm

    def start(self) -> None:
        """Rank 0's parameters to all, whatever the others were initialised to."""
        with self.phase("start"):
            for flat in self.model.flat_parameters.values():
                self.comm.broadcast(flat, root=0, out=flat, algorithm=self.broadcast_algorithm)

    @property
    def part(self) -> tuple[int, int]:
        return self.comm.rank, self.comm.size

    def layer_done(self, layer: str) -> None:
        self._sum(f"backward/{layer}", self.model.flat_gradients[layer])

    def whole_loss(self, loss: Array) -> Array:
        return self._sum("loss", loss)

    def _sum(self, phase: str, x: Array) -> Array:
        with self.phase(phase):
            return self.comm.all_reduce(x, op="sum", out=x, algorithm=self.algorithm)

    def traffic(self, steps: int) -> list[PredictedCall]:
        """The table above, with this model's sizes."""
        sizes = {layer: int(flat.nbytes) for layer, flat in self.model.flat_parameters.items()}
        element = next(iter(self.model.flat_parameters.values())).dtype.itemsize
        sums = {f"backward/{layer}": n for layer, n in sizes.items()} | {"loss": int(element)}
        start = [
            PredictedCall("start", "broadcast", self.broadcast_algorithm, n)
            for n in sizes.values()
        ]  # fmt: skip
        return start + [
            PredictedCall(phase, "all_reduce", self.algorithm, n, count=steps)
            for phase, n in sums.items()
        ]  # fmt: skip
