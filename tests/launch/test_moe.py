"""Experts over MPI: predicted from a run on one rank = recorded, and under Open MPI = observed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.test_layouts import train
from tests.launch.test_strategies import EQUAL

LAYOUTS = {
    "switch": (4, "--mesh data=2,expert=2 --zero 1"),
    "gshard": (4, "--mesh expert=4 --padding needed --dispatch-parts 2"),
    "sigmoid": (8, "--mesh pipe=2,expert=2,tensor=2 --micro-batches 2 --zero 1"),
    "stable": (4, "--mesh expert=4 --dispatch hierarchical --ranks-per-host 2 --zero 1"),
    "expert-choice": (4, "--mesh context=2,expert=2"),
}


@pytest.mark.parametrize("gate", LAYOUTS)
def test_what_is_sent_is_what_one_rank_routes(gate: str, tmp_path: Path) -> None:
    num_ranks, words = LAYOUTS[gate]
    model = f"--moe {gate} --experts 4 --moe-every 1"
    routing = tmp_path / "routing.npz"
    alone = f"--strategy serial {model} --save-routing {routing}"
    _, losses = train(1, alone, tmp_path / "one.json")
    said, found = train(num_ranks, f"{words} {model} --routing {routing}", tmp_path / "many.json")
    assert EQUAL in said and "parameters: equal, to the bit" in said
    assert found == pytest.approx(losses, rel=1e-12)
