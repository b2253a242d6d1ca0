"""mpi4py's own test suite passes on our communicators, and a fall back to MPI's is noticed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from collectives.launch import TIMED_OUT, launch

pytestmark = [pytest.mark.timeout(660), pytest.mark.ranks(n=3)]

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "mpi4py_compat" / "drop_in_program.py")
WORLD_PROGRAM = str(ROOT / "tests" / "mpi4py_compat" / "world_program.py")
# The files of the suite, and how many tests are in each.
NUM_TESTS = {
    "test_cco_buf": 70,
    "test_cco_vec": 62,
    "test_cco_obj": 40,
    "test_cco_nb_buf": 70,
    "test_cco_nb_vec": 62,
    "test_cco_pr_buf": 70,
    "test_cco_pr_vec": 62,
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests in the source distribution of the mpi4py that is installed, by pip."""
    place = tmp_path_factory.mktemp("mpi4py")
    version = importlib.metadata.version("mpi4py")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "mpi4py"]
    done = subprocess.run(
        [*pip, "--quiet", "--dest", str(place), f"mpi4py=={version}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    archives = list(place.glob("mpi4py-*.tar.gz"))
    if done.returncode or not archives:
        pytest.fail(
            f"pip could not download the source distribution of mpi4py {version}, "
            f"whose tests are to run here:\n{done.stdout}{done.stderr}",
            pytrace=False,
        )
    with tarfile.open(archives[0]) as archive:
        archive.extractall(place, filter="data")
    return next(place.glob("mpi4py-*/test"))


def run(
    suite: Path, num_ranks: int, *options: str, program: str = PROGRAM, drop_in: bool = False
) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": os.fspath(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [program, os.fspath(suite), *options]
    return launch(num_ranks, command, timeout=600, env=env, capture=True, drop_in=drop_in)


# Those of one block are recorded, in each of the three ways: this goes another path.
RECORDED = ["test_cco_buf", "test_cco_nb_buf", "test_cco_pr_buf"]


# Calls that block, begin at once, or are persistent; blocks of the same or of other sizes: .ci/run
# runs all pairs on both MPIs.
MARKS = {
    "test_cco_buf": pytest.mark.on_open_mpi,
    "test_cco_vec": pytest.mark.on_mpich,
    "test_cco_nb_buf": pytest.mark.on_open_mpi,
    "test_cco_nb_vec": pytest.mark.on_mpich,
    "test_cco_pr_buf": pytest.mark.on_mpich,
    "test_cco_pr_vec": pytest.mark.on_open_mpi,
}


@pytest.mark.parametrize(
    "module", [pytest.param(name, marks=MARKS.get(name, ())) for name in NUM_TESTS]
)
def test_mpi4pys_own_suite_passes_on_ours(suite: Path, module: str) -> None:
    more = ["--record"] if module in RECORDED else []
    check(run(suite, 3, "--modules", module, *more), NUM_TESTS[module])


def check(done: subprocess.CompletedProcess[str], num_tests: int) -> None:
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    assert f"{num_tests} passed, 0 failed, 0 skipped\nmpi4py's suite passes" in done.stdout, output


@pytest.mark.on_open_mpi
def test_a_call_that_falls_back_to_mpi_is_noticed(suite: Path) -> None:
    done = run(suite, 2, "--modules", "test_cco_obj", "--missing", "allgather")
    assert done.returncode not in (0, TIMED_OUT)
    assert "allgather fell back to MPI" in done.stderr
    assert "mpi4py's suite FAILS" in done.stdout


@pytest.mark.on_open_mpi
def test_a_call_that_does_the_wrong_thing_is_noticed(suite: Path) -> None:
    done = run(suite, 2, "--modules", "test_cco_buf", "--broken", "Bcast")
    assert done.returncode not in (0, TIMED_OUT)
    assert "mpi4py's suite FAILS" in done.stdout


def test_mpi4pys_other_tests_pass_where_comm_world_is_replaced(suite: Path) -> None:
    done = run(suite, 3, program=WORLD_PROGRAM, drop_in=True)
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) > 900, output
    assert "mpi4py's other tests pass" in done.stdout


@pytest.mark.on_open_mpi
def test_a_world_that_was_not_replaced_is_noticed(suite: Path) -> None:
    done = run(suite, 1, program=WORLD_PROGRAM)
    assert done.returncode == 1
    assert "COMM_WORLD was not replaced" in done.stderr
