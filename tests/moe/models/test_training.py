"""Training a GPT with experts on any mesh equals one rank, and every byte is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import collectives
from moe import GATES, RoutingLog, mixtures, moe_gpt
from parallel import SGD, Adam, Mesh, Recipe, Sharding, TrafficMismatch, Trainer, checkpoint
from parallel.nn import Model
from parallel.step import Reduce, SumCounts
from tests.covering import pairwise
from tests.moe.experts import moved
from tests.moe.routing.tables import digests
from tests.parallel.layouts import CLIP, End, Setup, check_as_one_rank, check_equal, with_optimizer
from tests.parallel.training import CONTEXT

pytestmark = pytest.mark.slow

PADDED = ["gshard", "switch", "expert-choice", "v-moe", "stable"]
OPTIMIZERS = {"sgd": partial(SGD, lr=0.5, momentum=0.9), "adam": Adam}
EXPERTS = 4
STEPS = 2  # the second uses what optimizers and biases have kept of the first


class Mixture(NamedTuple):
    """A model with experts in both of its blocks; its logs are kept on one rank."""

    gate: str = "switch"
    num_experts: int = EXPERTS
    padding: str = "none"
    num_shared: int = 0
    blocks: int = 2
    dispatch: str = "flat"
    ranks_per_host: int | None = None
    dropout: float = 0.0
    optimizer: str = "adam"  # on which the routing of later steps depends
    num_parts: int = 1  # into which tokens are divided, which are exchanged one after the other

    def __call__(self, mesh: Mesh | None) -> Model:
        is_alone = mesh is None or mesh.size == 1
        log = RoutingLog()
        model = moe_gpt(
            gate=self.gate,
            num_experts=self.num_experts,
            every=1,
            num_shared=self.num_shared,
            num_layers=self.blocks,
            num_heads=2,
            hidden=6,
            context=CONTEXT,
            mesh=mesh,
            log=log,
            padding=self.padding,
            dispatch=self.dispatch,
            ranks_per_host=self.ranks_per_host,
            dropout=self.dropout,
            expert_dropout=2 * self.dropout,
            num_parts=self.num_parts,
        )
        if is_alone:
            LOGS[self] = log
        for layer in mixtures(model):
            layer.expected = LOGS[self]
        return model


LOGS: dict[Mixture, RoutingLog] = {}


def setup_of(mixture: Mixture, zero: int = 1, parts: int = 2, **axes: int) -> Setup:
    shared = tuple(axis for axis in ("data", "context", "expert") if axis in axes)
    recipe = Recipe(num_micro_batches=parts, clip=CLIP)
    sharding: Callable[[], Sharding] = partial(Sharding.zero, zero, axes=shared)
    if not zero:
        sharding = partial(Sharding.ddp, axes=shared)
    return Setup(
        tuple(axes.items()),
        recipe=recipe,
        sharding=sharding if shared else Sharding,
        of=mixture,
        rows=13,
        steps=STEPS,
    )


def check(setup: Setup) -> list[End]:
    ends = check_as_one_rank(setup)
    assert all(end.norms == ends[0].norms for end in ends) and min(ends[0].norms) > CLIP
    return ends


FORMS = {"none": [*GATES], "capacity": PADDED, "needed": ["bias", "gshard"]}


@pytest.mark.parametrize(
    ("name", "padding", "axes"),
    pairwise(
        GATES,
        FORMS,
        [{"expert": 2}, {"data": 2, "expert": 2}, {"expert": 3}, {"context": 2, "expert": 2}],
        where=lambda name, padding, _: name in FORMS[padding],
    ),
)
def test_every_gate_trains_as_one_rank(name: str, padding: str, axes: dict[str, int]) -> None:
    """Losses and parameters of 2 clipped steps; traffic and memory of each, to the byte."""
    check(setup_of(Mixture(name, padding=padding), **axes))


LAYOUTS: list[dict[str, int]] = [
    {"expert": 4},
    {"expert": 8},
    {"data": 4, "expert": 2},
    {"pipe": 2, "expert": 2},
    {"expert": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"pipe": 2, "expert": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "expert": 2},
    {"data": 3},
    {"tensor": 2},
    {"pipe": 2},
    {"context": 2},
    {"context": 3, "expert": 2},
    {"data": 2, "context": 2, "expert": 2},
    {"pipe": 2, "context": 2, "expert": 2},
    {"context": 2, "expert": 2, "tensor": 2},
]


@pytest.mark.parametrize(("axes", "optimizer"), [*zip(LAYOUTS, cycle(OPTIMIZERS), strict=False)])
def test_every_layout_trains_as_one_rank(axes: dict[str, int], optimizer: str) -> None:
    """With a shared expert beside the others; and experts divided along tensor."""
    setup = setup_of(Mixture(num_shared=1, optimizer=optimizer), **axes)
    check(with_optimizer(setup, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize(
    ("dispatch", "axes"),
    [
        ("hierarchical", {"expert": 4}),
        ("hierarchical", {"data": 2, "expert": 4}),
        ("hierarchical", {"pipe": 2, "expert": 4}),
        ("hierarchical", {"expert": 4, "tensor": 2}),
        ("hierarchical", {"context": 2, "expert": 4}),
        ("weights", {"data": 2, "expert": 4}),
        ("weights", {"expert": 2, "tensor": 2}),
        ("weights", {"context": 2, "expert": 2}),
        ("cheaper", {"expert": 4}),
        ("cheaper", {"pipe": 2, "expert": 2}),
        ("cheaper", {"expert": 2, "tensor": 2}),
    ],
)
def test_every_way_to_dispatch_trains_as_one_rank(dispatch: str, axes: dict[str, int]) -> None:
    """On hosts, of 2 or 4 ranks, with two places along expert."""
    on_host = 2 * axes.get("tensor", 1) if dispatch == "hierarchical" else None
    check(setup_of(Mixture("stable", dispatch=dispatch, ranks_per_host=on_host), **axes))


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "expert": 2},
        {"expert": 2, "tensor": 2},
        {"context": 2, "expert": 2},
        {"pipe": 2},
        {"tensor": 3},
    ],
)
def test_dropout_trains_as_one_rank(axes: dict[str, int]) -> None:
    """In dense layers and, at twice the rate, in experts."""
    check(setup_of(Mixture("gshard", dropout=0.2, num_shared=1), **axes))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2}, {"expert": 2}])
def test_every_way_to_shard_trains_as_one_rank(axes: dict[str, int], zero: int) -> None:
    check(setup_of(Mixture("stable"), zero, **axes))


DIVISIONS = [(size, parts) for parts in (1, 2, 4) for size in (1, 2, 3, 4, 8)]


@pytest.mark.parametrize(("i", "name"), [*enumerate(GATES)])
def test_routing_is_the_same_on_all_layouts(i: int, name: str) -> None:
    """SHA-256 of every step and layer; two divisions of the batch for each gate, of all 15.

    `test_layer` has all of them for every gate, without a trainer.
    """
    mixture = Mixture(name)
    setup_of(mixture, expert=1).alone()
    wanted = digests([LOGS[mixture]], CONTEXT)
    assert len(wanted) == STEPS * 2
    for size, parts in {DIVISIONS[i], DIVISIONS[-1 - i]}:
        ends = setup_of(mixture, parts=parts, expert=size).run()
        logs = [mixtures(end.trainer.model)[0].log for end in ends]
        assert digests([log for log in logs if log is not None], CONTEXT) == wanted, (size, parts)


@pytest.mark.parametrize("name", ["stable", "sigmoid"])
def test_float32_is_as_on_one_rank(name: str) -> None:
    """Within 1e-5."""
    setup = setup_of(Mixture(name, optimizer="sgd"), data=2, expert=2)
    setup = with_optimizer(setup, OPTIMIZERS["sgd"])
    setup = setup._replace(recipe=replace(setup.recipe, dtype="float32"))
    alone = setup.alone()
    ends = setup.run()
    check_equal(ends, alone, tolerance=1e-5)
    assert {x.dtype.name for end in ends for _, _, x in end.parameters} == {"float32"}


def test_an_expert_gradient_that_is_not_summed_over_its_copies_is_noticed() -> None:
    """The negative control: by more than float32 may differ."""

    def skip(trainer: Trainer) -> None:
        trainer.actions = [
            each
            for each in trainer.actions
            if not (isinstance(each, Reduce) and each.axes == ("data",))
        ]

    setup = setup_of(Mixture(), zero=0, data=2, expert=2)
    alone = setup.alone()  # first: of which the routing is predicted
    with pytest.raises(AssertionError):
        check_equal(setup._replace(change=skip).run(), alone, tolerance=1e-5)


def test_traffic_of_another_routing_is_noticed() -> None:
    """The negative control: one token of one step is said to go elsewhere."""
    mixture = Mixture("stable")
    setup = setup_of(mixture, data=2, expert=2)
    setup.alone()
    right = LOGS[mixture]
    LOGS[mixture] = moved(right, 2, (1, "block1"))
    try:
        table = setup.run()[0].table
    finally:
        LOGS[mixture] = right
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


def test_rows_that_a_rank_should_not_have_are_refused() -> None:
    setup = setup_of(Mixture(), expert=2)
    setup.alone()

    def fewer(trainer: Trainer) -> None:
        whole = trainer.rows_of

        def rows_of(step: int, batch: Any) -> Any:
            inputs, targets = whole(step, batch)
            return inputs[1:], targets[1:]

        trainer.rows_of = rows_of  # type: ignore[method-assign]

    with pytest.raises(ValueError, match="but of a batch of 13 rows that"):
        setup._replace(change=fewer).run()


@pytest.mark.parametrize(
    "axes",
    [
        {"expert": 2},
        {"data": 2, "expert": 2},
        {"pipe": 2, "expert": 2},
        {"context": 2},
        {"tensor": 2},
    ],
)
def test_biases_are_those_of_one_rank(axes: dict[str, int]) -> None:
    """They have changed in each step by the loads of all ranks."""
    setup = setup_of(Mixture("bias"), **axes)
    wanted = [layer.bias for layer in mixtures(setup.alone().trainer.model)]
    steps = 1000 * wanted[0]
    assert (steps == steps.round()).all() and steps.any() and abs(steps).max() <= STEPS
    for end in setup.run():
        for layer, bias in zip(mixtures(end.trainer.model), wanted, strict=True):
            assert (layer.bias == bias).all()


def test_without_the_sum_of_counts_biases_differ() -> None:
    """The negative control."""

    def alone(trainer: Trainer) -> None:
        trainer.actions = [
            replace(each, axes=()) if isinstance(each, SumCounts) else each
            for each in trainer.actions
        ]

    setup = setup_of(Mixture("bias"), expert=4)
    setup.alone()
    ends = setup._replace(change=alone).run()
    first, *others = ([x.bias.tolist() for x in mixtures(end.trainer.model)] for end in ends)
    assert any(each != first for each in others)


def test_recomputed_layers_count_and_lose_once() -> None:
    class Recomputed(Mixture):
        def __call__(self, mesh: Mesh | None) -> Model:
            model = super().__call__(mesh)
            again = Model(model.layers, recompute=["block*"], mesh=mesh)
            return again if mesh is not None and mesh.size > 1 else model

    ends = check(setup_of(Recomputed("sigmoid"), expert=2))
    assert all(end.trainer.micro_batches.num_recomputed for end in ends)
    for layers in zip(*(mixtures(end.trainer.model) for end in ends), strict=True):
        counted = [layer.step_counts.sum() for layer in layers if layer.step_counts is not None]
        assert sum(counted) == layers[0].gate.k * 13 * CONTEXT


def test_checkpoints_have_the_biases(tmp_path: Path) -> None:
    """Saved on data x expert, loaded on one rank and on expert alone."""
    mixture = Mixture("bias")
    setup = setup_of(mixture, data=2, expert=2)
    alone = setup.alone()
    saved = [layer.bias.tolist() for layer in mixtures(alone.trainer.model)]
    setup._replace(change=partial(save_at_end, tmp_path)).run()
    path = checkpoint.latest(tmp_path)
    assert path is not None

    def loaded(comm: collectives.Communicator) -> list[Any]:
        mesh = Mesh(comm, expert=comm.size)
        sharding = Sharding.zero(1, axes=("expert",))
        trainer = Trainer(mesh, mixture(mesh), setup.recipe, sharding=sharding)
        trainer.resume()
        checkpoint.load(trainer, path)
        return [layer.bias.tolist() for layer in mixtures(trainer.model)]

    log = LOGS[mixture]
    for size in (1, 4):
        assert collectives.run(loaded, size=size) == [saved] * size
    LOGS[mixture] = log


def save_at_end(folder: Path, trainer: Trainer) -> None:
    train = trainer.train

    def and_save(*args: Any) -> list[float]:
        losses = train(*args)
        checkpoint.save(trainer, folder, len(losses))
        return losses

    trainer.train = and_save  # type: ignore[method-assign]
