"""Every algorithm gives what a serial computation gives, on threads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

import collectives
from collectives import Communicator
from tests.scenarios.jobs import (
    ALGORITHMS,
    CASES,
    COLLECTIVES,
    DTYPES,
    MOVERS,
    OPS,
    Job,
    all_jobs,
    perform,
)
from tests.scenarios.random_jobs import jobs


def on_threads(jobs: list[Job]) -> None:
    def every(comm: Communicator) -> None:
        for job in jobs:
            perform(comm, job)

    collectives.run(every, jobs[0].size, timeout=60)


@pytest.mark.parametrize(
    "size", [1, 2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in range(4, 10))]
)
def test_every_algorithm_gives_the_serial_result(size: int) -> None:
    on_threads(all_jobs(size))


@pytest.mark.slow
def test_every_algorithm_gives_the_serial_result_on_sixteen_ranks() -> None:
    on_threads(all_jobs(16)[::2])  # of two jobs that differ in one thing, one


def test_the_jobs_give_every_option_another_value() -> None:
    run = {(job.collective, job.algorithm) for size in range(1, 10) for job in all_jobs(size)}
    for collective, name in ALGORITHMS:
        for option in collectives.algorithms.info(collective, name).options:
            if option == "shards":  # these need other arrays: tests/algorithms/test_invariant.py
                continue
            given = [text for c, text in run if c == collective and text.startswith(f"{name}(")]
            assert any(f"{option}=" in text for text in given)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(jobs(range(1, 17)))
@pytest.mark.slow
def test_random_jobs_give_the_serial_result(job: Job) -> None:
    on_threads([job])


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_operator_combines_every_dtype_that_it_serves(op: str) -> None:
    serving = [collective for collective, name in CASES if name == op]
    on_threads([Job(c, None, 3, 17, dtype, op) for dtype in OPS[op] for c in serving])


@pytest.mark.parametrize("collective", MOVERS)
def test_every_dtype_can_be_moved(collective: str) -> None:
    rows = (5, 5, 5) if collective in ("gather", "all_gather") else 17
    on_threads([Job(collective, None, 3, rows, dtype) for dtype in DTYPES])


@pytest.mark.parametrize("num_rows", [3, 40_000, 400_000])
@pytest.mark.slow
def test_the_default_algorithm_gives_the_serial_result_at_every_size(num_rows: int) -> None:
    for size in (1, 2, 4, 6):
        rows = {"gather": (num_rows,) * size, "all_gather": (num_rows,) * size}
        on_threads([Job(c, None, size, rows.get(c, num_rows)) for c in COLLECTIVES])


def test_a_wrong_result_would_be_noticed() -> None:
    def lie(comm: Communicator) -> None:
        perform(_Liar(comm), Job("all_reduce", None, 2, 5))

    with pytest.raises(AssertionError, match="wanted"):
        collectives.run(lie, 2)


def test_a_changed_input_would_be_noticed() -> None:
    def scribble(comm: Communicator) -> None:
        perform(_Scribbler(comm), Job("all_reduce", None, 2, 5, is_async=True))

    with pytest.raises(AssertionError, match="has changed what it reads"):
        collectives.run(scribble, 2)


class _Scribbler:
    """A communicator that leaves its mark on an input when the call is over."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm

    def all_reduce(self, x: Any, **keywords: Any) -> Any:
        self.x, self.work = x, self.comm.all_reduce(x, **keywords)
        return self

    def wait(self) -> Any:
        result = self.work.wait()
        self.x[-1] += 1
        return result


class _Liar:
    """A communicator whose sums are off by one."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size, self.comm = comm.rank, comm.size, comm

    def all_reduce(self, x: Any, **keywords: Any) -> Any:
        return self.comm.all_reduce(x, **keywords) + 1
