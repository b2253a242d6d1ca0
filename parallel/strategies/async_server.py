"""An asynchronous parameter server: rank 0 updates the model by every gradient as it arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import CollectiveTimeout, Communicator, Work
from parallel.accounts import PredictedCall
from parallel.layout import BatchFunction, ProgressCallback
from parallel.mesh import Mesh
from parallel.nn import Array
from parallel.predict import RunSize
from parallel.run import MissingGradient, Trainer, sum_of_squares
from parallel.sharding import SERVER, PushToServer, Sharding
from parallel.step import LayerBackward, LayerForward, SendNorm, SumLoss, Update
from parallel.text import Tokens

AXES = ("data",)
PAUSE = 5e-4  # seconds that the asynchronous server sleeps when no push has begun


class Staleness(NamedTuple):
    """How stale the gradient of a step was: `updates` came between the worker's pull and push."""

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
    comm : Communicator
        As in `SyncParameterServer`.
    algorithm : str
        As in `SyncParameterServer`.
    staleness_bound : int, optional
        How many steps a worker may be ahead of the slowest, at least 0: the server delays its
        answer until then (stale synchronous parallel, Ho et al. 2013).  With 0, each worker makes
        one step in each round.  By default there is no bound.  While a worker is in its step k, the
        clocks of the other workers are between k - bound and k + bound + 1, so that no staleness
        exceeds (2 bound + 1) (w - 1).  Raises ValueError if it is negative.

    Attributes
    ----------
    staleness : list of Staleness
        The staleness of each push, in the order in which they were applied; on the server.
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
        # Each rank does its part of a step alone: a worker the actions before the update, the
        # server the rest.  These have no phases, because pulls and pushes overlap in time.
        alone = LayerForward, LayerBackward, SumLoss, SendNorm, Update
        step = [replace(x, axes=(), phase="") for x in self.actions if isinstance(x, alone)]
        self._ends = [replace(x, phase="finish") for x in self.actions if x.phase == "update"]
        self.actions = [*step, *self._ends]

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

        Returns a worker's own losses; on the server the losses of all pushes, in the order in which
        the pushes were applied.  Raises CollectiveTimeout on the server, if a worker's push does
        not begin within the communicator's timeout.
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
        self.run(self._ends)
        return losses

    def options(self) -> dict[str, Any]:
        return super().options() | {"staleness_bound": self.staleness_bound}

    # The server

    def _serve(self, first: int, steps: int, show: ProgressCallback) -> list[float]:
        """Answer workers and apply their gradients until every worker has made its steps."""
        clocks = dict.fromkeys(range(1, self.size), first)  # the steps that each worker has made
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
        comm = self.arrays.comm_of(AXES)
        with collectives.phase(f"pull/worker{worker}"):
            transfer(comm.send, self.parameters, worker)
        work = comm.recv(np.empty(2), worker, async_op=True)
        self._expected[worker] = work, time.monotonic(), self.updates.num_updates

    def _next_push(self) -> int:
        """Wait for a push of any worker; the worker answered last is tested last, for fairness."""
        timeout = self.arrays.comm_of(AXES).timeout
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
        transfer(self.arrays.comm_of(AXES).recv, self.gradients, worker)
        self.staleness.append(Staleness(worker, step, self.updates.num_updates - updates))
        self.run(action for action in self.actions if isinstance(action, SendNorm | Update))
        return float(loss)

    # A worker

    def rows_of(self, step: int, batch: BatchFunction) -> tuple[Tokens, Tokens]:
        if self.size > 1:  # before `batch` is called: the server waits for the receipt
            transfer(self.arrays.comm_of(AXES).recv, self.parameters, SERVER)
        return super().rows_of(step, batch)

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Compute the loss and the gradient, and send both to the server; see `Trainer.step`."""
        if self.size == 1:
            return super().step(inputs, targets, total)
        comm, loss = self.arrays.comm_of(AXES), self.compute(inputs, targets, targets.size)
        if any(self.scalars.absent_layers()):
            used = self.micro_batches.used_layers
            missing = ", ".join(name for name in self.model.layers if name not in used)
            raise MissingGradient(f"no gradient in this step for {missing} (on rank {self.rank})")
        with collectives.phase(f"push/worker{self.rank}"):
            comm.send(np.array([loss, self.loss_scale.value]), SERVER)
            transfer(comm.send, self.gradients, SERVER)
        if self.loss_scale.is_dynamic:
            squares = float(sum(map(sum_of_squares, self.gradients.values())))
            self.updates.num_skipped += not self.updates.update_loss_scale(squares)
        return loss

    # Reports and predictions

    def summary_lines(self) -> list[str]:
        updates = [push.updates for push in self.staleness] or [0]
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
        units = [(n, self.view.dtype.itemsize) for n in self.view.unit_sizes.values()]
        options = {"algorithm": "point_to_point", "num_calls": run.num_steps}
        calls = []
        for worker in range(1, self.size):
            pull = f"async/pull/worker{worker}", (SERVER, worker), units
            push = f"async/push/worker{worker}", (worker, SERVER), [(2, 8), *units]
            calls += [
                self.view.predicted(
                    phase, "send", n, AXES, itemsize=width, groups=(ends,), **options
                )
                for phase, ends, messages in (pull, push)
                for n, width in messages
            ]
        return calls + [call for action in self._ends for call in action.sends(self.view)]


def transfer(call: Callable[..., object], flats: Mapping[str, Array], other: int) -> None:
    """Send the arrays to another rank, or receive them from it."""
    for tag, flat in enumerate(flats.values(), 1):
        call(flat, other, tag)
