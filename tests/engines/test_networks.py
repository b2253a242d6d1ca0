"""Ranks of one host do not wait for a network, and the user's choice stays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from collectives.engines import leave_out_networks
from collectives.launch import find_mpirun, launch

CHOICE = "OMPI_MCA_btl"


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "^ofi"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", CHOICE: "tcp"}, "tcp"),
    ],
    ids=["one host", "two hosts", "unknown hosts", "another MPI", "chosen by the user"],
)
def test_only_ranks_of_one_open_mpi_host_leave_networks_out(
    given: Mapping[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    leave_out_networks()
    assert os.environ.get(CHOICE) == chosen


@pytest.mark.ranks(n=2)
def test_a_launched_rank_leaves_networks_out_before_mpi_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CHOICE, raising=False)
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n"
        f"print(os.environ.get('{CHOICE}'), end='|')\n"
        "from mpi4py import MPI\n"
        "assert MPI.COMM_WORLD.allreduce(1) == 2\n"
    )
    done = launch(2, [str(program)], timeout=60, capture=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("^ofi|^ofi|" if find_mpirun().vendor == "openmpi" else "None|None|")
