"""Training that outlives its ranks, which are killed for real.

On threads (`tests/parallel/strategies/test_elastic.py`) a death can be put anywhere.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import TIMED_OUT, launch
from collectives.launch.mpirun import find_mpirun

pytestmark = pytest.mark.ranks(n=4)

ROOT = Path(__file__).parent.parent.parent
IS_OPEN_MPI = find_mpirun().vendor == "openmpi"


def run(*command: str, ranks: int = 4, **options: Any) -> Any:
    env = {"PYTHONPATH": str(ROOT)}
    return launch(ranks, [*command], timeout=90, env=env, capture=True, **options)


SMALL = ["--layers", "1", "--hidden", "8", "--steps", "6", "--batch", "12", "--text", __file__]


def test_where_a_death_is_the_end_of_all_elastic_training_is_refused() -> None:
    """MPICH, and an Open MPI that was started without fault tolerance."""
    done = run("-m", "parallel.train", "--strategy", "elastic", *SMALL, ranks=2)
    assert done.returncode == 2
    assert "needs an Open MPI that was started with fault tolerance" in done.stderr


if IS_OPEN_MPI:

    @pytest.mark.timeout(240)
    def test_two_ranks_are_killed_and_two_train_on(tmp_path: Path) -> None:
        """Rank 2 in the midst of step 2, then rank 0 in step 4; to the last bit as if they left."""
        (tmp_path / "killed").mkdir()
        (tmp_path / "left").mkdir()
        program = "tests.launch.elastic_program"
        killed = run("-m", program, "killed", str(tmp_path / "killed"), fault_tolerant=True)
        assert killed.returncode == 0, killed.stderr
        left = run("-m", program, "left", str(tmp_path / "left"))
        assert left.returncode == 0, left.stderr
        survivors, reference = results(tmp_path / "killed"), results(tmp_path / "left")
        assert [end["rank"] for end in survivors] == [end["rank"] for end in reference] == [1, 3]
        for end in survivors:
            assert end["losses"] == reference[0]["losses"]
            assert end["digest"] == reference[0]["digest"]
            assert len(end["delays"]) == 2 and max(end["delays"]) < 2, "seconds until PeerFailed"
            assert end["failed"] == [[2], [0]]
            assert "of rank 1 (of 2) are not those of rank 0" in end["noticed"]

    def test_the_training_program_tells_who_died() -> None:
        words = ["--strategy", "elastic", "--kill", "0:3", *SMALL]
        done = run("-m", "parallel.train", *words, ranks=3, fault_tolerant=True)
        assert done.returncode == 0, done.stderr
        assert "Rank 0 (process" in done.stderr
        assert "1 of 3 ranks died; the others ended with the same parameters" in done.stdout

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("when", ["reading the text", "making the strategy", "reporting"])
    def test_a_death_before_or_after_training_is_survived_too(when: str, rank: int) -> None:
        done = dying(when, rank)
        assert done.returncode == 0, done.stderr
        assert "nats per byte" in done.stdout
        assert "1 of 3 ranks died; the others ended with the same parameters" in done.stdout

    def test_a_death_after_the_report_changes_nothing() -> None:
        done = dying("leaving", 1)
        assert done.returncode == 0, done.stderr
        assert "Rank 1 (process" in done.stderr
        assert "parameters: equal, to the bit" in done.stdout

    def test_a_death_before_mpi_has_started_ends_the_job() -> None:
        done = dying("starting", 1)
        assert done.returncode == 1
        assert "Rank 1 (process" in done.stderr
        assert "A rank died before MPI had started on all ranks" in done.stderr

    def test_a_death_before_the_first_communicator_is_made_ends_the_job() -> None:
        """Which message comes depends on whether the others are still in MPI_Init."""
        done = dying("in MPI", 1)
        assert done.returncode not in (0, TIMED_OUT)
        messages = (
            "has failed before this communicator was made",
            "A rank died before MPI had started on all ranks",
        )
        assert any(message in done.stderr for message in messages), done.stderr

    def test_where_nobody_dies_the_training_program_accounts_for_all_that_was_sent() -> None:
        words = ["-m", "parallel.train", "--strategy", "elastic", *SMALL]
        done = run(*words, ranks=3, fault_tolerant=True, mpi_args=MPIRUN_ARGS)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "predicted = recorded = observed by MPI, to the byte" in done.stdout
        assert "parameters: equal, to the bit" in done.stdout


def dying(when: str, rank: int) -> Any:
    """A run of three ranks of which one dies."""
    words = ["-m", "tests.launch.death_program", when, str(rank), "--strategy", "elastic", *SMALL]
    return run(*words, ranks=3, fault_tolerant=True)


def results(folder: Path) -> list[dict[str, Any]]:
    ends = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(ends, key=lambda end: int(end["rank"]))
