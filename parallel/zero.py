"""ZeRO: ranks divide the memory that data parallelism keeps on each of them.

Rajbhandari et al. 2020.  Each of p ranks owns one p-th of every unit of the model, its shard; it
updates the shard and sends it where it is needed.  Psi is the number of the model's parameters.
The tables are for S steps of k micro-batches of which no update was skipped.  They give the bytes
that all ranks together send in a call, by ring, in addition to
what all strategies send (`Strategy`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Unpack

import collectives
from collectives import Communicator, Work
from parallel import shards
from parallel.nn import Array, Model
from parallel.strategy import SCALAR_ALGORITHM, Recipe, RunSize, Strategy, StrategyOptions
from parallel.traffic import PredictedCall


class PendingGather(Protocol):
    """An all-gather of parameters that has been started."""

    def wait(self) -> Any:
        """Return when the parameters are complete."""


class Zero1(Strategy):
    """ZeRO stage 1: each rank keeps its shard of the optimizer states.

    | phase        | collective     | calls | bytes a call                              |
    |--------------|----------------|-------|-------------------------------------------|
    | reduce/unit  | reduce_scatter | S     | (p-1) n(unit)                             |
    | update/unit  | all_gather     | S     | (p-1) n(unit)                             |
    | norm         | all_reduce     | S     | 8 p log2 p, with clipping, and in float16 |

    A rank sends 2 Psi (p-1)/p elements in a step, for any number of micro-batches.

    The parameters (`comm`, `model`, `recipe`, `algorithm`, `phase`), errors and attributes are
    those of `Strategy`, but `comm` must be a communicator.
    Initial values must be the same on all ranks.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Recipe, Zero1, gpt
    >>> make = lambda comm: Zero1(comm, gpt(num_layers=1), Recipe("float16", num_micro_batches=2))
    >>> collectives.run(lambda comm: make(comm).memory.peak["optimizer"], size=2)
    [3750912, 3750912]
    """

    comm: Communicator
    sharded: ClassVar[frozenset[str]] = frozenset({"optimizer", "master"})
    algorithm_collectives = "reduce_scatter", "all_gather"

    @property
    def shard_comm(self) -> Communicator:
        """The communicator of the ranks that divide the model."""
        return self.comm

    def counts(self, unit: str) -> tuple[int, ...]:
        """Return the number of elements of each rank's shard of a unit."""
        return collectives.even_counts(self.model.unit_sizes[unit], self.shard_comm.size)

    @property
    def call_groups(self) -> dict[str, int]:
        num_ranks = self.shard_comm.size
        return {"num_ranks": num_ranks, "num_groups": self.size // num_ranks}

    @property
    def replica_group(self) -> tuple[int, int]:
        return 0, 1

    def shard_slice(self, unit: str) -> slice:
        comm = self.shard_comm
        return shards.span(self.model.unit_sizes[unit], comm.size, comm.rank)

    def before_update(self) -> None:
        with self.phase("reduce"):
            for unit, gradient in self.gradients.items():
                self.reduce_scatter(unit, gradient)

    def after_update(self) -> None:
        with self.phase("update"):
            for unit, full in self.parameters.items():
                self.all_gather(unit, full).wait()

    def reduce_scatter(self, unit: str, full: Array) -> Array:
        """Replace this rank's shard of a unit's gradient by its sum over ranks; return the shard.

        `full` is the gradient of the whole unit, of which the shard is a view.
        """
        shard = full[self.shard_slice(unit)]
        with collectives.phase(unit):
            self.shard_comm.reduce_scatter(
                full, op="sum", out=shard, counts=self.counts(unit), algorithm=self.algorithm
            )
        return shard

    def all_gather(self, unit: str, full: Array) -> Work[Any]:
        """Start to fill `full`, the whole unit, which contains this rank's shard already.

        Returns the call to wait for.
        """
        with collectives.phase(unit):
            work: Work[Any] = self.shard_comm.all_gather(
                full[self.shard_slice(unit)], out=full, counts=self.counts(unit),
                algorithm=self.algorithm, async_op=True,
            )  # fmt: skip
        return work

    def sum_of_squares(self) -> float:
        """Add up the sums of the shards."""
        mine = super().sum_of_squares()
        if not self.needs_norm:
            return mine
        return self.all_reduce_scalars("norm", [mine], self.shard_comm)[0]

    def loss_traffic(self, steps: int) -> list[PredictedCall]:
        """Return what the loss and the norm (8 bytes) send in a number of steps.

        The norm also shows an overflow.
        """
        norm = PredictedCall("norm", "all_reduce", SCALAR_ALGORITHM, 8, steps, **self.call_groups)
        return super().loss_traffic(steps) + [norm] * self.needs_norm

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send, as in the table."""
        return [
            *self.calls_per_unit("reduce", "reduce_scatter", run.num_steps),
            *self.calls_per_unit("update", "all_gather", run.num_updates),
        ]


class Zero2(Zero1):
    """ZeRO stage 2: each rank keeps its shard of the optimizer states and gradients.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |
    | update/unit   | all_gather     | S     | (p-1) n(unit) |

    and the norm.  A rank sends (k + 1) Psi (p-1)/p elements in a step.  A gradient of a whole unit
    exists while the backward pass of its layer runs; backward continues when it has been reduced.

    The parameters (`comm`, `model`, `recipe`, `algorithm`, `phase`), errors and attributes are
    those of `Zero1`.
    """

    sharded: ClassVar[frozenset[str]] = Zero1.sharded | {"gradients"}

    def _allocate(self) -> None:
        sizes = self.model.unit_sizes
        self.parameters = {
            unit: self.initial_values(unit, slice(0, n)) for unit, n in sizes.items()
        }
        self.parameter_shards = {u: x[self.shard_slice(u)] for u, x in self.parameters.items()}
        self.full_parameters = self.parameters
        self.full_gradients: dict[str, Array] = {}
        self._allocate_gradients()

    def _allocate_gradients(self) -> None:
        """Make the shards of the gradients."""
        sizes = {unit: shards.length(self.shard_slice(unit)) for unit in self.model.units}
        self.gradients = {unit: self.new_buffer("gradients", n) for unit, n in sizes.items()}
        self.gradient_shards = self.gradients

    def bind_layers(self) -> None:
        """Do nothing: each layer is bound while it runs."""

    def before_forward(self, layer: str) -> None:
        self.model.bind(layer, self.full_parameters)

    def after_forward(self, layer: str) -> None:
        self.model.unbind(layer)

    def before_backward(self, layer: str) -> None:
        for unit in self.model.units_of(layer):
            if unit not in self.full_gradients:
                self.full_gradients[unit] = self.new_buffer("buffers", self.model.unit_sizes[unit])
        self.model.bind(layer, self.full_parameters, self.full_gradients)

    def gradient_ready(self, unit: str) -> None:
        self.gradients[unit] += self.reduce_scatter(unit, self.full_gradients.pop(unit))

    def after_backward(self, layer: str) -> None:
        self.model.unbind(layer)

    def before_update(self) -> None:
        """Do nothing: the gradients were reduced during backward."""

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send, as in the table."""
        num_backwards = self.recipe.num_micro_batches * run.num_steps
        return [
            *self.calls_per_unit("backward", "reduce_scatter", num_backwards),
            *self.calls_per_unit("update", "all_gather", run.num_updates),
        ]

    def open_gradients(self, layer: str) -> list[str]:
        """Return the units whose full gradients exist while a layer's backward runs."""
        layers = list(self.model.layers)
        later = layers[layers.index(layer) :]
        begun = {unit for name in later for unit in self.model.units_of(name)}
        return [unit for unit in self.model.units_until(layer) if unit in begun]

    def buffer_bytes(self) -> int:
        """Return the bytes of the full gradients of the largest layer."""
        open_bytes = (
            sum(map(self.unit_nbytes, self.open_gradients(layer))) for layer in self.model.layers
        )
        return max(open_bytes)


class Zero3Options(StrategyOptions, total=False):
    """The keyword arguments of `Zero3`."""

    keep_after_forward: bool


class Zero3(Zero2):
    """ZeRO stage 3: each rank keeps its shard of optimizer states, gradients and parameters.

    A layer's parameters are gathered before it runs and freed after it has run.  While a layer
    runs, those of the next one are gathered.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | forward/unit  | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |

    and the norm.  A rank sends 3 k Psi (p-1)/p elements in a step, or 2 k Psi (p-1)/p with
    `keep_after_forward`.

    Parameters
    ----------
    comm, model, recipe, algorithm, phase
        As in `Zero1`.
    keep_after_forward : bool
        Free parameters after backward only: this sends less and keeps more.
    """

    sharded: ClassVar[frozenset[str]] = Zero2.sharded | {"parameters"}

    def __init__(
        self,
        comm: Communicator,
        model: Model,
        recipe: Recipe | None = None,
        *,
        keep_after_forward: bool = False,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.keep_after_forward = keep_after_forward
        super().__init__(comm, model, recipe, **options)

    def _allocate(self) -> None:
        self.full_parameters, self.full_gradients = {}, {}
        self._pending: dict[str, PendingGather] = {}
        self.parameters = {
            unit: self.initial_values(unit, self.shard_slice(unit)) for unit in self.model.units
        }
        self.parameter_shards = self.parameters
        self._allocate_gradients()

    def before_forward(self, layer: str) -> None:
        self._gather(layer, self.model.next_layer(layer))
        super().before_forward(layer)

    def after_forward(self, layer: str) -> None:
        super().after_forward(layer)
        if not self.keep_after_forward:
            self._free(layer, self.model.next_layer(layer))

    def before_backward(self, layer: str) -> None:
        self._gather(layer, self.model.previous_layer(layer))
        super().before_backward(layer)

    def after_backward(self, layer: str) -> None:
        super().after_backward(layer)
        if self.keep_after_forward:
            for unit in self.model.completed_units(layer):  # an earlier layer may need the others
                del self.full_parameters[unit]
        else:
            self._free(layer, self.model.previous_layer(layer))

    def _gather(self, layer: str, following: str | None) -> None:
        """Wait for a layer's parameters, and start to gather those of the following layer."""
        for unit in (*self.model.units_of(layer), *self.model.units_of(following)):
            if unit not in self.full_parameters:
                full = self.new_buffer("buffers", self.model.unit_sizes[unit])
                self.full_parameters[unit] = full
                self._pending[unit] = self.start_gather(unit, full)
        for unit in self.model.units_of(layer):
            if unit in self._pending:
                self._pending.pop(unit).wait()

    def start_gather(self, unit: str, full: Array) -> PendingGather:
        """Start to gather a unit's parameters into `full`.  Returns the call to wait for."""
        full[self.shard_slice(unit)] = self.parameters[unit]
        return self.all_gather(unit, full)

    def _free(self, layer: str, following: str | None) -> None:
        """Free a layer's parameters, except those that the following layer needs."""
        for unit in self.model.units_of(layer):
            if unit not in self.model.units_of(following):
                del self.full_parameters[unit]

    def after_update(self) -> None:
        """Do nothing: the next forward pass gathers the new parameters."""

    def step_traffic(self, run: RunSize) -> list[PredictedCall]:
        """Return what the steps of `run` send.

        A unit that several layers use is gathered for each, unless they are adjacent.
        """
        passes, gathers = self.recipe.num_micro_batches * run.num_steps, self.model.num_gathers()
        forward = dict.fromkeys(gathers, 1) if self.keep_after_forward else gathers
        backward = {} if self.keep_after_forward else gathers
        return [
            *self.calls_per_unit("forward", "all_gather", passes, forward),
            *self.calls_per_unit("backward", "all_gather", passes, backward),
            *self.calls_per_unit("backward", "reduce_scatter", passes),
        ]

    def options(self) -> dict[str, Any]:
        return super().options() | {"keep_after_forward": self.keep_after_forward}

    def buffer_bytes(self) -> int:
        """Return the bytes of two layers' parameters (or all so far) and one layer's gradients."""
        layers, most = list(self.model.layers), 0
        for i, layer in enumerate(layers):
            kept = layers[: i + 1] if self.keep_after_forward else [layer]
            gradients = sum(map(self.unit_nbytes, self.open_gradients(layer)))
            most = max(
                most,
                self._bytes_of([*kept, self.model.next_layer(layer)]),
                self._bytes_of([*kept, self.model.previous_layer(layer)]) + gradients,
            )
        return most

    def _bytes_of(self, layers: list[str | None]) -> int:
        """Return the bytes of the units that these layers use, each counted once."""
        units = {unit for name in layers for unit in self.model.units_of(name)}
        return sum(map(self.unit_nbytes, units))
