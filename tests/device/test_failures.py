"""Failures of devices whose ranks are processes, over the MPI of this environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.jobs import environment
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun
from tests.device.failure_program import PROGRAMS

PROGRAM = str(Path(__file__).parent / "failure_program.py")
KILLED = "a_rank_that_is_killed", "a_sender_that_is_killed"


def run(*arguments: str, fault_tolerant: bool = False) -> Any:
    words, env = [PROGRAM, *arguments], environment()
    return launch(3, words, timeout=80, env=env, capture=True, fault_tolerant=fault_tolerant)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - set(KILLED)))
def test_a_failure_is_noticed_by_all(name: str) -> None:
    done = run(name)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("is right") == 3


@pytest.mark.timeout(100)
def test_devices_that_are_let_go_only_once_wait_for_a_slow_peer() -> None:
    """The negative control of a test above."""
    done = run("a_slow_peer_that_writes_smaller_values_back", "control")
    assert done.stdout.count("is right") == 3


@pytest.mark.timeout(100)
def test_a_rank_that_gives_up_without_letting_the_others_know_is_noticed() -> None:
    """The negative control of a test above."""
    done = run("a_device_that_stands_still_after_any_operation", "control")
    assert done.returncode not in (0, 124)


if find_mpirun().vendor == "openmpi":

    @pytest.mark.timeout(100)
    @pytest.mark.parametrize("name", KILLED)
    def test_a_rank_that_is_killed_is_noticed_by_all(name: str) -> None:
        """There is no time limit; the others go on without it."""
        assert run(name, fault_tolerant=True).stdout.count("a survivor is right") == 2
