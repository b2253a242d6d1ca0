"""Dropout sets the same elements to 0 on any number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from parallel import Recipe, Sharding, Trainer
from parallel.nn import BatchRows, Dropout, Step
from tests.parallel.layouts import CLIP, Setup, check_as_one_rank, check_equal

LAYOUTS: list[dict[str, int]] = [
    {"data": 3},
    {"tensor": 2},
    {"tensor": 3},
    {"pipe": 2},
    {"context": 2},
    {"context": 3},
    {"pipe": 2, "data": 2, "tensor": 2},
    {"data": 2, "context": 2, "tensor": 2},
]


def setup_of(axes: dict[str, int], rate: float = 0.3, **model: Any) -> Setup:
    shared = tuple(axis for axis in ("data", "context") if axis in axes)
    sharding = partial(Sharding.zero, 1, axes=shared) if shared else Sharding
    options = (("dropout", rate), *model.items())
    return Setup(tuple(axes.items()), sharding=sharding, model=options)


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.slow
def test_training_with_dropout_is_as_on_one_rank(axes: dict[str, int]) -> None:
    """Losses and parameters, traffic and memory of 4 steps."""
    check_as_one_rank(setup_of(axes))


@pytest.mark.parametrize("form", ["keep", "gather"])
@pytest.mark.parametrize("axes", [{"tensor": 2}, {"tensor": 3}, {"pipe": 2, "tensor": 2}])
def test_ranks_that_divide_tokens_drop_the_same_elements(axes: dict[str, int], form: str) -> None:
    """Sequence parallelism."""
    check_as_one_rank(setup_of(axes, sequence_parallel=form))


@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 2}])
def test_recomputed_layers_drop_the_same_elements_again(axes: dict[str, int]) -> None:
    check_as_one_rank(setup_of(axes, recompute=("block*",)))


def test_micro_batches_drop_the_same_elements() -> None:
    setup = setup_of({"data": 2})
    recipe = Recipe(num_micro_batches=4, clip=CLIP)
    check_equal(setup._replace(recipe=recipe).run(), setup.alone())


def test_a_seed_that_differs_on_a_rank_is_noticed() -> None:
    """The negative control: one rank has numbers of another seed."""
    setup = setup_of({"data": 2})

    def change(trainer: Trainer) -> None:
        whole = trainer.layout.rows_of_ranks

        def rows_of_ranks(num_rows: int, number: int, step: int) -> BatchRows:
            rows = whole(num_rows, number, step)
            return BatchRows(rows.step, rows.of_rank, rows.seed + trainer.rank)

        trainer.layout.rows_of_ranks = rows_of_ranks  # type: ignore[method-assign]

    with pytest.raises(AssertionError):
        check_equal(setup._replace(change=change).run(), setup.alone(), tolerance=1e-6)


def step_of(rows: int, context: int) -> Step:
    return Step(np.zeros((rows, context)), context=context, batch=BatchRows(0, (range(rows),)))


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_a_fraction_is_zero_and_the_mean_stays(rate: float) -> None:
    """Of 200,000 elements; a token, a feature, and a pair of either are not special."""
    x = np.ones((10, 20, 1000))
    y, saved = Dropout(rate, "here").forward(x, step_of(10, 20))
    found = y == 0
    assert abs(found.mean() - rate) < 0.01
    assert abs(y.mean() - 1) < 0.05
    assert set(np.unique(y)) <= {0.0, 1 / (1 - rate)}
    for axis in (0, 1, 2):
        shifted = np.roll(found, 1, axis=axis)
        assert abs((found & shifted).mean() - rate**2) < 0.01
    np.testing.assert_array_equal(Dropout(rate, "here").backward(x, saved), y)


def test_other_names_and_steps_drop_other_elements() -> None:
    x = np.ones((2, 3, 100))
    step, other = step_of(2, 3), step_of(2, 3)
    other.batch = BatchRows(1, (range(2),))
    y = Dropout(0.5, "here").forward(x, step)[0]
    for found in (Dropout(0.5, "there").forward(x, step), Dropout(0.5, "here").forward(x, other)):
        assert 0.4 < (found[0] == y).mean() < 0.6


def test_without_a_batch_nothing_is_dropped() -> None:
    x = np.ones((2, 3, 4))
    y, saved = Dropout(0.5, "here").forward(x, Step(np.zeros((2, 3))))
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(Dropout(0.5, "here").backward(x, saved), x)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_out_of_range_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be from 0 to less than 1"):
        Dropout(rate, "here")
