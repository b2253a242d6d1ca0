"""Device arrays are staged through host memory, and nothing else of them reaches an engine."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import Communicator
from tests import device_scenarios as scenarios
from tests.fake_device import BACKEND, FakeDeviceArray, on_device, on_host
from tests.scenarios import all_jobs


@pytest.fixture(autouse=True)
def _counts_from_zero() -> None:
    BACKEND.reset()


def test_the_host_cannot_look_into_a_fake_device_array() -> None:
    x = on_device(np.ones(3))
    with pytest.raises(TypeError):
        memoryview(x)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        np.add(x, 1.0)
    with pytest.raises(TypeError):
        iter(x)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_algorithm_on_device_arrays(size: int) -> None:
    def every(comm: Communicator) -> None:
        for job in all_jobs(size):
            scenarios.perform_on_device(comm, job, on_device, on_host)

    collectives.run(every, size, timeout=60)


def test_staged_bytes_are_the_bytes_sent() -> None:
    def body(comm: Communicator) -> int:
        with comm.record() as ledger:
            comm.all_reduce(on_device(np.ones(1000)), algorithm="ring")
        return sum(row.bytes for row in ledger.rows())

    sent = sum(collectives.run(body, 4))
    assert sent == 2 * 3 * 8000
    assert BACKEND.bytes_to_host == BACKEND.bytes_to_device == sent


def test_device_arrays_are_combined_on_the_device() -> None:
    collectives.run(lambda comm: comm.all_reduce(on_device(np.ones(8)), algorithm="ring"), 4)
    assert BACKEND.num_combined == 4 * 3


@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_device_programs(scenario: object) -> None:
    collectives.run(lambda comm: scenario(comm, on_device, on_host), 3)


def test_one_call_with_arrays_of_two_kinds_is_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="x is on fake and out on numpy"):
            comm.all_reduce(on_device(np.ones(3)), out=np.ones(3))

    collectives.run(body, 2)


def test_results_are_new_device_arrays() -> None:
    (y,) = collectives.run(lambda comm: comm.all_reduce(on_device(np.ones(3))), 1)
    assert isinstance(y, FakeDeviceArray)
