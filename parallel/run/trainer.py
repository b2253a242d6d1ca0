"""Train a model: make steps, and predict what the steps send."""

from __future__ import annotations

from typing import Any

import collectives
from parallel.accounts import PhaseFunction, PredictedCall
from parallel.layout import BatchFunction, Layout, ProgressCallback, RankView, Recipe
from parallel.mesh import Mesh
from parallel.nn import Model
from parallel.pipeline import Schedule
from parallel.predict import RunSize, start_traffic, step_traffic, with_checks
from parallel.run import agreement
from parallel.run.rank_run import RankRun
from parallel.sharding import Sharding
from parallel.step import LayerAction, Update
from parallel.text import Tokens


class Trainer(RankRun):
    """Trains a model on the ranks of a mesh.

    A step is a list of actions (`actions`); `functions` says which function does which kind.  What
    a step sends and keeps is read off the list, before it runs.

    Before the first step all ranks check that they agree, and in each step they add up the loss.
    With u units, o options (`options`), S steps, p ranks, and q = log2 p for p a power of two, all
    ranks together send, in addition to what the sharding sends,

    | phase       | collective | calls | bytes a call                            |
    |-------------|------------|-------|-----------------------------------------|
    | start/check | all_gather | 2     | 16 p (p-1), 32 (u + o) p (p-1)          |
    | unused      | all_reduce | S     | u p q, with `find_unused_parameters`    |
    | loss        | all_reduce | S     | 16 p q                                  |
    | norm        | all_reduce | S     | 8 p q, if ranks divide gradients, with  |
    |             |            |       | clipping and in float16                 |
    | count       | all_reduce | S     | 8 n p q, if layers count n numbers      |

    Parameters
    ----------
    mesh : Mesh or None
        None: there is one rank, and nothing is sent.
    model : Model
        Its last layer is a loss, such as `parallel.nn.CrossEntropy`.
    recipe : Recipe, optional
        By default ``Recipe()``.
    sharding : Sharding, optional
        How the ranks along the data axes of the mesh divide the model.  By default one rank has it
        all.
    schedule : str or Schedule
        In which order the ranks along the axis ``pipe`` compute stages and micro-batches: a name
        of `parallel.pipeline.SCHEDULES`, by default ``"1f1b"``.
    algorithm : str
        The algorithm of calls that send parameters and gradients; by default ``"ring"``.
    phase : function
        Marks the phases; by default `collectives.phase`.  Pass `TrafficMonitor.phase` to have MPI
        count what is sent in each.

    Raises
    ------
    ValueError
        If the algorithm does not serve the numbers of ranks, or gives ranks different bits; if the
        mesh lacks axes of the sharding; or if the model divides its parameters on another mesh.
    InvalidSchedule
        If a given schedule cannot run, or computes a part of a stage twice or never.
    ModelMismatch
        On all ranks, if ranks would communicate along different axes.

    Attributes
    ----------
    steps_alone, next_step : int
        With `Sharding.every`, the steps since ranks had the same parameters; and the number of the
        next step.  `RankRun` has the other attributes.

    Examples
    --------
    >>> from parallel import Trainer, gpt, text
    >>> trainer = Trainer(None, gpt(num_layers=1, hidden=16, context=8))
    >>> trainer.start()
    >>> rows = text.batch(text.load(), seed=0, step=0, batch_size=4, context=8)
    >>> loss = trainer.step(*rows, total=4 * 8)
    """

    def __init__(
        self,
        mesh: Mesh | None,
        model: Model,
        recipe: Recipe | None = None,
        *,
        sharding: Sharding | None = None,
        schedule: str | Schedule = "1f1b",
        algorithm: str = "ring",
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        mesh = mesh or Mesh(None)
        if mesh.comm is None and mesh.size > 1:
            raise ValueError(f"a mesh of {mesh.size} ranks trains with a communicator only")
        layout = Layout(
            mesh, model, recipe, sharding=sharding, schedule=schedule, algorithm=algorithm
        )
        agreement.make_communicators(layout)
        super().__init__(RankView(layout, mesh.rank), phase)
        self.steps_alone = self.next_step = 0
        if layout.is_divided and any(self.sharding.reduction.state(self.optimizer)):
            name = type(self.sharding.reduction).__name__
            raise ValueError(f"{name} keeps arrays: it does not work beside a divided model")

    # A run

    def start(self) -> None:
        """Prepare the first step: check that ranks agree, and send initial values.

        Along the axes of the sharding, the first rank's values are sent to the others if the
        sharding has a `broadcast_algorithm`; otherwise they must be the same.  All ranks call this
        once, or `resume`.  Raises ModelMismatch, on all ranks, if models or options differ.
        """
        self.resume()
        algorithm = self.sharding.broadcast_algorithm
        if algorithm is None or self.comm is None:
            return
        with self.phase("start"), collectives.phase("broadcast"):
            for unit, flat in self.parameters.items():
                if axes := self.view.sharding_of(unit).axes:
                    comm = self.arrays.comm_of(axes)
                    comm.broadcast(flat, root=0, out=flat, algorithm=algorithm)
        self.offload.load()

    def resume(self) -> None:
        """Prepare the first step as `start` does, if `checkpoint.load` will set the parameters."""
        if self.comm is not None:
            units = {unit: agreement.digest_of(self.arrays, unit) for unit in self.model.units}
            with self.phase("start"), collectives.phase("check"):
                agreement.check_same(self.comm, units, self.options())

    def options(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, because their calls depend on it."""
        name = type(self).__name__
        return {"strategy": name} | agreement.options_of_run(self.view, self.optimizer)

    def close(self) -> None:
        """Free the communicators of the mesh.  All ranks call this at the end."""
        self.mesh.free()

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of the rows of a batch this rank computes: (index, number of parts)."""
        return self.layout.batch_part(self.rank)

    def train(
        self, steps: int, batch: BatchFunction, total: int, show: ProgressCallback, first: int = 0
    ) -> list[float]:
        """Make steps `first` to `steps` (exclusive) and return their losses.

        All ranks call this, after `start` or `resume`.  A loss is the mean of a batch in nats per
        target, the same on all ranks.  Raises MissingGradient as `step` does.

        Parameters
        ----------
        steps, first : int
            The number of steps done at the end and at the beginning, counted from 0.
        batch : function
            Called with (step, index, number of parts); returns the inputs and targets of one part
            of the step's batch, int64 (rows, context).  A row of the inputs may have any other
            shape that the first layer takes, such as the shape of an image with one target.
        total : int
            The number of targets in the batch of all ranks: of tokens in a text.
        show : function
            Called after each step with the number of steps done and the loss.
        """
        losses = []
        self.next_step = first
        for step in range(first, steps):
            losses.append(self.step(*self.rows_of(step, batch), total))
            show(step + 1, losses[-1])
        if self.steps_alone:
            self._average()
        return losses

    def rows_of(self, step: int, batch: BatchFunction) -> tuple[Tokens, Tokens]:
        """Return this rank's inputs and targets of a step; `batch` is as in `train`."""
        return batch(step, *self.batch_part)

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Make one update from this rank's rows of a batch and return the loss of the whole batch.

        All ranks call this.  `inputs` and `targets` are as a batch in `train`; the numbers of rows
        may differ among ranks.  The batch of all ranks has `total` targets.  The loss is the mean
        in nats per target, the same on all ranks.

        Raises MissingGradient, on all ranks, if a layer took no part in the step on some rank;
        ValueError if a token or a target is out of range; and FloatingPointError if gradients are
        not finite even with the smallest loss scale (float16).
        """
        self.begin(inputs, targets, total, self.next_step)
        self.next_step += 1
        self.run(action for action in self.actions if action.phase != "average")
        self.micro_batches.end()
        if self.sharding.every is not None:
            self.steps_alone += 1
            if self.steps_alone == self.sharding.every:
                self._average()
        return self.scalars.loss

    def _average(self) -> None:
        """Make the parameters of all ranks equal again."""
        self.run(action for action in self.actions if action.phase == "average")
        self.steps_alone = 0

    def compute(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add up gradients and return this rank's part of the loss, without sending anything.

        `inputs`, `targets` and `total` are as in `step`.
        """
        self.begin(inputs, targets, total, self.next_step)
        self.next_step += 1
        self.run(action for action in self.actions if isinstance(action, LayerAction))
        return float(self.micro_batches.loss)

    # Reports and predictions

    def summary_lines(self) -> list[str]:
        """Return sentences on what losses, traffic and memory do not show."""
        is_blocking = self.sharding.reduction.is_blocking
        can_overlap = "parameters" in self.sharding.divided or not is_blocking
        lines = [self.overlap.summary()] if self.comm is not None and can_overlap else []
        if number := self.micro_batches.num_recomputed:
            lines.append(f"{number} forward passes of layers recomputed on rank {self.rank}")
        if self.loss_scale.is_dynamic:
            scale = f"loss scale {self.loss_scale.value:g}"
            lines.append(f"{self.updates.num_skipped} updates skipped, {scale}")
        return [line for line in lines if line]

    def traffic(
        self,
        steps: int,
        *,
        batch: tuple[int, int] | None = None,
        num_skipped: int = 0,
        is_resumed: bool = False,
        first: int = 0,
    ) -> list[PredictedCall]:
        """Return what `start` and one `train` of `steps` steps will send.

        The calls, for `TrafficTable`, are the same on all ranks; there are none without a
        communicator.  Raises ValueError if an argument is missing or impossible.

        Parameters
        ----------
        steps : int
        batch : (rows, context), optional
            The shape of the targets of all ranks; needed by `SyncParameterServer`, which sends the
            batch, and if layers send messages.
        num_skipped : int
            How many updates an overflow prevents, which is known after a run in float16 only.
        is_resumed : bool
            Whether `resume` is called instead of `start`.
        first : int
            The number of the first step, on which a mixture of experts depends.
        """
        if num_skipped and not self.loss_scale.is_dynamic:
            dtype = self.view.dtype.name
            raise ValueError(f"in {dtype} no update is skipped, but num_skipped is {num_skipped}")
        if self.comm is None:
            return []
        run = RunSize(steps, self.num_updates_in(steps) - num_skipped, batch, first)
        check = agreement.start_check(self.comm, len(self.model.units), len(self.options()))
        start = start_traffic(self.layout, check, is_resumed=is_resumed)
        return with_checks([*start, *self.step_traffic(run)], self.comm)

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send."""
        return step_traffic(self.layout, run)

    def num_updates_in(self, steps: int) -> int:
        """Return how many updates `steps` steps make if no gradient overflows."""
        return steps * sum(isinstance(action, Update) for action in self.actions)

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes of other arrays that a rank keeps, by category: none by default."""
        return {}
