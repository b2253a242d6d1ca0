"""No wait is for ever: time limits, Ctrl-C, signals and dead ranks, over MPI.

Programs are `deadline_program.py`'s functions; ranks print what they see.  Programs that can follow
one another are in one job.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from collectives.diagnostics import hang_report
from collectives.launch import launch
from collectives.launch.job import find_mpirun

pytestmark = pytest.mark.ranks(n=6)

ROOT = Path(__file__).parent.parent.parent
is_open_mpi = find_mpirun().vendor == "openmpi"
Done = subprocess.CompletedProcess[str]


def run(
    *programs: str, size: int, env: dict[str, str] | None = None, fault_tolerant: bool = False
) -> subprocess.CompletedProcess[str]:
    return launch(
        size,
        ["-m", "tests.launch.deadline_program", *programs],
        env={"PYTHONPATH": str(ROOT)} | (env or {}),
        timeout=100,
        capture=True,
        fault_tolerant=fault_tolerant,
    )


STOPPED = ["call", "plan", "default"]
INTERRUPTED = ["call", "large", "async_op", "among_others", "thread"]
MADE = ["split", "subgroup"]
# Few in a job, because each needs one more rank.  After "wrap" Open MPI makes no communicator.
KILLING = [
    ["killed_call", "killed_plan", "killed_large"],
    ["killed_async_op", "killed_split", "killed_subgroup"],
    ["outsider", "killed_hosts", "killed_wrap"],
]
KILLED = [name.removeprefix("killed_") for job in KILLING for name in job if name != "outsider"]


@pytest.fixture(scope="module")
def stopped() -> Done:
    return run("shrink_refused", *(f"stopped_{what}" for what in STOPPED), size=3)


@pytest.fixture(scope="module")
def interrupted() -> Done:
    return run(*(f"interrupted_{what}" for what in INTERRUPTED), size=2)


@pytest.fixture(scope="module")
def made() -> Done:
    return run(*(f"made_{what}" for what in MADE), size=3)


@cache
def killed(program: str) -> Done:
    """The job of this program, with one more rank for each of its programs: the one that dies."""
    (programs,) = (job for job in KILLING if program in job)
    if programs[0] != program:
        return killed(programs[0])
    return run(*programs, size=3 + len(programs), fault_tolerant=True)


@pytest.fixture(scope="module")
def shrink() -> Done:
    return run("shrink_patient", "shrink_late", size=3, fault_tolerant=True)


@pytest.mark.parametrize("what", STOPPED)
def test_a_stopped_rank_is_reported_by_the_deadline(what: str, stopped: Done) -> None:
    assert stopped.returncode == 0, stopped.stderr
    for rank in (0, 1):
        words = rf"stopped_{what}: rank {rank}: ([\d.]+) s: all_reduce .*for .*rank \d"
        said = re.search(words, stopped.stdout)
        assert said is not None, stopped.stdout + stopped.stderr
        assert 1.0 <= float(said[1]) < 5.0  # the limit is one second


@pytest.mark.parametrize("what", INTERRUPTED)
def test_ctrl_c_works_inside_a_wait_without_a_limit(what: str, interrupted: Done) -> None:
    words = rf"interrupted_{what}: rank 0: KeyboardInterrupt after ([\d.]+) s"
    said = re.search(words, interrupted.stdout)
    assert said is not None, interrupted.stdout + interrupted.stderr
    assert float(said[1]) < 3.0  # sent after half a second


@pytest.mark.parametrize("what", MADE)
def test_a_communicator_that_is_not_made_in_time_is_given_up_by_all(what: str, made: Done) -> None:
    said = rf"rank \d: CollectiveTimeout after ([\d.]+) s, and then: .* {what} .*failed half-way"
    seconds = re.findall(f"made_{what}: {said}", made.stdout)
    assert len(seconds) == 3, made.stdout + made.stderr
    assert all(0.5 <= float(each) < 3.0 for each in seconds), seconds


def test_a_signal_dumps_what_every_rank_is_doing(tmp_path: Path) -> None:
    done = run("dumped", size=3, env={"COLLECTIVES_FLIGHT": str(tmp_path)})
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
    done = run("signalled", size=3, env={"COLLECTIVES_FLIGHT": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == [
        "",
        *(f"signalled: rank {k}: dumped: True" for k in range(3)),
    ]
    assert "BrokenPipeError" not in done.stderr
    dumps, faults = hang_report.read(hang_report.files(tmp_path))
    assert (list(dumps), faults) == ([0, 1, 2], [])


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
@pytest.mark.parametrize("what", KILLED)
def test_survivors_learn_who_died_and_go_on(what: str) -> None:
    done = killed(f"killed_{what}")
    lines = re.findall(rf"^killed_{what}: (.*)", done.stdout, re.MULTILINE)
    for rank in (0, 1, 3):
        said = re.search(rf"^rank {rank}: (\S+) s: (.*)", "\n".join(lines), re.MULTILINE)
        assert said is not None, done.stdout + done.stderr
        assert float(said[1]) < 2.0
        assert said[2].startswith("rank 2 has failed")
    if what != "wrap":  # after an Idup that failed, Open MPI makes no communicator
        sums = [line for line in lines if "the survivors sum to 3 and are ranks 0, 1, 3" in line]
        assert len(sums) == 3, done.stdout + done.stderr


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_communicator_of_others_than_the_dead_waits_for_a_late_rank() -> None:
    done = killed("outsider")
    assert done.stdout.count("the others sum to 3") == 3, done.stdout + done.stderr


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_survivor_that_does_not_come_is_not_waited_for_for_ever(shrink: Done) -> None:
    assert "rank 0: CollectiveTimeout: shrink" in shrink.stdout, shrink.stdout + shrink.stderr


@pytest.mark.skipif(not is_open_mpi, reason="fault tolerance is Open MPI's alone")
def test_a_shrink_that_interrupts_nothing_lets_the_calls_of_others_complete(shrink: Done) -> None:
    assert shrink.stdout.count("3 ranks") == 3, shrink.stdout + shrink.stderr


def test_without_fault_tolerance_shrink_says_what_it_needs(stopped: Done) -> None:
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.count("CollectiveError: shrink() needs an Open MPI") == 3
