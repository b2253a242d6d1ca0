"""A synchronous parameter server: rank 0 alone updates the model.

This is the simplest form of data parallelism.  Everything is sent to or from one rank, which
therefore sends and receives (p-1) times what another rank does.  Li et al. 2014.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

import collectives
from collectives import Communicator
from parallel.accounts import PredictedCall
from parallel.accounts.monitor import PhaseFunction
from parallel.mesh import Mesh
from parallel.nn import Model
from parallel.runtime import BatchFunction, ProgressCallback, Recipe, RunSize, Trainer
from parallel.schedule import Action
from parallel.sharding import Sharding
from parallel.sharding.server import SERVER
from parallel.text import Tokens, share

AXES = ("data",)


class SyncParameterServer(Trainer):
    """Add up all gradients of a step on rank 0, which updates and sends the new parameters.

    This is bulk-synchronous: Valiant 1990.  The server alone reads the batches, and computes on its
    part of them like the other ranks.  With u units, p ranks and S steps of batches of r rows of c
    tokens, of which r0 = ceil(r / p) rows are the server's, all ranks together send by linear
    algorithms

    | phase           | collective | calls           | bytes a call            |
    |-----------------|------------|-----------------|-------------------------|
    | start/broadcast | broadcast  | u               | (p-1) n(unit)           |
    | data            | broadcast  | S               | 16 (p-1): r and c       |
    | data            | scatter    | S               | 16 c (r - r0)           |
    | reduce/unit     | reduce     | S               | (p-1) n(unit)           |
    | norm            | broadcast  | S, float16 only | 8 (p-1)                 |
    | update/unit     | broadcast  | updates         | (p-1) n(unit)           |

    in addition to what all training runs send (`Trainer`), for any number of micro-batches.  In a
    step the server sends (p-1) Psi elements, and each other rank Psi.  After a gradient that
    overflowed, which the norm tells the other ranks, no parameters are sent.

    `algorithm` is that of the broadcasts and reductions of units; `comm`, `model`, `recipe` and
    `phase` are as in `Trainer`.
    """

    batch_shape = 0, 0  # rows and tokens of the batches so far, which are equal

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        algorithm: str = "linear",
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        super().__init__(
            Mesh(comm), model, recipe, sharding=Sharding.parameter_server(SERVER),
            algorithm=algorithm, phase=phase,
        )  # fmt: skip

    def train(
        self, steps: int, batch: BatchFunction, total: int, show: ProgressCallback, first: int = 0
    ) -> list[float]:
        """Make steps `first` to `steps` and return their losses; see `Trainer.train`.

        `batch` is called on the server alone, for whole batches.  Raises ValueError, on all ranks,
        if a batch has fewer rows than there are ranks or another shape than the one before.  If
        `batch` raises an error on the server, the other ranks raise ValueError.
        """

        def scattered(step: int, *_: int) -> tuple[Tokens, Tokens]:
            if self.rank != SERVER:
                return self.scatter_batch(None)
            try:
                whole = np.stack(batch(step, 0, 1), axis=1, dtype=np.int64)
            except Exception:
                with suppress(ValueError):
                    self.scatter_batch(None)  # the other ranks would wait forever
                raise
            return self.scatter_batch(whole)

        return super().train(steps, scattered, total, show, first)

    def scatter_batch(self, whole: Tokens | None) -> tuple[Tokens, Tokens]:
        """Return this rank's inputs and targets, (rows, context) both.  All ranks call this.

        `whole` is the batch on the server, int64 (rows, 2, context), and None on other ranks.
        """
        shape = np.array([0, 0] if whole is None else whole.shape[::2])
        comm = self.comm_of(AXES)
        with self.phase("data"):
            comm.broadcast(shape, root=SERVER, out=shape, algorithm="linear")
            rows, context = self._checked(int(shape[0]), int(shape[1]))
            counts = collectives.even_counts(rows, self.size)
            mine = np.empty((counts[self.rank], 2, context), np.int64)
            comm.scatter(whole, root=SERVER, out=mine, counts=counts, algorithm="linear")
        return mine[:, 0], mine[:, 1]

    def _checked(self, rows: int, context: int) -> tuple[int, int]:
        """Return the shape of a batch, which all ranks know.  Raise ValueError if it is wrong."""
        share(rows, self.size, self.rank)  # raises if there are too few rows
        shape = rows, context
        if self.batch_shape not in ((0, 0), shape):
            raise ValueError(
                f"batches differ in (rows, tokens): {self.batch_shape}, then {shape};"
                " all must have the same shape"
            )
        self.batch_shape = shape
        return shape

    def reduce_norm(self, action: Action) -> None:
        """Set `squares` to the server's sum; broadcast it if the loss scale depends on it."""
        found = np.array([self.own_squares()], np.float64)
        if self.loss_scale.is_dynamic:
            comm = self.comm_of(AXES)
            comm.broadcast(found, root=SERVER, out=found, algorithm="linear")
        self.squares = float(found[0])

    def calls_of(self, action: Action) -> Iterable[PredictedCall]:
        if action.kind != "NORM":
            return super().calls_of(action)
        call = self.predicted("norm", "broadcast", 1, AXES, itemsize=8, algorithm="linear")
        return [call] * self.loss_scale.is_dynamic

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send.

        Raises ValueError if `run.batch_shape` is None: the server sends the batches.
        """
        if run.batch_shape is None:
            raise ValueError("the server sends the batches: pass batch=(rows, context)")
        rows, context = run.batch_shape
        counts = tuple(2 * context * n for n in collectives.even_counts(rows, self.size))
        options = {"itemsize": 8, "algorithm": "linear", "num_calls": run.num_steps}
        return [
            self.predicted("data", "broadcast", 2, AXES, **options),
            self.predicted("data", "scatter", counts, AXES, **options),
            *super().step_traffic(run),
        ]
