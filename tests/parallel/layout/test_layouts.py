"""Pipelines, data and tensor parallelism together: every layout of 1 to 8 ranks equals one rank."""

from __future__ import annotations

import ast
import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import collectives
from parallel import SGD, Adam, Mesh, Recipe, Sharding, TrafficMismatch, Trainer
from parallel.accounts.table import by_axis, sums
from parallel.pipeline import SCHEDULES, Schedule, parse, simulate
from parallel.step import (
    LayerAction,
    LayerBackward,
    LayerBackwardInput,
    LayerBackwardWeight,
    LayerForward,
    Reduce,
    StageMessage,
)
from tests.covering import pairwise
from tests.parallel.layouts import (
    CLIP,
    FEW_STEPS,
    LAYOUTS,
    ROWS,
    Setup,
    batch,
    check_accounts,
    check_as_one_rank,
    check_equal,
    with_optimizer,
)
from tests.parallel.training import CONTEXT

OPTIMIZERS = {"sgd": partial(SGD, lr=0.5, momentum=0.9), "adam": Adam}
# Each layout with some optimizer; each number of ranks along an axis with both, tied and untied.
CASES = pairwise(
    *3 * [range(1, 9)],
    OPTIMIZERS,
    [True, False],
    where=lambda pipe, data, tensor, *_: (pipe, data, tensor) in LAYOUTS,
)
CASES += [(*layout, "adam", True) for layout in LAYOUTS if layout not in {x[:3] for x in CASES}]


def setup_of(pipe: int, data: int, tensor: int, **options: Any) -> Setup:
    return Setup((("pipe", pipe), ("data", data), ("tensor", tensor)), steps=FEW_STEPS, **options)


def test_every_layout_of_1_to_8_ranks_is_a_case() -> None:
    assert len(LAYOUTS) == len(set(LAYOUTS)) == 38
    assert {case[:3] for case in CASES} == set(LAYOUTS)


@pytest.mark.parametrize(("pipe", "data", "tensor", "optimizer", "is_tied"), CASES)
@pytest.mark.slow
def test_losses_and_parameters_are_those_of_one_rank(
    pipe: int, data: int, tensor: int, optimizer: str, is_tied: bool
) -> None:
    """With a clipped gradient in each step; and the three accounts agree."""
    setup = setup_of(pipe, data, tensor, model=(("is_tied", is_tied),))
    setup = with_optimizer(setup, OPTIMIZERS[optimizer])
    ends = check_as_one_rank(setup)
    assert all(end.norms == ends[0].norms for end in ends)
    assert len(ends[0].norms) == FEW_STEPS and min(ends[0].norms) > CLIP
    check_parameter_bytes(ends)


def check_parameter_bytes(ends: list[Any]) -> None:
    """Counted bytes are those of the boxes; distinct boxes cover each parameter exactly once."""
    model = ends[0].trainer.model
    places: dict[str, Counter[Any]] = {name: Counter() for name in model.specs}
    for end in ends:
        trainer = end.trainer
        stages = trainer.stages.units_of[trainer.view.pipe_index]
        boxes = {name: box for unit in stages for name, box in trainer.model.boxes(unit).items()}
        nbytes = 8 * sum(math.prod(box.shape) for box in boxes.values())
        assert trainer.memory.now["parameters"] == nbytes
        for name, box in boxes.items():
            places[name][box] += math.prod(box.shape) > 0
    for name, found in places.items():
        distinct = [box for box, times in found.items() if times]
        covered = np.zeros(model.specs[name].shape, int)
        for box in distinct:
            covered[box.slices] += 1
        assert (covered == 1).all(), name
        assert len({found[box] for box in distinct}) == 1  # as many replicas of each


def test_a_box_that_two_ranks_have_is_noticed() -> None:
    """Although it has as many bytes as the right one."""
    ends = setup_of(1, 1, 2).run()
    check_parameter_bytes(ends)
    first, second = (end.trainer.model for end in ends)
    second.boxes = first.boxes
    with pytest.raises(AssertionError):
        check_parameter_bytes(ends)


