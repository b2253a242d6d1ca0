"""Models of images with experts over MPI, and a student of one, whose teacher sends too."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from tests.launch.test_strategies import EQUAL, IS_OPEN_MPI

MODEL = "--steps 3 --batch 8 --hidden 16 --layers 2 --dtype float64"
LAYOUTS = {
    "v": (4, "--model v --mesh data=2,expert=2"),
    "swin": (8, "--model swin --mesh pipe=2,expert=2,tensor=2 --micro-batches 2 --moe gshard"),
}


def train(num_ranks: int, words: str) -> str:
    """What the program prints on these ranks."""
    done = launch(
        num_ranks,
        ["-m", "moe.images", *MODEL.split(), *words.split()],
        mpi_args=MPIRUN_ARGS if IS_OPEN_MPI else (),
        env=environment(),
        timeout=60,
        capture=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(said: str) -> list[str]:
    """The lines about losses: those of steps, and the last one."""
    found = [line for line in said.splitlines() if "loss " in line and "|" not in line]
    assert found
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_sent_is_what_was_predicted(name: str) -> None:
    num_ranks, words = LAYOUTS[name]
    said = train(num_ranks, words)
    assert EQUAL in said and "parameters: equal, to the bit" in said
    model = words.partition(" --mesh")[0] + (" --moe gshard" if "gshard" in words else "")
    parts = " --micro-batches 2" if "micro" in words else ""
    assert losses(said) == losses(train(1, model + parts))


def test_a_student_on_ranks_whose_teacher_is_larger(tmp_path: Path) -> None:
    train(2, f"--layers 4 --save {tmp_path}")
    taught = f"--teacher {tmp_path} --teacher-layers 4 --stop 2"
    said = train(4, f"{taught} --mesh data=2,expert=2")
    assert EQUAL in said and "forward/loss/teacher/block3/dispatch" in said
    assert "times as many" in said
    assert losses(said) == losses(train(1, taught))
