"""Programs that end in unusual ways end well: calls from exit handlers, calls never waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

PROGRAM = str(Path(__file__).parent / "ending_program.py")


def test_calls_in_a_handler_that_runs_at_the_very_end_complete() -> None:
    done = launch(2, [PROGRAM, "late"], timeout=60, capture=True)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    ways = "Waitall", "requests", "thread"
    assert said == [f"rank {r} {way} 2" for r in (0, 1) for way in ways]


def test_a_first_call_in_a_handler_imports_no_numba_and_prints_nothing() -> None:
    """numba registers functions for the end of the program, and would find it too late."""
    done = launch(2, [PROGRAM, "first"], timeout=60, capture=True)
    assert sorted(done.stdout.splitlines()) == [f"rank {r} 2 2 False" for r in (0, 1)]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", ["unawaited", "threaded"])
def test_leaving_with_calls_under_way_is_no_crash(way: str) -> None:
    for _ in range(2):
        done = launch(2, [PROGRAM, way], timeout=60, capture=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("leaves") == 2


def test_the_world_can_be_had_again_after_it_was_freed() -> None:
    done = launch(2, [PROGRAM, "freed"], timeout=60, capture=True)
    assert sorted(done.stdout.splitlines()) == ["rank 0 again 2", "rank 1 again 2"], done.stderr
