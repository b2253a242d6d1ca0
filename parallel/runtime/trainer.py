"""Train a model: run the actions of a step, and say what they will send."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
from array_api_compat import numpy as numpy_namespace

import collectives
from parallel.accounts import Event, PredictedCall, merged
from parallel.accounts.monitor import PhaseFunction
from parallel.actions import Action
from parallel.lowering import SENDS
from parallel.mesh import Mesh
from parallel.nn import Array, Model
from parallel.optim import Offload, Optimizer, pieces
from parallel.pipeline import Schedule, make, validate
from parallel.placement import length, pieces_of, span, split
from parallel.runtime import agreement, prediction
from parallel.runtime.agreement import format_ranks
from parallel.runtime.checks import check_arguments, check_model, check_recipe, check_schedule
from parallel.runtime.micro_batches import MicroBatches, number_of
from parallel.runtime.overlap import Overlap
from parallel.runtime.prediction import SCALAR_ALGORITHM
from parallel.runtime.recipe import BatchFunction, ProgressCallback, Recipe
from parallel.runtime.state import BatchSize, State
from parallel.runtime.turns import Turns, may_change_threads
from parallel.runtime.units import Units
from parallel.sharding import Sharding
from parallel.stages import Stages
from parallel.text import Tokens

METHODS = {
    "F": "forward", "B": "backward", "I": "backward", "W": "backward",
    "SEND_F": "micro_batches.send", "SEND_B": "micro_batches.send",
    "RECV_F": "micro_batches.receive", "RECV_B": "micro_batches.receive",
    "UNSHARD": "units.unshard", "RESHARD": "units.reshard", "REDUCE": "units.reduce",
    "AVERAGE": "units.average", "WAIT": "wait",
    "UNUSED": "find_unused", "LOSS": "reduce_loss", "NORM": "reduce_norm", "UPDATE": "update",
    "COUNT": "sum_counts",
}  # fmt: skip
HALVES = {"B": "backward", "I": "backward_input", "W": "backward_weight"}
COMPUTING = ("F", "B", "I", "W", "UPDATE", "RESHARD")


class MissingGradient(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """Layers took no part in a step on some ranks.  The message names the layers and ranks."""


class Trainer(State):
    """Trains a model on the ranks of a mesh.

    A step is a list of actions (`actions`); `do` does one of them.  What a step sends and keeps is
    read off the list, before it runs.

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
        Of the collectives that send parameters and gradients; by default ``"ring"``.
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
    actions : list of Action
        What each step does.
    masters : dict of str to array
        What the optimizer updates: `parameter_shards`, or copies in the dtype of updates.
    optimizer, offload, activations, loss_scale
        As the recipe says.
    micro_batches : MicroBatches
        Those of the step that is in progress.
    units : Units
        The parameters that are being gathered, and the gradients that are being summed.
    num_updates, num_skipped, num_batches, steps_alone, next_step : int
        The updates made, those that an overflow prevented, the batches computed, with
        `Sharding.every` the steps since ranks had the same parameters, and the number of the next
        step.
    turns : Turns
        Of a forward and a backward that overlap.
    takes_turns : bool
        Whether each of these goes on while the other waits: if the model is in host memory, and MPI
        can be called from one thread after another.  Otherwise their layers follow each other.
    is_on_host : bool
        Whether the model is in host memory, so that the host can time what it does.
    overlap : Overlap
        The time for which this rank waited, with and without computation at the same time; none if
        the model is on a device.

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
        mesh, sharding, recipe = mesh or Mesh(None), sharding or Sharding(), recipe or Recipe()
        of_units = (sharding.of_unit(model, unit) for unit in model.units)
        for each in (sharding, *of_units):
            check_arguments(mesh.axes, each, algorithm)
        check_recipe(recipe, sharding)
        check_model(model, mesh, sharding)
        if isinstance(schedule, str):
            schedule = make(schedule, mesh.axes.get("pipe", 1), recipe.num_micro_batches)
        else:  # one that tests have not proved
            validate(schedule)
        check_schedule(schedule, mesh, recipe, sharding, model)
        super().__init__(mesh, model, recipe, sharding, algorithm, Stages(model, schedule))
        self.phase = phase
        self.num_updates = self.num_skipped = self.num_batches = self.steps_alone = 0
        self.next_step = 0
        self.overlap, self.turns = Overlap(), Turns(self._record)
        self.is_on_host = self.xp is numpy_namespace
        self.takes_turns = self.is_on_host and may_change_threads()
        self.activations = recipe.offload_activations(self.rank, self.xp)
        self.micro_batches = MicroBatches(self, self.activations, self.overlap, self.turns)
        self.loss = self.squares = 0.0  # of this step, and of its gradient if `needs_norm`
        self.unused_units: set[str] = set()  # used on no rank in this step, and not updated
        self._make_communicators()
        self.offload = Offload(
            recipe.offload(self.rank, self.xp), self.parameter_shards, self.memory
        )
        self.masters = self.offload.masters
        self.units = Units(self, self.masters, self.overlap)
        self.optimizer: Optimizer = recipe.optimizer(self.masters, make_state=self.offload.zeros)
        if self.is_divided and any(sharding.reduction.state(self)):
            name = type(sharding.reduction).__name__
            raise ValueError(f"{name} keeps arrays: it does not work beside a divided model")

    def _make_communicators(self) -> None:
        """Make those along all axes now, and not in the middle of the first step.

        First check that all ranks make the same: others would wait for each other.
        """
        parts = prediction.model_parts(self)
        used = (action.axes for part in parts for action in part.actions if action.axes)
        of_layers = ((axis,) for axis in self.model.comm_axes)
        of_units = (axes for unit in self.model.units for axes in self.sharding_of(unit).groups)
        axes = list(dict.fromkeys((*self.sharding.groups, *of_units, *used, *of_layers)))
        if self.comm is not None:
            agreement.check_same(self.comm, {}, {"axes": axes})
        for each in axes:
            self.mesh[each]

    @property
    def comm(self) -> collectives.Communicator | None:
        """The communicator of all ranks; None if there is one rank alone."""
        return self.mesh.comm

    @property
    def rank(self) -> int:
        """This rank; 0 without a communicator."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """The number of ranks; 1 without a communicator."""
        return self.mesh.size

    # A run

    def start(self) -> None:
        """Prepare the first step: check that ranks agree, and send initial values.

        Along the axes of the sharding, the first rank's values are sent to the others if the
        sharding has a `broadcast_algorithm`; otherwise they must be the same.  All ranks call this
        once, or `resume`.  Raises ModelMismatch, on all ranks, if models or options differ.
        """
        self.check_models()
        algorithm = self.sharding.broadcast_algorithm
        if algorithm is None or self.comm is None:
            return
        with self.phase("start"), collectives.phase("broadcast"):
            for unit, flat in self.parameters.items():
                if axes := self.sharding_of(unit).axes:
                    self.comm_of(axes).broadcast(flat, root=0, out=flat, algorithm=algorithm)
        self.offload.load()

    def resume(self) -> None:
        """Prepare the first step as `start` does, if `checkpoint.load` will set the parameters."""
        self.check_models()

    def close(self) -> None:
        """Free the communicators of the mesh.  All ranks call this at the end."""
        self.mesh.free()

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of the rows of a batch this rank computes: (index, number of parts)."""
        return self.mesh.index(self.sharding.row_axes), self.mesh.size_of(self.sharding.row_axes)

    def train(
        self,
        steps: int,
        batch: BatchFunction,
        total: int,
        show: ProgressCallback,
        first: int = 0,
    ) -> list[float]:
        """Make steps `first` to `steps` (exclusive) and return their losses.

        All ranks call this, after `start` or `resume`.  A loss is the mean of a batch in nats per
        target, the same on all ranks.  Raises MissingGradient as `step` does.

        Parameters
        ----------
        steps, first : int
            The number of steps after which to end, counted from 0, and that of those done before.
        batch : function
            Called with (step, index, number of parts); returns the inputs and targets of one part
            of the step's batch, int64 (rows, context).  A row of the inputs may have any other
            shape that the first layer takes, such as that of an image with one target.
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
        self.begin(inputs, targets, total)
        self.run(action for action in self.actions if action.phase != "average")
        self.micro_batches.end()
        if self.sharding.every is not None:
            self.steps_alone += 1
            if self.steps_alone == self.sharding.every:
                self._average()
        return self.loss

    def _average(self) -> None:
        """Make the parameters of all ranks equal again."""
        self.run(action for action in self.actions if action.phase == "average")
        self.steps_alone = 0

    def compute(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add up gradients and return this rank's part of the loss, without sending anything.

        `inputs`, `targets` and `total` are those of `step`.
        """
        self.begin(inputs, targets, total)
        self.run(action for action in self.actions if action.kind in ("F", "B", "I", "W"))
        self.loss = float(self.micro_batches.loss)
        return self.loss

    def begin(self, inputs: Tokens, targets: Tokens, total: int) -> None:
        """Set the micro-batches that the next actions compute, and set gradients to 0.

        `inputs`, `targets` and `total` are those of `step`.
        """
        self.check_batch(total // targets.shape[1], targets.shape[1], inputs.shape[1:])
        if self.is_on_host:
            self.overlap.begin()
        self.loss, self.squares = 0.0, 0.0
        self.num_batches += 1
        self._zero_gradients()
        for counts in self.model.step_counts.values():
            counts[...] = 0
        self._share = 1.0  # of the loss of the whole batch
        if self.sharding.every is not None:  # the gradient is the mean over the rank's own rows
            self._share, total = targets.size / total, targets.size
        totals = self._totals(total, targets.shape[1])
        self.micro_batches.begin(inputs, targets, totals, self.next_step)
        self.next_step += 1

    def _totals(self, total: int, context: int) -> list[int]:
        """Return the number of tokens over which the loss of each micro-batch is a mean."""
        num_parts, num_ranks = self.recipe.num_micro_batches, self.batch_part[1]
        if self.micro_batches.stash is None:
            return [total] * num_parts
        rows = [length(span(total // context, num_ranks, rank)) for rank in range(num_ranks)]
        found = [sum(length(span(n, num_parts, k)) for n in rows) for k in range(num_parts)]
        if not all(found):
            raise ValueError(
                f"a batch of {total // context} rows leaves micro-batch {found.index(0)} of"
                f" {num_parts} without rows, of which pipedream would update by a mean"
            )
        return [context * n for n in found]

    def _zero_gradients(self) -> None:
        for flat in self.gradients.values():
            flat[...] = 0

    def run(self, actions: Iterable[Action]) -> None:
        """Do some actions, up to an update that must be skipped; see `begin`."""
        takes_turns = self.takes_turns and not self.overlap.is_reference
        with self.ignore_overflow():
            for slot, group in groupby(actions, attrgetter("slot")):
                if slot is not None and takes_turns:
                    self.turns.run(list(group), self.do, self.phase)
                elif not self._run_in_order(group):
                    return

    def _run_in_order(self, actions: Iterable[Action]) -> bool:
        """Do one action after the other; return whether none must be skipped."""
        for label, group in groupby(actions, attrgetter("phase")):
            with self.phase(label) if label else nullcontext():
                for action in group:
                    began = time.perf_counter()
                    if self.do(action) is False:
                        return False
                    self._record(action, began, time.perf_counter())
        return True

    def _record(self, action: Action, began: float, ended: float) -> None:
        """Note when this rank did an action, or a part of it."""
        self.micro_batches.events.append(Event.of(action, began, ended))
        if action.kind not in COMPUTING:
            self.overlap.add(ended - began)

    def do(self, action: Action) -> bool | None:
        """Do one action; return False if the rest of the step must be skipped."""
        method: Callable[[Action], bool | None] = attrgetter(METHODS[action.kind])(self)
        return method(action)

    def ignore_overflow(self) -> AbstractContextManager[object]:
        """Return a context manager without NumPy's overflow warnings if the loss scale changes."""
        is_dynamic = self.loss_scale.is_dynamic
        return np.errstate(over="ignore", invalid="ignore") if is_dynamic else nullcontext()

    # Actions that compute

    def forward(self, action: Action) -> None:
        """Run a layer forward on a micro-batch, as `action` says."""
        self.units.complete(action.part)
        self.micro_batches.forward(action)
        self._unbind(action.part)

    def backward(self, action: Action) -> None:
        """Run a layer backward on a micro-batch, or a half of that, as `action` says."""
        if action.kind != "W":  # which needs no parameters
            self.units.complete(action.part)
        if action.kind != "I":
            self.units.open_gradients(action.part)
        getattr(self.micro_batches, HALVES[action.kind])(action)
        self._unbind(action.part)

    def _unbind(self, layer: str) -> None:
        """Let a layer forget arrays that may be freed."""
        may_change = {"gradients", "parameters"} & self.sharding.divided
        if may_change or self.micro_batches.stash is not None:
            self.model.unbind(layer)

    def wait(self, action: Action) -> None:
        """Complete the messages, or the calls, that were started before this `action`."""
        if action.part == SENDS:
            self.micro_batches.complete_sends()
        else:
            self.units.wait()

    # Small messages

    def find_unused(self, action: Action) -> None:
        """Find the units that no rank along the axes of an `action` used."""
        names = self.model.layers_with_parameters
        used = np.array([name in self.micro_batches.used_layers for name in names], np.uint8)
        options = {"op": "max", "out": used, "algorithm": SCALAR_ALGORITHM}
        self.start_call(action.axes, "all_reduce", used, **options)()
        units = [set(self.model.units_of(names[i])) for i in np.flatnonzero(used)]
        self.unused_units = set(self.unit_sizes).difference(*units)

    def reduce_loss(self, action: Action) -> None:
        """Add up `loss` along the axes of an `action`.  Raise MissingGradient as `step` does.

        Here the host waits for the device.
        """
        numbers = [float(self.micro_batches.loss) * self._share, sum(self.absent_layers())]
        self.loss, num_absent = self.all_reduce_scalars(action.axes, numbers)
        if num_absent:
            self.raise_missing_gradient()

    def reduce_norm(self, action: Action) -> None:
        """Set `squares` to that of the scaled gradient, along the axes of an `action`.

        Here the host waits for the device.
        """
        (self.squares,) = self.all_reduce_scalars(action.axes, [float(self.own_squares())])

    def sum_counts(self, action: Action) -> None:
        """Let layers use what those of all ranks along the axes of an `action` have counted."""
        own = self.model.step_counts
        counts = np.concatenate(list(own.values()))
        if action.axes:
            options = {"op": "sum", "out": counts, "algorithm": SCALAR_ALGORITHM}
            self.start_call(action.axes, "all_reduce", counts, **options)()
        for name, each in zip(own, split(counts, map(len, own.values())), strict=True):
            self.model.counting_layers[name].end_step(each)

    def own_squares(self) -> Array:
        """Return the sum of squares of the scaled gradients that this rank updates by, a number.

        Of ranks that update the same part of a parameter, although others divide the model along
        their axis, the first one counts it.
        """
        if not self.is_divided:
            return sum(map(sum_of_squares, self.gradient_shards.values()))
        total: Array = 0.0
        axes = self.model.split_axes
        for unit, x in self.gradient_shards.items():
            for piece in pieces_of(self.model.boxes(unit), self.shard_slice(unit)):
                if self.is_first_copy(unit, piece.name, axes):
                    total += sum_of_squares(x[piece.flat])
        return total

    def all_reduce_scalars(self, axes: Sequence[str], numbers: list[float]) -> list[float]:
        """Return the sums over the ranks along `axes` of a few numbers, computed in float64."""
        x = np.array(numbers, np.float64)
        if axes:
            options = {"op": "sum", "out": x, "algorithm": SCALAR_ALGORITHM}
            self.start_call(axes, "all_reduce", x, **options)()
        sums: list[float] = x.tolist()
        return sums

    def absent_layers(self) -> list[bool]:
        """Return for each layer whether it should have taken part in this step and did not."""
        missing = set(self.stages.layers_of[self.pipe_place]) - self.micro_batches.used_layers
        may_miss = self.sharding.find_unused_parameters
        return [name in missing and not may_miss for name in self.model.layers_with_parameters]

    def raise_missing_gradient(self) -> None:
        """Raise MissingGradient with the names of layers and ranks.  All ranks call this."""
        layers = self.model.layers_with_parameters
        mine = np.array(self.absent_layers(), np.uint8)
        table = mine[None] if self.comm is None else self.comm.all_gather(mine[None])
        missing = [
            f"{layers[i]} (on {format_ranks(table[:, i])})" for i in np.flatnonzero(table.any(0))
        ]
        raise MissingGradient(f"no gradient in this step for {', '.join(missing)}")

    # Updates

    def update(self, action: Action) -> bool:
        """Change the parameters; return whether no gradient overflowed.  `action` is an UPDATE.

        If it is of one micro-batch, begin the gradient of the next.
        """
        if self.micro_batches.stash is not None:
            self.micro_batches.stash.update(number_of(action), self.parameters)
        if not self.update_loss_scale(self.squares):
            self.num_skipped += 1
            return False
        self.num_updates += 1
        factor = 1 / self._scale_used
        if self.recipe.clip is not None:
            norm = math.sqrt(self.squares) * factor
            factor *= self.recipe.clip / max(norm, self.recipe.clip)
        used = {u: x for u, x in self.gradient_shards.items() if u not in self.unused_units}
        self.offload.update(self.optimizer, used, factor)
        if self.micro_batches.stash is not None:
            self._zero_gradients()
        return True

    def update_loss_scale(self, squares: float) -> bool:
        """Set the scale of the next step; return whether this step's gradients are finite.

        `squares` is the sum of their squares over all ranks.
        """
        self._scale_used = self.loss_scale.value
        return self.loss_scale.update(is_finite=math.isfinite(squares))

    # Before the first step

    def check_models(self) -> None:
        """Raise ModelMismatch, on all ranks, unless all have the same model and options."""
        if self.comm is None:
            return
        units = {unit: agreement.digest_of(self, unit) for unit in self.model.units}
        with self.phase("start"), collectives.phase("check"):
            agreement.check_same(self.comm, units, self.options())

    def options(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, because their calls depend on it."""
        return {
            "strategy": type(self).__name__,
            "mesh": self.mesh.axes,
            "algorithm": self.algorithm,
            "dtype": self.dtype.name,
            "schedule": self.stages.schedule.actions,
            "num_micro_batches": self.recipe.num_micro_batches,
            "clip": self.recipe.clip,
            "reduce_dtype": self.recipe.reduce_dtype,
            "optimizer": agreement.options_of(self.optimizer),
            "hook": agreement.options_of(self.sharding.reduction),
            "gather": agreement.options_of(self.sharding.gather),
            # A layer that sends, and runs again, sends again.
            "recompute": self.model.recompute if self.model.mesh.size > 1 else (),
            "layers": [[name, *x.config()] for name, x in self.model.layers.items()]
            + sorted(map(list, self.model.ties.items())),
        } | self.sharding.config()

    # Reports and predictions

    def summary_lines(self) -> list[str]:
        """Return sentences about the run that losses, traffic and memory do not show."""
        is_blocking = self.sharding.reduction.is_blocking
        can_overlap = "parameters" in self.sharding.divided or not is_blocking
        lines = [self.overlap.summary()] if self.comm is not None and can_overlap else []
        if self.micro_batches.num_recomputed:
            lines.append(
                f"{self.micro_batches.num_recomputed} forward passes of layers recomputed on rank"
                f" {self.rank}"
            )
        if self.loss_scale.is_dynamic:
            scale = f"loss scale {self.loss_scale.value:g}"
            lines.append(f"{self.num_skipped} updates skipped, {scale}")
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
        communicator.  Raises ValueError if an argument is needed, or impossible.

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
            raise ValueError(
                f"in {self.dtype.name} no update is skipped, but num_skipped is {num_skipped}"
            )
        if self.comm is None:
            return []
        run = prediction.RunSize(steps, self.num_updates_in(steps) - num_skipped, batch, first)
        start = prediction.start_traffic(self, len(self.options()), is_resumed=is_resumed)
        return prediction.with_checks([*start, *self.step_traffic(run)], self.comm)

    def calls_of(self, action: Action, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        """Return the calls in one action of all groups that have a rank with this model part.

        `batch` is that of all ranks, needed if layers send messages.
        """
        return prediction.calls_of(self, action, batch)

    def kept_bytes(self) -> dict[str, int]:
        """Return the bytes of what else a rank keeps, by category: nothing by default."""
        return {}

    def num_updates_in(self, steps: int) -> int:
        """Return how many updates `steps` steps make if no gradient overflows."""
        return steps * sum(action.kind == "UPDATE" for action in self.actions)

    def step_traffic(self, run: prediction.RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send."""
        return merged(
            replace(call, num_calls=call.num_calls * each)
            for part in prediction.model_parts(self)
            for action, times in prediction.times_of(part.actions, run, self.sharding.every)
            for batch, each in prediction.in_steps(part, action, run, times)
            for call in prediction.led_here(part, part.calls_of(action, batch))
        )


def sum_of_squares(x: Array) -> Array:
    """Return the sum of the squares of a flat array's elements, in float64, on its device."""
    wide = (piece.astype(np.float64) for (piece,) in pieces(x))
    return sum((piece @ piece for piece in wide), 0.0)
