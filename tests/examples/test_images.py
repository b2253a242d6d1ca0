"""Training models of images with experts on any mesh equals one rank, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from examples import images
from examples.images import swin_moe, v_moe
from moe import Gate, RoutingLog, mixtures
from moe.gates import named
from parallel import Adam, Mesh, Recipe, Sharding, TrafficMismatch, Trainer, checkpoint
from parallel.layout import BatchSize
from parallel.nn import Model, Step
from parallel.run.memory import peak_memory
from parallel.strategies import SyncParameterServer
from tests.moe.experts import moved
from tests.moe.routing.tables import digests
from tests.parallel.layouts import CLIP, End, Setup, check_as_one_rank
from tests.parallel.training import nothing

ROWS, SIZE = 9, 8  # images, and their rows of pixels
STEPS = 2  # the second uses what optimizers and biases have kept of the first
MODELS: dict[str, Callable[..., Model]] = {
    "v": partial(v_moe, patch=4, hidden=6, num_layers=2, num_heads=2),
    "swin": partial(swin_moe, patch=1, hidden=4, num_layers=(2, 1), num_heads=(2, 2), window=4),
}


class Images(NamedTuple):
    """A model of images; its routing is kept on one rank."""

    name: str
    gate: str = "v-moe"
    padding: str = "none"
    every: int = 1
    dispatch: str = "flat"
    recompute: tuple[str, ...] = ()

    def __call__(self, mesh: Mesh | None) -> Model:
        log = RoutingLog()
        model = MODELS[self.name](
            num_classes=len(images.CLASSES),
            image_size=SIZE,
            gate=self.gate,
            num_experts=4,
            every=self.every,
            mesh=mesh,
            log=log,
            padding=self.padding,
            dispatch=self.dispatch,
            recompute=self.recompute,
        )
        if mesh is None or mesh.size == 1:
            LOGS[self] = log
        for layer in mixtures(model):
            layer.expected = LOGS[self]
        return model


LOGS: dict[Images, RoutingLog] = {}


def batch(step: int, rank: int, ranks: int, rows: int) -> Any:
    return images.batch(
        seed=0, step=step, batch_size=rows, image_size=SIZE, rank=rank, num_ranks=ranks
    )


def setup_of(of: Callable[[Mesh | None], Model], zero: int = 1, **axes: int) -> Setup:
    shared = tuple(axis for axis in ("data", "expert") if axis in axes)
    sharding = partial(Sharding.zero, zero, axes=shared) if shared else Sharding
    recipe = Recipe(num_micro_batches=2, clip=CLIP)
    return Setup(
        tuple(axes.items()),
        recipe=recipe,
        sharding=sharding,
        of=of,
        rows=ROWS,
        batch=batch,
        context=1,
        steps=STEPS,
    )


def check(setup: Setup) -> list[End]:
    ends = check_as_one_rank(setup)
    assert all(end.norms == ends[0].norms for end in ends)
    return ends


LAYOUTS: list[dict[str, int]] = [
    {"expert": 2},
    {"data": 2, "expert": 2},
    {"expert": 3},
    {"tensor": 2},
    {"tensor": 3},
    {"expert": 2, "tensor": 2},
    {"pipe": 2},
    {"pipe": 2, "expert": 2},
    {"pipe": 2, "data": 2, "expert": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"data": 3},
]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_every_layout_trains_as_one_rank(name: str, axes: dict[str, int]) -> None:
    """Losses and parameters of 2 clipped steps; traffic and memory of each, to the byte."""
    check(setup_of(Images(name), **axes))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_divided_gradients_and_parameters_train_as_one_rank(name: str, zero: int) -> None:
    check(setup_of(Images(name, gate="stable"), zero, data=2, expert=2))


@pytest.mark.parametrize(
    "of",
    [
        Images("v", "switch", padding="capacity", every=2),
        Images("swin", "gshard", padding="needed", every=2),
        Images("swin", "bias"),
        Images("swin", "expert-choice", dispatch="weights"),
        Images("v", "stable", recompute=("embedding", "block*")),
        Images("swin", "stable", recompute=("merge1", "block*.attention")),
    ],
)
@pytest.mark.slow
def test_every_gate_padding_way_and_recomputation_trains_as_one_rank(of: Images) -> None:
    check(setup_of(of, data=2, expert=2))


@pytest.mark.parametrize("padding", ["none", "needed", "capacity"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_ranks_may_have_micro_batches_without_rows(name: str, padding: str) -> None:
    """Of 5 images on 4 ranks, three ranks have one, which is in one of two micro-batches."""
    check(setup_of(Images(name, "switch", padding), data=2, expert=2)._replace(rows=5))


TOKENS = {"v": {"block0": 4, "block1": 4}, "swin": {"block0": 64, "block1": 64, "block2": 16}}


@pytest.mark.parametrize("name", MODELS)
def test_routing_is_the_same_on_all_layouts(name: str) -> None:
    """SHA-256 of every step and layer."""
    of = Images(name)
    setup_of(of).alone()
    ends = setup_of(of, data=2, expert=2).run()
    logs = [log for end in ends if (log := mixtures(end.trainer.model)[0].log) is not None]
    for layer, per_row in TOKENS[name].items():
        on_ranks, alone = (digests(routings, per_row) for routings in (logs, [LOGS[of]]))
        for step in range(STEPS):
            assert on_ranks[step, layer] == alone[step, layer]


def test_traffic_of_another_routing_is_noticed() -> None:
    """The negative control: one token of one image is said to go to another rank."""
    of = Images("v", "stable")
    setup = setup_of(of, expert=2)
    setup.alone()
    right = LOGS[of]
    LOGS[of] = moved(right, 2, (1, "block1"))
    try:
        table = setup.run()[0].table
    finally:
        LOGS[of] = right
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


def test_memory_of_more_images_is_noticed() -> None:
    """The negative control."""
    setup = setup_of(Images("v"), expert=2)
    setup.alone()  # of which the routing is predicted
    trainer = setup.run()[0].trainer
    rows = len(batch(0, *trainer.batch_part, ROWS)[0])
    batches = [BatchSize(ROWS, 1, step) for step in range(STEPS)]
    right, more = (peak_memory(trainer, n, 1, batches)["activations"] for n in (rows, rows + 4))
    assert right == trainer.memory.peak["activations"] < more


# Auxiliary losses


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 5])
def test_auxiliary_losses_are_means_over_all_patches(name: str, rows: int) -> None:
    """Whatever the number of patches: with equal probabilities that of Switch is its weight."""
    model = MODELS[name](
        num_classes=3, image_size=SIZE, gate="switch", gate_options={"weight": 0.25}, every=1
    )
    trainer = Trainer(None, model)
    for unit, flat in trainer.parameters.items():
        for key, x in model.split(unit, flat).items():
            if key.endswith("router"):
                x[...] = 0
    pixels, targets = batch(0, 0, 1, rows=rows)
    for layer in model.layers:
        model.bind(layer, trainer.parameters)
    step, x = Step(targets % 3, total=rows, context=1), pixels
    for layer in model.layers.values():
        x, _ = layer.forward(x, step)
    np.testing.assert_allclose(step.losses, 0.25, rtol=1e-12)
    assert len(step.losses) == len(mixtures(model))


# Learning


LEARNING = Recipe(dtype="float32", optimizer=partial(Adam, lr=0.01))


@pytest.mark.parametrize(
    "make",
    [
        partial(v_moe, hidden=16, num_layers=2),
        partial(swin_moe, hidden=16, num_heads=(2, 2), patch=4, window=2),
    ],
)
@pytest.mark.slow
def test_a_model_learns_the_shapes(make: Callable[..., Model]) -> None:
    """The loss of new images, a constant guess of which costs log 6 = 1.79 nats."""
    model = make(num_classes=len(images.CLASSES), num_experts=4)
    trainer = Trainer(None, model, LEARNING)
    trainer.start()

    def of_step(step: int, rank: int, ranks: int) -> Any:
        return images.batch(seed=0, step=step, batch_size=32, rank=rank, num_ranks=ranks)

    losses = trainer.train(60, of_step, 32, nothing)
    assert np.mean(losses[:5]) == pytest.approx(np.log(6), abs=0.1)
    assert np.mean(losses[-10:]) < 1.1


def test_without_images_nothing_is_learnt() -> None:
    """The negative control: all pixels are zero."""
    model = v_moe(num_classes=len(images.CLASSES), num_experts=4, hidden=16, num_layers=2)
    trainer = Trainer(None, model, LEARNING)
    trainer.start()

    def blank(step: int, rank: int, ranks: int) -> Any:
        pixels, targets = images.batch(seed=0, step=step, batch_size=32)
        return np.zeros_like(pixels), targets

    assert np.mean(trainer.train(60, blank, 32, nothing)[-10:]) > 1.7


# Data


def test_images_do_not_depend_on_the_ranks() -> None:
    whole = images.batch(seed=1, step=2, batch_size=11, image_size=12, channels=3)
    parts = [
        images.batch(
            seed=1, step=2, batch_size=11, image_size=12, channels=3, rank=rank, num_ranks=4
        )
        for rank in range(4)
    ]
    for of_ranks, wanted in zip(zip(*parts, strict=True), whole, strict=True):
        np.testing.assert_array_equal(np.concatenate(of_ranks), wanted)
    pixels, targets = whole
    assert (pixels.shape, targets.shape) == ((11, 12, 12, 3), (11, 1))
    assert pixels.min() >= 0 and pixels.max() <= 255
    other, _ = images.batch(seed=1, step=3, batch_size=11, image_size=12, channels=3)
    assert (other != pixels).any()


def test_all_shapes_are_drawn_and_differ() -> None:
    drawn = {
        name: images.shapes.draw(np.random.default_rng(4), name, 32)[..., 0] > 120
        for name in images.CLASSES
    }
    areas = {name: int(x.sum()) for name, x in drawn.items()}
    assert min(areas.values()) > 20 and len(set(areas.values())) == len(areas)


# What is refused


@pytest.mark.parametrize(
    ("make", "change", "words"),
    [
        (v_moe, {"patch": 5}, "patches of 5 x 5 do not divide a grid of 16 x 16"),
        (v_moe, {"num_heads": 3}, "3 heads do not divide a width of 64"),
        (v_moe, {"num_classes": 0}, "num_classes is 0: it must be at least 1"),
        (v_moe, {"num_layers": 0}, "num_layers is 0"),
        (v_moe, {"gate": "hash"}, "a gate without a router routes tokens of a text"),
        (v_moe, {"gate": "none"}, "there is no gate 'none'"),
        (v_moe, {"num_experts": [4]}, "num_experts has 1 numbers for 2 blocks"),
        (swin_moe, {"window": 3}, "windows of 3 x 3 do not divide a grid of 8 x 8"),
        (swin_moe, {"num_heads": (2,)}, "2 stages have 1 numbers of heads"),
        (swin_moe, {"num_layers": (), "num_heads": ()}, "stages is 0"),
        (swin_moe, {"num_layers": (2, 0)}, "num_layers is 0"),
        (swin_moe, {"num_heads": (2, 5)}, "5 heads do not divide a width of 64"),
        (swin_moe, {"image_size": 6, "window": 3}, "squares of 2 x 2 do not divide"),
    ],
)
def test_impossible_models_are_refused(
    make: Callable[..., Model], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        make(**{"num_classes": 6, **change})


def test_a_mesh_that_divides_positions_is_refused() -> None:
    def make(comm: collectives.Communicator) -> str:
        try:
            v_moe(num_classes=6, mesh=Mesh(comm, context=2))
        except ValueError as error:
            return str(error)
        return ""

    reasons = collectives.run(make, size=2)
    assert all("divide the positions of a text" in reason for reason in reasons)


def test_images_of_another_size_are_refused_on_all_ranks() -> None:
    words = r"images have the shape \(20, 20, 1\), but the model is for \(16, 16, 1\)"

    def fit(comm: collectives.Communicator) -> None:
        mesh = Mesh(comm, expert=2)
        model = v_moe(num_classes=6, hidden=8, num_layers=2, mesh=mesh)
        trainer = Trainer(mesh, model, sharding=Sharding.zero(1, axes=("expert",)))
        trainer.start()
        rows = images.batch(
            seed=0, step=0, batch_size=4, image_size=20, rank=comm.rank, num_ranks=2
        )
        with comm.record() as ledger, pytest.raises(ValueError, match=words):
            trainer.step(*rows, total=4)
        assert not ledger.rows()

    collectives.run(fit, size=2)


def test_models_without_experts_train_as_one_rank() -> None:
    """The same transformers: ranks need not know which rows they have."""

    def dense(mesh: Mesh | None) -> Model:
        return v_moe(
            num_classes=6,
            image_size=SIZE,
            hidden=6,
            num_layers=1,
            num_heads=2,
            num_experts=[],
            mesh=mesh,
        )

    for axes in ({"data": 2}, {"tensor": 2}):
        check(setup_of(dense, **axes))


def test_a_server_scatters_texts_only() -> None:
    """All ranks say so: the first why, the others that they got no rows."""

    def fit(comm: collectives.Communicator) -> str:
        model = v_moe(num_classes=6, image_size=SIZE, hidden=8, num_layers=1, num_experts=[])
        trainer = SyncParameterServer(comm, model)
        trainer.start()
        try:
            trainer.train(1, partial(batch, rows=ROWS), ROWS, nothing)
        except ValueError as error:
            return str(error)
        return ""

    first, *others = collectives.run(fit, size=2)
    assert "the server scatters texts: inputs (9, 8, 8, 1) and targets (9, 1)" in first
    assert all(others)


def test_checkpoints_of_one_layout_are_loaded_on_another(tmp_path: Path) -> None:
    of, rows_of = Images("swin"), partial(batch, rows=ROWS)

    def made(comm: collectives.Communicator, **axes: int) -> Trainer:
        mesh = Mesh(comm, **axes)
        return Trainer(mesh, of(mesh), sharding=Sharding.zero(1, axes=tuple(axes)))

    def third(trainer: Trainer) -> float:
        (loss,) = trainer.train(3, rows_of, ROWS, nothing, first=2)
        return loss

    def save(comm: collectives.Communicator) -> float:
        trainer = made(comm, data=2, expert=2)
        trainer.start()
        trainer.train(2, rows_of, ROWS, nothing)
        checkpoint.save(trainer, tmp_path, 2)
        return third(trainer)

    def load(comm: collectives.Communicator) -> float:
        trainer = made(comm, expert=3)
        trainer.resume()
        assert checkpoint.load(trainer, checkpoint.checkpoint_path(tmp_path, 2)) == 2
        return third(trainer)

    setup_of(of).alone()  # from which the routing is known
    (saved, *_), loaded = collectives.run(save, size=4), collectives.run(load, size=3)
    assert loaded == pytest.approx([saved] * 3, abs=1e-12)


def test_a_gate_may_be_made_by_a_function() -> None:
    """As in Swin-MoE: one expert, which takes up to 1.25 times its share, best tokens first."""

    def gate(num_experts: int) -> Gate:
        return named.v_moe(num_experts, k=1, capacity_factor=1.25)

    (layer,) = mixtures(v_moe(num_classes=2, num_layers=2, gate=gate))
    assert (layer.gate.k, layer.gate.rule, layer.name) == (1, "v-moe", "block1")
