"""The MPI tier, under mpirun: one launch per number of ranks, each with a time limit.

A new file in `tests/mpi` runs in all of them.

By hand: `mpirun -n 4 python -m pytest --with-mpi tests/mpi`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from collectives.launch import TIMED_OUT, launch

# Beyond the time limit of the launch itself, which then says what hung.
pytestmark = [pytest.mark.timeout(630), pytest.mark.ranks(n=3)]

ROOT = Path(__file__).parent.parent
SUITE = ["-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", "--color=no"]


def run_suite(
    num_ranks: int,
    *what: str,
    promised: int | None = None,
    timeout: float = 600,
    more_env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {"COLLECTIVES_TEST_RANKS": str(promised or num_ranks), "PYTHONPATH": paths}
    env |= more_env or {}
    return launch(num_ranks, [*SUITE, *what], timeout=timeout, env=env, capture=True)


def check_suite(
    num_ranks: int,
    folder: str,
    without: Collection[str] = (),
    more_env: Mapping[str, str] | None = None,
) -> None:
    """All tests in a folder, without some files, must pass, and none be skipped."""
    place = ROOT / "tests" / folder
    left_out = [place / name for name in without]
    assert all(path.exists() for path in left_out)
    ignored = [f"--ignore={path}" for path in left_out]
    done = run_suite(num_ranks, str(place), *ignored, more_env=more_env)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    summary = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)  # nothing skipped
    assert summary is not None and int(summary[1]) > 50, output


# What these test is the same on any number of ranks above two.
ON_UP_TO_FOUR_RANKS = [
    "test_repeated_calls.py",
    "test_errors.py",
    "test_fuzz_arguments.py",
    "test_intracomm.py",
    "test_loading.py",
    "test_progress.py",
    "test_threads.py",
]


# MPICH's ranks do not yield: more of them than cores take twice the time of Open MPI's.
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(4, marks=pytest.mark.on_mpich),
        *(pytest.param(num_ranks, marks=pytest.mark.on_open_mpi) for num_ranks in (8, 5, 3, 2, 1)),
    ],
)
@pytest.mark.ranks(n="num_ranks")
def test_every_mpi_test_passes(num_ranks: int) -> None:
    check_suite(num_ranks, "mpi", without=ON_UP_TO_FOUR_RANKS if num_ranks > 4 else [])


# All communicators of these are made with `check=`, so that the variable changes nothing.
SAY_WHETHER_TO_CHECK = ["test_repeated_calls.py", "test_checked.py", "test_threads.py"]


@pytest.mark.on_open_mpi
def test_checked_mode_changes_no_result() -> None:
    checked = {"COLLECTIVES_CHECK": "1"}
    check_suite(3, "mpi", without=SAY_WHETHER_TO_CHECK, more_env=checked)


INTERPRETED = ["test_programs.py", "test_collectives.py", "test_checked.py", "test_operators.py"]


@pytest.mark.on_open_mpi
def test_without_numba_programs_are_interpreted_with_the_same_results() -> None:
    files = [str(ROOT / "tests" / "mpi" / name) for name in INTERPRETED]
    done = run_suite(3, *files, more_env={"NUMBA_DISABLE_JIT": "1"})
    output = f"{done.stdout}\n{done.stderr}"
    summary = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and summary is not None and int(summary[1]) > 100, output
    says = "import collectives, numpy; c = collectives.world(); x = numpy.ones(3); "
    says += "print(c.explain('all_reduce', x).run_by, c.all_reduce(x)[0])"
    program = ["-c", says]
    env = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    alone = subprocess.run(
        [sys.executable, *program], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert alone.stdout == "the interpreter: NUMBA_DISABLE_JIT is set 1.0\n"


FAILS_ON_ONE_RANK = """
import pytest
from tests.mpi.conftest import *
pytestmark = pytest.mark.mpi

def test_one_rank_fails(world):
    assert world.rank != world.size - 1, "the last rank objects"

def test_the_ranks_are_still_in_step(world):
    world.barrier()

@pytest.fixture
def broken(world):
    if world.rank == 0:
        raise RuntimeError("broken on rank 0")

def test_a_broken_fixture(broken):
    pass

def test_the_ranks_are_in_step_again(world):
    world.barrier()
"""


@pytest.fixture
def one_file(tmp_path: Path) -> Path:
    path = tmp_path / "test_one_rank.py"
    path.write_text(FAILS_ON_ONE_RANK)
    (tmp_path / "conftest.py").write_text("from tests.mpi.conftest import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return path


def test_a_failure_on_one_rank_fails_the_test_and_keeps_the_ranks_in_step(one_file: Path) -> None:
    done = run_suite(3, str(one_file), "--rootdir", str(one_file.parent))
    assert done.returncode not in (0, TIMED_OUT)
    assert "1 failed, 2 passed, 1 error" in done.stdout
    assert "the last rank objects" in done.stdout
    assert "broken on rank 0" in done.stdout


def test_a_world_of_another_size_is_an_error(one_file: Path) -> None:
    done = run_suite(2, str(one_file), "--rootdir", str(one_file.parent), promised=3)
    assert done.returncode not in (0, TIMED_OUT)
    assert "started as 2 ranks instead of 3" in done.stdout + done.stderr


def test_a_hanging_test_is_ended_by_the_time_limit(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = tmp_path / "test_hang.py"
    path.write_text(
        "import collectives, numpy, pytest\n"
        "@pytest.mark.mpi\n"
        "@pytest.mark.timeout(3, method='thread')\n"
        "def test_hang():\n"
        "    comm = collectives.world()\n"
        "    comm.rank or comm.recv(numpy.empty(1), 1)\n"
    )
    done = run_suite(2, str(path), "--rootdir", str(tmp_path), timeout=60)
    assert done.returncode not in (0, TIMED_OUT)
    assert "Timeout" in done.stdout + done.stderr
