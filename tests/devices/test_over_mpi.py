"""Calls on devices of ranks that are processes, over the MPI of this environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.commands.jobs import environment
from collectives.doctor import Level
from collectives.doctor.device_pointers import device_pointers
from collectives.launch import launch
from tests.devices.mpi_program import PROGRAMS
from tests.devices.program_jobs import SECONDS, ProgramJobs

pytestmark = pytest.mark.ranks(n=3)

LARGE = "large_messages_between_devices_that_are_partly_staged"
EVERY = "every_algorithm", "algorithms_as_kernels"
DIRECT = "every_algorithm_between_hosts_whose_mpi_takes_device_memory"
JOBS = ProgramJobs(str(Path(__file__).parent / "mpi_program.py"), PROGRAMS)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", sorted(PROGRAMS.by_name.keys() - {*EVERY, LARGE, DIRECT}))
def test_a_program_is_right(name: str) -> None:
    JOBS.check(name)


@pytest.mark.timeout(SECONDS)
def test_ranks_end_well() -> None:
    JOBS.check_end_of_many()


@pytest.mark.timeout(100)
@pytest.mark.ranks(n=4)
def test_messages_of_partly_staged_calls_move_while_a_rank_waits_for_its_device() -> None:
    """With Open MPI's transport that moves them only in calls of MPI."""
    JOBS.check(
        LARGE, 4, OMPI_MCA_pml="ob1", OMPI_MCA_btl="tcp,self", OMPI_MCA_btl_tcp_if_include="lo"
    )


@pytest.mark.timeout(100)
def test_mpi_sends_from_device_memory() -> None:
    """It confirms what the ledger says, where it counts messages."""
    JOBS.check(DIRECT, OMPI_MCA_pml_monitoring_enable="2")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("corrupt", "What has arrived is not what was sent: 65536 bytes from device to device"),
        ("crash", "exchange 65536 bytes from device to device memory: Rank 1 .* was killed"),
        ("hang", "the job did not end in time"),
    ],
)
def test_an_mpi_that_does_not_take_device_memory_is_found_out(
    fault: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    program = [str(Path(__file__).with_name("probe_program.py")), fault, "0"]
    found = device_pointers(program, 3 if fault == "hang" else 80)
    assert found.level is Level.WRONG and re.search(why, found.sentence)


@pytest.mark.timeout(100)
def test_the_host_time_of_calls_is_measured() -> None:
    program = ["-m", "tests.devices.host_time_program"]
    done = launch(2, program, timeout=80, env=environment(), capture=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.findall(r"^(.*): \d+\.\d us$", done.stdout, re.MULTILINE) == [
        "a plan",
        "a plan as a kernel",
        "a call on the same arrays",
        "a call on other arrays",
        "a plan on the host, with its messages",
    ]


@pytest.mark.timeout(100)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.on_open_mpi
@pytest.mark.ranks(n="num_ranks")
@pytest.mark.slow
def test_every_algorithm_is_right_over_mpi(num_ranks: int) -> None:
    JOBS.check(EVERY[0], num_ranks)


@pytest.mark.timeout(100)
def test_algorithms_as_kernels_are_right_over_mpi() -> None:
    JOBS.check(EVERY[1], 3)