@pytest.mark.parametrize(
    ("axis", "layout"),
    [
        ("data", {"data": 2, "tensor": 2}),
        ("context", {"context": 2, "tensor": 2}),
        ("pipe", {"pipe": 2, "tensor": 2}),
        ("tensor", {"pipe": 2, "tensor": 2}),
    ],
)
def test_without_one_sum_the_result_is_another(axis: str, layout: dict[str, int]) -> None:
    """The negative control: by more than 1e-6."""

    def skip(trainer: Trainer) -> None:
        trainer.actions = [
            each
            for each in trainer.actions
            if not (isinstance(each, Reduce) and axis in {a.partition("[")[0] for a in each.axes})
        ]

    model = (("is_tied", True), ("sequence_parallel", "keep"))
    shared = tuple(each for each in ("data", "context") if each in layout)
    sharding = partial(Sharding.zero, 1, axes=shared) if shared else Sharding
    good = Setup(tuple(layout.items()), model=model, sharding=sharding, steps=FEW_STEPS)
    check_equal(good.run(), good.alone())
    with pytest.raises(AssertionError):
        check_equal(good._replace(change=skip).run(), good.alone(), tolerance=1e-6)


@pytest.mark.parametrize("form", ["keep", "gather"])
@pytest.mark.parametrize(
    ("pipe", "data", "tensor"), [(1, 1, 2), (1, 1, 3), (1, 1, 5), (2, 1, 2), (1, 2, 3), (2, 2, 2)]
)
@pytest.mark.slow
def test_sequence_parallelism_trains_as_one_rank(
    form: str, pipe: int, data: int, tensor: int
) -> None:
    """More ranks than tokens in a row, too: some have none."""
    setup = setup_of(pipe, data, tensor, model=(("sequence_parallel", form), ("is_tied", True)))
    check_as_one_rank(setup)


CONTEXT_LAYOUTS = [  # pipe, data, context, tensor
    (1, 1, 2, 1),
    (1, 1, 3, 1),
    (1, 1, 4, 1),
    (1, 2, 2, 1),
    (2, 1, 2, 1),
    (1, 1, 2, 2),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
]


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.parametrize("layout", CONTEXT_LAYOUTS, ids=str)
@pytest.mark.slow
def test_context_parallelism_trains_as_one_rank(attention: str, layout: tuple[int, ...]) -> None:
    """With sequence parallelism where there are tensor ranks: parts of parts of each row."""
    axes = tuple(zip(("pipe", "data", "context", "tensor"), layout, strict=True))
    model: tuple[tuple[str, Any], ...] = (("attention", attention), ("is_tied", True))
    if layout[-1] > 1:
        model += (("sequence_parallel", "gather"),)
    sharding = partial(Sharding.zero, 1, axes=("data", "context"))
    setup = Setup(axes, model=model, sharding=sharding, steps=FEW_STEPS)
    check_as_one_rank(setup)


def test_context_ranks_that_nothing_sums_over_are_refused() -> None:
    setup = Setup((("data", 1), ("context", 2)))
    with pytest.raises(ValueError, match="the sharding must sum over it"):
        setup.run()


@pytest.mark.parametrize(
    "axes", [{"data": 2}, {"context": 2}, {"data": 1, "context": 2}, {"context": 1, "expert": 2}]
)
def test_the_sharding_that_a_refusal_names_trains(axes: dict[str, int]) -> None:
    def fn(comm: Any) -> None:
        mesh = Mesh(comm, **axes)
        with pytest.raises(ValueError, match=r"such as Sharding|pass sharding=") as refused:
            Trainer(mesh, Setup(()).make_model(mesh))
        _, _, words = str(refused.value).partition("Sharding.zero(1, axes=")
        trainer = Trainer(
            mesh,
            Setup(()).make_model(mesh),
            sharding=Sharding.zero(1, axes=ast.literal_eval(words.removesuffix(")"))),
        )
        trainer.start()
        trainer.step(*batch(0, *trainer.batch_part), ROWS * CONTEXT)

    collectives.run(fn, size=2)


SYNCHRONOUS = [name for name in SCHEDULES if name != "pipedream"]


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("layout", [(4, 1, 1), (2, 2, 2)])
@pytest.mark.slow
def test_every_schedule_trains_as_one_rank(name: str, layout: tuple[int, int, int]) -> None:
    """Tied, with two stages and two micro-batches for each rank, it equals one rank."""
    twice = 2 * layout[0]
    setup = setup_of(
        *layout,
        schedule=name,
        recipe=Recipe(num_micro_batches=twice, clip=CLIP),
        blocks=twice - 2,
        model=(("is_tied", True),),
    )
    check_as_one_rank(setup)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["gpipe", "zb-v", "dualpipe"])
