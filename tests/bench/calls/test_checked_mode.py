"""The table of what checked mode costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.calls.checked_mode import MODES, table
from collectives.launch import launch

ROOT = Path(__file__).resolve().parents[3]


def test_every_size_has_plan_and_call_in_every_mode() -> None:
    made = table({8: [1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6]})
    assert made.heads == [
        "size (B)",
        *(f"{how} {mode}" for how in ("plan", "call") for mode in MODES),
    ]
    assert made.rows[0][:3] == (8, pytest.approx(1.0), pytest.approx(2.0))


@pytest.mark.ranks(n=2)
@pytest.mark.slow
def test_the_benchmark_runs_on_two_ranks() -> None:
    done = launch(
        2,
        [
            "-m",
            "bench",
            *["checked_mode", "--wide", "-b", "8", "-e", "64K", "-f", "8192", "-n", "1", "-w", "1"],
        ],
        timeout=60,
        env={"PYTHONPATH": str(ROOT)},
        capture=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split("|") for line in done.stdout.splitlines()]
    sizes = [row[0].strip() for row in rows if len(row) == 7]
    assert sizes == ["size (B)", "8", "65536"]
    assert all(float(cell) > 0 for row in rows if row[0].strip() == "8" for cell in row)
