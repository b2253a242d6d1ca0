"""A parameter server: rank 0 alone updates the model, from gradients that others compute for it.

Data parallelism at its most naive, synchronous or asynchronous.  All that is sent goes to or from
one rank, which therefore sends and receives (p-1) times what another one does.  Li et al. 2014.
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
from parallel import shards
from parallel.strategy import Batches, NoGradient, Run, Show, Strategy, squares
from parallel.text import Tokens, share
from parallel.traffic import PredictedCall, PredictedScatter

SERVER = 0
PAUSE = 5e-4  # seconds that the asynchronous server sleeps when nothing has come


class ParameterServer(Strategy):
    """What both have in common: rank 0 alone has optimizer states and master weights.

    `algorithm`: by which rank 0 broadcasts, and the synchronous one reduces; "linear" is the naive
    one.  Initial values are rank 0's, whatever the others drew.
    """

    comm: Communicator
    divided: ClassVar[frozenset[str]] = frozenset({"optimizer", "master"})
    must_begin_alike = False
    large: ClassVar[tuple[str, ...]] = ("broadcast",)

    def __init__(self, *args: Any, algorithm: str = "linear", **more: Any) -> None:
        super().__init__(*args, algorithm=algorithm, **more)

    @property
    def replicas(self) -> tuple[int, int]:
        return 0, 1

    def own(self, unit: str) -> slice:
        """All of it on the server, nothing on the others."""
        return slice(0, self.model.sizes[unit] if self.rank == SERVER else 0)

    def broadcast_parameters(self) -> None:
        """The server's, to all."""
        for unit, flat in self.parameters.items():
            with collectives.phase(unit):
                self.comm.broadcast(flat, root=SERVER, out=flat, algorithm=self.algorithm)


class ServerSync(ParameterServer):
    """All gradients of a step are added up, then rank 0 updates: bulk-synchronous.  Valiant 1990.

    The server alone reads the data, and computes on its share of them like the others.  With u
    units, S steps of batches of r rows of c tokens, of which r0 = ceil(r / p) rows are the
    server's, all ranks together send ("linear"; k micro-batches make no difference)

    | phase                | collective | calls           | bytes a call            |
    |----------------------|------------|-----------------|-------------------------|
    | start/broadcast/unit | broadcast  | 1               | (p-1) n(unit)           |
    | data                 | broadcast  | S               | 16 (p-1): r and c       |
    | data                 | scatter    | S               | 16 c (r - r0)           |
    | reduce/unit          | reduce     | S               | (p-1) n(unit)           |
    | norm                 | broadcast  | S, float16 only | 8 (p-1)                 |
    | update/unit          | broadcast  | updates         | (p-1) n(unit)           |

    beside what all strategies send.  In a step the server sends (p-1) Psi elements, and each worker
    Psi.  A step whose gradient overflowed is no update: no parameters are sent.  The norm tells the
    workers of that.
    """

    large = "broadcast", "reduce"
    shape = 0, 0  # of the batches so far: rows and tokens in each; all are alike

    def start(self) -> None:
        super().start()
        with self.phase("start"), collectives.phase("broadcast"):
            self.broadcast_parameters()

    def train(
        self, steps: int, batch: Batches, total: int, show: Show, first: int = 0
    ) -> list[float]:
        """As `Strategy.train`; `batch` is called on the server alone, for whole batches.

        Raises ValueError, on all ranks, if a batch has fewer rows than there are ranks, or another
        shape than the one before; and on the workers if the server could not read it.
        """

        def dealt(step: int, *_: int) -> tuple[Tokens, Tokens]:
            if self.rank != SERVER:
                return self.deal(None)
            try:
                whole = np.stack(batch(step, 0, 1), axis=1, dtype=np.int64)
            except Exception:
                with suppress(ValueError):
                    self.deal(None)  # or the others would wait for it for ever
                raise
            return self.deal(whole)

        return super().train(steps, dealt, total, show, first)

    def deal(self, whole: Tokens | None) -> tuple[Tokens, Tokens]:
        """This rank's inputs and targets, (rows, context) both.

        `whole`: the server's batch, (rows, 2, context) int64; None elsewhere.
        """
        shape = np.array([0, 0] if whole is None else whole.shape[::2])
        with self.phase("data"):
            self.comm.broadcast(shape, root=SERVER, out=shape, algorithm="linear")
            rows, context = self._checked(int(shape[0]), int(shape[1]))
            counts = shards.counts(rows, self.size)
            mine = np.empty((counts[self.rank], 2, context), np.int64)
            self.comm.scatter(whole, root=SERVER, out=mine, counts=counts, algorithm="linear")
        return mine[:, 0], mine[:, 1]

    def _checked(self, rows: int, context: int) -> tuple[int, int]:
        """The shape of a batch, which all ranks know by now."""
        share(rows, self.size, self.rank)  # refuses too few
        shape = rows, context
        if self.shape not in ((0, 0), shape):
            raise ValueError(f"batches differ in rows and tokens: {self.shape}, then {shape}")
        self.shape = shape
        return shape

    def before_update(self) -> None:
        with self.phase("reduce"):
            for unit, x in self.gradients.items():
                with collectives.phase(unit):
                    self.comm.reduce(x, op="sum", root=SERVER, out=x, algorithm=self.algorithm)

    def sum_of_squares(self) -> float:
        """The server's; the workers hear of it if their loss scale depends on it."""
        found = np.array([super().sum_of_squares()], np.float64)
        if self.loss_scale.is_dynamic:
            with self.phase("norm"):
                self.comm.broadcast(found, root=SERVER, out=found, algorithm="linear")
        return float(found[0])

    def after_update(self) -> None:
        with self.phase("update"):
            self.broadcast_parameters()

    def traffic_of_start(self) -> list[PredictedCall]:
        return [*super().traffic_of_start(), *self.each_unit("start/broadcast", "broadcast", 1)]

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """ValueError if the shape of batches is not said."""
        if run.batch is None:
            raise ValueError("the server sends batches: say how many rows of how many tokens")
        steps, (rows, context) = run.steps, run.batch
        row, kept = 2 * 8 * context, shards.counts(rows, self.size)[SERVER]
        calls = [
            PredictedCall("data", "broadcast", "linear", 16, steps),
            PredictedScatter("data", "scatter", "linear", row * rows, steps, kept=row * kept),
            *self.each_unit("reduce", "reduce", steps),
            *self.each_unit("update", "broadcast", run.updates),
        ]
        norm = PredictedCall("norm", "broadcast", "linear", 8, steps)
        return calls + [norm] * self.loss_scale.is_dynamic


