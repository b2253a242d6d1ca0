"""What a test leaves behind is noticed, and laid at its door: of threads, and over MPI."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import run

import pytest

from collectives.launch import TIMED_OUT
from tests.test_mpi_tier import ROOT, SUITE, run_suite

ON_THREADS = """
import numpy as np, pytest, collectives
from tests.fakes.device import on_device
kept = []

def leaves_nothing(comm):
    comm.all_reduce(np.ones(3)), comm.all_reduce(on_device(np.ones(3)))

def leaves_a_message(comm):
    comm.send(np.ones(3), 1 - comm.rank)

def leaves_a_plan_under_way(comm):
    if comm.rank == 0:
        comm.recv(np.empty(1), 1, async_op=True)

def leaves_page_locked_memory(comm):
    kept.append(comm.plan.all_reduce(on_device(np.ones(3))))
    kept[-1].run()

def leaves_tags_out_of_step(comm):
    comm._session.numbering.next_number() if comm.rank else None

@pytest.mark.parametrize("function", [
    leaves_nothing, leaves_a_message, leaves_a_plan_under_way,
    leaves_page_locked_memory, leaves_tags_out_of_step, leaves_nothing,
])
def test(function):
    collectives.run(function, 2, device="staged")
"""
LEFT_ON_THREADS = {
    "leaves_a_message": r"1 message\(s\) from rank 0 to rank 1 with tag 0\n"
    r"1 message\(s\) from rank 1 to rank 0 with tag 0",
    "leaves_a_plan_under_way": r"a call under way: recv \(point_to_point\), call p1\n"
    "a receive: a message from rank 1",
    "leaves_page_locked_memory": r"\d+ bytes of page-locked memory",
    "leaves_tags_out_of_step": "tags out of step: calls counted by each rank: {.*: 0.*: 1.*}",
}

OVER_MPI = """
import numpy as np, pytest, collectives
pytestmark = pytest.mark.mpi
kept = []

def leaves_nothing(comm):
    comm.all_reduce(np.ones(3)), comm.split(0).free()

def leaves_a_message(comm):
    if comm.rank == 0:
        comm.send(np.ones(3), 1, tag=5)

def leaves_a_request(comm):
    if comm.rank == 1:
        kept.append(comm.recv(np.empty(1), 0, tag=6, async_op=True))

def leaves_a_communicator(comm):
    comm.split(0)

def leaves_tags_out_of_step(comm):
    comm._session.numbering.next_number() if comm.rank else None

@pytest.mark.parametrize("function", [
    leaves_nothing, leaves_a_message, leaves_a_request,
    leaves_a_communicator, leaves_nothing, leaves_tags_out_of_step,
])
def test(world, function):
    function(world)
"""
LEFT_OVER_MPI = {
    "leaves_a_message": "rank 1: .* left\na message of 24 bytes from rank 0 with tag 5",
    "leaves_a_request": r"rank 1: .* left\na call under way: recv \(point_to_point\), call p\d\n"
    "a request: a receive from rank 0",
    "leaves_a_communicator": r"left\na communicator of ranks \[0, 1\]",
    "leaves_tags_out_of_step": r"tags out of step: calls counted by each rank: {0: (\d), 1: (?!\1)",
}


def attributed(output: str, left: dict[str, str], num_passed: int) -> None:
    """Each test has its own error and no other has any."""
    assert f"{num_passed} passed, {len(left)} errors" in output, output
    for name, what in left.items():
        report = re.search(
            rf"ERROR at teardown of test\[{name}\] _+\n(.*?)\n(_____|=====)", output, re.DOTALL
        )
        assert report is not None and re.search(what, report[1]), (name, report and report[1])


def written(directory: Path, program: str, *conftests: str) -> str:
    path = directory / "test_leaves.py"
    path.write_text(program)
    (directory / "conftest.py").write_text("".join(f"from {c} import *\n" for c in conftests))
    (directory / "pytest.ini").write_text("[pytest]\n")
    return str(path)


@pytest.mark.slow
def test_what_is_left_on_threads_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, ON_THREADS, "tests.conftest")
    command = [sys.executable, *SUITE, path, "--rootdir", str(tmp_path)]
    done = run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    attributed(done.stdout, LEFT_ON_THREADS, num_passed=6)


@pytest.mark.timeout(150)
@pytest.mark.ranks(n=2)
@pytest.mark.slow
def test_what_is_left_over_mpi_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, OVER_MPI, "tests.mpi.conftest")
    done = run_suite(2, path, "--rootdir", str(tmp_path), timeout=120)
    assert done.returncode not in (0, TIMED_OUT)
    attributed(done.stdout, LEFT_OVER_MPI, num_passed=6)
