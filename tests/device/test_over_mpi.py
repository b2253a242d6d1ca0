"""Calls on devices of ranks that are processes, over the MPI of this environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.jobs import environment
from collectives.launch import launch
from tests.device.mpi_program import PROGRAMS

LARGE = "large_messages_between_devices_that_are_partly_staged"
PROGRAM = str(Path(__file__).parent / "mpi_program.py")


def run(name: str, num_ranks: int, **variables: str) -> None:
    env = environment() | variables
    done = launch(num_ranks, [PROGRAM, name], timeout=80, env=env, capture=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("is right") == num_ranks


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"every_algorithm", LARGE}))
def test_a_program_is_right(name: str) -> None:
    run(name, 3)


@pytest.mark.timeout(100)
def test_messages_of_partly_staged_calls_move_while_a_rank_waits_for_its_device() -> None:
    """With Open MPI's transport that moves them only in calls of MPI."""
    run(LARGE, 4, OMPI_MCA_pml="ob1", OMPI_MCA_btl="tcp,self", OMPI_MCA_btl_tcp_if_include="lo")


@pytest.mark.timeout(100)
def test_the_host_time_of_calls_is_measured() -> None:
    program = ["-m", "tests.device.host_time_program"]
    done = launch(2, program, timeout=80, env=environment(), capture=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.findall(r"^(.*): \d+\.\d us$", done.stdout, re.MULTILINE) == [
        "a plan",
        "a call on the same arrays",
        "a call on other arrays",
        "a plan on the host, with its messages",
    ]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_algorithm(num_ranks: int) -> None:
    run("every_algorithm", num_ranks)
