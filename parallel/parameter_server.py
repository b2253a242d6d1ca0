"""Parameter servers: rank 0 alone updates the model, from gradients that other ranks compute.

This is the simplest form of data parallelism, synchronous or asynchronous.  Everything is sent to
or from one rank, which therefore sends and receives (p-1) times what another rank does.  Li et al.
2014.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

import numpy as np

import collectives
from collectives import CollectiveTimeout, Communicator, Work
from parallel.nn import Model
from parallel.strategy import (
    BatchFunction,
    MissingGradient,
    PhaseFunction,
    ProgressCallback,
    Recipe,
    RunSize,
    Strategy,
    sum_of_squares,
)
from parallel.text import Tokens, share
from parallel.traffic import PredictedCall, PredictedScatter

SERVER = 0
PAUSE = 5e-4  # seconds that the asynchronous server sleeps when no push has begun


class ParameterServer(Strategy):
    """The base class of parameter servers: rank 0 alone has optimizer states and master copies.

    Initial values are those of rank 0.  `algorithm` is that of the broadcasts, and of the
    reductions of `SyncParameterServer`; by default ``"linear"``.
    """

    comm: Communicator
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer", "master"})
    needs_same_initial_values = False
    algorithm_collectives: ClassVar[tuple[str, ...]] = ("broadcast",)

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        algorithm: str = "linear",
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        super().__init__(comm, model, recipe, algorithm=algorithm, phase=phase)

    @property
    def replica_group(self) -> tuple[int, int]:
        return 0, 1

    def shard_slice(self, unit: str) -> slice:
        """Return all elements on the server, none on other ranks."""
        return slice(0, self.model.unit_sizes[unit] if self.rank == SERVER else 0)

    def broadcast_parameters(self) -> None:
        """Send the server's parameters to all ranks."""
        for unit, flat in self.parameters.items():
            with collectives.phase(unit):
                self.comm.broadcast(flat, root=SERVER, out=flat, algorithm=self.algorithm)


