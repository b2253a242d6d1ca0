"""Combinations of layouts, sharding, schedules and places that once went wrong."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collectives
from parallel import Mesh, ModelMismatch, Recipe, Sharding, Trainer, gpt
from parallel.commands.rank_report import differences
from parallel.commands.training import Training
from parallel.nn import CrossEntropy, Embedding, Gelu, Linear, Model
from parallel.nn.tensor import Divided, VocabularyEmbedding, Whole
from parallel.optim.storage import Disk
from parallel.pipeline import InvalidSchedule, Schedule, parse
from parallel.train import COMMAND
from tests.parallel import layouts
from tests.parallel.layouts import CLIP, ROWS, STEPS, Setup, check_accounts, check_equal
from tests.parallel.training import CONTEXT, nothing


def axes_of(**sizes: int) -> tuple[tuple[str, int], ...]:
    return tuple(sizes.items())


@pytest.mark.parametrize("stage", [2, 3])
def test_weight_gradients_of_a_divided_table_need_no_values(stage: int) -> None:
    """Of a W under ZeRO-3, which gathers no parameters; ZeRO-2 is the control, with values."""
    setup = Setup(
        axes_of(pipe=2, data=2, tensor=2),
        "zb-h1",
        sharding=partial(Sharding.zero, stage),
        model=(("is_tied", True),),
    )
    ends = setup.run()
    np.testing.assert_allclose(ends[0].losses, setup.alone().losses, rtol=0, atol=1e-12)
    check_accounts(ends)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_activations_moved_are_those_of_the_stages_of_a_rank(tmp_path: Path, name: str) -> None:
    """And of the micro-batches that it has of them, which dualpipe divides between two ranks."""
    recipe = Recipe(num_micro_batches=4, clip=CLIP, offload_activations=partial(Disk, tmp_path))
    setup = Setup(axes_of(pipe=2, data=2), name, recipe, blocks=4)
    ends = setup.run()
    assert differences([end.report for end in ends]) == []
    moved = [end.trainer.activations.moved for end in ends]
    assert len({str(each) for each in moved}) > 1  # else a sum over all layers would pass
    check_equal(ends, setup._replace(recipe=Recipe(num_micro_batches=4, clip=CLIP)).alone())


@pytest.mark.parametrize(("rows", "is_enough"), [(5, False), (7, True)])
def test_a_micro_batch_of_pipedream_without_rows_is_refused(rows: int, *, is_enough: bool) -> None:
    """Before a step sends anything.  With 7 rows, one of two data ranks has some of the last."""
    recipe = Recipe(num_micro_batches=4)
    setup = Setup(axes_of(pipe=2, data=2), "pipedream", recipe, sharding=Sharding.ddp, rows=rows)
    if is_enough:
        assert np.isfinite(setup.run()[0].losses).all()
        return
    with pytest.raises(ValueError, match="5 rows leaves micro-batch 3 of 4 without rows"):
        setup.run()


def schedule_of(*rows: str) -> Schedule:
    return Schedule.of("mine", [[parse(word) for word in row.split()] for row in rows])


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("0F0 0F1 0I0 0B1", "stage 0 computes FI of micro-batch 0 on rank 0"),
        ("0F0 0F0 0F1 0B0 0B1", "0F0 is there twice"),
        ("0F0 0F1 0I0 0B0 0W0 0B1", "stage 0 computes FBIW of micro-batch 0"),
        ("0F1 0B1 0F0 0B0", "waits forever"),
    ],
)
def test_a_given_schedule_that_is_wrong_is_refused_with_its_grid(first: str, why: str) -> None:
    """Without a W, a stage would train without a part of its gradient."""
    second = "1F0 1F1 1B0 1B1"
    recipe = Recipe(num_micro_batches=2, clip=CLIP)
    setup = Setup(axes_of(pipe=2), schedule_of(first, second), recipe, Sharding)
    with pytest.raises(InvalidSchedule, match=why) as info:
        setup.run()
    assert re.search(r"\nrank 0: .*\nrank 1: .*1B1", str(info.value))
    good = setup._replace(schedule=schedule_of("0F0 0F1 0B0 0I1 0W1", second))
    check_equal(good.run(), good.alone())


class WithoutLastBlock(Model):
    """Its last block, which has the parameters of the first, takes part in no step."""

    def active_layers(self) -> list[str]:
        return [name for name in self.layers if name != "block3"]


def trained_without_last_block(**axes: int) -> list[Any]:
    """The losses, and the parameters of the blocks on each rank."""

    def fn(comm: Any) -> tuple[list[float], Any]:
        mesh = Mesh(comm, **axes)
        model = Setup((), blocks=4, model=(("is_shared", True),)).make_model(mesh)
        model.__class__ = WithoutLastBlock
        sharding = Sharding.ddp(find_unused_parameters=True)
        trainer = Trainer(mesh, model, Recipe(num_micro_batches=2), sharding=sharding)
        trainer.start()
        losses = trainer.train(STEPS, layouts.batch, ROWS * CONTEXT, nothing)
        return losses, next(x for unit, x in trainer.parameters.items() if "block0" in unit)

    return collectives.run(fn, size=math.prod(axes.values()), timeout=60)


def test_a_unit_unused_in_one_stage_is_updated_if_another_stage_uses_it() -> None:
    """On all ranks that have it: else they would have different parameters."""
    ((alone, block),) = trained_without_last_block(data=1)
    for losses, there in trained_without_last_block(pipe=4, data=2):
        np.testing.assert_allclose(losses, alone, rtol=0, atol=1e-12)
        np.testing.assert_allclose(there, block, rtol=0, atol=1e-12)


class Penalty(Gelu):
    """Adds the mean square of what enters it to the loss, as a router of experts does."""

    def forward(self, x: Any, step: Any) -> tuple[Any, Any]:
        step.losses.append(float((x**2).sum()) / step.total)
        y, saved = super().forward(x, step)
        return y, (saved, 2 * x / step.total)

    def backward_input(self, dy: Any, saved: Any) -> tuple[Any, Any]:
        dx, rest = super().backward_input(dy, saved[0])
        return dx + saved[1], rest


def losses_with_penalty(name: str, pipe: int, recompute: tuple[str, ...] = ()) -> list[float]:
    def fn(comm: Any) -> list[float]:
        mesh = Mesh(comm, pipe=pipe)
        layers = {
            "embedding": Embedding(256, CONTEXT, 6),
            "first": Penalty(),
            "middle": Linear(6, 6),
            "second": Penalty(),
            "last": Linear(6, 256),
            "loss": CrossEntropy(),
        }
        model = Model(layers, mesh=mesh, recompute=recompute)
        trainer = Trainer(mesh, model, Recipe(num_micro_batches=4), schedule=name)
        trainer.start()
        return trainer.train(STEPS, layouts.batch, ROWS * CONTEXT, nothing)

    (first, *others) = collectives.run(fn, size=pipe, timeout=60)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("name", "pipe"), [("1f1b", 2), ("gpipe", 5), ("zb-v", 2), ("dualpipe", 2)]
)
@pytest.mark.parametrize("recompute", [(), ("first",)])
def test_losses_of_layers_count_in_every_stage(
    name: str, pipe: int, recompute: tuple[str, ...]
) -> None:
    """Once each, if forward runs again too."""
    alone = losses_with_penalty("1f1b", 1)
    found = losses_with_penalty(name, pipe, recompute)
    np.testing.assert_allclose(found, alone, rtol=0, atol=1e-12)


def test_ranks_with_different_schedules_are_refused_before_the_first_step() -> None:
    """They would wait for messages that the others never send."""

    def fn(comm: Any) -> None:
        setup = Setup(axes_of(pipe=2), recipe=Recipe(num_micro_batches=2))
        mesh = Mesh(comm, pipe=2)
        names = ("1f1b", "1f1b"), ("1f1b", "gpipe")
        same, others = (
            Trainer(mesh, setup.make_model(mesh), setup.recipe, schedule=each[comm.rank])
            for each in names
        )
        same.start()
        with pytest.raises(ModelMismatch, match="option schedule of rank 1"):
            others.start()

    collectives.run(fn, size=2, timeout=60)


def test_ranks_whose_schedules_share_units_along_other_subsets_are_refused() -> None:
    """They would wait for each other in the making of the communicators."""

    def fn(comm: Any) -> None:
        setup = Setup(axes_of(pipe=4), model=(("is_tied", True),))
        mesh, recipe = Mesh(comm, pipe=4), Recipe(num_micro_batches=8)
        schedule = "dualpipe" if comm.rank == 3 else "1f1b"
        with pytest.raises(ModelMismatch, match="option axes of rank 3"):
            Trainer(mesh, setup.make_model(mesh), recipe, schedule=schedule)

    collectives.run(fn, size=4, timeout=20)


def test_divided_layers_that_run_again_on_some_ranks_only_are_refused() -> None:
    """They send in backward what the others do not."""

    def fn(comm: Any) -> None:
        mesh = Mesh(comm, tensor=2)
        recompute = ("block*",) if comm.rank else ()
        model = gpt(num_layers=1, hidden=8, num_heads=2, mesh=mesh, recompute=recompute)
        with pytest.raises(ModelMismatch, match="option recompute of rank 1"):
            Trainer(mesh, model).start()

    collectives.run(fn, size=2, timeout=60)


def test_vocabularies_divided_in_other_forms_are_refused() -> None:
    """Their ranks would make other calls."""

    def fn(comm: Any) -> None:
        mesh = Mesh(comm, tensor=2)
        at = Divided(mesh) if comm.rank else Whole(mesh)
        layers = {"embedding": VocabularyEmbedding(5, 4, 8, at), "loss": CrossEntropy()}
        with pytest.raises(ModelMismatch, match="option layers of rank 1"):
            Trainer(mesh, Model(layers, mesh=mesh)).start()

    collectives.run(fn, size=2, timeout=60)


def test_an_axis_that_neither_the_model_nor_the_sharding_uses_is_refused() -> None:
    """Also of a mesh that the model was made for: its ranks would do the same."""

    def fn(comm: Any) -> None:
        mesh = Mesh(comm, pipe=2, expert=2)
        with pytest.raises(ValueError, match="uses the axis 'expert'"):
            Trainer(mesh, gpt(num_layers=2, hidden=8, num_heads=2, mesh=mesh))

    collectives.run(fn, size=4, timeout=60)


@pytest.mark.parametrize(("context", "is_enough"), [(3, False), (4, True)])
def test_the_command_line_refuses_a_context_of_fewer_positions_than_ranks(
    context: int, *, is_enough: bool
) -> None:
    """Before it prepares a run, and not in the first step."""
    words = f"--mesh context=4 --context {context} --layers 1 --hidden 8 --steps 1 --text"
    options = COMMAND.parser().parse_args([*words.split(), __file__])
    if is_enough:
        collectives.run(lambda comm: Training(comm, options), size=4, timeout=60)
        return
    with pytest.raises(ValueError, match="4 ranks cannot divide 3 positions"):
        collectives.run(lambda comm: Training(comm, options), size=4, timeout=60)
