"""Awkward counts: none, one, fewer than ranks, primes, one more or less than a segment holds."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

import collectives
from collectives import Communicator
from tests.covering import pairwise
from tests.scenarios.jobs import (
    ALGORITHMS,
    COLLECTIVES,
    REDUCTIONS,
    WHOLE,
    Job,
    dtype,
    perform,
    random_rows,
)

SIZES = [3, 5, 7]
SEGMENT_BYTES = 512 * 1024  # a large message travels in segments of so much
PRIMES = [2, 13, 97, 10_007]


class RandomJob(Job):
    """Random whole numbers, so that what lies in a wrong place is seen; their sums are exact."""

    def _input(self, rank: int) -> np.ndarray:
        return drawn((self.num_rows(rank), *self.tail), rank).astype(dtype(self.dtype))


@lru_cache(maxsize=64)
def drawn(shape: tuple[int, ...], rank: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 31, shape, np.uint8)


def on_threads(jobs: list[Job]) -> None:
    def every(comm: Communicator) -> None:
        for job in jobs:
            perform(comm, job)

    collectives.run(every, jobs[0].size, timeout=60)


def jobs_of(
    collective: str, algorithm: str | None, size: int, num_rows: int, kind: str = "float32"
) -> list[Job]:
    """Even and uneven rows, out of place and in place."""
    evenness = [True] if collective in WHOLE else [True, False]
    return [
        RandomJob(collective, algorithm, size, rows, kind, is_in_place=is_in_place)
        for rows in (random_rows(collective, size, num_rows, is_even) for is_even in evenness)
        for is_in_place in (False, True)
    ]


def serving(size: int) -> list[tuple[str, str]]:
    info = collectives.algorithms.info
    return [
        (collective, name) for collective, name in ALGORITHMS if info(collective, name).serves(size)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_few_elements_and_primes_give_the_serial_result(collective: str, size: int) -> None:
    counts = [0, 1, size - 1, size, size + 1, *PRIMES]
    on_threads([job for count in counts for job in jobs_of(collective, None, size, count)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.slow
def test_every_algorithm_serves_about_one_element_per_rank(size: int) -> None:
    counts = [1, size + 1]
    on_threads(
        [job for each in serving(size) for count in counts for job in jobs_of(*each, size, count)]
    )


def fitting(kind: str) -> int:
    """Elements that just fit a segment."""
    return SEGMENT_BYTES // dtype(kind).itemsize


@pytest.mark.parametrize(
    ("collective", "size", "more", "is_each_part"),
    pairwise(COLLECTIVES, SIZES, [-1, 0, 1], [False, True]),
)
@pytest.mark.slow
def test_about_as_many_elements_as_a_segment_holds_give_the_serial_result(
    collective: str, size: int, more: int, is_each_part: bool
) -> None:
    """All of them, or each of `size` parts, just fit a segment, or just do not."""
    are_each_ranks = collective in ("gather", "all_gather")
    num_parts = size if is_each_part and not are_each_ranks else 1
    rows = random_rows(collective, size, num_parts * fitting("float64") + more, is_even=True)
    on_threads([RandomJob(collective, None, size, rows, "float64")])


@pytest.mark.parametrize("kind", ["uint8", "float16", "bfloat16"])
@pytest.mark.parametrize("collective", REDUCTIONS)
@pytest.mark.slow
def test_small_elements_fill_segments(collective: str, kind: str) -> None:
    on_threads(
        [
            job
            for more in (-1, 1)
            for job in jobs_of(collective, None, 3, 3 * fitting(kind) + more, kind)
        ]
    )


@pytest.mark.parametrize(
    ("collective", "name"), [each for each in ALGORITHMS if each[0] in REDUCTIONS]
)
@pytest.mark.slow
def test_every_reduction_serves_a_short_last_segment(collective: str, name: str) -> None:
    count = 6 * fitting("float64") + 7
    is_even, *_, is_uneven_and_in_place = jobs_of(collective, name, 4, count, "float64")
    on_threads([is_even, is_uneven_and_in_place])
