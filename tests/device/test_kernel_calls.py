"""Calls that are one kernel on each rank, whose blocks go on in orders drawn by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.devices import kernel_table
from tests import device_scenarios as scenarios
from tests.device.kernels_of_threads import run_as_kernels
from tests.fake_device import BACKEND, FakeDeviceArray, on_device, on_host
from tests.fake_driver import gpu
from tests.scenarios import COLLECTIVES, all_jobs, some_jobs

SIZES = 2, 3, 4


@pytest.fixture(autouse=True)
def _kernels(new_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    run_as_kernels(monkeypatch)
    yield
    _KEPT.clear()


def run(body: Callable[[Communicator], Any], size: int, **options: Any) -> list[Any]:
    return collectives.run(body, size, timeout=100, **options)


def kept(x: np.ndarray) -> FakeDeviceArray:
    """An array that stays, because a peer's host may enqueue what reads it later.

    The fake GPU cannot know that the memory of ranks that are threads is not used again before.
    """
    _KEPT.append(on_device(x))
    return _KEPT[-1]


_KEPT: list[FakeDeviceArray] = []


def num_launches() -> int:
    return gpu().num_calls["cuLaunchCooperativeKernel"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_algorithm(collective: str, size: int) -> None:
    every = some_jobs(collective, SIZES, lambda job: [job.algorithm])
    jobs = [job for job in every if job.size == size]

    def body(comm: Communicator) -> None:
        for job in jobs:
            scenarios.perform_on_device(comm, job, kept, on_host)

    run(body, size)
    assert num_launches() >= len(jobs)
    assert BACKEND.bytes_to_host == 0
