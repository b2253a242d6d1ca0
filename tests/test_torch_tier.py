"""The backend of torch.distributed, under mpirun: one launch per number of ranks, with time limits.

By hand: `mpirun -n 3 python -m pytest --with-mpi tests/torch`.
Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

import pytest

from tests.test_mpi_tier import check_suite

# Beyond the time limit of the launch itself, which then says what hung.
pytestmark = [pytest.mark.timeout(330), pytest.mark.ranks(n="num_ranks")]


# MPICH's ranks do not yield: 4 of them need minutes on two cores.
@pytest.mark.parametrize(
    "num_ranks",
    [
        pytest.param(2, marks=pytest.mark.on_mpich),
        pytest.param(3, marks=pytest.mark.on_open_mpi),
        pytest.param(4, marks=pytest.mark.on_open_mpi),
    ],
)
def test_every_torch_test_passes(num_ranks: int) -> None:
    check_suite(num_ranks, "torch")
