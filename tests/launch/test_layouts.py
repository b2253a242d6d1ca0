"""Layouts over MPI: predicted = recorded, and under Open MPI = observed, along every axis."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from bench.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from tests.launch.test_strategies import EQUAL, IS_OPEN_MPI

pytestmark = pytest.mark.timeout(220)

MODEL = "--layers 2 --hidden 32 --heads 2 --context 32 --batch 16 --steps 3"
LAYOUTS = {
    "dualpipe": (
        4,
        "--mesh pipe=4 --schedule dualpipe --micro-batches 16 --tied --layers 4 --clip 0.1",
    ),
    "three axes": (
        8,
        "--mesh pipe=2,data=2,tensor=2 --schedule zb-v --micro-batches 4 --zero 1"
        " --sequence-parallel",
    ),
    "tensor first": (8, "--mesh tensor=2,data=2,pipe=2 --micro-batches 4 --zero 1"),
    "context": (8, "--mesh pipe=2,context=2,tensor=2 --micro-batches 4 --zero 1 --tied"),
    "ulysses": (4, "--mesh data=2,context=2 --attention ulysses --zero 2"),
    "pipedream": (2, "--mesh pipe=2 --schedule pipedream --micro-batches 4"),
}


def train(num_ranks: int, words: str, file: Path) -> tuple[str, list[float]]:
    """What the training program prints on these ranks, and its losses."""
    done = launch(
        num_ranks,
        ["-m", "parallel.train", *MODEL.split(), *words.split(), "--json", str(file)],
        mpi_args=MPIRUN_ARGS if IS_OPEN_MPI else (),
        env=environment(),
        timeout=100,
        capture=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())["losses"]


@cache
def losses_alone(words: str) -> list[float]:
    """The losses of one rank, which several tests compare with theirs."""
    with TemporaryDirectory() as folder:
        return train(1, f"--strategy serial {words}", Path(folder) / "one.json")[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_sent_is_what_was_predicted(name: str, tmp_path: Path) -> None:
    """And messages are too large to be buffered: a send waits for its receive."""
    num_ranks, words = LAYOUTS[name]
    said, losses = train(num_ranks, words, tmp_path / "many.json")
    assert EQUAL in said and "parameters: equal, to the bit" in said
    if name != "pipedream":  # which is another algorithm
        shared = [option for option in ("--tied", "--layers 4", "--clip 0.1") if option in words]
        assert losses == pytest.approx(losses_alone(" ".join(shared)), rel=1e-12)
