"""The backend of torch.distributed, under mpirun: one launch per number of ranks, with time limits.

By hand: `mpirun -n 3 python -m pytest --with-mpi tests/torch`.
Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

import re

import pytest

from tests.test_mpi_tier import ROOT, run_suite

# Beyond the time limit of the launch itself, which then says what hung.
pytestmark = pytest.mark.timeout(330)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_torch_test_passes(num_ranks: int) -> None:
    done = run_suite(num_ranks, str(ROOT / "tests" / "torch"))
    output = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, output
    summary = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)  # nothing skipped
    assert summary is not None and int(summary[1]) > 50, output
