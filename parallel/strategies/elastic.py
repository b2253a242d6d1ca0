"""Data parallelism that continues with the surviving ranks when ranks fail."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

import collectives
from collectives import Communicator, PeerFailed
from parallel.accounts import PhaseFunction, PredictedCall
from parallel.layout import BatchFunction, ProgressCallback, RankView, check_arguments
from parallel.mesh import Mesh
from parallel.nn import Array, on_host
from parallel.optim import Optimizer, master_dtype
from parallel.predict import RunSize
from parallel.run import DIGEST_BYTES, Trainer, agreement, format_ranks
from parallel.sharding import AllReduce, Arrays, Axes, Completion, Sharding
from parallel.step import Reduce, Update
from parallel.text import Tokens

AXES = ("data",)
T = TypeVar("T")


class ReplicaMismatch(RuntimeError):  # noqa: N818 - named like the errors of `collectives`
    """Ranks that should hold the same parameters do not.  The message names the ranks."""


class BlockingAllReduce(AllReduce):
    """Complete every sum before the next begins, so that none is pending when a rank fails."""

    is_blocking: ClassVar[bool] = True

    def start(self, arrays: Arrays, bucket: str, flat: Array, axes: Axes) -> Completion:
        super().start(arrays, bucket, flat, axes)()
        return lambda: None


class Elastic(Trainer):
    """Data parallelism over the ranks that are alive.

    When a rank dies in a step, the surviving ranks agree on the step to repeat, return to its
    beginning and divide its batch among themselves.  The results that follow are bitwise the
    results of the smaller number of ranks from the same parameters.

    No sum completes on any rank before all ranks have begun it.  So no rank is ahead by more than
    one update, and a copy of parameters and optimizer states from before it is enough to go back.

    Parameters
    ----------
    comm : Communicator
        A communicator of an MPI that was started with fault tolerance.
    algorithm : str
        As in `Trainer`, like the arguments after `comm`, and `phase`.
    kill : (int, int), optional
        For demonstrations: a rank, and the step in whose middle this rank kills its process.
    sharding
        The options of `Sharding.ddp`, except `hook`.

    Raises
    ------
    ValueError
        As in `Trainer`; if a failure would end all ranks; if there is no rank to `kill`; and for
        float16, which may skip updates.

    Attributes
    ----------
    num_steps : int
        The number of completed steps; -1 before `start`.
    """

    def __init__(
        self,
        comm: Communicator,
        *given: Any,
        algorithm: str = "ring",
        phase: PhaseFunction = collectives.phase,
        kill: tuple[int, int] | None = None,
        **sharding: Any,
    ) -> None:
        if not comm.can_shrink:
            raise ValueError(
                "the elastic strategy needs an Open MPI that was started with fault tolerance: "
                "ring launch --fault-tolerant"
            )
        victim, last_step = kill or (0, None)
        if victim >= comm.size:
            raise ValueError(f"--kill {victim}:{last_step}: there are ranks 0 to {comm.size - 1}")
        self._last_step = last_step if victim == comm.rank else None  # of this process
        divided = Sharding.ddp(hook=BlockingAllReduce(), **sharding)
        for size in range(1, comm.size + 1):  # others may fail
            check_arguments({"data": size}, divided, algorithm)
        copy = comm.split(0, name="data")  # the run replaces and frees it
        super().__init__(Mesh(copy), *given, sharding=divided, algorithm=algorithm, phase=phase)
        if self.loss_scale.is_dynamic:
            raise ValueError("elastic training does not support float16: it may skip updates")
        self.num_steps = -1
        self.functions |= {Update: self._update_with_backup, Reduce: self._reduce_and_die}
        self._state = self.optimizer.arrays()
        if self.masters is not self.arrays.parameter_shards:
            self._state += self.parameters.values()
        # The state before the last update.
        self._backup = [self.memory.track("backup", array.copy()) for array in self._state]

    def start(self) -> None:
        """Check that ranks agree, and broadcast the parameters of rank 0; again after a failure.

        All ranks call this.  Raises ModelMismatch, on all ranks, if shapes or options differ.
        """
        while self.num_steps < 0:
            try:
                super().start()
                self.num_steps = 0
            except PeerFailed:
                self.recover()

    def train(
        self, steps: int, batch: BatchFunction, total: int, show: ProgressCallback, first: int = 0
    ) -> list[float]:
        """Make all steps and return their losses, whichever ranks fail; see `Trainer.train`.

        The loss of a repeated step is the loss of its last repetition.  `first` must be 0.  Raises
        ReplicaMismatch if surviving ranks do not have the same parameters.
        """
        assert first == 0, "an elastic run begins with the first step"
        losses: list[float] = []
        while True:
            try:
                for step in range(self.num_steps, steps):
                    losses[step:] = [self.step(*self.rows_of(step, batch), total)]
                    show(step + 1, losses[-1])
                with contextlib.suppress(PeerFailed):
                    self.check()
                if self.recover(is_over=True):
                    return losses
            except PeerFailed:
                self.recover()
            self.start()  # returns at once unless a surviving rank had not completed it

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        loss = super().step(inputs, targets, total)
        self.num_steps += 1
        return loss

    def _update_with_backup(self, action: Update) -> bool:
        """Copy what the update changes, then change the parameters."""
        for copy, array in zip(self._backup, self._state, strict=True):
            copy[...] = array
        return self.updates.update(action)

    def _reduce_and_die(self, action: Reduce) -> None:
        """Sum a bucket; then, as `kill` says, kill the process in the middle of a step."""
        self.units.reduce(action)
        if self.num_steps == self._last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    # After a failure

    def recover(self, *, is_over: bool = False) -> bool:
        """Return whether training is over; if not, go back to the step that `num_steps` says.

        All surviving ranks call this, after PeerFailed or (`is_over`) after the last step; more of
        them may fail meanwhile.  Raises ReplicaMismatch if their parameters and optimizer states
        are then not equal.
        """
        # A last sum can complete on one rank and fail on another, which then waits here for the
        # first.  So all ranks shrink after the last step, too; the same ranks are left on all of
        # them, and if none is missing, all have completed that step.
        comm, size = self.arrays.comm_of(AXES), self.size
        mesh = Mesh(comm.shrink(interrupt=not is_over))  # others may still be in the check
        self.set_view(RankView(self.layout.on(mesh), mesh.rank))
        comm.free()
        if is_over and self.size == size:
            return True
        try:
            with self.phase("recover"):
                steps = self.arrays.comm_of(AXES).all_reduce(np.array([self.num_steps]), op="min")
            self._go_back(int(steps[0]))
            if self.num_steps >= 0:
                self.check()
        except PeerFailed:
            self.recover()
        return False

    def _go_back(self, num_steps: int) -> None:
        """Restore the state after `num_steps` steps: the current state, or the backup."""
        if self.optimizer.steps > max(num_steps, 0):
            for copy, array in zip(self._backup, self._state, strict=True):
                array[...] = copy
            self.optimizer.steps -= 1
        assert self.optimizer.steps == max(num_steps, 0)
        self.num_steps = num_steps

    # Bitwise equality

    def check(self) -> None:
        """Raise ReplicaMismatch, on every rank, unless all have the same state; all call this."""
        mine = np.frombuffer(digest(self.optimizer), np.uint8)
        with self.phase("check"):
            digests = self.arrays.comm_of(AXES).all_gather(mine, algorithm="ring")
        digests = digests.reshape(-1, DIGEST_BYTES)
        is_wrong = (digests != digests[0]).any(axis=1)
        if is_wrong.any():
            raise ReplicaMismatch(
                f"after {self.optimizer.steps} updates the parameters or optimizer states of"
                f" {format_ranks(is_wrong)} (of {self.size}) are not those of rank 0"
            )

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` and the check at the end send if no rank fails."""
        counts = (DIGEST_BYTES,) * self.size
        check = self.view.predicted(
            "check", "all_gather", counts, AXES, itemsize=1, algorithm="ring"
        )
        return [*super().step_traffic(run), check]

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes of the backup: masters, states, and parameters that are not masters."""
        per_element = master_dtype(self.view.dtype).itemsize * (1 + len(self.optimizer.STATES))
        if self.masters is not self.arrays.parameter_shards:
            per_element += self.view.dtype.itemsize
        return {"backup": per_element * sum(self.view.unit_sizes.values())}


def survive(comm: Communicator, function: Callable[[Communicator], T], *, is_elastic: bool) -> T:
    """Return `function(comm)`; if ranks die and `is_elastic`, all others call it again."""
    if not is_elastic:
        return function(comm)
    while True:
        with contextlib.suppress(PeerFailed):
            result = function(comm)
        size, comm = comm.size, comm.shrink(interrupt=False)
        if comm.size == size:
            comm.free()
            return result


def digest(optimizer: Optimizer) -> bytes:
    """Return the SHA-256 of the values, the states and the number of updates."""
    return agreement.digest(optimizer.steps, *map(on_host, optimizer.arrays()))
