"""Training a GPT with experts on any mesh equals one rank, and every byte is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from moe import GATES, RoutingLog, moe_gpt
from moe.layer import MixtureOfExperts
from moe.log import digests
from parallel import SGD, Adam, Mesh, Recipe, Sharding, TrafficMismatch, Trainer
from parallel.nn import Model
from parallel.rank_report import differences
from tests.parallel.layouts import CLIP, End, Setup, check_equal, with_optimizer
from tests.parallel.training import CONTEXT

PADDED = ["gshard", "switch", "expert-choice", "v-moe", "stable"]
OPTIMIZERS = {"sgd": partial(SGD, lr=0.5, momentum=0.9), "adam": Adam}
EXPERTS = 4


class Mixture(NamedTuple):
    """A model with experts in both of its blocks; its logs are kept on one rank."""

    gate: str = "switch"
    num_experts: int = EXPERTS
    is_padded: bool = False
    num_shared: int = 0
    blocks: int = 2
    optimizer: str = "adam"  # on which the routing of later steps depends

    def __call__(self, mesh: Mesh | None) -> Model:
        is_alone = mesh is None or mesh.size == 1
        log = RoutingLog()
        model = moe_gpt(
            gate=self.gate, num_experts=self.num_experts, every=1, num_shared=self.num_shared,
            num_layers=self.blocks, num_heads=2, hidden=6, context=CONTEXT, mesh=mesh, log=log,
            is_padded=self.is_padded,
        )  # fmt: skip
        if is_alone:
            LOGS[self] = log
        for layer in mixtures(model):
            layer.expected = LOGS[self]
        return model


LOGS: dict[Mixture, RoutingLog] = {}


def mixtures(model: Model) -> list[MixtureOfExperts]:
    found, layers = [], list(model.layers.values())
    for layer in layers:  # which grow meanwhile
        if isinstance(layer, MixtureOfExperts):
            found.append(layer)
        layers.extend(getattr(layer, "layers", {}).values())
    return found


def setup_of(mixture: Mixture, zero: int = 1, parts: int = 2, **axes: int) -> Setup:
    shared = tuple(axis for axis in ("data", "context", "expert") if axis in axes)
    recipe = Recipe(num_micro_batches=parts, clip=CLIP)
    sharding: Callable[[], Sharding] = partial(Sharding.zero, zero, axes=shared)
    if not zero:
        sharding = partial(Sharding.ddp, axes=shared)
    return Setup(tuple(axes.items()), recipe=recipe, sharding=sharding if shared else Sharding,
                 of=mixture, rows=13)  # fmt: skip


def check(setup: Setup) -> list[End]:
    alone = setup.alone()
    ends = setup.run()
    check_equal(ends, alone)
    assert differences([end.report for end in ends]) == []
    assert ends[0].table is not None and ends[0].table.check()
    assert all(end.norms == ends[0].norms for end in ends) and min(ends[0].norms) > CLIP
    return ends


@pytest.mark.parametrize(("name", "is_padded"), [(name, False) for name in GATES]
                         + [(name, True) for name in PADDED])  # fmt: skip
@pytest.mark.parametrize(
    "axes", [{"expert": 2}, {"data": 2, "expert": 2}, {"expert": 3}, {"context": 2, "expert": 2}]
)
def test_every_gate(name: str, is_padded: bool, axes: dict[str, int]) -> None:
    """Losses and parameters of 4 clipped steps; traffic and memory of each, to the byte."""
    check(setup_of(Mixture(name, is_padded=is_padded), **axes))


LAYOUTS: list[dict[str, int]] = [
    {"expert": 4}, {"expert": 8}, {"data": 4, "expert": 2}, {"pipe": 2, "expert": 2},
    {"expert": 2, "tensor": 2}, {"data": 2, "expert": 2, "tensor": 2},
    {"pipe": 2, "expert": 2, "tensor": 2}, {"pipe": 2, "data": 2, "expert": 2}, {"data": 3},
    {"tensor": 2}, {"pipe": 2}, {"context": 2}, {"context": 3, "expert": 2},
    {"data": 2, "context": 2, "expert": 2},
]  # fmt: skip


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("axes", LAYOUTS)
def test_every_layout(axes: dict[str, int], optimizer: str) -> None:
    """With a shared expert beside the others; and experts divided along tensor."""
    setup = setup_of(Mixture(num_shared=1, optimizer=optimizer), **axes)
    check(with_optimizer(setup, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", [{"data": 2, "expert": 2}, {"expert": 2}])
def test_every_way_to_shard(axes: dict[str, int], zero: int) -> None:
    check(setup_of(Mixture("stable"), zero, **axes))


@pytest.mark.parametrize("name", GATES)
def test_routing_is_the_same_on_all_layouts(name: str) -> None:
    """SHA-256 of every step and layer; for 1, 2, 3, 4, 8 ranks and 1, 2, 4 micro-batches."""
    mixture = Mixture(name)
    setup_of(mixture, expert=1).alone()
    wanted = digests([LOGS[mixture]], CONTEXT)
    assert len(wanted) == 4 * 2
    for size, parts in [(1, 4), (2, 1), (3, 2), (4, 4), (8, 1)]:
        ends = setup_of(mixture, parts=parts, expert=size).run()
        logs = [mixtures(end.trainer.model)[0].log for end in ends]
        assert digests([log for log in logs if log is not None], CONTEXT) == wanted, (size, parts)


def test_an_expert_gradient_that_is_not_summed_over_its_copies_is_noticed() -> None:
    """The negative control: by more than 1e-6."""

    def skip(trainer: Trainer) -> None:
        trainer.actions = [
            each for each in trainer.actions
            if not (each.kind == "REDUCE" and each.axes == ("data",))
        ]  # fmt: skip

    setup = setup_of(Mixture(), zero=0, data=2, expert=2)
    with pytest.raises(AssertionError):
        check_equal(setup._replace(change=skip).run(), setup.alone(), tolerance=1e-6)


def test_traffic_of_another_routing_is_noticed() -> None:
    """The negative control: one token of one step is said to go elsewhere."""
    mixture = Mixture("stable")
    setup = setup_of(mixture, data=2, expert=2)
    setup.alone()
    right = LOGS[mixture]
    wrong = RoutingLog()
    for (step, name), parts in right.parts.items():
        for row, routing in parts.items():
            wrong.add(step, name, row, routing)
    key = (2, "block1")
    row, routing = next(iter(wrong.parts[key].items()))
    expert = routing.expert.copy()
    kept = math.floor(next(iter((~routing.is_dropped).nonzero()[0])))
    expert[kept] = (expert[kept] + 2) % EXPERTS
    wrong.add(*key, row, replace(routing, expert=expert))
    LOGS[mixture] = wrong
    try:
        table = setup.run()[0].table
    finally:
        LOGS[mixture] = right
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


def test_rows_that_a_rank_should_not_have_are_refused() -> None:
    setup = setup_of(Mixture(), expert=2)

    def fewer(trainer: Trainer) -> None:
        whole = trainer.rows_of

        def rows_of(step: int, batch: Any) -> Any:
            inputs, targets = whole(step, batch)
            return inputs[1:], targets[1:]

        trainer.rows_of = rows_of  # type: ignore[method-assign]

    with pytest.raises(ValueError, match="but of a batch of 13 rows that"):
        setup._replace(change=fewer).run()
