"""Recorded = observed: Open MPI's own counters confirm the ledger for every algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun

pytestmark = pytest.mark.ranks(n="num_ranks")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("num_ranks", "modes"), [(3, ["off", "on", "finite"]), (4, ["off"])])
def test_mpi_counts_what_the_ledger_records(num_ranks: int, modes: list[str]) -> None:
    has_counters = find_mpirun().vendor == "openmpi"
    done = launch(
        num_ranks,
        ["-m", "tests.diagnostics.witness_program", *modes],
        mpi_args=MPIRUN_ARGS if has_counters else (),
        env={"PYTHONPATH": str(ROOT)},
        timeout=250,
        capture=True,
    )
    if has_counters:
        assert done.returncode == 0, done.stderr
        said = [done.stdout.count(f"equal where checking is {mode}\n") for mode in modes]
        assert said == [num_ranks] * len(modes), done.stdout
    else:
        assert done.returncode != 0
        assert "MonitorUnavailable: only Open MPI has message counters" in done.stderr
