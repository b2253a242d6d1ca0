"""ZeRO: ranks divide what data parallelism keeps on every one of them.

Rajbhandari et al. 2020.  Each of p ranks owns one p-th of every unit of the model, updates it, and
sends it where it is needed.  Psi is the number of parameters.  The tables are of S steps of k
micro-batches, of which no update was skipped: bytes a call by all ranks together (ring), beside
what all strategies send (`Strategy`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import collectives
from collectives import Communicator, Work
from parallel import shards
from parallel.nn import Array
from parallel.strategy import SMALL, Run, Strategy
from parallel.traffic import PredictedCall


class Arrival(Protocol):
    """Parameters on their way."""

    def wait(self) -> Any:
        """Return when they are there."""


class Zero1(Strategy):
    """Optimizer states are divided: stage 1.

    | phase        | collective     | calls | bytes a call                              |
    |--------------|----------------|-------|-------------------------------------------|
    | reduce/unit  | reduce_scatter | S     | (p-1) n(unit)                             |
    | update/unit  | all_gather     | S     | (p-1) n(unit)                             |
    | norm         | all_reduce     | S     | 8 p log2 p, with clipping, and in float16 |

    A rank sends 2 Psi (p-1)/p elements a step, whatever the number of micro-batches.
    """

    comm: Communicator
    divided: ClassVar[frozenset[str]] = frozenset({"optimizer", "master"})
    large = "reduce_scatter", "all_gather"

    @property
    def shard_comm(self) -> Communicator:
        """The ranks that divide the model."""
        return self.comm

    def counts(self, unit: str) -> tuple[int, ...]:
        """The elements of a unit that each rank owns."""
        return shards.counts(self.model.sizes[unit], self.shard_comm.size)

    @property
    def groups(self) -> dict[str, int]:
        return {"ranks": self.shard_comm.size, "groups": self.size // self.shard_comm.size}

    @property
    def replicas(self) -> tuple[int, int]:
        return 0, 1

    def own(self, unit: str) -> slice:
        return shards.span(self.model.sizes[unit], self.shard_comm.size, self.shard_comm.rank)

    def before_update(self) -> None:
        with self.phase("reduce"):
            for unit, gradient in self.gradients.items():
                self.reduce_scatter(unit, gradient)

    def after_update(self) -> None:
        with self.phase("update"):
            for unit, whole in self.parameters.items():
                self.all_gather(unit, whole).wait()

    def reduce_scatter(self, unit: str, whole: Array) -> Array:
        """The own part of the sum of all ranks' gradients, in its place in `whole`."""
        own = whole[self.own(unit)]
        with collectives.phase(unit):
            self.shard_comm.reduce_scatter(
                whole, op="sum", out=own, counts=self.counts(unit), algorithm=self.algorithm
            )
        return own

    def all_gather(self, unit: str, whole: Array) -> Work[Any]:
        """Begin to fill `whole`, in which the own part is at its place."""
        with collectives.phase(unit):
            work: Work[Any] = self.shard_comm.all_gather(
                whole[self.own(unit)], out=whole, counts=self.counts(unit),
                algorithm=self.algorithm, async_op=True,
            )  # fmt: skip
        return work

    def sum_of_squares(self) -> float:
        """Summed over the ranks, each of which has a part of the gradient."""
        mine = super().sum_of_squares()
        if not self.needs_norm:
            return mine
        return float(self.sum_small("norm", [mine], self.shard_comm)[0])

    def traffic_of_loss(self, steps: int) -> list[PredictedCall]:
        """And of the norm, whose being infinite is what tells of an overflow: 8 bytes."""
        norm = PredictedCall("norm", "all_reduce", SMALL, 8, steps, **self.groups)
        return super().traffic_of_loss(steps) + [norm] * self.needs_norm

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        return [
            *self.each_unit("reduce", "reduce_scatter", run.steps),
            *self.each_unit("update", "all_gather", run.updates),
        ]


class Zero2(Zero1):
    """Gradients are divided too: stage 2.  A whole one lives while its layer's backward runs.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |
    | update/unit   | all_gather     | S     | (p-1) n(unit) |

    and the norm.  A rank sends (k + 1) Psi (p-1)/p elements a step.  Backward goes on when a unit's
    gradient has been reduced, so that never more than one layer's is whole.
    """

    divided: ClassVar[frozenset[str]] = Zero1.divided | {"gradients"}

    def _allocate(self) -> None:
        sizes = self.model.sizes
        self.parameters = {unit: self.initial(unit, slice(0, n)) for unit, n in sizes.items()}
        self.own_parameters = {unit: x[self.own(unit)] for unit, x in self.parameters.items()}
        self.whole = self.parameters
        self.whole_gradients: dict[str, Array] = {}
        self._allocate_gradients()

    def _allocate_gradients(self) -> None:
        """Of the own part alone."""
        sizes = {unit: shards.length(self.own(unit)) for unit in self.model.units}
        self.gradients = {unit: self.new("gradients", n) for unit, n in sizes.items()}
        self.own_gradients = self.gradients

    def bind_all(self) -> None:
        """Each is bound while it runs."""

    def before_forward(self, layer: str) -> None:
        self.model.bind(layer, self.whole)

    def after_forward(self, layer: str) -> None:
        self.model.unbind(layer)

    def before_backward(self, layer: str) -> None:
        for unit in self.model.uses(layer):
            if unit not in self.whole_gradients:
                self.whole_gradients[unit] = self.new("buffers", self.model.sizes[unit])
        self.model.bind(layer, self.whole, self.whole_gradients)

    def reduce(self, unit: str) -> None:
        self.gradients[unit] += self.reduce_scatter(unit, self.whole_gradients.pop(unit))

    def after_backward(self, layer: str) -> None:
        self.model.unbind(layer)

    def before_update(self) -> None:
        """The gradients have been reduced as they came."""

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        return [
            *self.each_unit("backward", "reduce_scatter", self.recipe.micro_batches * run.steps),
            *self.each_unit("update", "all_gather", run.updates),
        ]

    def open_gradients(self, layer: str) -> list[str]:
        """The units whose whole gradients are alive while a layer's backward runs."""
        layers = list(self.model.layers)
        later = layers[layers.index(layer) :]
        since = {unit for name in later for unit in self.model.uses(name)}
        return [unit for unit in self.model.used_until(layer) if unit in since]

    def buffer_bytes(self) -> int:
        """The whole gradient of the layer that runs."""
        open_bytes = (sum(map(self.nbytes, self.open_gradients(x))) for x in self.model.layers)
        return max(open_bytes)


