"""A synchronous parameter server: rank 0 alone reads batches and updates the model."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

import collectives
from collectives import Communicator
from parallel.accounts import PredictedCall
from parallel.layout import BatchFunction
from parallel.mesh import Mesh
from parallel.predict import RunSize
from parallel.run import Trainer
from parallel.sharding import SERVER, Sharding
from parallel.text import Tokens, share

AXES = ("data",)


class SyncParameterServer(Trainer):
    """Add up all gradients of a step on rank 0, which updates and sends the new parameters.

    Li et al. 2014; bulk-synchronous (Valiant 1990).  The server alone reads the batches, and
    computes its part of them like the other ranks.  With u units, p ranks and S steps of batches
    of r rows of c tokens, of which r0 = ceil(r / p) rows are the server's, all ranks together send
    by linear algorithms

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

    `train` calls `batch` on the server alone, for whole batches.  It raises ValueError, on all
    ranks, if a batch has fewer rows than there are ranks or another shape than the one before, and
    on the other ranks if `batch` raises an error on the server.  `algorithm` is for
    broadcasts and reductions of units; the arguments after `comm` are as in `Trainer`.
    """

    batch_shape = 0, 0  # rows and tokens of the batches so far, which are equal

    def __init__(
        self, comm: Communicator, *given: Any, algorithm: str = "linear", **options: Any
    ) -> None:
        sharding = Sharding.parameter_server(SERVER)
        super().__init__(Mesh(comm), *given, sharding=sharding, algorithm=algorithm, **options)

    def rows_of(self, step: int, batch: BatchFunction) -> tuple[Tokens, Tokens]:
        if self.rank != SERVER:
            return self.scatter_batch(None)
        try:
            both = batch(step, 0, 1)
            if both[0].shape != both[1].shape:
                raise ValueError(
                    f"the server scatters texts: inputs {both[0].shape} and targets"
                    f" {both[1].shape} must have the same shape"
                )
            whole = np.stack(both, axis=1, dtype=np.int64)
        except Exception:
            with suppress(ValueError):
                self.scatter_batch(None)  # the other ranks would wait forever
            raise
        return self.scatter_batch(whole)

    def scatter_batch(self, whole: Tokens | None) -> tuple[Tokens, Tokens]:
        """Return this rank's inputs and targets, (rows, context) both.  All ranks call this.

        `whole` is the batch on the server, int64 (rows, 2, context), and None on other ranks.
        """
        shape = np.array([0, 0] if whole is None else whole.shape[::2])
        comm = self.arrays.comm_of(AXES)
        with self.phase("data"):
            comm.broadcast(shape, root=SERVER, out=shape, algorithm="linear")
            rows, context = shape.tolist()
            share(rows, self.size, self.rank)  # raises if there are too few rows
            if self.batch_shape not in ((0, 0), (rows, context)):
                raise ValueError(
                    f"batches differ in (rows, tokens): {self.batch_shape}, then"
                    f" {rows, context}; all must have the same shape"
                )
            self.batch_shape = rows, context
            counts = collectives.even_counts(rows, self.size)
            mine = np.empty((counts[self.rank], 2, context), np.int64)
            comm.scatter(whole, root=SERVER, out=mine, counts=counts, algorithm="linear")
        return mine[:, 0], mine[:, 1]

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send.  Raise ValueError without `batch_shape`."""
        if run.batch_shape is None:
            raise ValueError("the server sends the batches: pass batch=(rows, context)")
        rows, context = run.batch_shape
        counts = tuple(2 * context * n for n in collectives.even_counts(rows, self.size))
        options = {"itemsize": 8, "algorithm": "linear", "num_calls": run.num_steps}
        return [
            self.view.predicted("data", "broadcast", 2, AXES, **options),
            self.view.predicted("data", "scatter", counts, AXES, **options),
            *super().step_traffic(run),
        ]
