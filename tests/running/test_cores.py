"""Tests that start no job have one core, and jobs have all."""

from __future__ import annotations

import os

import pytest

from tests.running.cores import number_of

HAS_AFFINITY = hasattr(os, "sched_setaffinity")


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system gives no process cores of its own")
def test_a_test_without_a_job_has_one_core() -> None:
    assert len(os.sched_getaffinity(0)) == 1


@pytest.mark.skipif(not HAS_AFFINITY, reason="this system gives no process cores of its own")
@pytest.mark.ranks(n=1)
def test_a_test_with_a_job_has_the_cores_of_the_process_that_started_the_tests() -> None:
    assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid())


def test_workers_are_numbered_and_a_process_alone_is_the_first() -> None:
    assert [number_of(worker) for worker in ("", "gw0", "gw11")] == [0, 0, 11]