class Zero3(Zero2):
    """Parameters are divided too: stage 3.  A layer's are gathered before it runs, and then freed.

    | phase         | collective     | calls | bytes a call  |
    |---------------|----------------|-------|---------------|
    | forward/unit  | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | all_gather     | k S   | (p-1) n(unit) |
    | backward/unit | reduce_scatter | k S   | (p-1) n(unit) |

    and the norm.  A rank sends 3 k Psi (p-1)/p elements a step; 2 k with `keep_after_forward`,
    which frees after backward only.  While a layer runs the next one's parameters are on their way.
    """

    divided: ClassVar[frozenset[str]] = Zero2.divided | {"parameters"}

    def __init__(self, *args: Any, keep_after_forward: bool = False, **more: Any) -> None:
        self.keep_after_forward = keep_after_forward
        super().__init__(*args, **more)

    def _allocate(self) -> None:
        self.whole, self.whole_gradients = {}, {}
        self._works: dict[str, Arrival] = {}
        self.parameters = {unit: self.initial(unit, self.own(unit)) for unit in self.model.units}
        self.own_parameters = self.parameters
        self._allocate_gradients()

    def before_forward(self, layer: str) -> None:
        self._gather(layer, self.model.after(layer))
        super().before_forward(layer)

    def after_forward(self, layer: str) -> None:
        super().after_forward(layer)
        if not self.keep_after_forward:
            self._release(layer, self.model.after(layer))

    def before_backward(self, layer: str) -> None:
        self._gather(layer, self.model.before(layer))
        super().before_backward(layer)

    def after_backward(self, layer: str) -> None:
        super().after_backward(layer)
        if self.keep_after_forward:
            for unit in self.model.completes(layer):  # an earlier layer may need the others
                del self.whole[unit]
        else:
            self._release(layer, self.model.before(layer))

    def _gather(self, layer: str, following: str | None) -> None:
        """Wait for a layer's parameters; those of the following one are on their way by then."""
        for unit in (*self.model.uses(layer), *self.model.uses(following)):
            if unit not in self.whole:
                self.whole[unit] = self.new("buffers", self.model.sizes[unit])
                self._works[unit] = self.gather_into(unit, self.whole[unit])
        for unit in self.model.uses(layer):
            if unit in self._works:
                self._works.pop(unit).wait()

    def gather_into(self, unit: str, whole: Array) -> Arrival:
        """Begin to gather a unit's parameters."""
        whole[self.own(unit)] = self.parameters[unit]
        return self.all_gather(unit, whole)

    def _release(self, layer: str, following: str | None) -> None:
        """Free a layer's parameters, unless the following one needs them."""
        for unit in self.model.uses(layer):
            if unit not in self.model.uses(following):
                del self.whole[unit]

    def after_update(self) -> None:
        """Nobody needs the new parameters before the next forward."""

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """A unit that several layers use is gathered anew for each, unless they are neighbours."""
        calls, gathers = self.recipe.micro_batches * run.steps, self.model.times_gathered()
        forward = dict.fromkeys(gathers, 1) if self.keep_after_forward else gathers
        backward = {} if self.keep_after_forward else gathers
        return [
            *self.each_unit("forward", "all_gather", calls, forward),
            *self.each_unit("backward", "all_gather", calls, backward),
            *self.each_unit("backward", "reduce_scatter", calls),
        ]

    def options(self) -> dict[str, Any]:
        return super().options() | {"keep_after_forward": self.keep_after_forward}

    def buffer_bytes(self) -> int:
        """Two layers' parameters, or all so far, and the gradient of the one in backward."""
        layers, most = list(self.model.layers), 0
        for i, layer in enumerate(layers):
            kept = layers[: i + 1] if self.keep_after_forward else [layer]
            gradients = sum(map(self.nbytes, self.open_gradients(layer)))
            most = max(
                most,
                self._bytes_of([*kept, self.model.after(layer)]),
                self._bytes_of([*kept, self.model.before(layer)]) + gradients,
            )
        return most

    def _bytes_of(self, layers: list[str | None]) -> int:
        """Of the units that these layers use, each once."""
        return sum(map(self.nbytes, {unit for name in layers for unit in self.model.uses(name)}))
