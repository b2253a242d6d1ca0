"""No wait is for ever: time limits, Ctrl-C, signals and dead ranks, over MPI.

Programs are `deadline_program.py`'s functions; rank 0 prints what it saw.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.diagnostics import hang_report
from collectives.launch import launch
from collectives.launch.job import find_mpirun

ROOT = Path(__file__).parent.parent.parent
is_open_mpi = find_mpirun().vendor == "openmpi"


def run(
    what: str, size: int, *mpi_args: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return launch(
        size,
        ["-m", "tests.launch.deadline_program", what],
        env={"PYTHONPATH": str(ROOT)} | (env or {}),
        mpi_args=mpi_args,
        timeout=60,
        capture=True,
    )


@pytest.mark.parametrize("what", ["call", "plan", "default"])
def test_a_stopped_rank_is_reported_by_the_deadline(what: str) -> None:
    done = run(f"stopped_{what}", 3)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        said = re.search(rf"rank {rank}: ([\d.]+) s: all_reduce .*for .*rank \d", done.stdout)
        assert said is not None, done.stdout + done.stderr
        assert 1.0 <= float(said[1]) < 5.0  # the limit is one second


@pytest.mark.parametrize("what", ["call", "large", "async_op", "among_others", "thread"])
def test_ctrl_c_works_inside_a_wait_without_a_limit(what: str) -> None:
    done = run(f"interrupted_{what}", 2)
    said = re.search(r"rank 0: KeyboardInterrupt after ([\d.]+) s", done.stdout)
    assert said is not None, done.stdout + done.stderr
    assert float(said[1]) < 3.0  # sent after half a second


@pytest.mark.parametrize("what", ["split", "subgroup"])
def test_a_communicator_that_is_not_made_in_time_is_given_up_by_all(what: str) -> None:
    done = run(f"made_{what}", 3)
    said = rf"rank \d: CollectiveTimeout after ([\d.]+) s, and then: .* {what} .*failed half-way"
    seconds = re.findall(said, done.stdout)
    assert len(seconds) == 3, done.stdout + done.stderr
    assert all(0.5 <= float(each) < 3.0 for each in seconds), seconds


def test_a_signal_dumps_what_every_rank_is_doing(tmp_path: Path) -> None:
    done = run("dumped", 3, env={"COLLECTIVES_FLIGHT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    said = subprocess.run(
        [sys.executable, "-m", "collectives.flight", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout
    assert "call 3 of ranks 0, 1, 2: all_reduce" in said
    assert re.search(r"rank 0: waits in round \d of \d for a message from rank", said), said
    assert re.search(r"rank 2: has not called it; its last call is 2, all_reduce, complete", said)
    assert "in load_batch" in said  # where rank 2 is, asleep


def test_signals_during_calls_neither_end_the_listener_nor_spoil_a_dump(tmp_path: Path) -> None:
    done = run("signalled", 3, env={"COLLECTIVES_FLIGHT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {k}: dumped: True" for k in range(3))]
    assert "BrokenPipeError" not in done.stderr
    dumps, faults = hang_report.read(hang_report.files(tmp_path))
    assert (list(dumps), faults) == ([0, 1, 2], [])


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
@pytest.mark.parametrize(
    "what", ["call", "plan", "large", "async_op", "split", "subgroup", "wrap", "hosts"]
)
def test_survivors_learn_who_died_and_go_on(what: str) -> None:
    done = run(f"killed_{what}", 4, "--with-ft", "ulfm")
    for rank in (0, 1, 3):
        said = re.search(rf"^rank {rank}: (\S+) s: (.*)", done.stdout, re.MULTILINE)
        assert said is not None, done.stdout + done.stderr
        assert float(said[1]) < 2.0
        assert said[2].startswith("rank 2 has failed")
    if what != "wrap":  # after an Idup that failed, Open MPI makes no communicator
        assert done.stdout.count("the survivors sum to 3 and are ranks 0, 1, 3") == 3, done.stdout


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_communicator_of_others_than_the_dead_waits_for_a_late_rank() -> None:
    done = run("outsider", 4, "--with-ft", "ulfm")
    assert done.stdout.count("the others sum to 3") == 3, done.stdout + done.stderr


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_survivor_that_does_not_come_is_not_waited_for_for_ever() -> None:
    done = run("shrink_late", 3, "--with-ft", "ulfm")
    assert "rank 0: CollectiveTimeout: shrink" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_shrink_that_interrupts_nothing_lets_the_calls_of_others_complete() -> None:
    done = run("shrink_patient", 2, "--with-ft", "ulfm")
    assert done.stdout.count("2 ranks") == 2, done.stdout + done.stderr


def test_without_fault_tolerance_shrink_says_what_it_needs() -> None:
    done = run("shrink_refused", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("CollectiveError: shrink() needs an Open MPI") == 2