class SyncParameterServer(ParameterServer):
    """Add up all gradients of a step on rank 0, which updates and sends the new parameters.

    This is bulk-synchronous: Valiant 1990.  The server alone reads the batches, and computes on its
    part of them like the other ranks.  With u units, p ranks and S steps of batches of r rows of c
    tokens, of which r0 = ceil(r / p) rows are the server's, all ranks together send by linear
    algorithms

    | phase                | collective | calls           | bytes a call            |
    |----------------------|------------|-----------------|-------------------------|
    | start/broadcast/unit | broadcast  | 1               | (p-1) n(unit)           |
    | data                 | broadcast  | S               | 16 (p-1): r and c       |
    | data                 | scatter    | S               | 16 c (r - r0)           |
    | reduce/unit          | reduce     | S               | (p-1) n(unit)           |
    | norm                 | broadcast  | S, float16 only | 8 (p-1)                 |
    | update/unit          | broadcast  | updates         | (p-1) n(unit)           |

    in addition to what all strategies send (`Strategy`), for any number of micro-batches.  In a
    step the server sends (p-1) Psi elements, and each other rank Psi.  After a gradient that
    overflowed, which the norm tells the other ranks, no parameters are sent.

    Parameters
    ----------
    comm, model, recipe, phase
        As in `Strategy`; `comm` must be a communicator.
    algorithm : str
        Of the broadcasts and reductions of units; by default ``"linear"``.

    Raises
    ------
    ValueError
        As `Strategy`.
    """

    algorithm_collectives = "broadcast", "reduce"
    batch_shape = 0, 0  # rows and tokens of the batches so far, which are equal

    def start(self) -> None:
        """Check that ranks agree, and broadcast the parameters of rank 0.

        All ranks call this.  Raises ModelMismatch, on all ranks, if shapes or options differ.
        """
        super().start()
        with self.phase("start"), collectives.phase("broadcast"):
            self.broadcast_parameters()

    def train(
        self,
        steps: int,
        batch: BatchFunction,
        total: int,
        show: ProgressCallback,
        first: int = 0,
    ) -> list[float]:
        """Make steps `first` to `steps` and return their losses; see `Strategy.train`.

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
        with self.phase("data"):
            self.comm.broadcast(shape, root=SERVER, out=shape, algorithm="linear")
            rows, context = self._checked(int(shape[0]), int(shape[1]))
            counts = collectives.even_counts(rows, self.size)
            mine = np.empty((counts[self.rank], 2, context), np.int64)
            self.comm.scatter(whole, root=SERVER, out=mine, counts=counts, algorithm="linear")
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

    def before_update(self) -> None:
        with self.phase("reduce"):
            for unit, x in self.gradients.items():
                with collectives.phase(unit):
                    self.comm.reduce(x, op="sum", root=SERVER, out=x, algorithm=self.algorithm)

    def sum_of_squares(self) -> float:
        """Return the server's sum; broadcast it if the loss scale depends on it."""
        found = np.array([super().sum_of_squares()], np.float64)
        if self.loss_scale.is_dynamic:
            with self.phase("norm"):
                self.comm.broadcast(found, root=SERVER, out=found, algorithm="linear")
        return float(found[0])

    def after_update(self) -> None:
        with self.phase("update"):
            self.broadcast_parameters()

    def start_traffic(self) -> list[PredictedCall]:
        return [*super().start_traffic(), *self.calls_per_unit("start/broadcast", "broadcast", 1)]

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send.

        Raises ValueError if `run.batch_shape` is None: the server sends the batches.
        """
        if run.batch_shape is None:
            raise ValueError("the server sends the batches: pass batch=(rows, context)")
        steps, (rows, context) = run.num_steps, run.batch_shape
        row_bytes, kept = 2 * 8 * context, collectives.even_counts(rows, self.size)[SERVER]
        calls = [
            PredictedCall("data", "broadcast", "linear", 16, steps),
            PredictedScatter(
                "data", "scatter", "linear", row_bytes * rows, steps, root_bytes=row_bytes * kept
            ),
            *self.calls_per_unit("reduce", "reduce", steps),
            *self.calls_per_unit("update", "broadcast", run.num_updates),
        ]
        norm = PredictedCall("norm", "broadcast", "linear", 8, steps)
        return calls + [norm] * self.loss_scale.is_dynamic


class Staleness(NamedTuple):
    """How stale one gradient was.

    Attributes
    ----------
    worker : int
        The rank that pushed it.
    step : int
        The worker's step.
    updates : int
        The updates made between the worker's pull of the parameters and its push.
    """

    worker: int
    step: int
    updates: int


class PendingPush(NamedTuple):
    """A push that has not begun: the receive of its first message, and when it was posted."""

    work: Work[Any]
    since: float


class AsyncParameterServer(ParameterServer):
    """Update the parameters by every gradient as it arrives.  Dean et al. 2012.

    Rank 0 is the server and computes no gradients.  Each of the other w = p-1 ranks, the workers,
    pulls the parameters, computes the gradient of its part of a step's batch (the mean over its own
    rows) and pushes it, S times.  The server applies the gradient and answers this worker alone.
    With one rank, training is serial.  All ranks together send, in u messages for u units,

    | phase              | collective | messages  | bytes                     |
    |--------------------|------------|-----------|---------------------------|
    | start/check        | all_gather | 2 calls   | (16 + 32 (u + 8)) p (p-1) |
    | async/pull/workerW | send       | S u       | S n(model)                |
    | async/push/workerW | send       | S (u + 1) | S (n(model) + 16)         |
    | finish/unit        | broadcast  | 1 call    | (p-1) n(unit)             |

    where 16 bytes are a worker's loss and loss scale, which precede its gradient.  In a step a
    worker sends Psi elements and receives Psi.  A broadcast at the end of `train` makes the
    parameters equal on all ranks.  Each worker has its own loss scale; a gradient that overflowed
    is pushed but not applied.

    An error on a worker, such as MissingGradient, is raised there alone.  The other ranks learn of
    it by the communicator's `timeout`: it limits the time of a worker's step, and the time for
    which other ranks wait for the slowest, because of a staleness bound or at the end.

    Parameters
    ----------
    comm, model, recipe, phase
        As in `Strategy`; `comm` must be a communicator.
    staleness_bound : int, optional
        How many steps a worker may be ahead of the slowest, at least 0: the server delays its
        answer until then (stale synchronous parallel, Ho et al. 2013).  With 0, each worker makes
        one step in each round.  By default there is no bound.  While a worker is in its step k, the
        clocks of the others are between k - bound and k + bound + 1, so that no staleness exceeds
        (2 bound + 1) (w - 1).
    algorithm : str
        Of the broadcast at the end; by default ``"linear"``.

    Raises
    ------
    ValueError
        As `Strategy`, and if `staleness_bound` is negative.

    Attributes
    ----------
    staleness : list of Staleness
        One for each push, in the order in which they were applied; on the server.
    """

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        staleness_bound: int | None = None,
        algorithm: str = "linear",
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        if staleness_bound is not None and staleness_bound < 0:
            raise ValueError(
                f"staleness_bound is {staleness_bound}: it must be at least 0, or None"
            )
        self.staleness_bound = staleness_bound
        self.staleness: list[Staleness] = []
        self._expected: dict[int, PendingPush] = {}
        self._pulled: dict[int, int] = {}  # after how many updates each worker pulled
        super().__init__(comm, model, recipe, algorithm=algorithm, phase=phase)

    @property
    def batch_part(self) -> tuple[int, int]:
        """The workers divide a batch; the server has no part: (0, 0)."""
        if self.size == 1:
            return 0, 1
        return (0, 0) if self.rank == SERVER else (self.rank - 1, self.size - 1)

    def train(
        self,
        steps: int,
        batch: BatchFunction,
        total: int,
        show: ProgressCallback,
        first: int = 0,
    ) -> list[float]:
        """Make steps `first` to `steps` of every worker.  All ranks call this.

        Parameters
        ----------
        steps, batch, first
            As in `Strategy.train`; `batch` is called for a worker's own part.
        total : int
            Used with one rank only.
        show : function
            Called on a worker after each of its steps, on the server after each step that all
            workers have made.

        Returns
        -------
        list of float
            A worker's own losses; on the server the losses of all pushes, in the order in which
            they were applied.

        Raises
        ------
        ValueError
            On all ranks, if `batch` raises it for too few rows.
        CollectiveTimeout
            On the server, if a worker's push does not begin within the communicator's timeout.
        """
        if self.size == 1:
            return super().train(steps, batch, total, show, first)
        if first < steps:
            batch(first, max(self.rank - 1, 0), self.size - 1)  # may raise before any rank waits
        with self._one_phase("async"):
            if self.rank == SERVER:
                losses = self._serve(first, steps, show)
            else:
                losses = self._work(first, steps, batch, show)
        with self.phase("finish"):
            self.broadcast_parameters()
        return losses

    @contextmanager
    def _one_phase(self, label: str) -> Iterator[None]:
        """Let `phase` read MPI's counters at both ends only: pulls and pushes overlap in time."""
        phase = self.phase
        with phase(label):
            self.phase = collectives.phase
            try:
                yield
            finally:
                self.phase = phase

    def options(self) -> dict[str, Any]:
        return super().options() | {"staleness_bound": self.staleness_bound}

    # The server

    def _serve(self, first: int, steps: int, show: ProgressCallback) -> list[float]:
        """Answer workers and apply their gradients until every worker has made its steps."""
        clocks = dict.fromkeys(range(1, self.size), first)  # the steps that each has made
        waiting, losses = list(clocks), []
        ahead = math.inf if self.staleness_bound is None else self.staleness_bound
        while (slowest := min(clocks.values())) < steps:
            for worker in [w for w in waiting if clocks[w] <= slowest + ahead]:
                waiting.remove(worker)
                self._answer(worker)
            worker = self._next_push()
            losses.append(self._apply(worker, clocks[worker]))
            clocks[worker] += 1
            if clocks[worker] < steps:
                waiting.append(worker)
            if min(clocks.values()) > slowest:
                show(slowest + 1, losses[-1])
        return losses

    def _answer(self, worker: int) -> None:
        """Send a worker the current parameters, and expect its push."""
        self._pulled[worker] = self.num_updates
        with collectives.phase(f"pull/worker{worker}"):
            for tag, flat in enumerate(self.parameters.values(), 1):
                self.comm.send(flat, worker, tag)
        work = self.comm.recv(np.empty(2), worker, async_op=True)
        self._expected[worker] = PendingPush(work, time.monotonic())

    def _next_push(self) -> int:
        """Wait for a push of any worker; the worker answered last is tested last, for fairness."""
        limit = math.inf if self.comm.timeout is None else self.comm.timeout
        while True:
            for worker, (work, since) in self._expected.items():
                if work.test():
                    return worker
                if time.monotonic() > since + limit:
                    raise CollectiveTimeout(f"no push from rank {worker} within {limit} s", work)
            time.sleep(PAUSE)

    def _apply(self, worker: int, step: int) -> float:
        """Update by the gradient that a worker has begun to push; return its loss."""
        loss, self.loss_scale.value = self._expected.pop(worker).work.wait().tolist()
        for tag, flat in enumerate(self.gradients.values(), 1):
            self.comm.recv(flat, worker, tag)
        updates = self.num_updates - self._pulled[worker]
        self.staleness.append(Staleness(worker, step, updates))
        self.update()
        return float(loss)

    # A worker

    def _work(
        self, first: int, steps: int, batch: BatchFunction, show: ProgressCallback
    ) -> list[float]:
        """Pull, compute and push.  The pull precedes `batch`: the server waits for its receipt."""
        losses = []
        for step in range(first, steps):
            for tag, flat in enumerate(self.parameters.values(), 1):
                self.comm.recv(flat, SERVER, tag)
            inputs, targets = batch(step, *self.batch_part)
            losses.append(self.step(inputs, targets, inputs.size))
            show(step + 1, losses[-1])
        return losses

    def reduce_loss(self, loss: float) -> float:
        """On a worker: send the loss and the loss scale to the server, and return the loss."""
        if self.rank == SERVER:
            return super().reduce_loss(loss)
        if any(self.absent_layers()):
            missing = ", ".join(name for name in self.model.layers if name not in self.used_layers)
            raise MissingGradient(f"no gradient in this step for {missing} (on rank {self.rank})")
        with collectives.phase(f"push/worker{self.rank}"):
            self.comm.send(np.array([loss, self.loss_scale.value]), SERVER)
        return loss

    def update(self) -> None:
        """On a worker: send the gradient to the server, which checks that it is finite, too."""
        if self.rank == SERVER:
            super().update()
            return
        with collectives.phase(f"push/worker{self.rank}"):
            for tag, flat in enumerate(self.gradients.values(), 1):
                self.comm.send(flat, SERVER, tag)
        if self.loss_scale.is_dynamic:
            squares = sum(map(sum_of_squares, self.gradients.values()))
            self.num_skipped += not self.update_loss_scale(squares)

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
        steps, sizes = run.num_steps, [self.unit_nbytes(unit) for unit in self.model.units]
        return [
            *(
                PredictedCall(f"async/{what}/worker{worker}", "send", "point_to_point", n, steps)
                for worker in range(1, self.size)
                for what, sent in {"pull": sizes, "push": [16, *sizes]}.items()
                for n in sent
            ),
            *self.calls_per_unit("finish", "broadcast", 1),
        ]

    def loss_traffic(self, steps: int) -> list[PredictedCall]:
        """Return no calls, for any number of `steps`: the loss is a part of each push."""
        return []
