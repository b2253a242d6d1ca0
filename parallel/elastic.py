"""Data parallelism that outlives its ranks: when one dies, the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from collectives import Communicator, PeerFailed
from parallel import agreement
from parallel.data import AllReduce, DataParallel
from parallel.nn import Array, Model, on_host
from parallel.optim import Optimizer
from parallel.strategy import Batches, Recipe, Run, Show
from parallel.text import Tokens
from parallel.traffic import PredictedCall

DIGEST_BYTES = agreement.DIGEST


class ReplicasDiffer(RuntimeError):  # noqa: N818 - as the others of its kind are named
    """Ranks that should hold the same parameters do not.  The message says which."""


class Blocking(AllReduce):
    """Every sum is over before the next begins, so that a failure leaves none under way."""

    def start(self, strategy: DataParallel, bucket: str, flat: Array) -> Callable[[], object]:
        super().start(strategy, bucket, flat)()
        return lambda: None


class Elastic(DataParallel):
    """Data parallel over the ranks of `comm` that are alive.  It must be one that can shrink.

    When a rank dies in a step, the others agree on the step to repeat, go back to its beginning and
    divide its batch among themselves.  What follows is, to the last bit, what so many ranks would
    have computed from the same parameters.

    The ranks need not be at the same place when they learn of a death.  One may be waiting for the
    last sum of a step, which another has seen complete before it updated and went on.  But no sum
    completes anywhere before all have begun it, so nobody is ahead by more than one update: a copy
    of parameters and moments from before the last update is enough to go back.

    ValueError for float16, of which steps may be skipped.
    """

    def __init__(
        self, comm: Communicator, model: Model, recipe: Recipe | None = None, **options: Any
    ) -> None:
        ours = comm.split(0)
        assert ours is not None
        super().__init__(ours, model, recipe, hook=Blocking(), **options)
        if self.loss_scale.is_dynamic:
            raise ValueError("elastic training takes no float16: it counts updates as steps")
        self.num_steps = -1  # completed ones; -1 before `start`
        self._state = self.optimizer.arrays()
        if self.masters is not self.own_parameters:
            self._state += self.parameters.values()
        self._before = [array.copy() for array in self._state]  # the last update

    def calls_of_many(self) -> dict[str, Collection[int]]:
        """Any number of ranks may be left."""
        return dict.fromkeys(self.large, range(1, self.size + 1))

    def start(self) -> None:
        while self.num_steps < 0:
            try:
                super().start()
                self.num_steps = 0
            except PeerFailed:
                self.recover()

    def train(
        self, steps: int, batch: Batches, total: int, show: Show, first: int = 0
    ) -> list[float]:
        """As ever, whoever dies; the last loss of a step that was repeated counts."""
        assert first == 0, "an elastic run begins at the beginning"
        losses: list[float] = []
        while True:
            try:
                for step in range(self.num_steps, steps):
                    losses[step:] = [self.step(*batch(step, *self.part), total)]
                    show(step + 1, losses[-1])
                if self.finish():
                    return losses
            except PeerFailed:
                self.recover()
            self.start()  # unless some rank had not even come to its end

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        loss = super().step(inputs, targets, total)
        self.num_steps += 1
        return loss

    def update(self) -> None:
        for copy, array in zip(self._before, self._state, strict=True):
            copy[...] = array
        super().update()

    # When a rank has died

    def recover(self) -> None:
        """After a PeerFailed: go back, with the other survivors, to the first step to repeat.

        That is now `num_steps`.  More ranks may die meanwhile.  Raises ReplicasDiffer if parameters
        and moments are not the same everywhere then.
        """
        self._shrink()
        self._agree()

    def finish(self) -> bool:
        """After the last step: whether it is over.  If not, all is as after `recover`.

        A last sum can complete on one rank and fail on another, which then
        waits in `recover` for the first.  So here, too, all meet in a shrink.  It leaves the same
        ranks on all of them; if none is missing, all have come to the end.
        """
        with contextlib.suppress(PeerFailed):
            self.check()
        size = self.comm.size
        self._shrink()
        if self.comm.size == size:
            return True
        self._agree()
        return False

    def _shrink(self) -> None:
        comm, self.comm = self.comm, self.comm.shrink()
        comm.free()

    def _agree(self) -> None:
        while True:
            try:
                with self.phase("recover"):
                    steps = self.comm.all_reduce(np.array([self.num_steps]), op="min")
                self._go_back(int(steps[0]))
                if self.num_steps >= 0:
                    self.check()
            except PeerFailed:
                self._shrink()
            else:
                return

    def _go_back(self, num_steps: int) -> None:
        """To the parameters and moments after so many steps: the present ones, or those before."""
        if self.optimizer.steps > max(num_steps, 0):
            for copy, array in zip(self._before, self._state, strict=True):
                array[...] = copy
            self.optimizer.steps -= 1
        assert self.optimizer.steps == max(num_steps, 0)
        self.num_steps = num_steps

    # Equal to the last bit

    def check(self) -> None:
        """Raise ReplicasDiffer on every rank if not all have the same digest."""
        mine = np.frombuffer(digest(self.optimizer), np.uint8)
        with self.phase("check"):
            digests = self.comm.all_gather(mine, algorithm="ring").reshape(-1, DIGEST_BYTES)
        if wrong := [rank for rank, other in enumerate(digests) if (other != digests[0]).any()]:
            ranks = ", ".join(map(str, wrong))
            raise ReplicasDiffer(
                f"after {self.optimizer.steps} updates the parameters or moments of rank {ranks}"
                f" (of {self.comm.size}) are not those of rank 0"
            )

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """Data parallel's, and the check of `finish`: of a run in which nobody dies."""
        check = PredictedCall("check", "all_gather", "ring", DIGEST_BYTES * self.comm.size)
        return [*super().traffic_of_steps(run), check]


class Doomed(Elastic):
    """It kills this process in the middle of a step, so that one can see the others go on."""

    last_step = -1

    def options(self) -> dict[str, Any]:
        """It tells nobody what it is about to do."""
        return super().options() | {"strategy": Elastic.__name__}

    def reduce(self, unit: str) -> None:
        super().reduce(unit)
        if self.num_steps == self.last_step:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(optimizer: Optimizer) -> bytes:
    """Of the values, their moments and the number of updates: DIGEST_BYTES bytes."""
    return agreement.digest(optimizer.steps, *map(on_host, optimizer.arrays()))
