"""One training step, and the methods by which a strategy divides it among ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypedDict

import numpy as np
from array_api_compat import numpy as numpy_namespace

import collectives
from collectives import Communicator
from parallel import agreement
from parallel.agreement import format_ranks
from parallel.memory import MemoryTracker
from parallel.nn import Array, Model, cross_entropy, on_host
from parallel.offload import NoOffload, Offload
from parallel.optim import Adam, Optimizer, pieces
from parallel.precision import LossScale, dtype_of, master_dtype
from parallel.shards import span
from parallel.text import Tokens
from parallel.traffic import PredictedCall, sends_blocks_equally

BatchFunction: TypeAlias = Callable[[int, int, int], tuple[Tokens, Tokens]]
"""Called with (step, rank, number of ranks); returns this rank's inputs and targets of the step."""

ProgressCallback: TypeAlias = Callable[[int, float], object]
"""Called with the number of steps done and the last loss."""

PhaseFunction: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Called with a label; returns a context manager, such as `collectives.phase`."""

SCALAR_ALGORITHM = "recursive_doubling"  # the all-reduce of a few numbers


class MissingGradient(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """Layers took no part in a step on some ranks.  The message names the layers and ranks."""


@dataclass(frozen=True)
class Recipe:
    """How to train, independent of the strategy.

    Attributes
    ----------
    dtype : str
        What the model computes in, keeps and sends: ``"float64"``, ``"float32"``, ``"bfloat16"`` or
        ``"float16"``.  In two-byte dtypes updates are made in float32.
    optimizer : function
        Called with the values to update by name, and ``make_state``; returns an `Optimizer`.
    num_micro_batches : int
        The number of parts in which a rank computes its rows of a batch, at least 1.  Their
        gradients are added.
    clip : float, optional
        The largest norm of the gradient of the whole model, more than 0; a larger gradient is
        scaled to it.
    recompute : collection of str
        Names of layers that keep only their input, and run forward again during backward (Chen et
        al. 2016).
    seed : int
        Of the initial values.
    xp : namespace
        The array namespace of the parameters: ``array_api_compat.numpy`` or
        ``array_api_compat.cupy``.
    offload : function
        Makes the `parallel.offload.Offload` that says where updates are made: `NoOffload`,
        `HostOffload`, or ``partial(DiskOffload, folder)``.

    Raises
    ------
    ValueError
        If an option is out of range.

    Examples
    --------
    >>> from functools import partial
    >>> from parallel import SGD, Recipe
    >>> recipe = Recipe(dtype="float16", optimizer=partial(SGD, lr=0.1), clip=1.0)
    """

    dtype: str = "float64"
    optimizer: Callable[..., Optimizer] = Adam
    num_micro_batches: int = 1
    clip: float | None = None
    recompute: Collection[str] = ()
    seed: int = 0
    xp: Any = numpy_namespace
    offload: Callable[[MemoryTracker, int], Offload] = NoOffload

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            k = self.num_micro_batches
            raise ValueError(f"num_micro_batches is {k}: it must be at least 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip is {self.clip}: it must be a finite norm above 0, or None")
        if isinstance(self.recompute, str):
            raise ValueError(f"recompute is a collection of names: [{self.recompute!r}]")


class RunSize(NamedTuple):
    """What traffic is predicted for.  `batch_shape`: see `batch` in `Strategy.traffic`."""

    num_steps: int
    num_updates: int
    batch_shape: tuple[int, int] | None = None


class StrategyOptions(TypedDict, total=False):
    """The keyword arguments of every `Strategy`."""

    algorithm: str
    phase: PhaseFunction


class Strategy:
    """Train a model on one rank: the reference, and the base class of all strategies.

    A step runs forward and backward over each micro-batch, then updates.  A subclass defines what
    it keeps of each unit (flat parameter) of the model in `_allocate`, and communicates in
    `before_forward`, `after_forward`, `before_backward` and `after_backward` of each layer,
    `gradient_ready` of each unit, `finish_backward`, `before_update` and `after_update`.  All are
    called for the same layers in the same order on every rank.

    Before the first step all strategies check that ranks agree, and in each step they add up the
    loss.  With u units, o options (`options`), S steps, p ranks, and q = log2 p for p a power of
    two, all ranks together send

    | phase       | collective | calls | bytes a call                    |
    |-------------|------------|-------|---------------------------------|
    | start/check | all_gather | 2     | 16 p (p-1), 32 (u + o) p (p-1)  |
    | loss        | all_reduce | S     | 16 p q                          |

    Parameters
    ----------
    comm : Communicator or None
        None: there is one rank, and nothing is sent.
    model : Model
    recipe : Recipe, optional
        By default ``Recipe()``.
    algorithm : str
        Of the collectives that send parameters and gradients; by default ``"ring"``.
    phase : function
        Marks the phases; by default `collectives.phase`.  Pass `TrafficMonitor.phase` to have MPI
        count what is sent in each.

    Raises
    ------
    ValueError
        If `Recipe.recompute` names a layer that does not exist; if the algorithm does not serve
        this number of ranks, or gives ranks different bits; or if it has no formula for a unit
        that the ranks cannot divide into equal parts.

    Attributes
    ----------
    parameters, gradients : dict of str to array
        What this rank keeps of each unit, as flat arrays.
    parameter_shards, gradient_shards : dict of str to array
        The parts of these that this rank updates (`shard_slice`).
    masters : dict of str to array
        What the optimizer updates: `parameter_shards`, or copies in the dtype of updates.
    memory : MemoryTracker
        The bytes that this rank keeps.
    optimizer, offload, loss_scale
        As the recipe says.
    num_updates, num_skipped : int
        The updates made, and those that an overflow prevented.
    num_recomputed : int
        The number of forward passes of layers that ran again.

    Examples
    --------
    >>> from parallel import Strategy, gpt, text
    >>> strategy = Strategy(None, gpt(num_layers=1, hidden=16, context=8))
    >>> strategy.start()
    >>> rows = text.batch(text.load(), seed=0, step=0, batch_size=4, context=8)
    >>> loss = strategy.step(*rows, total=4 * 8)
    """

    sharded: ClassVar[frozenset[str]] = frozenset()  # categories of memory that ranks divide
    needs_same_initial_values: ClassVar[bool] = True
    algorithm_collectives: ClassVar[tuple[str, ...]] = ()  # those called by `algorithm`

    def __init__(
        self,
        comm: Communicator | None,
        model: Model,
        recipe: Recipe | None = None,
        *,
        algorithm: str = "ring",
        phase: PhaseFunction = collectives.phase,
    ) -> None:
        self.comm, self.model, self.recipe = comm, model, recipe or Recipe()
        self.algorithm, self.phase = algorithm, phase
        self._check_arguments()
        self.xp, self.dtype = self.recipe.xp, dtype_of(self.recipe.dtype)
        self.memory, self.loss_scale = MemoryTracker(), LossScale(self.dtype)
        self.num_updates = self.num_skipped = self.num_recomputed = 0
        self.used_layers: set[str] = set()  # those of this step, on this rank
        self.unused_units: set[str] = set()  # used on no rank in this step, and not updated
        self._allocate()
        self.optimizer = self._make_optimizer()

    def _check_arguments(self) -> None:
        if unknown := [name for name in self.recipe.recompute if name not in self.model.layers]:
            raise ValueError(f"there is no layer {unknown[0]!r} to recompute")
        for collective, sizes in self.collective_sizes().items():
            for size in sizes:
                check_algorithm(collective, self.algorithm, size, self.uneven_unit(size))

    def uneven_unit(self, size: int) -> str | None:
        """Return a unit that `size` ranks, or all, cannot divide into equal parts, or None."""
        sizes = self.model.unit_sizes.items()
        return next((unit for unit, n in sizes if n % size or n % self.size), None)

    def collective_sizes(self) -> dict[str, Collection[int]]:
        """Return the collectives called by `algorithm`, and the numbers of ranks that call each."""
        return dict.fromkeys(self.algorithm_collectives, (self.size,))

    @property
    def rank(self) -> int:
        """This rank; 0 without a communicator."""
        return 0 if self.comm is None else self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks; 1 without a communicator."""
        return 1 if self.comm is None else self.comm.size

    # What is kept

    def _allocate(self) -> None:
        """Make `parameters` and `gradients`, and bind the layers if they stay bound."""
        sizes = self.model.unit_sizes
        self.parameters = {
            unit: self.initial_values(unit, slice(0, n)) for unit, n in sizes.items()
        }
        self.gradients = {unit: self.new_buffer("gradients", n) for unit, n in sizes.items()}
        self.parameter_shards = {u: x[self.shard_slice(u)] for u, x in self.parameters.items()}
        self.gradient_shards = {u: x[self.shard_slice(u)] for u, x in self.gradients.items()}
        self.bind_layers()

    def shard_slice(self, unit: str) -> slice:
        """Return the elements of a unit that this rank updates."""
        return slice(0, self.model.unit_sizes[unit])

    def stored_slice(self, unit: str) -> slice:
        """Return the elements of a unit whose parameters this rank keeps."""
        is_sharded = "parameters" in self.sharded
        return self.shard_slice(unit) if is_sharded else slice(0, self.model.unit_sizes[unit])

    @property
    def replica_group(self) -> tuple[int, int]:
        """The index of this rank among those that update the same elements, and their number."""
        return self.rank, self.size

    def bind_layers(self) -> None:
        """Let every layer work on this strategy's parameters and gradients."""
        for layer in self.model.layers:
            self.model.bind(layer, self.parameters, self.gradients)

    def new_buffer(
        self, category: str, num_elements: int, dtype: np.dtype[Any] | type | None = None
    ) -> Array:
        """Return a 1-d array of `num_elements` zeros, which `memory` counts in `category`.

        `dtype` is the model's by default.
        """
        zeros = self.xp.zeros(num_elements, dtype=self.dtype if dtype is None else dtype)
        return self.memory.track(category, zeros)

    def initial_values(self, unit: str, part: slice) -> Array:
        """Return the initial values of a part of a unit."""
        values = self.model.draw(unit, self.recipe.seed)[part].astype(self.dtype)
        return self.memory.track("parameters", self.xp.asarray(values))

    def _make_optimizer(self) -> Optimizer:
        self.offload = self.recipe.offload(self.memory, self.rank)
        self.masters = self.offload.make_masters(self.parameter_shards, master_dtype(self.dtype))
        return self.recipe.optimizer(self.masters, make_state=self.offload.zeros)

    # What a strategy adds

    def start(self) -> None:
        """Prepare the first step: check that ranks agree, and send what the strategy must send.

        All ranks call this once, or `resume`.  Raises ModelMismatch, on all ranks, if models or
        options differ.
        """
        self.check_models()

    def resume(self) -> None:
        """Prepare the first step if `checkpoint.load` will set the parameters; instead of `start`.

        All ranks call this.  Raises ModelMismatch, on all ranks, if models or options differ.
        """
        self.check_models()

    def close(self) -> None:
        """Free the communicators that the strategy made.  All ranks call this at the end."""

    def before_forward(self, layer: str) -> None:
        """Called before a layer's forward pass."""

    def after_forward(self, layer: str) -> None:
        """Called after a layer's forward pass."""

    def before_backward(self, layer: str) -> None:
        """Called before a layer's backward pass, which adds to the gradients of its units."""

    def gradient_ready(self, unit: str) -> None:
        """Called when this micro-batch's gradient of a unit is complete."""

    def after_backward(self, layer: str) -> None:
        """Called after a layer's backward pass."""

    def finish_backward(self) -> None:
        """Called after the backward pass of the last layer."""

    def before_update(self) -> None:
        """Called after all micro-batches; completes `gradient_shards`."""

    def after_update(self) -> None:
        """Called when `parameter_shards` have been updated."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager in which gradients are added up and not sent.

        It is entered for all micro-batches but the last.
        """
        return nullcontext()

    # A step

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of a batch this rank computes: (index, number of parts)."""
        return self.rank, self.size

    def train(
        self,
        steps: int,
        batch: BatchFunction,
        total: int,
        show: ProgressCallback,
        first: int = 0,
    ) -> list[float]:
        """Make steps `first` to `steps` (exclusive) and return their losses.

        All ranks call this, after `start` or `resume`.

        Parameters
        ----------
        steps : int
            The number of steps after which to end, counted from 0.
        batch : function
            Called with (step, index, number of parts); returns the inputs and targets of one part
            of the step's batch, int64 (rows, context).
        total : int
            The number of tokens in the batch of all ranks.
        show : function
            Called after each step with the number of steps done and the loss.
        first : int
            The number of steps that were done before.

        Returns
        -------
        list of float
            The mean loss of each batch in nats per token, the same on all ranks.

        Raises
        ------
        MissingGradient
            As `step`.
        """
        losses = []
        for step in range(first, steps):
            losses.append(self.step(*batch(step, *self.batch_part), total))
            show(step + 1, losses[-1])
        return losses

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Make one update from this rank's rows of a batch and return the loss of the whole batch.

        All ranks call this.

        Parameters
        ----------
        inputs, targets : arrays of int64, (rows, context)
            This rank's rows; the numbers of rows may differ among ranks.
        total : int
            The number of tokens in the batch of all ranks.

        Returns
        -------
        float
            The mean loss in nats per token, the same on all ranks.

        Raises
        ------
        MissingGradient
            On all ranks, if a layer took no part in the step on some rank.
        FloatingPointError
            If gradients are not finite even with the smallest loss scale (float16).
        """
        if self.model.bound_to is not self.parameters:  # another strategy uses this model too
            self.model.bound_to = self.parameters
            self.bind_layers()
        for flat in self.gradients.values():
            flat[...] = 0
        self.used_layers.clear()
        with self.ignore_overflow():
            loss = self.run_micro_batches(inputs, targets, total)
            self.before_update()
            whole_loss = self.reduce_loss(loss)
            self.update()
        return whole_loss

    def ignore_overflow(self) -> AbstractContextManager[object]:
        """Return a context manager without NumPy's overflow warnings if the loss scale changes."""
        is_dynamic = self.loss_scale.is_dynamic
        return np.errstate(over="ignore", invalid="ignore") if is_dynamic else nullcontext()

    def run_micro_batches(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add up the gradients of this rank's rows; return the part of the loss they contribute.

        `inputs` and `targets` are tokens of shape (rows, context); `total` is the number of tokens
        in the batch of all ranks.
        """
        k = self.recipe.num_micro_batches
        *others, last = (span(len(inputs), k, number) for number in range(k))
        loss = 0.0
        for rows in others:
            with self.no_sync():
                loss += self.forward_backward(inputs[rows], targets[rows], total)
        return loss + self.forward_backward(inputs[last], targets[last], total)

    def forward_backward(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add a micro-batch's gradients; return the part of the loss that it contributes.

        `inputs`, `targets` and `total` are those of `run_micro_batches`, for one micro-batch.
        """
        saved: dict[str, Any] = {}
        with self.phase("forward"):
            logits = self._forward(self.xp.asarray(inputs), saved)
        truth, scale = self.xp.asarray(targets), self.loss_scale.value
        loss, dlogits = cross_entropy(logits, truth, total, scale)
        del logits
        with self.phase("backward"):
            self._backward(dlogits, saved)
        return loss

    def _forward(self, x: Array, saved: dict[str, Any]) -> Array:
        active = self.model.active_layers()
        for name, layer in self.model.layers.items():
            self.before_forward(name)
            if name in active:
                entering = x
                x, layer_saved = layer.forward(x)
                saved[name] = entering if name in self.recipe.recompute else layer_saved
                del entering, layer_saved
                self.memory.track("activations", saved[name])
            self.after_forward(name)
        return x

    def _backward(self, dy: Array, saved: dict[str, Any]) -> None:
        for name in reversed(self.model.layers):
            self.before_backward(name)
            if name in saved:
                dy = self._backward_of(name, dy, saved.pop(name))
                self.used_layers.add(name)
            for unit in self.model.completed_units(name):
                self.gradient_ready(unit)
            self.after_backward(name)
        self.finish_backward()

    def _backward_of(self, name: str, dy: Array, saved: Any) -> Array:
        layer = self.model.layers[name]
        if name in self.recipe.recompute:
            saved = layer.forward(saved)[1]
            self.memory.track("activations", saved)
            self.num_recomputed += 1
        return layer.backward(dy, saved)

    def reduce_loss(self, loss: float) -> float:
        """Return the loss of the whole batch.  Raise MissingGradient as `step` does."""
        whole, num_absent = self.all_reduce_scalars("loss", [loss, sum(self.absent_layers())])
        if num_absent:
            self.raise_missing_gradient()
        return float(whole)

    def absent_layers(self) -> list[bool]:
        """Return for each layer whether it should have taken part in this step and did not."""
        return [name not in self.used_layers for name in self.model.layers]

    def update(self) -> None:
        """Change the parameters, unless a gradient overflowed."""
        squares = self.sum_of_squares()
        if not self.update_loss_scale(squares):
            self.num_skipped += 1
            return
        self.num_updates += 1
        factor = 1 / self._scale_used
        if self.recipe.clip is not None:
            norm = math.sqrt(squares) * factor
            factor *= self.recipe.clip / max(norm, self.recipe.clip)
        used = {u: x for u, x in self.gradient_shards.items() if u not in self.unused_units}
        self.offload.update(self.optimizer, used, factor)
        self.after_update()

    def update_loss_scale(self, squares: float) -> bool:
        """Set the scale of the next step; return whether this step's gradients are finite.

        `squares` is the sum of their squares over all ranks.
        """
        self._scale_used = self.loss_scale.value
        return self.loss_scale.update(is_finite=math.isfinite(squares))

    # Small messages

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on the norm of the whole gradient: to clip it or to scale."""
        return self.recipe.clip is not None or self.loss_scale.is_dynamic

    def sum_of_squares(self) -> float:
        """Return the sum of squares of the whole scaled gradient; 0 if it is not needed."""
        if not self.needs_norm:
            return 0.0
        return sum(map(sum_of_squares, self.gradient_shards.values()))

    def all_reduce_scalars(
        self, phase: str, numbers: list[float], comm: Communicator | None = None
    ) -> list[float]:
        """Return the sums over the ranks of `comm` of a few numbers, computed in float64.

        The ledger shows the call under `phase`.  By default `comm` is the strategy's.
        """
        comm = comm or self.comm
        x = np.array(numbers, np.float64)
        if comm is not None:
            with self.phase(phase):
                comm.all_reduce(x, op="sum", out=x, algorithm=SCALAR_ALGORITHM)
        sums: list[float] = x.tolist()
        return sums

    def raise_missing_gradient(self) -> None:
        """Raise MissingGradient with the names of layers and ranks.  All ranks call this."""
        layers = list(self.model.layers)
        mine = np.array(self.absent_layers(), np.uint8)
        table = mine[None] if self.comm is None else self.comm.all_gather(mine[None])
        missing = [
            f"{layers[i]} (on {format_ranks(table[:, i])})" for i in np.flatnonzero(table.any(0))
        ]
        raise MissingGradient(f"no gradient in this step for {', '.join(missing)}")

    # Before the first step

    def check_models(self) -> None:
        """Raise ModelMismatch, on all ranks, unless all have the same model and options."""
        if self.comm is None:
            return
        units = {unit: self._digest(unit) for unit in self.model.units}
        options = {name: agreement.digest(value) for name, value in self.options().items()}
        with self.phase("start"), collectives.phase("check"):
            agreement.check_same(self.comm, units, options)

    def _digest(self, unit: str) -> bytes:
        """Return the digest of a unit's names and shapes, and of initial values if compared.

        If ranks divide the parameters, the values are those of the whole unit.
        """
        shapes = agreement.shapes_of(self.model.units[unit])
        if not self.needs_same_initial_values:
            return agreement.digest(shapes)
        if "parameters" in self.sharded:
            return agreement.digest(shapes, self.model.draw(unit, self.recipe.seed))
        return agreement.digest(shapes, on_host(self.parameters[unit]))

    def options(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, because their calls depend on it."""
        return {
            "strategy": type(self).__name__,
            "algorithm": self.algorithm,
            "dtype": self.dtype.name,
            "num_micro_batches": self.recipe.num_micro_batches,
            "clip": self.recipe.clip,
            "optimizer": agreement.options_of(self.optimizer),
            "layers": [[name, *x.config()] for name, x in self.model.layers.items()]
            + sorted(map(list, self.model.ties.items())),
        }

    # Reports and predictions

    def summary_lines(self) -> list[str]:
        """Return sentences about the run that losses, traffic and memory do not show."""
        lines = []
        if self.num_recomputed:
            lines.append(
                f"{self.num_recomputed} forward passes of layers recomputed on rank {self.rank}"
            )
        if self.loss_scale.is_dynamic:
            scale = f"loss scale {self.loss_scale.value:g}"
            lines.append(f"{self.num_skipped} updates skipped, {scale}")
        return lines

    def traffic(
        self,
        steps: int,
        *,
        batch: tuple[int, int] | None = None,
        num_skipped: int = 0,
        is_resumed: bool = False,
    ) -> list[PredictedCall]:
        """Return what `start` and one `train` of `steps` steps will send.

        Parameters
        ----------
        steps : int
        batch : (rows, context), optional
            The shape of the batch of all ranks; needed by `SyncParameterServer`, which sends it.
        num_skipped : int
            How many updates an overflow prevents, which is known after the run only.
        is_resumed : bool
            Whether `resume` is called instead of `start`.

        Returns
        -------
        list of PredictedCall
            For `TrafficTable`; the same on all ranks, and empty without a communicator.

        Raises
        ------
        ValueError
            If `num_skipped` is not 0 in a dtype that skips no update, or if `batch` is needed.
        """
        if num_skipped and not self.loss_scale.is_dynamic:
            raise ValueError(
                f"in {self.dtype.name} no update is skipped, but num_skipped is {num_skipped}"
            )
        if self.comm is None:
            return []
        run = RunSize(steps, self.num_updates_in(steps) - num_skipped, batch)
        start = self.check_traffic() if is_resumed else self.start_traffic()
        return [*start, *self.step_traffic(run), *self.loss_traffic(steps)]

    def num_updates_in(self, steps: int) -> int:
        """Return how many updates `steps` steps make if no gradient overflows."""
        return steps

    def start_traffic(self) -> list[PredictedCall]:
        """Return what `start` sends."""
        return self.check_traffic()

    def check_traffic(self) -> list[PredictedCall]:
        """Return what the check that all ranks have the same model sends."""
        num_units, num_options = len(self.model.units), len(self.options())
        return agreement.check_same_traffic("start/check", self.size, num_units, num_options)

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send, without the loss."""
        return []

    def loss_traffic(self, steps: int) -> list[PredictedCall]:
        """Return what the loss and the number of missing layers send: 16 bytes, in all `steps`."""
        return [PredictedCall("loss", "all_reduce", SCALAR_ALGORITHM, 16, num_calls=steps)]

    @property
    def call_groups(self) -> dict[str, int]:
        """For `PredictedCall`: how many ranks call together, and how many such groups there are."""
        return {"num_ranks": self.size, "num_groups": 1}

    def calls_per_unit(
        self, phase: str, collective: str, num_calls: int, times: Mapping[str, int] | None = None
    ) -> list[PredictedCall]:
        """Return `num_calls` calls of a `collective` for every unit, in phase ``phase/unit``.

        `times`: how often each unit is sent instead of once.
        """
        factors = dict.fromkeys(self.model.units, 1) if times is None else times
        return [
            PredictedCall(
                f"{phase}/{unit}", collective, self.algorithm, self.unit_nbytes(unit),
                num_calls * n, **self.call_groups,
            )
            for unit, n in factors.items()
        ]  # fmt: skip

    def buffer_bytes(self) -> int:
        """Return the most bytes of buffers at a time, such as gathered units."""
        return 0

    def unit_nbytes(self, unit: str) -> int:
        """Return the bytes of a whole unit's parameters, or gradients."""
        return int(self.model.unit_sizes[unit] * self.dtype.itemsize)


def sum_of_squares(x: Array) -> float:
    """Return the sum of the squares of a flat array's elements, computed in float64."""
    wide = (piece.astype(np.float64) for (piece,) in pieces(x))
    return sum((float(piece @ piece) for piece in wide), 0.0)


def check_algorithm(collective: str, name: str, size: int, uneven: str | None) -> None:
    """Raise ValueError unless `size` ranks can use this algorithm.

    It must give all ranks the same bits, and have a formula for the parts of `uneven`, a unit that
    they cannot divide equally.
    """
    chosen = collectives.choose(collective, name, size, 0).algorithm
    if not chosen.is_bitwise:
        raise ValueError(
            f"{collective}.{name} rounds differently on different ranks: their parameters would"
            " differ; choose another algorithm"
        )
    if uneven is not None and not sends_blocks_equally(collective, name, size):
        raise ValueError(
            f"{collective}.{name} sends some blocks more often than others: no formula says what"
            f" {size} ranks send of {uneven}, which they cannot divide equally; choose another"
            " algorithm"
        )
