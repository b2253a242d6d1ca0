"""Recorded = observed: Open MPI's own counters confirm the ledger for every algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.diagnostics.mpi_counters import MPIRUN_ARGS
from collectives.launch import launch
from collectives.launch.mpirun import find_mpirun

pytestmark = pytest.mark.ranks(n="num_ranks")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("num_ranks", "check"), [(3, "0"), (4, "0"), (3, "1"), (3, "finite")])
def test_mpi_counts_what_the_ledger_records(num_ranks: int, check: str) -> None:
    has_counters = find_mpirun().vendor == "openmpi"
    done = launch(
        num_ranks,
        ["-m", "tests.diagnostics.witness_program"],
        mpi_args=MPIRUN_ARGS if has_counters else (),
        env={"PYTHONPATH": str(ROOT), "COLLECTIVES_CHECK": check},
        timeout=110,
        capture=True,
    )
    if has_counters:
        assert (done.returncode, done.stdout.count("equal")) == (0, num_ranks), done.stderr
    else:
        assert done.returncode != 0
        assert "MonitorUnavailable: only Open MPI has message counters" in done.stderr
