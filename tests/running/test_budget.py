"""However many processes run tests, there are only so many ranks at a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.running.budget import Budget

PLACES = 4


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Threads, which lock files against each other as processes do."""
    with ThreadPoolExecutor(3) as made:
        yield made


def begin(budget: Budget, num_ranks: int) -> ExitStack:
    """Take places until the stack is closed."""
    job = ExitStack()
    job.enter_context(budget.taken(num_ranks))
    return job


def waits(job: Future[ExitStack]) -> bool:
    """Return whether a job still waits for places."""
    try:
        job.result(timeout=0.3)
    except NotYet:
        return True
    return False


@pytest.mark.parametrize(
    ("running", "next_one", "must_wait"),
    [(3, 1, False), (3, 2, True), (4, 1, True), (4, 0, False), (1, 100, True), (0, 100, False)],
)
def test_a_job_waits_until_its_ranks_have_places(
    running: int, next_one: int, must_wait: bool, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    first = begin(Budget(tmp_path, PLACES), running)
    second = threads.submit(begin, Budget(tmp_path, PLACES), next_one)
    assert waits(second) == must_wait
    first.close()
    second.result(timeout=30).close()


def test_small_jobs_that_come_later_do_not_keep_a_large_one_waiting(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    budget = Budget(tmp_path, PLACES)
    first = begin(budget, 1)
    large = threads.submit(begin, budget, PLACES)
    assert waits(large)
    small = threads.submit(begin, budget, 1)
    assert waits(small)
    begin(budget, 0).close()  # a test without a job begins at once
    first.close()
    large.result(timeout=30).close()
    small.result(timeout=30).close()


def test_places_of_a_test_that_fails_are_free_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Budget(tmp_path, PLACES).taken(PLACES):
        raise KeyError
    begin(Budget(tmp_path, PLACES), PLACES).close()
