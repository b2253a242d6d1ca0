"""Operators of the caller's own, over MPI."""

from __future__ import annotations

from typing import Any

import pytest

from collectives import Communicator
from tests.scenarios.jobs import REDUCTIONS, Job
from tests.scenarios.operators import (
    FALSELY_COMMUTATIVE,
    OVERWRITING,
    ordered_jobs,
    perform_in_order,
    refuse_to_overwrite,
)

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("collective", REDUCTIONS)
def test_an_operator_that_is_not_commutative_is_applied_in_rank_order(
    world: Communicator, collective: str
) -> None:
    for job in ordered_jobs(world.size):
        if job.collective == collective:
            perform_in_order(world, job)


def test_out_of_order_the_result_would_be_another(world: Communicator) -> None:
    # Block r is combined in the order r+1, r+2, ... round the ring: right for the last rank's only.
    job = Job("reduce_scatter", "ring", world.size, 99, op=FALSELY_COMMUTATIVE)
    if world.rank == world.size - 1:
        perform_in_order(world, job)
    else:
        with pytest.raises(AssertionError, match="wanted"):
            perform_in_order(world, job)


@pytest.mark.parametrize("function", OVERWRITING)
def test_an_operator_that_changes_its_operands_is_refused(
    world: Communicator, function: Any
) -> None:
    refuse_to_overwrite(world, function)
