"""One training step, and the places where a strategy divides it among ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import numpy as host

import collectives
from collectives import Communicator
from parallel import agreement
from parallel.agreement import ranks_in_words
from parallel.memory import Memory
from parallel.nn import Array, Model, cross_entropy, on_host
from parallel.offload import Device, Place
from parallel.optim import Adam, Optimizer, pieces
from parallel.precision import LossScale, dtype_of, master_dtype
from parallel.shards import span
from parallel.text import Tokens
from parallel.traffic import PredictedCall, sends_alike

Batches: TypeAlias = Callable[[int, int, int], tuple[Tokens, Tokens]]
"""(step, rank, number of ranks) -> this rank's rows of that step's batch."""

Show: TypeAlias = Callable[[int, float], object]
"""Called with the number of steps done and the last loss."""

Phase: TypeAlias = Callable[[str], AbstractContextManager[None]]

SMALL = "recursive_doubling"  # the all-reduce of a few numbers


class NoGradient(ValueError):  # noqa: N818
    """Layers of some ranks took no part in a step.  The message says which."""


@dataclass(frozen=True)
class Recipe:
    """How to train, whatever the strategy.

    `dtype`: what the model computes, keeps and sends (float64, float32, bfloat16, float16).
    `optimizer`: called with the values to update.  `clip`: the greatest norm of the whole gradient.
    `recompute`: names of layers that keep only their input, and run forward again in backward (Chen
    et al. 2016).  `xp`: where arrays are, NumPy's or CuPy's array namespace.  `place`: where
    optimizer states are, and updates are made (`parallel.offload`).
    """

    dtype: str = "float64"
    optimizer: Callable[..., Optimizer] = Adam
    micro_batches: int = 1
    clip: float | None = None
    recompute: Collection[str] = ()
    seed: int = 0
    xp: Any = host
    place: Callable[[Memory, int], Place] = Device

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise ValueError(f"there is at least one micro-batch, not {self.micro_batches}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip is a norm above 0, or None; not {self.clip}")
        if isinstance(self.recompute, str):
            raise ValueError(f"recompute is several names, not one: [{self.recompute!r}]")


class Run(NamedTuple):
    """Of which traffic is predicted.  `batch`: see `Strategy.traffic`."""

    steps: int
    updates: int
    batch: tuple[int, int] | None = None


class Strategy:
    """Trains a model on one rank: the reference, and what every strategy is derived from.

    A step runs forward and backward over each micro-batch, then updates.  A strategy says what it
    keeps of each unit of the model (`_allocate`) and steps in where it has something to send:
    `before_forward`, `after_forward`, `before_backward`, `after_backward` of each layer, `reduce`
    when a unit's gradient is complete, `finish_backward`, `before_update` and `after_update`.  All
    are called for the same layers in the same order on every rank.

    `whole` are the arrays that layers work on, `parameters` and `gradients` what this rank keeps of
    them, and `own_parameters` and `own_gradients` the parts of these that it updates (`own`): here
    these are all the same.

    All strategies check before the first step that ranks agree, and tell each other the loss: with
    u units and o options, those of `options`, S steps and q = log2 p (for p a power of two)

    | phase       | collective | calls | bytes a call                    |
    |-------------|------------|-------|---------------------------------|
    | start/check | all_gather | 2     | 16 p (p-1), 32 (u + o) p (p-1)  |
    | loss        | all_reduce | S     | 16 p q                          |
    """

    divided: ClassVar[frozenset[str]] = frozenset()  # categories of memory that ranks divide
    must_begin_alike: ClassVar[bool] = True  # in their initial values too
    large: ClassVar[tuple[str, ...]] = ()  # the collectives that `algorithm` is of

    def __init__(
        self,
        comm: Communicator | None,
        model: Model,
        recipe: Recipe | None = None,
        *,
        algorithm: str = "ring",
        phase: Phase = collectives.phase,
    ) -> None:
        self.comm, self.model, self.recipe = comm, model, recipe or Recipe()
        self.algorithm, self.phase = algorithm, phase
        self._check_arguments()
        self.xp, self.dtype = self.recipe.xp, dtype_of(self.recipe.dtype)
        self.memory, self.loss_scale = Memory(), LossScale(self.dtype)
        self.num_updates = self.num_skipped = self.num_recomputed = 0
        self.used: set[str] = set()  # layers that took part in this step, on this rank
        self.unused: set[str] = set()  # units that took part in it on no rank, and are not updated
        self._allocate()
        self.optimizer = self._make_optimizer()

    def _check_arguments(self) -> None:
        """ValueError for what no such model or number of ranks can do."""
        if unknown := [name for name in self.recipe.recompute if name not in self.model.layers]:
            raise ValueError(f"there is no layer {unknown[0]!r} to recompute")
        for collective, ranks in self.calls_of_many().items():
            for size in ranks:
                check_algorithm(collective, self.algorithm, size, self.uneven(size))

    def uneven(self, size: int) -> str | None:
        """A unit that so many ranks, and all, cannot divide into equal parts, if there is one."""
        sizes = self.model.sizes.items()
        return next((unit for unit, n in sizes if n % size or n % self.size), None)

    def calls_of_many(self) -> dict[str, Collection[int]]:
        """The collectives that `algorithm` is of, with how many ranks may call each together."""
        return dict.fromkeys(self.large, (self.size,))

    @property
    def rank(self) -> int:
        """This rank."""
        return 0 if self.comm is None else self.comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.comm is None else self.comm.size

    # What is kept

    def _allocate(self) -> None:
        """Make `parameters` and `gradients`, and bind the layers if they stay bound."""
        sizes = self.model.sizes
        self.parameters = {unit: self.initial(unit, slice(0, n)) for unit, n in sizes.items()}
        self.gradients = {unit: self.new("gradients", n) for unit, n in sizes.items()}
        self.own_parameters = {unit: x[self.own(unit)] for unit, x in self.parameters.items()}
        self.own_gradients = {unit: x[self.own(unit)] for unit, x in self.gradients.items()}
        self.bind_all()

    def own(self, unit: str) -> slice:
        """The elements of a unit that this rank updates."""
        return slice(0, self.model.sizes[unit])

    def held(self, unit: str) -> slice:
        """The elements of a unit of which this rank keeps the parameters."""
        return self.own(unit) if "parameters" in self.divided else slice(0, self.model.sizes[unit])

    @property
    def replicas(self) -> tuple[int, int]:
        """Of the ranks that update the same elements: which one is this, and how many there are."""
        return self.rank, self.size

    def bind_all(self) -> None:
        """Let every layer work on whole parameters and gradients, whoever it worked for before."""
        for layer in self.model.layers:
            self.model.bind(layer, self.parameters, self.gradients)

    def new(self, category: str, num_elements: int, dtype: Any = None) -> Array:
        """A flat array of zeros, counted."""
        zeros = self.xp.zeros(num_elements, dtype=self.dtype if dtype is None else dtype)
        return self.memory.count(category, zeros)

    def initial(self, unit: str, part: slice) -> Array:
        """A part of a unit's parameters as they begin, whoever draws them."""
        values = self.model.draw(unit, self.recipe.seed)[part].astype(self.dtype)
        return self.memory.count("parameters", self.xp.asarray(values))

    def _make_optimizer(self) -> Optimizer:
        """Over the own parameters, or copies: in the dtype of updates, or at another place."""
        self.place = self.recipe.place(self.memory, self.rank)
        self.masters = self.place.masters_of(self.own_parameters, master_dtype(self.dtype))
        return self.recipe.optimizer(self.masters, new=self.place.zeros)

    # What a strategy adds

    def start(self) -> None:
        """What is to be done once, before the first step."""
        self.check_models()

    def resume(self) -> None:
        """What is to be done instead if `checkpoint.load` gives the parameters."""
        self.check_models()

    def close(self) -> None:
        """Give back to MPI what the strategy made there.  All ranks call this, at the end."""

    def before_forward(self, layer: str) -> None:
        """The layer's parameters are about to be used."""

    def after_forward(self, layer: str) -> None:
        """They have been used."""

    def before_backward(self, layer: str) -> None:
        """They are about to be used again, and gradients to be added."""

    def reduce(self, unit: str) -> None:
        """This micro-batch's gradient of a unit is complete."""

    def after_backward(self, layer: str) -> None:
        """The layer's parameters have been used."""

    def finish_backward(self) -> None:
        """Every layer's backward is over."""

    def before_update(self) -> None:
        """All micro-batches are over; `own_gradients` must be complete when this returns."""

    def after_update(self) -> None:
        """`own_parameters` has been updated."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients are only added up; for all micro-batches but the last."""
        return nullcontext()

    # A step

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch is ours: (rank, number of ranks)."""
        return self.rank, self.size

    def train(
        self, steps: int, batch: Batches, total: int, show: Show, first: int = 0
    ) -> list[float]:
        """Steps `first` to `steps`, after `start`, on batches of `total` tokens; their losses."""
        losses = []
        for step in range(first, steps):
            losses.append(self.step(*batch(step, *self.part), total))
            show(step + 1, losses[-1])
        return losses

    def step(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """One update from this rank's rows of a batch of `total` tokens; the batch's mean loss.

        `inputs` and `targets` (rows, context) are int64; the loss is in nats.  Raises NoGradient,
        on all ranks, if a layer of some rank took no part.
        """
        if self.model.worked_on is not self.parameters:  # but on another strategy's
            self.model.worked_on = self.parameters
            self.bind_all()
        for flat in self.gradients.values():
            flat[...] = 0
        self.used.clear()
        with self.overflows_allowed():
            loss = self.all_micro_batches(inputs, targets, total)
            self.before_update()
            whole_loss = self.agree(loss)
            self.update()
        return whole_loss

    def overflows_allowed(self) -> AbstractContextManager[object]:
        """Where the loss scale is to find its place overflows are expected, and no warning."""
        is_dynamic = self.loss_scale.is_dynamic
        return np.errstate(over="ignore", invalid="ignore") if is_dynamic else nullcontext()

    def all_micro_batches(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add up the gradients of this rank's rows; the loss of these."""
        k = self.recipe.micro_batches
        *others, last = (span(len(inputs), k, number) for number in range(k))
        loss = 0.0
        for rows in others:
            with self.no_sync():
                loss += self.forward_backward(inputs[rows], targets[rows], total)
        return loss + self.forward_backward(inputs[last], targets[last], total)

    def forward_backward(self, inputs: Tokens, targets: Tokens, total: int) -> float:
        """Add a micro-batch's gradients, which are those of its part of the loss; that part."""
        kept: dict[str, Any] = {}
        with self.phase("forward"):
            logits = self._forward(self.xp.asarray(inputs), kept)
        truth, scale = self.xp.asarray(targets), self.loss_scale.value
        loss, dlogits = cross_entropy(logits, truth, total, scale)
        del logits
        with self.phase("backward"):
            self._backward(dlogits, kept)
        return loss

    def _forward(self, x: Array, kept: dict[str, Any]) -> Array:
        route = self.model.route()
        for name, layer in self.model.layers.items():
            self.before_forward(name)
            if name in route:
                entering = x
                x, saved = layer.forward(x)
                kept[name] = entering if name in self.recipe.recompute else saved
                del entering, saved
                self.memory.count("activations", kept[name])
            self.after_forward(name)
        return x

    def _backward(self, dy: Array, kept: dict[str, Any]) -> None:
        for name in reversed(self.model.layers):
            self.before_backward(name)
            if name in kept:
                dy = self._backward_of(name, dy, kept.pop(name))
                self.used.add(name)
            for unit in self.model.completes(name):
                self.reduce(unit)
            self.after_backward(name)
        self.finish_backward()

    def _backward_of(self, name: str, dy: Array, saved: Any) -> Array:
        layer = self.model.layers[name]
        if name in self.recipe.recompute:
            saved = layer.forward(saved)[1]
            self.memory.count("activations", saved)
            self.num_recomputed += 1
        return layer.backward(dy, saved)

    def agree(self, loss: float) -> float:
        """The loss of the whole batch; NoGradient, on all ranks, if a layer of one is missing."""
        whole, num_absent = self.sum_small("loss", [loss, sum(self.is_absent())])
        if num_absent:
            self.refuse_absent()
        return float(whole)

    def is_absent(self) -> list[bool]:
        """Of each layer, whether it was to take part in this step and did not, on this rank."""
        return [name not in self.used for name in self.model.layers]

    def update(self) -> None:
        """Change the parameters, unless a gradient overflowed."""
        squares = self.sum_of_squares()
        if not self.loss_scale_passes(squares):
            self.num_skipped += 1
            return
        self.num_updates += 1
        factor = 1 / self._scale_used
        if self.recipe.clip is not None:
            norm = math.sqrt(squares) * factor
            factor *= self.recipe.clip / max(norm, self.recipe.clip)
        used = {unit: x for unit, x in self.own_gradients.items() if unit not in self.unused}
        self.place.update(self.optimizer, used, factor)
        self.after_update()

    def loss_scale_passes(self, squares: float) -> bool:
        """Whether the gradients are finite; the scale of the next step follows."""
        self._scale_used = self.loss_scale.value
        return self.loss_scale.update(is_finite=math.isfinite(squares))

    # Small messages

    @property
    def needs_norm(self) -> bool:
        """Whether an update depends on the norm of the whole gradient, or on its being finite."""
        return self.recipe.clip is not None or self.loss_scale.is_dynamic

    def sum_of_squares(self) -> float:
        """Of the whole gradient as backward made it; not finite if it is not.  0 if unused."""
        return sum(map(squares, self.own_gradients.values())) if self.needs_norm else 0.0

    def sum_small(self, phase: str, numbers: list[float], comm: Communicator | None = None) -> Any:
        """The sums over ranks of a few numbers, in float64."""
        comm = comm or self.comm
        x = np.array(numbers, np.float64)
        if comm is None:
            return x.tolist()
        with self.phase(phase):
            return comm.all_reduce(x, op="sum", out=x, algorithm=SMALL).tolist()

    def refuse_absent(self) -> None:
        """Raise NoGradient, naming layers and ranks.  All ranks call this."""
        layers = list(self.model.layers)
        mine = np.array(self.is_absent(), np.uint8)
        table = mine[None] if self.comm is None else self.comm.all_gather(mine[None])
        said = [
            f"{layers[i]} (on {ranks_in_words(table[:, i])})" for i in np.flatnonzero(table.any(0))
        ]
        raise NoGradient(f"no gradient in this step for {', '.join(said)}")

    # Before the first step

    def check_models(self) -> None:
        """Raise ModelsDiffer, on all ranks, if not all begin with the same, in the same way."""
        if self.comm is None:
            return
        units = {unit: self._digest(unit) for unit in self.model.units}
        options = {name: agreement.digest(value) for name, value in self.options().items()}
        with self.phase("start"), collectives.phase("check"):
            agreement.check_alike(self.comm, units, options)

    def _digest(self, unit: str) -> bytes:
        """Of a unit's names and shapes; and initial values, if these must be alike.

        Where ranks divide them, of those that the parts were taken from.
        """
        shapes = agreement.shapes_of(self.model.units[unit])
        if not self.must_begin_alike:
            return agreement.digest(shapes)
        if "parameters" in self.divided:
            return agreement.digest(shapes, self.model.draw(unit, self.recipe.seed))
        return agreement.digest(shapes, on_host(self.parameters[unit]))

    def options(self) -> dict[str, Any]:
        """What must be the same on all ranks, or they would make different calls."""
        return {
            "strategy": type(self).__name__,
            "algorithm": self.algorithm,
            "dtype": self.dtype.name,
            "micro_batches": self.recipe.micro_batches,
            "clip": self.recipe.clip,
            "optimizer": agreement.options_of(self.optimizer),
            "layers": [[name, *x.likeness()] for name, x in self.model.layers.items()]
            + sorted(map(list, self.model.ties.items())),
        }

    # What it says about itself

    def remarks(self) -> list[str]:
        """What a run should tell beside its losses, traffic and memory, in words."""
        said = []
        if self.num_recomputed:
            said.append(
                f"{self.num_recomputed} layers' forwards computed again on rank {self.rank}"
            )
        if self.loss_scale.is_dynamic:
            said.append(f"{self.num_skipped} updates skipped, loss scale {self.loss_scale.value:g}")
        return said

    def traffic(
        self,
        steps: int,
        *,
        batch: tuple[int, int] | None = None,
        skipped: int = 0,
        is_resumed: bool = False,
    ) -> list[PredictedCall]:
        """What this strategy sends in `start`, or in `resume`, and in one `train` of so many steps.

        `batch`: the rows of all ranks together, and the tokens in each; who sends batches must be
        told.  `skipped`: how many updates an overflow prevents, which only a run can tell.
        ValueError if there are as many in a dtype that skips none.
        """
        if skipped and not self.loss_scale.is_dynamic:
            raise ValueError(f"in {self.dtype.name} all updates are made, {skipped} were not")
        if self.comm is None:
            return []
        run = Run(steps, self.updates_in(steps) - skipped, batch)
        start = self.traffic_of_check() if is_resumed else self.traffic_of_start()
        return [*start, *self.traffic_of_steps(run), *self.traffic_of_loss(steps)]

    def updates_in(self, steps: int) -> int:
        """How many so many steps make, unless a gradient overflows."""
        return steps

    def traffic_of_start(self) -> list[PredictedCall]:
        """What `start` sends."""
        return self.traffic_of_check()

    def traffic_of_check(self) -> list[PredictedCall]:
        """The check that all ranks begin with the same model."""
        num_units, num_options = len(self.model.units), len(self.options())
        return agreement.traffic("start/check", self.size, num_units, num_options)

    def traffic_of_steps(self, run: Run) -> list[PredictedCall]:
        """What distinguishes the strategy."""
        return []

    def traffic_of_loss(self, steps: int) -> list[PredictedCall]:
        """Loss and number of missing layers: two numbers of 8 bytes."""
        return [PredictedCall("loss", "all_reduce", SMALL, 16, count=steps)]

    @property
    def groups(self) -> dict[str, int]:
        """For `PredictedCall`: how many ranks make a call together, and how many such groups."""
        return {"ranks": self.size, "groups": 1}

    def each_unit(
        self, phase: str, collective: str, count: int, times: Mapping[str, int] | None = None
    ) -> list[PredictedCall]:
        """`count` calls for every unit, or `times` as many for some."""
        calls = dict.fromkeys(self.model.units, 1) if times is None else times
        return [
            PredictedCall(
                f"{phase}/{unit}", collective, self.algorithm, self.nbytes(unit), count * n,
                **self.groups,
            )
            for unit, n in calls.items()
        ]  # fmt: skip

    def buffer_bytes(self) -> int:
        """The most that is kept at a time beside the rest: whole units that ranks divide."""
        return 0

    def nbytes(self, unit: str) -> int:
        """Of a whole unit's parameters, or gradients."""
        return int(self.model.sizes[unit] * self.dtype.itemsize)


def squares(x: Array) -> float:
    """The sum of the squares of a flat array's elements, in float64."""
    wide = (piece.astype(np.float64) for (piece,) in pieces(x))
    return sum((float(piece @ piece) for piece in wide), 0.0)


def check_algorithm(collective: str, name: str, size: int, uneven: str | None) -> None:
    """ValueError unless so many ranks can call it, and all get the same bits by it.

    And if it has no formula for the parts of `uneven`, a unit that they cannot divide equally.
    """
    chosen = collectives.choose(collective, name, size, 0).algorithm
    if not chosen.is_bitwise:
        raise ValueError(
            f"by {collective}.{name} ranks get other last bits, and so parameters that differ"
        )
    if uneven is not None and not sends_alike(collective, name, size):
        raise ValueError(
            f"by {collective}.{name} some blocks are sent more often than others: no formula says"
            f" what {size} ranks send of {uneven}, which they cannot divide equally"
        )