@pytest.mark.slow
def test_zero_beside_a_pipeline_trains_as_one_rank(name: str, stage: int) -> None:
    """Gradients are summed, and parameters gathered, for each micro-batch."""
    recipe = Recipe(num_micro_batches=4, clip=CLIP)
    setup = setup_of(
        2, 2, 1, schedule=name, recipe=recipe, blocks=4, sharding=partial(Sharding.zero, stage)
    )
    ends = setup.run()
    np.testing.assert_allclose(ends[0].losses, setup.alone().losses, rtol=0, atol=1e-12)
    check_accounts(ends)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_trains_alike_on_all_ranks(dtype: str) -> None:
    """float32 equals one rank; the others train alike on all ranks, and the accounts agree."""
    recipe = Recipe(dtype, num_micro_batches=2, clip=CLIP)
    setup = setup_of(2, 2, 2, recipe=recipe)
    ends = setup.run()
    assert len({tuple(end.losses) for end in ends}) == 1
    tolerance = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.05}[dtype]
    np.testing.assert_allclose(ends[0].losses, setup.alone().losses, rtol=0, atol=tolerance)
    check_accounts(ends)


# Traffic by axis


def test_traffic_before_the_first_step_is_the_record_after_the_last() -> None:
    """As a matrix for each axis."""
    (first, *_) = setup_of(2, 2, 2, model=(("is_tied", True),)).run()
    assert first.table is not None
    predicted = sums(first.table.predicted, by_axis)
    assert set(predicted) >= {"pipe", "data", "tensor"}
    for axis, matrix in first.table.axes.items():
        np.testing.assert_array_equal(predicted[axis], matrix)
    for axis, others in (("pipe", 4), ("tensor", 1), ("data", 2)):
        source, target = np.nonzero(first.table.axes[axis][1])
        assert set(np.abs(source - target).tolist()) == {others}


def test_a_message_more_than_predicted_is_noticed() -> None:
    def more(trainer: Trainer) -> None:
        pipe: Any = trainer.mesh["pipe"]
        if trainer.view.pipe_index == 0:
            pipe.send(np.ones(1), 1, tag=1 << 20)
        else:
            pipe.recv(np.ones(1), 0, tag=1 << 20)

    def with_more(trainer: Trainer) -> None:
        start = trainer.start
        trainer.start = lambda: (start(), more(trainer))  # type: ignore[method-assign,assignment]

    (first, *_) = setup_of(2, 1, 1, change=with_more).run()
    assert first.table is not None
    with pytest.raises(TrafficMismatch, match="axis pipe"):
        first.table.check()


