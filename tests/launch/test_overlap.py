"""The benchmark of overlapping slots over MPI; and text on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from moe.generate import COMMAND
from tests.launch.test_strategies import EQUAL, IS_OPEN_MPI

pytestmark = [pytest.mark.ranks(n=4), pytest.mark.on_open_mpi]

MODEL = "--moe switch --experts 4 --moe-every 1"


def job(num_ranks: int, *words: str) -> str:
    """What the ranks print."""
    args = MPIRUN_ARGS if IS_OPEN_MPI else ()
    done = launch(num_ranks, [*words], mpi_args=args, env=environment(), timeout=120, capture=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_texts_are_those_of_one_rank(tmp_path: Path) -> None:
    small = f"{MODEL} --layers 2 --hidden 16 --context 32 --tokens 10 --temperature 1"
    words = [*small.split(), "--prompt", "def ", "--prompt", "import os", "--json"]
    one, many = tmp_path / "one.json", tmp_path / "many.json"
    assert COMMAND.main([*words, str(one), "--mesh", "data=1", "--threads", "1"]) == 0
    mesh = ["--mesh", "expert=2,tensor=2"]
    assert EQUAL in job(4, "-m", "moe.generate", *words, str(many), *mesh)
    found, wanted = (json.loads(path.read_text())["texts"] for path in (many, one))
    assert found == wanted


def test_steps_with_and_without_turns_are_measured() -> None:
    words = ["-n", "1", "--hidden", "8", "--context", "8", "--delay", "1"]
    said = job(4, "-m", "bench", "dualpipe", *words)
    assert "without turns" in said and "with turns" in said
    refused = launch(2, ["-m", "bench", "dualpipe"], env=environment(), timeout=60, capture=True)
    assert refused.returncode == 2 and "2 ranks are not pipe=2,expert=N" in refused.stderr
