"""Ranks along the axis "expert" compute different rows and divide some parameters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import SGD, Adam, Mesh, PredictedCall, Recipe, Sharding, Trainer, checkpoint, nn
from parallel.nn import Activations, ArraySpec, Layer, LayerTraffic, Model, ParameterSpec, Step
from parallel.step import Reduce, Unshard, WaitForCalls
from tests.covering import pairwise
from tests.parallel.layouts import (
    CLIP,
    FEW_STEPS,
    Setup,
    batch,
    check_accounts,
    check_equal,
    with_optimizer,
)
from tests.parallel.training import CONTEXT, nothing

ROWS, HIDDEN, VOCABULARY = 24, 6, 256  # as many rows on each rank and in each micro-batch
Axes = tuple[tuple[str, int], ...]


class Experts(Layer):
    """x plus the sum over all experts e of tanh(w_e x): each expert computes every token.

    Ranks along "expert" divide the experts.  A rank gathers the rows of the others, computes its
    experts' part of the sum for them, and gets the sum for its own rows.
    """

    saves_input = False

    def __init__(self, num_experts: int, mesh: Mesh | None) -> None:
        super().__init__()
        self.num_experts, self.mesh = num_experts, mesh or Mesh(None)
        self.size = self.mesh.axes.get("expert", 1)

    def specs(self) -> dict[str, ParameterSpec]:
        shape = self.num_experts, HIDDEN
        return {"weight": ParameterSpec(shape, std=0.5, splits=((0, "expert"),))}

    def forward(self, x: Any, step: Step) -> tuple[Any, Any]:
        rows = self._gathered(x)
        slopes = np.tanh(rows[..., None, :] * self.value["weight"])
        return x + self._scattered(slopes.sum(axis=-2)), (rows, slopes)

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        rows, y = saved
        inner = self._gathered(dy)[..., None, :] * (1 - y * y)
        dx = self._scattered((inner * self.value["weight"]).sum(axis=-2))
        return dy + dx, (inner, rows)

    def backward_weight(self, rest: Any) -> None:
        inner, rows = rest
        self.gradient["weight"] += (inner * rows[..., None, :]).sum(axis=(0, 1))

    def _gathered(self, x: Any) -> Any:
        return x.copy() if self.size == 1 else self._comm.all_gather(x, algorithm="ring")

    def _scattered(self, y: Any) -> Any:
        return y if self.size == 1 else self._comm.reduce_scatter(y, algorithm="ring")

    @property
    def _comm(self) -> Communicator:
        comm = self.mesh["expert"]
        assert comm is not None
        return comm

    def activation_bytes(self, x: ArraySpec) -> Activations:
        rank = x.rank if self.size > 1 else None
        mine = self.specs()["weight"].box(self.mesh, rank).shape[0]
        saved = self.size * (1 + mine) * x.nbytes
        return Activations(saved, x, rest=saved)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        if self.size == 1:
            return LayerTraffic()
        counts = (x.size,) * self.size
        both = tuple(
            PredictedCall("", name, "ring", counts, x.width, axis="expert")
            for name in ("all_gather", "reduce_scatter")
        )
        return LayerTraffic(both, both)


def model(num_experts: int, mesh: Mesh | None) -> Model:
    """Two blocks of a layer that all ranks have and experts."""
    blocks = {
        f"block{i}": nn.Sequential(
            {"norm": nn.LayerNorm(HIDDEN), "experts": Experts(num_experts, mesh)}
        )
        for i in range(2)
    }
    layers: dict[str, Layer] = {
        "embedding": nn.Embedding(VOCABULARY, CONTEXT, HIDDEN),
        **blocks,
        "head": nn.Unembedding(HIDDEN, VOCABULARY),
        "loss": nn.CrossEntropy(),
    }
    return Model(layers, mesh=mesh)


MODELS = {number: partial(model, number) for number in (2, 4)}  # by the number of experts
LAYOUTS: list[Axes] = [
    (("expert", 2),),
    (("data", 2), ("expert", 2)),
    (("expert", 4),),
    (("expert", 3),),  # of two experts: the last rank has none
    (("pipe", 2), ("expert", 2)),
]
SHARDINGS = {"ddp": Sharding.ddp} | {f"zero{i}": partial(Sharding.zero, i) for i in (1, 2, 3)}
OPTIMIZERS = {"sgd": partial(SGD, lr=0.5, momentum=0.9), "adam": Adam}
SQUARE: Axes = LAYOUTS[1]


def setup_of(axes: Axes, sharding: str = "ddp", **options: Any) -> Setup:
    """Of which ranks along "data" and "expert" compute different rows."""
    shared = tuple(axis for axis, _ in axes if axis in ("data", "expert"))
    number = 2 if ("expert", 3) in axes else 4
    of = partial(SHARDINGS[sharding], axes=shared)
    return Setup(axes, sharding=of, rows=ROWS, of=MODELS[number], steps=FEW_STEPS, **options)


@pytest.mark.parametrize(
    ("axes", "sharding", "optimizer"), pairwise(LAYOUTS, SHARDINGS, OPTIMIZERS), ids=str
)
@pytest.mark.slow
def test_losses_and_parameters_are_those_of_one_rank(
    axes: Axes, sharding: str, optimizer: str
) -> None:
    """With a clipped gradient in each step, of which every element counts once."""
    setup = with_optimizer(setup_of(axes, sharding), OPTIMIZERS[optimizer])
    ends, alone = setup.run(), setup.alone()
    check_equal(ends, alone)
    check_accounts(ends)
    assert min(alone.norms) > CLIP
    for end in ends:
        np.testing.assert_allclose(end.norms, alone.norms, rtol=1e-12)


def split_model(mesh: Mesh | None) -> Model:
    """A GPT with experts between its blocks, which ranks along "tensor" divide."""
    layers: dict[str, Layer] = {}
    whole = nn.gpt(num_layers=2, hidden=HIDDEN, num_heads=2, context=CONTEXT, mesh=mesh)
    for name, layer in whole.layers.items():
        layers[name] = layer
        if name.startswith("block"):
            layers[f"experts_of_{name}"] = Experts(4, mesh)
    return Model(layers, mesh=mesh)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_divide_experts_beside_tensor_parallelism(sharding: str) -> None:
    """Units divided along "tensor" are summed along "expert", and next to others that are not."""
    setup = setup_of((("expert", 2), ("tensor", 2)), sharding)._replace(of=split_model)
    ends = setup.run()
    check_equal(ends, setup.alone())
    check_accounts(ends)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_of_two_bytes_may_be_summed_in_four(sharding: str) -> None:
    recipe = Recipe("bfloat16", num_micro_batches=2, clip=CLIP, reduce_dtype="float32")
    ends = setup_of(SQUARE, sharding, recipe=recipe).run()
    assert len({tuple(end.losses) for end in ends}) == 1
    check_accounts(ends)


@pytest.mark.parametrize(
    ("axes", "dense", "experts"),
    [(SQUARE, {("data", "expert")}, {("data",)}), (LAYOUTS[0], {("expert",)}, set())],
)
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_experts_are_summed_along_the_other_axes_alone(
    sharding: str, axes: Axes, dense: set[Any], experts: set[Any]
) -> None:
    """A call of a bucket is for units of one kind."""
    trainer = setup_of(axes, sharding).run()[0].trainer
    found: dict[bool, set[Any]] = {True: set(), False: set()}
    for action in trainer.actions:
        if isinstance(action, Reduce | Unshard):
            units = trainer.view.buckets.get(action.part, [action.part])
            (is_expert,) = {unit.endswith("@expert") for unit in units}
            found[is_expert].add(action.axes)
    assert found == {False: dense, True: experts}


# Negative controls


def sum_experts(trainer: Trainer) -> None:
    """Sum the gradients of experts along "expert", too."""
    units = [unit for unit in trainer.view.unit_sizes if unit.endswith("@expert")]
    at = [action.kind for action in trainer.actions].index("LOSS")
    trainer.actions[at:at] = [
        action
        for unit in units
        for action in (
            Reduce(part=unit, axes=("expert",), phase="partial"),
            WaitForCalls(phase="partial"),
        )
    ]


def sum_nothing(trainer: Trainer) -> None:
    """Sum no gradient of what all ranks have."""
    trainer.actions = [action for action in trainer.actions if not isinstance(action, Reduce)]


@pytest.mark.parametrize("change", [sum_experts, sum_nothing])
def test_with_other_sums_the_result_is_another(change: Any) -> None:
    """By more than 1e-6."""
    good = setup_of(LAYOUTS[0])
    check_equal(good.run(), good.alone())
    with pytest.raises(AssertionError):
        check_equal(good._replace(change=change).run(), good.alone(), tolerance=1e-6)


# Checkpoints


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("axes", [SQUARE, LAYOUTS[2], ()], ids=["same", "expert4", "one"])
def test_a_checkpoint_continues_on_another_layout(
    axes: Axes, sharding: str, tmp_path: Path
) -> None:
    rows, total = partial(batch, rows=ROWS), ROWS * CONTEXT

    def trainer_of(comm: Communicator, axes: Axes) -> Trainer:
        setup, mesh = setup_of(axes or (("data", 1),), sharding), Mesh(comm, **dict(axes))
        return Trainer(mesh, setup.make_model(mesh), setup.recipe, sharding=setup.sharding())

    def save(comm: Communicator) -> None:
        trainer = trainer_of(comm, SQUARE)
        trainer.start()
        trainer.train(1, rows, total, nothing)
        checkpoint.save(trainer, tmp_path, 1)

    def rest(comm: Communicator) -> list[float]:
        trainer = trainer_of(comm, axes)
        trainer.resume()
        checkpoint.load(trainer, tmp_path / "step-00000001")
        return trainer.train(FEW_STEPS, rows, total, nothing, 1)

    collectives.run(save, size=4)
    size = int(np.prod([n for _, n in axes]))
    alone = setup_of(SQUARE).alone()
    for losses in collectives.run(rest, size=size):
        np.testing.assert_allclose(losses, alone.losses[1:], rtol=0, atol=1e-12)


# What is refused


@pytest.mark.parametrize(
    "sharding",
    [
        Sharding(secondary_axes=("expert",), shard_axes=("expert",)),
        Sharding(every=2, shard_axes=("expert",)),
        Sharding(server=0, shard_axes=("expert",)),
    ],
    ids=["secondary", "every", "server"],
)
def test_what_needs_whole_units_is_refused(sharding: Sharding) -> None:
    with pytest.raises(ValueError, match="need whole units: the model divides some along 'expert'"):
        setup_of(LAYOUTS[0])._replace(sharding=lambda: sharding).run()
