"""Arrays of a device that are staged in host memory: nothing else of them reaches an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from tests import device_scenarios as scenarios
from tests.fake_device import BACKEND, FakeDeviceArray, FakeStream, on_device, on_host
from tests.fake_driver import gpu
from tests.scenarios import all_jobs


@pytest.fixture(autouse=True)
def _no_violations() -> Iterator[None]:
    BACKEND.reset()
    gpu().reset()
    yield
    gpu().check()


def run(body: Callable[[Communicator], Any], size: int) -> list[Any]:
    return collectives.run(body, size, timeout=60, device="staged")


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
        # The way of arrays to the host and back is the same for all sizes.
        for job in all_jobs(size) if size == 3 else all_jobs(size)[size::4]:
            scenarios.perform_on_device(comm, job, on_device, on_host)

    run(every, size)


def test_staged_bytes_are_the_bytes_sent() -> None:
    def body(comm: Communicator) -> int:
        with comm.record() as ledger:
            comm.all_reduce(on_device(np.ones(1000)), algorithm="ring")
        return sum(row.bytes for row in ledger.rows())

    sent = sum(run(body, 4))
    assert sent == 2 * 3 * 8000
    assert BACKEND.bytes_to_host == BACKEND.bytes_to_device == sent


def test_device_arrays_are_combined_on_the_device() -> None:
    run(lambda comm: comm.all_reduce(on_device(np.ones(8)), algorithm="ring"), 4)
    assert BACKEND.num_combined == 4 * 3


def test_work_is_on_the_stream_that_was_current_at_the_call_whoever_continues_it() -> None:
    def body(comm: Communicator) -> None:
        x = on_device(np.ones(1000))
        with BACKEND.on_stream(FakeStream("the caller's")):
            work = comm.all_reduce(x, async_op=True)
            plan = comm.plan.all_reduce(x)
            plan.start()
        work.wait()
        plan.wait()
        plan.free()

    run(body, 3)
    assert BACKEND.streams_used == {"the caller's"}


def test_host_memory_that_changes_while_it_is_copied_makes_a_wrong_result() -> None:
    """The negative control of all tests here."""
    host, device = np.zeros(8, np.uint8), on_device(np.ones(1))
    BACKEND.to_device([(device, host)])
    host[:] = 1
    assert on_host(device).view(np.uint8).tolist() == [1] * 8


@pytest.mark.parametrize("scenario", [scenarios.mixed_program, scenarios.plan_reads_afresh])
def test_device_programs(scenario: object) -> None:
    run(lambda comm: scenario(comm, on_device, on_host), 3)


def test_one_call_with_arrays_of_two_kinds_is_refused() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(TypeError, match="x is on fake and out on numpy"):
            comm.all_reduce(on_device(np.ones(3)), out=np.ones(3))

    run(body, 2)


def test_results_are_new_device_arrays() -> None:
    (y,) = run(lambda comm: comm.all_reduce(on_device(np.ones(3))), 1)
    assert isinstance(y, FakeDeviceArray)
