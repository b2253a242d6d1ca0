"""Ranks that run at the same time run each call as one kernel, in programs of `device_program.py`.

That is so where they have a GPU each, or where MPS runs:
`python -m bench.gpu.mps 200 -m pytest FILE`.
"""

from __future__ import annotations

import functools
import os
from functools import partial

import pytest

from bench.gpu import mps
from bench.gpu.__main__ import no_mpi
from tests.gpu.device_program import PROGRAMS
from tests.gpu.test_devices import Job, check, jobs_of, run

PLACE = "kernels on cupy"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI"),
    pytest.mark.timeout(230),
]


def skip_unless_together(num_ranks: int) -> None:
    """Skip the test if ranks that share a GPU take turns."""
    import cupy

    num_gpus = cupy.cuda.runtime.getDeviceCount()
    if num_gpus < num_ranks and mps.VARIABLES[0] not in os.environ:
        pytest.skip(f"{num_ranks} ranks take turns on {num_gpus} GPU(s) without MPS")


@functools.cache
def all_programs(num_ranks: int) -> dict[str, Job]:
    return jobs_of(num_ranks, PROGRAMS, partial(run, num_ranks, place=PLACE))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(name: str, num_ranks: int) -> None:
    skip_unless_together(num_ranks)
    jobs = all_programs(num_ranks)
    assert name in jobs, "no time was left, after others had failed"
    check(jobs[name], name, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_stream_that_stands_still_ends_the_wait_of_the_others(num_ranks: int) -> None:
    skip_unless_together(num_ranks)
    check(run(num_ranks, ["held_stream"], PLACE), "held_stream", num_ranks)
