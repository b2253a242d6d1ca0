"""Failures of devices whose ranks are processes, over the MPI of this environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.launch.mpirun import find_mpirun
from tests.devices.failure_program import PROGRAMS
from tests.devices.program_jobs import NUM_RANKS, SECONDS, ProgramJobs

pytestmark = pytest.mark.ranks(n=3)

JOBS = ProgramJobs(str(Path(__file__).parent / "failure_program.py"), PROGRAMS)
KILLED = "a_rank_that_is_killed", "a_sender_that_is_killed"


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", sorted(PROGRAMS.by_name.keys() - set(KILLED)))
def test_a_failure_is_noticed_by_all(name: str) -> None:
    JOBS.check(name)


@pytest.mark.timeout(SECONDS)
def test_ranks_whose_calls_have_failed_end_well() -> None:
    JOBS.check_end_of_many()


@pytest.mark.timeout(100)
def test_devices_that_are_let_go_only_once_wait_for_a_slow_peer() -> None:
    """The negative control of a test above."""
    done = JOBS.start("a_slow_peer_that_writes_smaller_values_back", "control")
    assert done.stdout.count("is right") == NUM_RANKS


@pytest.mark.timeout(100)
def test_a_rank_that_gives_up_without_letting_the_others_know_is_noticed() -> None:
    """The negative control of a test above."""
    done = JOBS.start("a_device_that_stands_still_after_any_operation", "control")
    assert done.returncode not in (0, 124)


if find_mpirun().vendor == "openmpi":

    @pytest.mark.timeout(100)
    @pytest.mark.parametrize("name", KILLED)
    def test_a_rank_that_is_killed_is_noticed_by_all(name: str) -> None:
        """There is no time limit; the others go on without it."""
        assert JOBS.start(name, fault_tolerant=True).stdout.count("a survivor is right") == 2
