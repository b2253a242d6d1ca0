"""Combinations of axes, schedules, shardings and models that nobody chose agree with one rank."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from parallel import Recipe, Sharding, Trainer
from parallel.commands.rank_report import differences
from parallel.optim import SGD, Adam
from parallel.optim.storage import HostMemory, Storage
from parallel.pipeline import SCHEDULES
from parallel.step import Reduce
from tests.parallel.layouts import CLIP, FEW_STEPS, End, Setup, check_equal

FACTORS = [(2,), (3,), (2, 2), (2, 3), (2, 2, 2)]  # of the number of ranks
SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"]
MOST_ALONG_CONTEXT = 4  # of the positions of a row, each rank has some


def drawn(seed: int) -> Setup:
    """A combination that can train."""
    draw = random.Random(seed)
    axes = dict.fromkeys(draw.sample(["pipe", "data", "context", "tensor"], 4), 1)
    for factor in draw.choice(FACTORS):
        axis = draw.choice(list(axes))
        if axis == "context" and axes[axis] * factor > MOST_ALONG_CONTEXT:
            axis = "data"
        axes[axis] *= factor
    pipe = axes["pipe"]
    schedule = draw.choice([x for x in SYNCHRONOUS if x != "dualpipe" or pipe % 2 == 0])
    info = SCHEDULES[schedule]
    recipe = Recipe(
        num_micro_batches=draw.randint(1, 8) if info.needs == "m >= 1" else 2 * pipe,
        clip=draw.choice([None, CLIP]),
        optimizer=draw.choice([partial(SGD, momentum=0.9, lr=0.01), Adam]),
        offload=draw.choice([Storage, HostMemory]),
        offload_activations=draw.choice([Storage, HostMemory]),
    )
    model: dict[str, Any] = {
        "is_tied": draw.random() < 0.5,
        "is_shared": draw.random() < 0.5,
        "num_heads": draw.randint(1, 3),
        "recompute": draw.choice([(), ("block*",), ("block*.attention.heads",)]),
        "attention": draw.choice(["ring", "ulysses"]),
        "sequence_parallel": draw.choice(
            [None, "keep", "gather"] if axes["tensor"] > 1 else [None]
        ),
    }
    sharding = partial(Sharding.zero, draw.choice([1, 2, 3]), axes=("data", "context"))
    return Setup(
        tuple(axes.items()),
        schedule,
        recipe,
        sharding,
        tuple(model.items()),
        blocks=max(1, pipe * info.num_chunks - draw.randint(0, 2)),
        steps=FEW_STEPS,
    )


def check(setup: Setup, ends: list[End]) -> None:
    """Losses, parameters and accounts are as they must be."""
    alone = setup.alone()
    for end in ends:
        np.testing.assert_allclose(end.losses, alone.losses, rtol=0, atol=1e-12)
    if setup.sharding().divided != Sharding.zero(3).divided:  # then no rank has whole parameters
        check_equal(ends, alone, tolerance=1e-11)  # derivatives of biases of keys are rounded zeros
    assert ends[0].table is not None
    ends[0].table.check()
    assert differences([end.report for end in ends]) == []


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.slow
def test_any_combination_agrees_with_one_rank_and_with_its_prediction(seed: int) -> None:
    setup = drawn(seed)
    check(setup, setup.run())


def test_a_combination_without_a_sum_would_be_noticed() -> None:
    """The negative control."""

    def without_sums(trainer: Trainer) -> None:
        trainer.actions = [each for each in trainer.actions if not isinstance(each, Reduce)]

    setup = drawn(0)
    assert any(size > 1 for axis, size in setup.axes if axis in ("data", "context"))
    with pytest.raises(AssertionError):
        check(setup, setup._replace(change=without_sums).run())


def test_the_combinations_differ() -> None:
    setups = [drawn(seed) for seed in range(24)]
    assert len({setup.schedule for setup in setups}) > 5
    assert {setup.size for setup in setups} == {2, 3, 4, 6, 8}
    sizes = {axis: max(dict(setup.axes)[axis] for setup in setups) for axis, _ in setups[0].axes}
    assert min(sizes.values()) > 1
