"""Schedules for tests: of every kind, and of many sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from parallel.pipeline import SCHEDULES, Schedule, make

each_schedule = pytest.mark.parametrize("name", SCHEDULES)
NUM_MICRO_BATCHES = (1, 2, 3, 5, 8, 12, 16)


def of_all_sizes(name: str, num_ranks: range = range(1, 9)) -> Iterator[Schedule]:
    """Those of a kind that exist."""
    found = 0
    for p, m in product(num_ranks, NUM_MICRO_BATCHES):
        try:
            schedule = make(name, p, m)
        except ValueError:
            continue
        found += 1
        yield schedule
    assert found >= 8


def case(schedule: Schedule) -> tuple[int, int, int]:
    """P, m and v."""
    p = schedule.num_ranks
    return p, schedule.num_micro_batches, schedule.num_stages // p
