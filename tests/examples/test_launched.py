"""Models of images with experts over MPI, and a student of one, whose teacher sends too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.launch.test_layouts import run_commands
from tests.launch.test_strategies import EQUAL

pytestmark = [pytest.mark.ranks(n=8), pytest.mark.on_open_mpi]

IMAGES, STUDENTS = "examples.images.__main__", "examples.students.__main__"
MODEL = "--wide --steps 3 --batch 8 --hidden 16 --layers 2 --dtype float64"


def command(words: str, program: str = IMAGES) -> str:
    return f"{program} {MODEL} {words}"


def losses_alone(
    words: str, capsys: pytest.CaptureFixture[str], program: str = IMAGES
) -> list[str]:
    """What one rank says about its losses."""
    capsys.readouterr()
    main = import_module(program).COMMAND.main
    assert main([*MODEL.split(), *words.split(), "--threads", "1"]) == 0
    return losses(capsys.readouterr().out)


def losses(said: str) -> list[str]:
    """The lines about losses: those of steps, and the last one."""
    lines = [line for line in said.splitlines() if "loss " in line and "|" not in line]
    assert lines
    return lines


def test_a_hierarchical_transformer_trains_as_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """What is sent is what was predicted, and the losses are those of one rank."""
    model = "--model swin --micro-batches 2 --moe gshard"
    (said,) = run_commands(8, [command(f"{model} --mesh pipe=2,expert=2,tensor=2")])
    assert EQUAL in said and "parameters: equal, to the bit" in said
    assert losses(said) == losses_alone(model, capsys)


def test_a_transformer_and_a_student_whose_teacher_is_larger_train_as_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other on the same ranks; the teacher is saved by another layout."""
    taught, mesh = f"--teacher {tmp_path} --teacher-layers 4 --stop 2", "--mesh data=2,expert=2"
    v, teacher, student = run_commands(
        4,
        [
            command(f"--model v {mesh}"),
            command(f"--layers 4 --save {tmp_path}"),
            command(f"{taught} {mesh}", STUDENTS),
        ],
    )
    assert EQUAL in v and EQUAL in teacher and EQUAL in student
    assert "parameters: equal, to the bit" in v
    assert losses(v) == losses_alone("--model v", capsys)
    assert "forward/loss/teacher/block3/dispatch" in student
    assert "times as many" in student
    assert losses(student) == losses_alone(taught, capsys, STUDENTS)
