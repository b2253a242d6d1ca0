"""The doctor says what works, what is slow and what is wrong, and its exit status follows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from collectives.doctor import Finding, Level
from collectives.doctor.__main__ import COMMAND, report
from collectives.doctor.environment import other_launcher, shared_memory
from collectives.doctor.findings import good, slow, wrong
from collectives.doctor.job import alike, link, placed, started, used_gpus
from collectives.launch.mpirun import find_mpirun
from collectives.schedule import Topology

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "collectives.doctor"]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def test_by_itself_the_doctor_looks_at_the_environment_and_runs_a_job() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"its launcher is {find_mpirun().path}." in done.stdout
    assert "2 rank(s) on 1 host(s): 1x2." in done.stdout
    assert "Rank 0 to rank 1 (same host):" in done.stdout
    assert "ok     A job of two ranks has run." in done.stdout


def test_ranks_that_are_all_alone_are_wrong() -> None:
    done = doctor(SLURM_STEP_NUM_TASKS="4")
    assert done.returncode == 1, done.stderr
    assert "WRONG  The launcher started 4 ranks, but MPI has a world of 1" in done.stdout
    assert "srun needs --mpi=pmix for Open MPI" in done.stdout


def test_the_doctor_knows_what_started_it() -> None:
    assert started({}) is None
    assert started({"SLURM_NTASKS": "4"}) is None  # a shell of salloc, not a task
    assert started({"PMI_SIZE": "many"}) is None
    assert started({"PMI_SIZE": "3"}) == started({"OMPI_COMM_WORLD_SIZE": "3"}) == 3


def levels(found: Iterable[Finding]) -> list[Level]:
    return [finding.level for finding in found]


def test_another_launcher_on_path_is_pointed_out(tmp_path: Path) -> None:
    other = tmp_path / "mpirun"
    other.touch()
    assert levels(other_launcher(find_mpirun(), str(other))) == [Level.SLOW]
    assert levels(other_launcher(find_mpirun(), find_mpirun().path)) == []
    assert levels(other_launcher(find_mpirun(), None)) == []


def test_little_shared_memory_is_slow() -> None:
    assert levels(shared_memory(64 * 2**20)) == [Level.SLOW]
    assert levels(shared_memory(2**30)) == [Level.GOOD]


FACTS = {"library": "1", "MPI library": "Open MPI v5", "NumPy": "2.0.0", "cores": 2}


def test_different_versions_are_wrong() -> None:
    assert levels(alike([FACTS, FACTS])) == [Level.GOOD]
    different, _ = alike([FACTS, FACTS, {**FACTS, "NumPy": "2.1.0"}])
    assert different.level is Level.WRONG
    assert "rank 0 has 2.0.0; rank 2 has 2.1.0" in different.sentence


def test_more_ranks_than_cores_are_slow() -> None:
    assert levels(placed(Topology("aab"), [2, 2, 2])) == [Level.GOOD]
    _, crowded = placed(Topology("aaab"), [2, 2, 2, 2])
    assert crowded.level is Level.SLOW
    assert "1 host(s) have more ranks than cores (3 ranks on 2 core(s))" in crowded.sentence


def test_a_slow_link_within_a_host_is_pointed_out() -> None:
    assert link("same host", 1, 1e-6, 1e-4).level is Level.GOOD
    assert link("same host", 1, 1e-3, 1e-2).level is Level.SLOW
    assert link("other host", 1, 1e-3, 1e-2).level is Level.GOOD


@pytest.mark.parametrize(
    ("found", "status", "last"),
    [
        ([good("a")], 0, "It would work."),
        ([good("a"), slow("b")], 0, "It would work, but not as fast as it could: see slow."),
        ([slow("b"), wrong("c")], 1, "It would not work: see WRONG."),
    ],
)
def test_the_verdict_and_the_status_follow_from_the_findings(
    found: list[Finding], status: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(found, COMMAND.parser().parse_args([])) == status
    assert capsys.readouterr().out.splitlines()[-1] == last


def gpus(*uuids: str) -> list[dict[str, object]]:
    return [{"number": k, "of": 2, "name": "H200", "uuid": uuid} for k, uuid in enumerate(uuids)]


def test_the_gpu_of_each_rank_is_said_and_ranks_that_share_one_are_slow() -> None:
    own = list(used_gpus(Topology("aab"), gpus("x", "y", "x")))
    assert levels(own) == [Level.GOOD] * 2
    assert own[0].sentence.startswith("With comm.use_gpu, rank 0 GPU 0 of 2 (H200), rank 1 GPU 1")
    (shared,) = used_gpus(Topology("aaa"), gpus("x", "y", "x"))
    assert shared.level is Level.SLOW and "3 ranks share 2 GPU(s)" in shared.sentence
