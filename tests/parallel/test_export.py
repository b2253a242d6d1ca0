"""A whole training step, written for other simulators: it has exactly the predicted messages."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from collectives.export import Machine, Task, goal, smpi
from parallel.export import COMMAND, layout_of
from parallel.layout import Layout
from parallel.predict import RunSize, step_tasks, step_traffic
from tests.export.goal_reader import read, run
from tests.export.smpi_reader import Replay

SMALL = "--layers 2 --hidden 8 --heads 2 --context 8 --batch 8 --micro-batches 2"
STEPS = {
    "ddp": "--ranks 3 --strategy ddp --batch 6",
    "zero2": "--ranks 4 --zero 2",
    "zero3": "--ranks 4 --zero 3",
    "hsdp": "--ranks 4 --strategy hsdp",
    "local-updates": "--ranks 2 --strategy local-updates",
    "tensor": "--ranks 4 --mesh data=2,tensor=2 --zero 1",
    "pipeline": "--ranks 4 --mesh pipe=4 --layers 4",
    "interleaved": "--ranks 2 --mesh pipe=2 --schedule interleaved --layers 4",
    "context": "--ranks 4 --mesh data=2,context=2",
    "three axes": "--ranks 8 --mesh pipe=2,data=2,tensor=2 --zero 1",
}


def options_of(words: str, *others: str) -> argparse.Namespace:
    return COMMAND.parser().parse_args([*SMALL.split(), "--format=goal", *words.split(), *others])


def step_of(words: str, layer_seconds: float = 0.0) -> tuple[Layout, list[list[Task]]]:
    options = options_of(words)
    layout, batch = layout_of(options), (options.batch, options.context)
    return layout, step_tasks(layout, Machine({}), layer_seconds=layer_seconds, batch=batch)


def predicted(layout: Layout, words: str) -> np.ndarray:
    """The messages and bytes of a step from each rank to each, by the formulas."""
    options = options_of(words)
    calls = step_traffic(layout, RunSize(1, 1, (options.batch, options.context)))
    size = options.ranks
    return sum((call.matrices(size) for call in calls), np.zeros((2, size, size), np.int64))


@pytest.mark.parametrize("words", STEPS.values(), ids=STEPS)
def test_a_step_has_exactly_the_predicted_messages(words: str) -> None:
    layout, ranks = step_of(words)
    found = np.zeros((2, len(ranks), len(ranks)), np.int64)
    for ends, sizes in run(read(goal.lines(ranks))).items():
        found[:, *ends] = len(sizes), sum(sizes)
    empty = np.zeros_like(found)
    for rank, tasks in enumerate(ranks):
        for task in tasks:
            empty[1, rank, task.peer] += task.kind == "send" and task.size == 0
    np.testing.assert_array_equal(found - empty, predicted(layout, words))
    assert found[0].any()


def test_a_replay_of_a_step_ends() -> None:
    _, ranks = step_of(STEPS["three axes"])
    assert Replay(smpi.lines(ranks)).run()


def test_a_layer_waits_for_its_own_parameters_only() -> None:
    """The parameters of the next layer are gathered while it computes."""
    _, ranks = step_of(STEPS["zero3"], layer_seconds=1.0)
    tasks = ranks[0]
    first, second = [n for n, task in enumerate(tasks) if task.is_compute][:2]
    messages = [n for n in range(first) if tasks[n].is_message]
    assert set(tasks[first].after) < set(messages)
    assert {first, messages[-1]} <= set(tasks[second].after)
    assert messages[-1] not in tasks[first].after
    assert {task.seconds for task in tasks if task.is_compute} == {1.0, 2.0}


def test_a_call_that_is_missing_is_noticed() -> None:
    words = STEPS["ddp"]
    layout, ranks = step_of(words)
    shorter = [tasks[:-4] for tasks in ranks]
    found = sum(task.size for tasks in shorter for task in tasks if task.kind == "send")
    assert found != predicted(layout, words)[1].sum()


def test_the_command_writes_each_format(tmp_path: Path) -> None:
    words = [*SMALL.split(), *STEPS["tensor"].split()]
    for form, names in {
        "goal": ["x"],
        "smpi": ["x"],
        "chakra": [f"x.{rank}.et" for rank in range(4)],
    }.items():
        assert COMMAND.main([*words, "--format", form, "-o", str(tmp_path / "x")]) == 0
        assert all((tmp_path / name).stat().st_size > 100 for name in names)


def test_the_command_refuses_what_is_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        COMMAND.main([*SMALL.split(), "--ranks", "3", "--mesh", "data=2", "--format", "goal"])
    assert "3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        COMMAND.main(["--ranks", "3", "--format", "msccl"])
    assert "msccl" in capsys.readouterr().err