# What the runtime does


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "dualpipe"])
@pytest.mark.slow
def test_live_activations_are_those_of_the_simulator(name: str) -> None:
    """Of P = 4 and m = 8; until the second half of backward, as rests are kept so long."""
    most: dict[int, int] = {}

    def watch(trainer: Trainer) -> None:
        run, layers = trainer.micro_batches, trainer.stages.layers

        def counted(action: LayerForward) -> None:
            run.forward(action)
            if action.layer == layers[action.stage][-1]:
                held = {*run.saved, *run.rests}
                of_stage = {(k, trainer.stages.stage_of[name]) for k, name in held}
                most[trainer.rank] = max(most.get(trainer.rank, 0), len(of_stage))

        trainer.functions[LayerForward] = counted

    recipe = Recipe(num_micro_batches=8, clip=CLIP)
    setup = setup_of(4, 1, 1, schedule=name, recipe=recipe, blocks=6, change=watch)
    schedule = setup.run()[0].trainer.stages.schedule
    simulation = simulate(schedule)
    assert [most[rank] for rank in range(4)] == [simulation.live(rank) for rank in range(4)]
    if name == "1f1b":
        assert [most[rank] for rank in range(4)] == [min(4 - rank, 8) for rank in range(4)]
    if name == "gpipe":
        assert [most[rank] for rank in range(4)] == [8] * 4


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "dualpipe-v"])
def test_actions_are_done_as_the_schedule_says_cell_by_cell(name: str) -> None:
    log: dict[int, list[str]] = {}

    def watch(trainer: Trainer) -> None:
        log[trainer.rank], do = [], trainer.do

        def logged(action: Any) -> Any:
            if isinstance(action, LayerAction | StageMessage):
                log[trainer.rank].append(str(action))
            return do(action)

        trainer.do = logged  # type: ignore[method-assign]

    recipe = Recipe(num_micro_batches=4)
    setup = setup_of(2, 1, 1, schedule=name, recipe=recipe, blocks=4, change=watch)
    trainer = setup.run()[0].trainer
    for place, wanted in enumerate(trainer.stages.actions):
        of_step = log[place][: len(log[place]) // FEW_STEPS]
        cells = [word.partition("[")[0].partition("@")[0] for word in of_step]
        found = list(dict.fromkeys(cells))
        parts = [str(part) for action in wanted for part in action.parts]
        if name == "dualpipe-v":  # layers of two overlapping actions alternate
            assert sorted(found) == sorted(parts)
        else:
            assert found == parts


def test_first_i_changes_no_gradient_then_w_makes_them_all_to_the_bit() -> None:
    """After every I the gradients are unchanged; after W they are those of B."""
    gradients: dict[str, Any] = {}

    def watch(trainer: Trainer) -> None:
        functions = trainer.functions
        right = dict(functions)

        def checked(action: LayerAction) -> None:
            before = {unit: x.copy() for unit, x in trainer.gradients.items()}
            right[type(action)](action)
            units = trainer.model.units_of(action.layer)
            for unit, x in trainer.gradients.items():
                is_changed = (x != before[unit]).any()
                if isinstance(action, LayerBackwardInput) or unit not in units:
                    assert not is_changed
                else:
                    assert is_changed

        halves = LayerBackwardInput, LayerBackwardWeight
        functions |= dict.fromkeys((LayerBackward, *halves), checked)

    for name in ("1f1b", "zb-h1"):
        recipe = Recipe(num_micro_batches=3)
        setup = setup_of(2, 1, 1, schedule=name, recipe=recipe, change=watch)
        gradients[name] = [end.trainer.gradients for end in setup.run()]
    for whole, halves in zip(gradients["1f1b"], gradients["zb-h1"], strict=True):
        for unit, x in whole.items():
            np.testing.assert_array_equal(halves[unit], x)


# What is refused


def refused(**options: Any) -> str:
    setup = setup_of(2, 1, 1, **options)
    with pytest.raises(ValueError) as info:  # noqa: PT011 - the tests match the message
        setup.run()
    return str(info.value)


def test_what_does_not_go_together_is_refused_before_anything_is_sent() -> None:
    assert "at least 4, not 2" in refused(schedule="dualpipe")
    assert "ZeRO++ and local updates" in refused(sharding=lambda: Sharding(every=2))


def test_a_refused_schedule_is_shown_as_a_grid() -> None:
    """Too many stages, too few micro-batches, and ranks that wait for each other forever."""
    said = refused(blocks=1, schedule="zb-v")
    assert "a stage would have no layer\nrank 0: 0F0" in said
    assert "at least 4, not 2; with 4 it is\nrank 0: 0F0" in refused(schedule="dualpipe")
    lists = [[parse(word) for word in row.split()] for row in ("0B0 0F0", "1F0 1B0")]
    said = refused(schedule=Schedule.of("wrong", lists), recipe=Recipe())
    assert "rank 0 waits" in said and ">0B0<" in said


def test_dualpipe_on_four_ranks_with_sixteen_micro_batches_trains_as_one_rank() -> None:
    setup = setup_of(4, 1, 1, schedule="dualpipe", recipe=Recipe(num_micro_batches=16, clip=CLIP))
    check_as_one_rank(setup)


def test_a_model_made_without_the_mesh_is_refused() -> None:
    def fn(comm: Any) -> None:
        mesh = Mesh(comm, pipe=2)
        with pytest.raises(ValueError, match="make the model with mesh="):
            Trainer(mesh, Setup(()).make_model(None))

    collectives.run(fn, size=2)
