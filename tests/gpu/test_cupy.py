"""CuPy arrays: every algorithm, the caller's stream, host and device in one program, over MPI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy
import numpy as np
import pytest

import collectives
from bench.gpu import no_mpi
from bench.jobs import environment
from collectives import Communicator
from collectives.launch import launch
from tests import device_scenarios as scenarios
from tests.operator_scenarios import ordered_jobs, perform_in_order
from tests.scenarios import OPS, Job, all_jobs

pytestmark = pytest.mark.gpu
ON_CUPY = sorted({d for dtypes in OPS.values() for d in dtypes} - {"longdouble", "clongdouble"})


def to_host(x: Any) -> Any:
    return cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_algorithm(size: int) -> None:
    def every(comm: Communicator) -> None:
        for job in all_jobs(size):
            scenarios.perform_on_device(comm, job, cupy.asarray, to_host)

    collectives.run(every, size)


@pytest.mark.parametrize("dtype", ON_CUPY)
def test_every_dtype(dtype: str) -> None:
    ops = [op for op, dtypes in OPS.items() if dtype in dtypes]

    def every(comm: Communicator) -> None:
        for op in ops:
            job = Job("all_reduce", None, comm.size, 1001, dtype, op)
            scenarios.perform_on_device(comm, job, cupy.asarray, to_host)

    collectives.run(every, 3)


@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_programs(scenario: Any) -> None:
    collectives.run(lambda comm: scenario(comm, cupy.asarray, to_host), 3)


def test_operators_of_the_callers() -> None:
    def every(comm: Communicator) -> None:
        for job in ordered_jobs(comm.size):
            perform_in_order(comm, job, cupy.asarray, to_host)

    collectives.run(every, 3)


def test_work_on_the_callers_stream_is_waited_for() -> None:
    def body(comm: Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 22, cupy.float32)
            for _ in range(200):
                x += 1  # still running when the call is made
            y = comm.all_reduce(x)
            y *= 2
            assert float(cupy.abs(y - 400.0 * comm.size).max()) == 0.0

    collectives.run(body, 2)


def test_a_call_under_way_stays_on_the_callers_stream() -> None:
    def body(comm: Communicator) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 22, cupy.float32)
            for _ in range(200):
                x += 1
            work = comm.all_reduce(x, async_op=True)
        y = work.wait()  # here another stream is the current one
        assert float(cupy.abs(y - 200.0 * comm.size).max()) == 0.0

    collectives.run(body, 2)


@pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI")
def test_over_mpi(tmp_path: Path) -> None:
    script = tmp_path / "on_gpu.py"
    script.write_text(
        "import cupy, numpy, collectives\n"
        "from tests.gpu.test_cupy import to_host\n"
        "from tests.scenarios import all_jobs\n"
        "from tests import device_scenarios as s\n"
        "comm = collectives.world()\n"
        "for job in all_jobs(comm.size): s.perform_on_device(comm, job, cupy.asarray, to_host)\n"
        "s.mixed_program(comm, cupy.asarray, to_host)\n"
        "s.plan_reads_afresh(comm, cupy.asarray, to_host)\n"
        "print('served', comm.rank)\n"
    )
    done = launch(3, [str(script)], timeout=100, env=environment(), capture=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("served") == 3


def test_results_stay_on_the_device() -> None:
    (y,) = collectives.run(lambda comm: comm.all_reduce(cupy.asarray(np.ones(3))), 1)
    assert isinstance(y, cupy.ndarray)
