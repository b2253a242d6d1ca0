"""Ten thousand calls of every kind, in random order and several under way, leak nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from collectives.launch import launch

ROOT = Path(__file__).parent.parent.parent
RANKS = 3
WARM_UP, STEPS = 4_000, 6_800  # the first fill the caches and pools, which are all bounded
# From the end of the warm-up to the end.  A leak of one array of 512 bytes, or of two Python
# objects, in every call would be twice as much.
MAX_BYTES, MAX_BLOCKS = 2 * 2**20, 8_000

# Half a minute where nobody else computes.
pytestmark = [pytest.mark.timeout(300), pytest.mark.ranks(n=3)]


def reports(warm_up: int, steps: int, *leak: str) -> list[dict[str, Any]]:
    """What every rank says in the end."""
    program = ["-m", "tests.launch.leak_program", str(warm_up), str(steps), *leak]
    env = {"PYTHONPATH": str(ROOT)}
    done = launch(RANKS, program, timeout=280, env=env, capture=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def growth(report: dict[str, Any], what: str) -> float:
    """By the median of the eighths: a leak is in each.

    The system and MPI occupy memory a few MiB at a time (a huge page, a list of requests), which
    may happen in three of the eighths.
    """
    sizes = [sample[what] for sample in report["samples"]]
    return (len(sizes) - 1) * median(later - earlier for earlier, later in pairwise(sizes))


def test_growth_is_what_every_part_adds() -> None:
    def grown(*sizes: int) -> float:
        return growth({"samples": [{"bytes": size} for size in sizes]}, "bytes")

    assert grown(0, 10, 20, 30, 40) == 40  # a leak
    assert grown(0, 90, 90, 90, 90) == 0  # something that came once


def test_ten_thousand_calls_leak_nothing() -> None:
    found = reports(WARM_UP, STEPS)
    assert [report["rank"] for report in found] == list(range(RANKS))
    for report in found:
        assert report["calls"] >= 10_000 and report["left"] == []
        assert growth(report, "bytes") < MAX_BYTES, report["samples"]
        assert growth(report, "blocks") < MAX_BLOCKS, report["samples"]


@pytest.mark.on_open_mpi
def test_leaks_on_purpose_are_noticed() -> None:
    for report in reports(100, 800, "leak"):
        text = "\n".join(report["left"])
        assert "a communicator of ranks" in text
        assert growth(report, "bytes") > MAX_BYTES, report["samples"]
