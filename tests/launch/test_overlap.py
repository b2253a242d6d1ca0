"""Overlapping slots over MPI: turns in two threads, one at a time; and text on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from tests.launch.test_layouts import losses_alone, train
from tests.launch.test_strategies import EQUAL, IS_OPEN_MPI

LAYOUTS = {
    "dualpipe": (8, "--mesh pipe=2,expert=2,tensor=2 --zero 1"),
    "dualpipe-v": (4, "--mesh pipe=2,expert=2"),
}
MODEL = "--moe switch --experts 4 --moe-every 1"


@pytest.mark.parametrize("schedule", LAYOUTS)
def test_training_by_turns(schedule: str, tmp_path: Path) -> None:
    """What MPI counts in each phase too, although phases change with each turn."""
    num_ranks, words = LAYOUTS[schedule]
    split = f"{MODEL} --micro-batches 4"
    words = f"{words} {split} --schedule {schedule}"
    said, found = train(num_ranks, words, tmp_path / "many.json")
    assert EQUAL in said and "parameters: equal, to the bit" in said
    assert found == pytest.approx(losses_alone(split), rel=1e-12)


def job(num_ranks: int, *words: str) -> str:
    """What the ranks print."""
    args = MPIRUN_ARGS if IS_OPEN_MPI else ()
    done = launch(num_ranks, [*words], mpi_args=args, env=environment(), timeout=120, capture=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_texts_are_those_of_one_rank(tmp_path: Path) -> None:
    small = f"{MODEL} --layers 2 --hidden 16 --context 32 --tokens 10 --temperature 1"
    texts = []
    for num_ranks, mesh in ((1, "data=1"), (4, "expert=2,tensor=2")):
        path = tmp_path / f"{num_ranks}.json"
        words = [*small.split(), "--prompt", "def ", "--prompt", "import os", "--mesh", mesh]
        said = job(num_ranks, "-m", "moe.generate", *words, "--json", str(path))
        assert num_ranks == 1 or EQUAL in said
        texts.append(json.loads(path.read_text())["texts"])
    assert texts[0] == texts[1]


def test_steps_with_and_without_turns_are_measured() -> None:
    words = ["-n", "1", "--hidden", "8", "--context", "8", "--delay", "1"]
    said = job(4, "-m", "bench", "turns", *words)
    assert "without turns" in said and "with turns" in said
    refused = launch(2, ["-m", "bench", "turns"], env=environment(), timeout=60, capture=True)
    assert refused.returncode == 2 and "2 ranks are not pipe=2,expert=N" in refused.stdout
