"""No argument, however odd, reaches a message or breaks a communicator, over MPI."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Communicator
from tests.scenarios import arguments

pytestmark = pytest.mark.mpi
# Derandomized, so that every rank draws the same.
ALIKE = {"deadline": None, "derandomize": True, "database": None}


@settings(max_examples=40, **ALIKE)
@given(case=arguments.cases())
def test_a_call_is_served_or_refused_by_all_ranks(
    world: Communicator, case: arguments.Case
) -> None:
    arguments.check(case, world.size, lambda body: body(world))


@settings(max_examples=6, **ALIKE)
@given(data=st.data())
def test_every_rank_refuses_its_own_arguments(world: Communicator, data: st.DataObject) -> None:
    arguments.check_each(data.draw(arguments.bad_cases(world.size)), lambda body: body(world))
