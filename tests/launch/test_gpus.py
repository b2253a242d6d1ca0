"""GPUs of a rank's own: parts of what CUDA_VISIBLE_DEVICES leaves, in real jobs and by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.commands.jobs import environment
from collectives.launch import gpus, launch

pytestmark = [pytest.mark.ranks(n=2), pytest.mark.slow]

PROGRAM = """
import os
from mpi4py import MPI
print(MPI.COMM_WORLD.rank, os.environ["CUDA_VISIBLE_DEVICES"])
"""


def test_each_rank_of_a_job_sees_its_own(tmp_path: Path) -> None:
    (program := tmp_path / "program.py").write_text(PROGRAM)
    visible = environment() | {"CUDA_VISIBLE_DEVICES": "3,GPU-5e,MIG-a1/1/0,0,1"}
    done = launch(2, [str(program)], gpus_per_rank=2, env=visible, timeout=60, capture=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3,GPU-5e", "1 MIG-a1/1/0,0"]
    done = launch(2, [str(program)], gpus_per_rank=3, env=visible, timeout=60, capture=True)
    assert done.returncode == 1
    assert "leaves 5 GPU(s) on this host, too few for 2 ranks" in done.stderr


def visible_to(text: str | None, local_rank: int = 0, gpus_per_rank: int = 1) -> str:
    variables = {"MPI_LOCALRANKID": str(local_rank)}
    if text is not None:
        variables["CUDA_VISIBLE_DEVICES"] = text
    gpus.bind(gpus_per_rank, variables)
    return variables["CUDA_VISIBLE_DEVICES"]


def test_gpus_are_dealt_in_the_order_of_the_variable() -> None:
    assert [visible_to("7, 2,5", rank) for rank in range(3)] == ["7", "2", "5"]
    assert visible_to("7,2,5,GPU-1", 1, 2) == "5,GPU-1"


@pytest.mark.parametrize(("text", "number"), [("", 0), ("-1", 0), ("1,-1,2", 1), ("NoDevFiles", 0)])
def test_what_cuda_ignores_is_no_gpu(text: str, number: int) -> None:
    with pytest.raises(gpus.NoGpus, match=rf"leaves {number} GPU\(s\).* for {number + 1} ranks"):
        visible_to(text, number)


def test_without_the_variable_all_gpus_of_the_host_are_dealt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "_COUNT", "print(4)")
    assert visible_to(None, 1, 2) == "2,3"
    monkeypatch.setattr(gpus, "_COUNT", "raise OSError('no driver')")
    with pytest.raises(gpus.NoGpus, match="leaves 0 GPU"):
        visible_to(None)


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(gpus.NoGpus, match="this mpirun sets none of OMPI_COMM_WORLD_LOCAL_RANK"):
        gpus.bind(1, {"CUDA_VISIBLE_DEVICES": "0"})
    with pytest.raises(ValueError, match="gpus_per_rank is 0; it must be at least 1"):
        launch(2, ["program.py"], gpus_per_rank=0)
