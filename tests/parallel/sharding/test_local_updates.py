"""Local updates: ranks that train alone and agree now and then equal a simulation of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import SGD, Adam, HostMemory, Recipe, Trainer, checkpoint
from tests.parallel.training import (
    CONTEXT,
    ROWS,
    Values,
    batch,
    local_updates,
    model,
    nothing,
    train,
)

EXACT = {"rtol": 1e-12, "atol": 1e-13}


def simulated(
    ranks: int, recipe: Recipe, *, steps: int, every: int, lr: float, momentum: float
) -> Values:
    """The common model after `steps` steps: one trainer for each rank, and NumPy between them."""
    alone = [Trainer(None, model(), recipe) for _ in range(ranks)]
    common = {unit: x.copy() for unit, x in alone[0].parameters.items()}
    velocity = {unit: np.zeros_like(x) for unit, x in common.items()}
    for step in range(steps):
        for rank, trainer in enumerate(alone):
            rows = batch(step, rank, ranks)
            trainer.step(*rows, total=rows[0].size)
        if (step + 1) % every and step + 1 < steps:
            continue
        for unit, x in common.items():
            change = sum(x - trainer.parameters[unit] for trainer in alone) / ranks
            velocity[unit] = momentum * velocity[unit] + change
            x -= lr * (change + momentum * velocity[unit])
            for trainer in alone:
                trainer.parameters[unit][...] = x
    return common


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(("every", "lr", "momentum"), [(1, 1.0, 0.0), (2, 0.7, 0.9), (3, 0.5, 0.5)])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.slow
def test_ranks_that_train_alone_equal_the_simulation(
    ranks: int, every: int, lr: float, momentum: float, num_micro_batches: int
) -> None:
    """Also if the last steps are fewer than `every`; and its bytes and memory are predicted."""
    recipe = Recipe(optimizer=partial(SGD, lr=0.5), num_micro_batches=num_micro_batches)
    make = partial(local_updates, every=every, outer_lr=lr, outer_momentum=momentum)
    ends = train(make, ranks, recipe, steps=4)
    wanted = simulated(ranks, recipe, steps=4, every=every, lr=lr, momentum=momentum)
    for end in ends:
        for unit, (_, values) in end.held.items():
            np.testing.assert_allclose(values, wanted[unit], **EXACT)
        assert all(formula == counted for formula, counted in end.memory.values())
    assert ends[0].table is not None and ends[0].table.check()


def ten_rows(step: int, rank: int, ranks: int) -> Any:
    """As many on each of two ranks."""
    x, y = batch(step, 0, 1)
    part = slice(rank * 10 // ranks, (rank + 1) * 10 // ranks)
    return x[part], y[part]


@pytest.mark.parametrize(
    ("optimizer", "is_equal"), [(partial(SGD, lr=0.5), True), (partial(Adam, lr=0.1), False)]
)
def test_the_mean_after_every_step_is_one_rank_if_updates_are_linear(
    optimizer: Callable[..., Any], *, is_equal: bool
) -> None:
    """SGD with momentum is linear in the gradients; Adam is not."""

    def losses(trainer: Trainer) -> list[float]:
        trainer.start()
        return trainer.train(4, ten_rows, 10 * CONTEXT, nothing)

    def fn(comm: Communicator) -> list[float]:
        options = {"every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
        return losses(local_updates(comm, model(), Recipe(optimizer=optimizer), **options))

    alone = losses(Trainer(None, model(), Recipe(optimizer=optimizer)))
    for found in collectives.run(fn, size=2):
        assert np.allclose(found, alone, **EXACT) == is_equal


def test_between_two_agreements_only_the_loss_is_sent() -> None:
    ends = train(partial(local_updates, every=4), 3, steps=4)
    assert ends[0].table is not None
    calls = {row.phase: row.recorded.calls for row in ends[0].table.rows}
    assert calls["loss"] == 4
    assert {n for phase, n in calls.items() if phase.startswith("average/")} == {1}


def test_in_two_bytes_the_common_model_is_kept_and_sent_in_float32() -> None:
    ends = train(partial(local_updates, every=2), 2, Recipe("bfloat16"), steps=4)
    trainer = ends[0].strategy
    assert ends[0].table is not None and ends[0].table.check()
    for unit, x in trainer.sharding.reduction.common.items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(trainer.masters[unit], x)
        np.testing.assert_array_equal(trainer.parameters[unit], x.astype(trainer.view.dtype))


def test_a_checkpoint_continues_a_run_to_the_bit_and_is_refused_between_agreements(
    tmp_path: Path,
) -> None:
    def fn(comm: Communicator) -> list[list[float]]:
        def made() -> Trainer:
            return local_updates(comm, model(), Recipe(optimizer=partial(Adam, lr=0.01)), every=2)

        whole, first, second = made(), made(), made()
        for each in (whole, first):
            each.start()
        total = ROWS * CONTEXT
        wanted = whole.train(6, batch, total, nothing)
        first.train(2, batch, total, nothing)
        first.step(*batch(2, *first.batch_part), total)
        with pytest.raises(ValueError, match="ranks have made 1 steps alone: save when they have"):
            checkpoint.save(first, tmp_path, 3)
        first.step(*batch(3, *first.batch_part), total)
        path = checkpoint.save(first, tmp_path, 4)
        second.resume()
        checkpoint.load(second, path)
        return [wanted[4:], second.train(6, batch, total, nothing, first=4)]

    for wanted, found in collectives.run(fn, size=3):
        assert found == wanted


@pytest.mark.parametrize(
    ("options", "recipe", "sentence"),
    [
        ({"every": 0}, {}, "every is 0: it must be at least 1 step"),
        ({"outer_lr": 0.0}, {}, "the outer lr is 0.0"),
        ({"outer_momentum": 1.0}, {}, "the outer momentum 1.0"),
        ({}, {"dtype": "float16"}, "local updates take no offload, and no float16"),
        ({}, {"offload": HostMemory}, "local updates take no offload"),
    ],
)
def test_impossible_options_are_refused(options: Any, recipe: Any, sentence: str) -> None:
    def fn(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=sentence):
            local_updates(comm, model(), Recipe(**recipe), **options)

    collectives.run(fn, size=2)
