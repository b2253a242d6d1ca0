"""CuPy arrays of ranks that are threads, sent directly or staged in host memory.

Ranks that are processes and read each other's memory are in `test_devices.py`.
"""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest

import collectives
from collectives import Communicator
from tests.inside import links_of
from tests.scenarios import on_devices as scenarios
from tests.scenarios.jobs import OPS, Job, all_jobs
from tests.scenarios.operators import ordered_jobs, perform_in_order

pytestmark = pytest.mark.gpu
ON_CUPY = sorted({d for dtypes in OPS.values() for d in dtypes} - {"longdouble", "clongdouble"})


SECONDS = 100  # for all calls of a test
MODES = ["auto", "staged"]


def to_host(x: Any) -> Any:
    return cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x


@pytest.mark.parametrize("size", [1, 3])
def test_every_algorithm_gives_the_serial_result_on_a_gpu(size: int) -> None:
    def every(comm: Communicator) -> None:
        for job in all_jobs(size):
            scenarios.perform_on_device(comm, job, cupy.asarray, to_host)
        if size > 1:
            links = links_of(comm)
            assert links.staged == frozenset(), links.why

    collectives.run(every, size, timeout=SECONDS)


def test_staged_calls_give_the_serial_result() -> None:
    def every(comm: Communicator) -> None:
        for job in all_jobs(comm.size)[::3]:
            scenarios.perform_on_device(comm, job, cupy.asarray, to_host)
        assert links_of(comm) is None

    collectives.run(every, 3, timeout=SECONDS, device="staged")


@pytest.mark.parametrize("dtype", ON_CUPY)
def test_every_dtype_is_combined_on_a_gpu(dtype: str) -> None:
    ops = [op for op, dtypes in OPS.items() if dtype in dtypes]

    def every(comm: Communicator) -> None:
        for op in ops:
            job = Job("all_reduce", None, comm.size, 1001, dtype, op)
            scenarios.perform_on_device(comm, job, cupy.asarray, to_host)

    collectives.run(every, 3, timeout=SECONDS)


@pytest.mark.parametrize("device", MODES)
@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_programs_on_a_gpu_do_what_they_do_on_the_host(scenario: Any, device: Any) -> None:
    run = collectives.run
    run(lambda comm: scenario(comm, cupy.asarray, to_host), 3, timeout=SECONDS, device=device)


def test_operators_of_the_caller_are_applied_in_rank_order() -> None:
    """They are functions in Python, for which all messages are staged."""

    def every(comm: Communicator) -> None:
        for job in ordered_jobs(comm.size):
            perform_in_order(comm, job, cupy.asarray, to_host)

    collectives.run(every, 3, timeout=SECONDS)


@pytest.mark.parametrize("device", MODES)
def test_work_on_the_callers_stream_is_waited_for(device: Any) -> None:
    def body(comm: Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 22, cupy.float32)
            for _ in range(200):
                x += 1  # still running when the call is made
            y = comm.all_reduce(x)
            y *= 2
            assert float(cupy.abs(y - 400.0 * comm.size).max()) == 0.0

    collectives.run(body, 2, timeout=SECONDS, device=device)


@pytest.mark.parametrize("device", MODES)
def test_a_call_under_way_stays_on_the_callers_stream(device: Any) -> None:
    def body(comm: Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 22, cupy.float32)
            for _ in range(200):
                x += 1
            work = comm.all_reduce(x, async_op=True)
        y = work.wait()  # here another stream is the current one
        assert float(cupy.abs(y - 200.0 * comm.size).max()) == 0.0

    collectives.run(body, 2, timeout=SECONDS, device=device)


def test_one_call_may_have_host_and_device_arrays() -> None:
    """Ranks that pass arrays of the host are noticed, and all messages of the call are staged."""

    def body(comm: Communicator) -> None:
        for turn in range(12):
            make = np.copy if (turn + comm.rank) % 4 == 0 else cupy.asarray
            y = to_host(comm.all_reduce(make(np.arange(5.0)), algorithm="ring"))
            assert y.tolist() == [comm.size * k for k in range(5)]

    collectives.run(body, 3, timeout=SECONDS)


def test_results_stay_on_the_device() -> None:
    (y,) = collectives.run(lambda comm: comm.all_reduce(cupy.asarray(np.ones(3))), 1)
    assert isinstance(y, cupy.ndarray)