class Staleness(NamedTuple):
    """Of a gradient that worker `worker` pushed in its step `step`.

    `updates`: how many were made between its pull of the parameters and its push.
    """

    worker: int
    step: int
    updates: int


class Expected(NamedTuple):
    """A push that has not begun: the receive of its first message, and since when it is awaited."""

    work: Work[Any]
    since: float


class ServerAsync(ParameterServer):
    """Every gradient updates the parameters as it comes, whatever the others do.  Dean et al. 2012.

    Rank 0 is a server and nothing else.  Each of the other w = p-1 ranks, the workers, pulls the
    parameters, computes the gradient of its own part of a step's batch, the mean over its own
    rows, and pushes it, S times.  The server applies it and answers this worker alone.  On one
    rank, training is serial.  All ranks together send, in u messages each way

    | phase              | collective | messages  | bytes                     |
    |--------------------|------------|-----------|---------------------------|
    | start/check        | all_gather | 2 calls   | (16 + 32 (u + 8)) p (p-1) |
    | async/pull/workerW | send       | S u       | S n(model)                |
    | async/push/workerW | send       | S (u + 1) | S (n(model) + 16)         |
    | finish/unit        | broadcast  | 1 call    | (p-1) n(unit)             |

    where 16 bytes are a worker's loss and loss scale, which go ahead of its gradient.  In a step a
    worker sends Psi elements and receives Psi; a broadcast makes all ranks equal at the end of
    `train`.  Workers scale their losses each for itself.  A gradient that overflowed is pushed,
    but not applied.

    `bound`: no worker runs more than so many steps ahead of the slowest, for which the server
    withholds its answer (stale synchronous parallel, Ho et al. 2013).  0: rounds in which every
    worker does one step.  None: no bound.  While a worker is in its step k the clocks of the others
    run at most from k - bound to k + bound + 1, so no staleness exceeds (2 bound + 1) (w - 1).
    `staleness` lists that of every push in the order in which they were applied (on the server).

    What fails on a worker (NoGradient, too) fails there alone.  The others learn of it from the
    communicator's `timeout`: a worker has so long for a step, and nobody waits longer for the
    slowest, where a bound holds him and at the end.
    """

    def __init__(self, *args: Any, bound: int | None = None, **more: Any) -> None:
        if bound is not None and bound < 0:
            raise ValueError(f"bound is a number of steps, at least 0, or None; not {bound}")
        self.bound = bound
        self.staleness: list[Staleness] = []
        self._expected: dict[int, Expected] = {}
        self._pulled: dict[int, int] = {}  # what each worker has: after so many updates
        super().__init__(*args, **more)

    @property
    def part(self) -> tuple[int, int]:
        """The workers divide a batch; the server has nothing of it."""
        if self.size == 1:
            return 0, 1
        return (0, 0) if self.rank == SERVER else (self.rank - 1, self.size - 1)

    def train(
        self, steps: int, batch: Batches, total: int, show: Show, first: int = 0
    ) -> list[float]:
        """Steps `first` to `steps` of every worker; `total` is not used, but on one rank.

        Returns a worker's own losses; on the server those of all pushes, in the order in which they
        were applied.  `show` is told on a worker of its own steps, on the server of those that all
        workers have done.  Raises ValueError, on all ranks, if `batch` does for too few rows.
        """
        if self.size == 1:
            return super().train(steps, batch, total, show, first)
        if first < steps:
            batch(first, max(self.rank - 1, 0), self.size - 1)  # refuses, before anybody waits
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
        """MPI's counters are read at its ends only: pulls and pushes inside overlap in time."""
        phase = self.phase
        with phase(label):
            self.phase = collectives.phase
            try:
                yield
            finally:
                self.phase = phase

    def options(self) -> dict[str, Any]:
        return super().options() | {"bound": self.bound}

    # The server

    def _serve(self, first: int, steps: int, show: Show) -> list[float]:
        """Answer and apply until every worker has done its steps."""
        clocks = dict.fromkeys(range(1, self.size), first)  # the steps that each has done
        waiting, losses = list(clocks), []
        ahead = math.inf if self.bound is None else self.bound
        while (slowest := min(clocks.values())) < steps:
            for worker in [w for w in waiting if clocks[w] <= slowest + ahead]:
                waiting.remove(worker)
                self._answer(worker)
            worker = self._next()
            losses.append(self._apply(worker, clocks[worker]))
            clocks[worker] += 1
            if clocks[worker] < steps:
                waiting.append(worker)
            if min(clocks.values()) > slowest:
                show(slowest + 1, losses[-1])
        return losses

    def _answer(self, worker: int) -> None:
        """Send a worker the parameters as they are; its push is now expected."""
        self._pulled[worker] = self.num_updates
        with collectives.phase(f"pull/worker{worker}"):
            for tag, flat in enumerate(self.parameters.values(), 1):
                self.comm.send(flat, worker, tag)
        work = self.comm.recv(np.empty(2), worker, async_op=True)
        self._expected[worker] = Expected(work, time.monotonic())

    def _next(self) -> int:
        """Wait for a push of any worker.  Who was answered last is asked last: nobody starves."""
        limit = math.inf if self.comm.timeout is None else self.comm.timeout
        while True:
            for worker, (work, since) in self._expected.items():
                if work.test():
                    return worker
                if time.monotonic() > since + limit:
                    raise CollectiveTimeout(f"no push from rank {worker} within {limit} s", work)
            time.sleep(PAUSE)

    def _apply(self, worker: int, step: int) -> float:
        """Update by the gradient that a worker has begun to push; its loss."""
        loss, self.loss_scale.value = self._expected.pop(worker).work.wait().tolist()
        for tag, flat in enumerate(self.gradients.values(), 1):
            self.comm.recv(flat, worker, tag)
        updates = self.num_updates - self._pulled[worker]
        self.staleness.append(Staleness(worker, step, updates))
        self.update()
        return float(loss)

    # A worker

    def _work(self, first: int, steps: int, batch: Batches, show: Show) -> list[float]:
        """Pull, compute and push.  The pull comes first: the server waits until it is taken."""
        losses = []
        for step in range(first, steps):
            for tag, flat in enumerate(self.parameters.values(), 1):
                self.comm.recv(flat, SERVER, tag)
            inputs, targets = batch(step, *self.part)
            losses.append(self.step(inputs, targets, inputs.size))
            show(step + 1, losses[-1])
        return losses

    def agree(self, loss: float) -> float:
        """A worker tells the server its loss, and by what its gradient is scaled."""
        if self.rank == SERVER:
            return super().agree(loss)
        if any(self.is_absent()):
            missing = ", ".join(name for name in self.model.layers if name not in self.used)
            raise NoGradient(f"no gradient in this step for {missing} (on rank {self.rank})")
        with collectives.phase(f"push/worker{self.rank}"):
            self.comm.send(np.array([loss, self.loss_scale.value]), SERVER)
        return loss

    def update(self) -> None:
        """A worker leaves it to the server, which finds as it does whether a gradient is finite."""
        if self.rank == SERVER:
            super().update()
            return
        with collectives.phase(f"push/worker{self.rank}"):
            for tag, flat in enumerate(self.gradients.values(), 1):
                self.comm.send(flat, SERVER, tag)
        if self.loss_scale.is_dynamic:
            is_good = self.loss_scale_passes(sum(map(squares, self.gradients.values())))
            self.num_skipped += not is_good

    # What it says about itself

    def remarks(self) -> list[str]:
        updates = [each.updates for each in self.staleness] or [0]
        mean, most = sum(updates) / len(updates), max(updates)
        said = (
            f"{len(self.staleness)} gradients, {mean:.2f} updates stale on average, at most {most}"
        )
        return [*super().remarks(), said]

    def updates_in(self, steps: int) -> int:
        """One for each push."""
        return steps * max(self.size - 1, 1)

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """Of so many steps of every worker, and of the end."""
        steps, sizes = run.steps, [self.nbytes(unit) for unit in self.model.units]
        return [
            *(
                PredictedCall(f"async/{what}/worker{worker}", "send", "point_to_point", n, steps)
                for worker in range(1, self.size)
                for what, sent in {"pull": sizes, "push": [16, *sizes]}.items()
                for n in sent
            ),
            *self.each_unit("finish", "broadcast", 1),
        ]

    def traffic_of_loss(self, steps: int) -> list[PredictedCall]:
        """It goes with each push."""
        return []
