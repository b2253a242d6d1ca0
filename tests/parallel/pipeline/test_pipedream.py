"""PipeDream: a stage is updated after every micro-batch; backward uses the weights of forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from parallel import SGD, Recipe, Sharding, Trainer
from parallel.layout import Stages
from parallel.mesh import length, span
from parallel.nn import Step
from parallel.optim import Adam
from parallel.pipeline import make, simulate
from tests.parallel.layouts import STEPS, Setup, batch, boxes_of, check_accounts, with_optimizer
from tests.parallel.training import CONTEXT, Values

MICRO_BATCHES = 5
RECIPE = Recipe(num_micro_batches=MICRO_BATCHES)
LAYOUTS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (3, 1, 2), (2, 2, 2)]
each_layout = pytest.mark.parametrize(("pipe", "data", "tensor"), LAYOUTS)


def setup_of(pipe: int, data: int, tensor: int, **options: Any) -> Setup:
    axes = (("pipe", pipe), ("data", data), ("tensor", tensor))
    given = {"schedule": "pipedream", "recipe": RECIPE, "sharding": Sharding.ddp} | options
    return Setup(axes, **given)


class Emulation:
    """One rank that does what the stages of all ranks do, with the versions of the simulator."""

    def __init__(self, setup: Setup, stages: Stages) -> None:
        axes = dict(setup.axes)
        self.pipe, self.data = axes["pipe"], axes["data"]
        self.model = setup._replace(blocks=None).make_model(None)
        self.layers = stages.layers
        self.trainer = Trainer(None, self.model, setup.recipe, schedule="gpipe")
        self.simulation = simulate(make("pipedream", self.pipe, MICRO_BATCHES))
        self.history: list[list[dict[str, Values]]] = [[self.copy(s)] for s in self.layers]

    def copy(self, layers: tuple[str, ...]) -> dict[str, Values]:
        units = {unit for name in layers for unit in self.model.units_of(name)}
        return {unit: self.trainer.parameters[unit].copy() for unit in units}

    def step(self, step: int) -> float:
        """Micro-batches one after the other, each stage with its version of the parameters."""
        loss, tokens = 0.0, 0
        first = [len(each) - 1 for each in self.history]
        for k in range(MICRO_BATCHES):
            parts = [batch(step, rank, self.data) for rank in range(self.data)]
            rows = [
                (x[span(len(x), MICRO_BATCHES, k)], y[span(len(y), MICRO_BATCHES, k)])
                for x, y in parts
            ]
            total = CONTEXT * sum(len(x) for x, _ in rows)
            versions = [
                self.history[s][first[s] + self.simulation.versions(s)[0][k]]
                for s in range(self.pipe)
            ]
            loss += total * sum(self.one(x, y, total, k, versions) for x, y in rows)
            tokens += total
            self.update()
        return loss / tokens

    def one(self, x: Any, y: Any, total: int, k: int, versions: list[dict[str, Values]]) -> float:
        """Add to the gradients of one micro-batch; return its loss."""
        values = {unit: w for version in versions for unit, w in version.items()}
        saved, step = [], Step(y, total)
        for name, layer in self.model.layers.items():
            self.model.bind(name, values, self.trainer.arrays.full_gradients)
            x, kept = layer.forward(x, step)
            saved.append(kept)
        dy: Any = 1.0
        for layer, kept in zip(reversed(self.model.layers.values()), reversed(saved), strict=True):
            dy = layer.backward(dy, kept)
        return float(x)

    def update(self) -> None:
        self.trainer.optimizer.step(self.trainer.arrays.gradient_shards)
        for flat in self.trainer.gradients.values():
            flat[...] = 0
        for stage, layers in enumerate(self.layers):
            self.history[stage].append(self.copy(layers))


# The bias of attention keys has no gradient but rounding, which Adam divides by `eps`.
OPTIMIZERS = {"SGD": partial(SGD, lr=0.1, momentum=0.9), "Adam": partial(Adam, eps=1e-6)}


@each_layout
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.slow
def test_pipedream_equals_a_serial_emulation(
    pipe: int, data: int, tensor: int, optimizer: Any
) -> None:
    """To 1e-12: losses and parameters."""
    setup = with_optimizer(setup_of(pipe, data, tensor), optimizer)
    ends = setup.run()
    serial = Emulation(setup, ends[0].trainer.stages)
    losses = [serial.step(step) for step in range(STEPS)]
    wanted = {name: x for name, _, x in boxes_of(serial.trainer)}
    for end in ends:
        np.testing.assert_allclose(end.losses, losses, rtol=0, atol=1e-12)
        for name, where, x in end.parameters:
            np.testing.assert_allclose(x, wanted[name][where], rtol=0, atol=1e-12)
    check_accounts(ends)


def test_with_the_newest_weights_in_backward_it_is_another_run() -> None:
    """The negative control: nothing is stashed."""

    def forget(trainer: Trainer) -> None:
        stash: Any = trainer.micro_batches.stash
        parameters_of = stash.parameters_of

        def newest(number: int, current: Any) -> Any:
            parameters_of(number, current)
            return current

        stash.parameters_of = newest

    good = setup_of(4, 1, 1)
    losses = good.run()[0].losses
    assert not np.allclose(good._replace(change=forget).run()[0].losses, losses, rtol=0, atol=1e-9)


@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
def test_versions_are_those_of_the_simulator(pipe: int) -> None:
    """And at most P - r are alive on rank r."""
    ends = setup_of(pipe, 1, 1).run()
    simulation = simulate(make("pipedream", pipe, MICRO_BATCHES))
    for rank, end in enumerate(ends):
        found, alive = simulation.versions(rank)
        stash = end.trainer.micro_batches.stash
        begun = (STEPS - 1) * MICRO_BATCHES
        assert stash.versions == {k: begun + version for k, version in found.items()}
        assert stash.num_alive == alive <= pipe - rank
        assert stash.staleness == {k: k - version for k, version in found.items()}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": Recipe(num_micro_batches=5, clip=1.0)}, "clip"),
        ({"recipe": Recipe("float16", num_micro_batches=5)}, "float16"),
        ({"sharding": partial(Sharding.zero, 1)}, "sharding"),
        ({"model": (("is_tied", True),)}, "tied"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        setup_of(2, 1, 1, **options).run()


def test_every_micro_batch_counts_as_many_tokens_as_it_has() -> None:
    """Rows that ranks divide unevenly are divided unevenly again."""
    rows = [length(span(17, 2, rank)) for rank in range(2)]
    (first, *_) = setup_of(1, 2, 1).run()
    totals = first.trainer.micro_batches.totals(17 * CONTEXT, CONTEXT)
    each = [[length(span(n, MICRO_BATCHES, k)) for k in range(MICRO_BATCHES)] for n in rows]
    assert totals == [CONTEXT * sum(pair) for pair in zip(*each, strict=True)]
    assert sum(totals) == 17 * CONTEXT
