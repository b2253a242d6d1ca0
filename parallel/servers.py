"""Parameter servers: runs in which rank 0 alone updates the model, by gradients of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import CollectiveTimeout, Communicator, Work
from parallel.accounts import PredictedCall
from parallel.actions import Action
from parallel.mesh import Mesh
from parallel.nn import Array
from parallel.runtime import (
    BatchFunction,
    MissingGradient,
    ProgressCallback,
    RunSize,
    Trainer,
)
from parallel.runtime.state import BatchSize
from parallel.runtime.trainer import sum_of_squares
from parallel.sharding import PushToServer, Sharding
from parallel.sharding.server import SERVER
from parallel.text import Tokens, share

AXES = ("data",)
PAUSE = 5e-4  # seconds that the asynchronous server sleeps when no push has begun


class SyncParameterServer(Trainer):
    """Add up all gradients of a step on rank 0, which updates and sends the new parameters.

    Li et al. 2014; bulk-synchronous (Valiant 1990).  The server alone reads the batches, and
    computes on its part of them like the other ranks.  With u units, p ranks and S steps of batches
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
    on the other ranks if `batch` raises an error on the server.  `algorithm` is that of the
    broadcasts and reductions of units; what follows `comm` is as in `Trainer`.
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
        comm = self.comm_of(AXES)
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

    def reduce_norm(self, action: Action) -> None:
        """Set `squares` to the server's sum; broadcast it if the loss scale depends on it."""
        found = np.array([float(self.own_squares())])
        if self.loss_scale.is_dynamic:
            comm = self.comm_of(AXES)
            comm.broadcast(found, root=SERVER, out=found, algorithm="linear")
        self.squares = float(found[0])

    def calls_of(self, action: Action, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        if action.kind != "NORM":
            return super().calls_of(action, batch)
        call = self.predicted("norm", "broadcast", 1, AXES, itemsize=8, algorithm="linear")
        return [call] * self.loss_scale.is_dynamic

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send; ValueError if it has no `batch_shape`."""
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


class Staleness(NamedTuple):
    """How stale the gradient of a worker's step was: `updates` came between its pull and push."""

    worker: int
    step: int
    updates: int


class AsyncParameterServer(Trainer):
    """Update the parameters by every gradient as it arrives.  Dean et al. 2012.

    Rank 0 is the server and computes no gradients.  Each of the other w = p-1 ranks, the workers,
    pulls the parameters, computes the gradient of its part of a step's batch (the mean over its own
    rows) and pushes it, S times.  The server applies the gradient and answers this worker alone.
    With one rank, training is serial.  All ranks together send, in u messages for u units, and with
    o options (`Trainer`),

    | phase              | collective | messages  | bytes                     |
    |--------------------|------------|-----------|---------------------------|
    | start/check        | all_gather | 2 calls   | (16 + 32 (u + o)) p (p-1) |
    | async/pull/workerW | send       | S u       | S n(model)                |
    | async/push/workerW | send       | S (u + 1) | S (n(model) + 16)         |
    | finish/unit        | broadcast  | 1 call    | (p-1) n(unit)             |

    where 16 bytes are a worker's loss and loss scale, which precede its gradient.  In a step a
    worker sends Psi elements and receives Psi.  At the end of `train` all ranks get the server's
    parameters.  Each worker has its own loss scale; a gradient that overflowed is pushed but not
    applied.

    An error on a worker, such as MissingGradient, is raised there alone.  The other ranks learn of
    it by the communicator's `timeout`: it limits the time of a worker's step, and the time for
    which other ranks wait for the slowest, because of a staleness bound or at the end.

    Parameters
    ----------
    comm, algorithm
        As in `SyncParameterServer`.
    staleness_bound : int, optional
        How many steps a worker may be ahead of the slowest, at least 0: the server delays its
        answer until then (stale synchronous parallel, Ho et al. 2013).  With 0, each worker makes
        one step in each round.  By default there is no bound.  While a worker is in its step k, the
        clocks of the others are between k - bound and k + bound + 1, so that no staleness exceeds
        (2 bound + 1) (w - 1).  Raises ValueError if it is negative.

    Attributes
    ----------
    staleness : list of Staleness
        One for each push, in the order in which they were applied; on the server.
    """

    def __init__(
        self,
        comm: Communicator,
        *given: Any,
        staleness_bound: int | None = None,
        algorithm: str = "linear",
        **options: Any,
    ) -> None:
        if staleness_bound is not None and staleness_bound < 0:
            raise ValueError(
                f"staleness_bound is {staleness_bound}: it must be at least 0, or None"
            )
        self.staleness_bound = staleness_bound
        self.staleness: list[Staleness] = []
        # The next push of each worker, since when it is expected, and after how many updates.
        self._expected: dict[int, tuple[Work[Any], float, int]] = {}
        sharding = replace(Sharding.parameter_server(SERVER), reduction=PushToServer())
        super().__init__(Mesh(comm), *given, sharding=sharding, algorithm=algorithm, **options)
        # A step is that of one rank alone: a worker does what precedes the update, the server the
        # rest.  It has no phases of its own, because pulls and pushes overlap in time.
        alone = ("F", "B", "LOSS", "NORM", "UPDATE")
        step = [each._replace(axes=(), phase="") for each in self.actions if each.kind in alone]
        ends = [each._replace(phase="finish") for each in self.actions if each.phase == "update"]
        self.actions = [*step, *ends]

    @property
    def batch_part(self) -> tuple[int, int]:
        """The workers divide a batch; the server has no part: (0, 0)."""
        if self.size == 1:
            return 0, 1
        return (0, 0) if self.rank == SERVER else (self.rank - 1, self.size - 1)

    def train(
        self, steps: int, batch: BatchFunction, total: int, show: ProgressCallback, first: int = 0
    ) -> list[float]:
        """Make steps `first` to `steps` of every worker; see `Trainer.train`.

        `batch` is called for a worker's own part, and may raise ValueError, on all ranks, for too
        few rows.  `total` is used with one rank only.  `show` is called on a worker after each of
        its steps, and on the server after each step that all workers have made.

        Returns a worker's own losses; on the server those of all pushes, in the order in which they
        were applied.  Raises CollectiveTimeout on the server, if a worker's push does not begin
        within the communicator's timeout.
        """
        if self.size == 1:
            return super().train(steps, batch, total, show, first)
        if first < steps:
            batch(first, max(self.rank - 1, 0), self.size - 1)  # may raise before any rank waits
        with self.phase("async"):
            if self.rank == SERVER:
                losses = self._serve(first, steps, show)
            else:
                losses = super().train(steps, batch, total, show, first)
        self.run(action for action in self.actions if action.phase == "finish")
        return losses

    def options(self) -> dict[str, Any]:
        return super().options() | {"staleness_bound": self.staleness_bound}

    # The server

    def _serve(self, first: int, steps: int, show: ProgressCallback) -> list[float]:
        """Answer workers and apply their gradients until every worker has made its steps."""
        clocks = dict.fromkeys(range(1, self.size), first)  # the steps that each has made
        ahead = steps if self.staleness_bound is None else self.staleness_bound
        losses = []
        while (slowest := min(clocks.values())) < steps:
            for worker, clock in clocks.items():
                if worker not in self._expected and clock < min(steps, slowest + ahead + 1):
                    self._answer(worker)
            worker = self._next_push()
            losses.append(self._apply(worker, clocks[worker]))
            clocks[worker] += 1
            if min(clocks.values()) > slowest:
                show(slowest + 1, losses[-1])
        return losses

    def _answer(self, worker: int) -> None:
        """Send a worker the current parameters, and expect its push."""
        comm = self.comm_of(AXES)
        with collectives.phase(f"pull/worker{worker}"):
            transfer(comm.send, self.parameters, worker)
        work = comm.recv(np.empty(2), worker, async_op=True)
        self._expected[worker] = work, time.monotonic(), self.num_updates

    def _next_push(self) -> int:
        """Wait for a push of any worker; the worker answered last is tested last, for fairness."""
        timeout = self.comm_of(AXES).timeout
        while True:
            for worker, (work, since, _) in self._expected.items():
                if work.test():
                    return worker
                if timeout is not None and time.monotonic() > since + timeout:
                    raise CollectiveTimeout(f"no push from rank {worker} within {timeout} s", work)
            time.sleep(PAUSE)

    def _apply(self, worker: int, step: int) -> float:
        """Update by the gradient that a worker has begun to push; return its loss."""
        work, _, updates = self._expected.pop(worker)
        loss, self.loss_scale.value = work.wait().tolist()
        transfer(self.comm_of(AXES).recv, self.gradients, worker)
        self.staleness.append(Staleness(worker, step, self.num_updates - updates))
        self.run(action for action in self.actions if action.kind in ("NORM", "UPDATE"))
        return float(loss)

    # A worker

    def rows_of(self, step: int, batch: BatchFunction) -> tuple[Tokens, Tokens]:
        if self.size > 1:  # before `batch` is called: the server waits for the receipt
            transfer(self.comm_of(AXES).recv, self.parameters, SERVER)
        return super().rows_of(step, batch)

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Compute the loss and the gradient, and send both to the server; see `Trainer.step`."""
        if self.size == 1:
            return super().step(inputs, targets, total)
        comm, loss = self.comm_of(AXES), self.compute(inputs, targets, targets.size)
        if any(self.absent_layers()):
            used = self.micro_batches.used_layers
            missing = ", ".join(name for name in self.model.layers if name not in used)
            raise MissingGradient(f"no gradient in this step for {missing} (on rank {self.rank})")
        with collectives.phase(f"push/worker{self.rank}"):
            comm.send(np.array([loss, self.loss_scale.value]), SERVER)
            transfer(comm.send, self.gradients, SERVER)
        if self.loss_scale.is_dynamic:
            squares = float(sum(map(sum_of_squares, self.gradients.values())))
            self.num_skipped += not self.update_loss_scale(squares)
        return loss

    # Reports and predictions

    def summary_lines(self) -> list[str]:
        updates = [each.updates for each in self.staleness] or [0]
        mean, most = sum(updates) / len(updates), max(updates)
        return [
            *super().summary_lines(),
            f"{len(self.staleness)} gradients, staleness in updates: mean {mean:.2f}, max {most}",
        ]

    def num_updates_in(self, steps: int) -> int:
        """Return one update for each push."""
        return steps * max(self.size - 1, 1)

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` by every worker send, and the broadcast at the end."""
        units = [(n, self.dtype.itemsize) for n in self.unit_sizes.values()]
        options = {"algorithm": "point_to_point", "num_calls": run.num_steps}
        calls = []
        for worker in range(1, self.size):
            pull = f"async/pull/worker{worker}", (SERVER, worker), units
            push = f"async/push/worker{worker}", (worker, SERVER), [(2, 8), *units]
            calls += [
                self.predicted(phase, "send", n, AXES, itemsize=width, groups=(ends,), **options)
                for phase, ends, messages in (pull, push)
                for n, width in messages
            ]
        ends = [action for action in self.actions if action.phase == "finish"]
        return calls + [call for action in ends for call in self.calls_of(action)]


def transfer(call: Callable[..., object], flats: Mapping[str, Array], other: int) -> None:
    """Send the arrays to another rank, or receive them from it."""
    for tag, flat in enumerate(flats.values(), 1):
        call(flat, other, tag)
