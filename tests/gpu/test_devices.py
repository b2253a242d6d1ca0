"""Ranks that are processes read each other's GPU memory, in programs of `device_program.py`."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from bench.gpu import no_mpi
from bench.jobs import environment
from collectives.launch import launch
from tests.gpu.device_program import PROGRAMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(no_mpi() is not None, reason="takes an MPI"),
    pytest.mark.timeout(200),  # beyond the time limit of a launch, which then says what hung
]
PROGRAM = str(Path(__file__).with_name("device_program.py"))


def run(num_ranks: int, *names: str) -> subprocess.CompletedProcess[str]:
    command = [PROGRAM, "cupy", *names]
    return launch(num_ranks, command, timeout=150, env=environment(), capture=True)


@functools.cache
def all_programs(num_ranks: int) -> subprocess.CompletedProcess[str]:
    """One job, because its start takes longer than most programs."""
    return run(num_ranks, *PROGRAMS)


def check(done: subprocess.CompletedProcess[str], name: str, num_ranks: int) -> None:
    said = done.stdout.count(f"{name} is right on rank")
    assert said == num_ranks, f"{name} was not right on all ranks\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_right(name: str, num_ranks: int) -> None:
    check(all_programs(num_ranks), name, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_job_ends_well(num_ranks: int) -> None:
    done = all_programs(num_ranks)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_staged_is_staged() -> None:
    check(run(3, "staged_after_all"), "staged_after_all", 3)


def test_a_captured_stream_is_refused() -> None:
    check(run(2, "captured_stream"), "captured_stream", 2)
