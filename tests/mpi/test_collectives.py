"""Every algorithm gives what a serial computation gives, over MPI."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
from collectives import Communicator
from tests.scenarios.jobs import (
    ALGORITHMS,
    COLLECTIVES,
    DTYPES,
    MOVERS,
    OPS,
    Job,
    jobs_of,
    perform,
    random_rows,
)
from tests.scenarios.random_jobs import jobs

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("collective", "algorithm"), ALGORITHMS)
def test_every_algorithm_gives_the_serial_result(
    world: Communicator, collective: str, algorithm: str
) -> None:
    jobs = jobs_of(collective, algorithm, world.size)
    serves = collectives.algorithms.info(collective, algorithm).serves(world.size)
    assert any(job.algorithm == algorithm for job in jobs) == serves
    for job in jobs:
        perform(world, job)


def test_an_algorithm_that_cannot_serve_this_size_is_refused(world: Communicator) -> None:
    refused = [
        (collective, algorithm)
        for collective, algorithm in ALGORITHMS
        if not collectives.algorithms.info(collective, algorithm).serves(world.size)
    ]
    assert bool(refused) == (world.size not in (2, 4, 8))
    for collective, algorithm in refused:
        ranks = collectives.algorithms.info(collective, algorithm).ranks_in_words
        rows = random_rows(collective, world.size, 12, is_even=True)
        sentence = re.escape(f"serves {ranks} only, not {world.size}")
        with pytest.raises(ValueError, match=sentence):
            perform(world, Job(collective, algorithm, world.size, rows))


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_operator_combines_every_dtype(world: Communicator, op: str) -> None:
    """All on up to three ranks; on more, where they are combined by the same code, some."""
    dtypes = OPS[op] if world.size <= 3 else OPS[op][world.size % 3 :: 3]
    for dtype in dtypes:
        perform(world, Job("all_reduce", None, world.size, 33, dtype, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_can_be_moved(world: Communicator, dtype: str) -> None:
    for collective in MOVERS:
        rows = random_rows(collective, world.size, 11, is_even=False)
        perform(world, Job(collective, None, world.size, rows, dtype, root=world.size - 1))


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("num_rows", [40_000, 1_000_001])
def test_large_arrays_give_the_serial_result(
    world: Communicator, collective: str, num_rows: int
) -> None:
    rows = random_rows(collective, world.size, num_rows // world.size, is_even=True)
    perform(world, Job(collective, None, world.size, rows))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_random_jobs_give_the_serial_result(world: Communicator, data: st.DataObject) -> None:
    perform(world, data.draw(jobs([world.size])))
