"""A layout predicts, for ranks that do not exist, what trainers predict and do."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Layout, Mesh, PredictedCall, RankView, Recipe, Sharding, Trainer, gpt, text
from parallel.predict import RunSize, StepMemory, step_traffic
from parallel.run.memory import peak_memory
from parallel.step import lower

ROWS, CONTEXT = 8, 8
AXES: list[dict[str, int]] = [
    {"data": 3},
    {"data": 2, "tensor": 2},
    {"pipe": 2, "data": 2},
    {"pipe": 2, "tensor": 2},
    {"pipe": 3, "data": 1},
    {"data": 2, "context": 2},
    {"pipe": 2, "data": 2, "tensor": 2},
]


def drawn(seed: int) -> dict[str, Any]:
    """The axes, the sharding and the recipe of a run."""
    draw = random.Random(seed)
    axes = draw.choice(AXES)
    along = tuple(axis for axis in axes if axis in ("data", "context"))
    stage = draw.choice([1, 2, 3])
    sharding = Sharding.zero(stage, axes=along) if along else Sharding()
    recipe = Recipe(
        draw.choice(["float64", "float16"]),
        num_micro_batches=draw.choice([1, 2]),
        clip=draw.choice([None, 1.0]),
    )
    return {"axes": axes, "sharding": sharding, "recipe": recipe}


def layout_of(mesh: Mesh, sharding: Sharding, recipe: Recipe, blocks: int = 3) -> Layout:
    model = gpt(num_layers=blocks, hidden=8, num_heads=2, context=CONTEXT, mesh=mesh)
    return Layout(mesh, model, recipe, sharding=sharding)


def trained(
    comm: Communicator, axes: dict[str, int], sharding: Sharding, recipe: Recipe
) -> tuple[list[PredictedCall], dict[str, int], dict[str, int]]:
    """What a trainer predicts to send, and to keep, and what it has kept after a step."""
    mesh = Mesh(comm, **axes)
    model = gpt(num_layers=3, hidden=8, num_heads=2, context=CONTEXT, mesh=mesh)
    trainer = Trainer(mesh, model, recipe, sharding=sharding)
    trainer.start()
    index, parts = trainer.batch_part
    rows = text.batch(
        text.load(), seed=0, step=0, batch_size=ROWS, context=CONTEXT, rank=index, num_ranks=parts
    )
    trainer.step(*rows, ROWS * CONTEXT)
    calls = trainer.step_traffic(RunSize(1, 1, (ROWS, CONTEXT)))
    return calls, peak_memory(trainer, len(rows[0]), CONTEXT), dict(trainer.memory.peak)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.slow
def test_ranks_that_do_not_exist_send_and_keep_what_real_ones_do(seed: int) -> None:
    run = drawn(seed)
    size = int(np.prod(list(run["axes"].values())))
    ranks = collectives.run(lambda comm: trained(comm, **run), size=size)
    layout = layout_of(Mesh(None, **run["axes"]), run["sharding"], run["recipe"])
    calls = step_traffic(layout, RunSize(1, 1, (ROWS, CONTEXT)))
    for rank, (predicted, kept, counted) in enumerate(ranks):
        assert predicted == calls
        view = RankView(layout, rank)
        memory = StepMemory(view, lower(view))
        here = memory.peak(layout.num_rows_of(ROWS, rank), CONTEXT)
        assert here == kept
        assert {name: n for name, n in here.items() if n} == {
            name: n for name, n in counted.items() if n
        }


def test_a_prediction_for_another_rank_is_another() -> None:
    """The negative control: in a pipeline, the view of one rank is not that of another."""
    layout = layout_of(Mesh(None, pipe=3, data=1), Sharding.zero(1), Recipe())
    views = [RankView(layout, rank) for rank in range(3)]
    peaks = [StepMemory(view, lower(view)).peak(ROWS, CONTEXT) for view in views]
    assert peaks[0] != peaks[1] != peaks[2]


def large() -> Iterator[Layout]:
    """A model of 175 G parameters on 1,024 ranks."""
    mesh = Mesh(None, pipe=8, data=16, tensor=8)
    model = gpt(
        num_layers=96, hidden=12288, num_heads=96, context=2048, vocab_size=51200, mesh=mesh
    )
    yield Layout(mesh, model, Recipe("float16"), sharding=Sharding.zero(1))


def test_nothing_is_allocated_for_a_prediction() -> None:
    tracemalloc.start()
    (layout,) = large()
    view = RankView(layout, 1023)
    assert sum(view.unit_sizes.values()) > 10**9
    assert len(lower(view)) > 100
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 2**20


def test_a_mesh_of_ranks_that_do_not_exist_does_not_train() -> None:
    mesh = Mesh(None, data=2)
    with pytest.raises(ValueError, match="a mesh of 2 ranks trains with a communicator only"):
        Trainer(mesh, gpt(num_layers=1, hidden=8), sharding=Sharding.ddp())
