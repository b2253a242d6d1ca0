"""A call that fails in the middle leaves nothing under way, over MPI too."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = pytest.mark.ranks(n="num_ranks")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("kind", "num_ranks"), [("plan", 2), ("call", 3)])
@pytest.mark.slow
def test_an_operator_that_fails_half_way_leaves_nothing_under_way(
    kind: str, num_ranks: int
) -> None:
    done = launch(
        num_ranks,
        ["-m", "tests.engines.failure_program", kind],
        env={"PYTHONPATH": str(ROOT)},
        timeout=60,
        capture=True,
    )
    assert done.stdout.count("as it should be") == 1, done.stderr
