"""Run by test_failure.py: an operator that fails half-way on rank 0, over MPI."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError, CollectiveTimeout, Communicator, Operator

LARGE = np.ones(3_000_000)  # several lanes, so that messages are on their way when it fails
LIMIT = 3.0  # seconds after which the other ranks give up


def failing(comm: Communicator, at: int) -> Operator:
    """Addition, but on rank 0 the piece of this number cannot be added.  Piece 1 is a rehearsal."""
    num_pieces = 0

    def add(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        nonlocal num_pieces
        num_pieces += 1
        if comm.rank == 0 and num_pieces == at:
            raise ArithmeticError("on purpose")
        return left + right

    return Operator.from_function(add, commutative=True)


def fails(comm: Communicator, run: Callable[[float], Any]) -> None:
    """Rank 0 raises what the operator raised, and has nothing under way; the others give up."""
    comm.barrier()  # no rank is late
    with pytest.raises(ArithmeticError if comm.rank == 0 else CollectiveTimeout):
        run(30.0 if comm.rank == 0 else LIMIT)
    if comm.rank == 0:
        assert comm._session.transport.in_flight == []


def by_plan(comm: Communicator) -> None:
    """The communicator stays usable: tags keep the failed plan's messages apart."""
    plan = comm.plan.all_reduce(LARGE, failing(comm, at=3), algorithm="ring")
    fails(comm, plan.run)
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match="has failed"):
            plan.run()
    assert comm.all_reduce(2 * LARGE)[-1] == 2 * comm.size
    assert comm.all_reduce(np.ones(3))[0] == comm.size


def by_call(comm: Communicator) -> None:
    """Blocking calls share their tag with the next, so the communicator is marked as broken."""
    op = failing(comm, at=3)
    fails(comm, lambda limit: comm.all_reduce(LARGE, op, algorithm="ring", timeout=limit))
    if comm.rank == 0:
        with pytest.raises(CollectiveError, match=r"is unusable: .*on purpose"):
            comm.all_reduce(np.ones(3))


{"plan": by_plan, "call": by_call}[sys.argv[1]](collectives.world())
if MPI.COMM_WORLD.rank == 0:
    print("as it should be", flush=True)
MPI.COMM_WORLD.Barrier()
MPI.COMM_WORLD.Abort(0)  # what the other ranks gave up can never end
