"""The hosts of the ranks, as MPI reports them or as the caller gives them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveMismatch, Communicator, Topology


def test_ranks_that_share_memory_are_on_one_host(world: Communicator) -> None:
    shared = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    keys = MPI.COMM_WORLD.allgather(shared.bcast(MPI.COMM_WORLD.rank))
    shared.Free()
    assert world.topology == Topology(keys)


def test_ranks_that_disagree_about_hosts_are_told_so(world: Communicator) -> None:
    hosts = Topology.consecutive(world.size, 2 if world.rank == 0 else 1)
    comm = collectives.wrap(MPI.COMM_WORLD, topology=hosts, check=True, timeout=30)
    disagree = pytest.raises(CollectiveMismatch, match=r"hierarchical.per_host=")
    with disagree if world.size > 1 else nullcontext():
        comm.all_reduce(np.ones(8), algorithm="hierarchical")
    comm.all_reduce(np.ones(8), algorithm="ring")
    comm.free()


def test_hosts_that_are_given_replace_those_of_mpi(world: Communicator) -> None:
    hosts = Topology.consecutive(world.size, 2)
    comm = collectives.wrap(MPI.COMM_WORLD, topology=hosts, timeout=30)
    assert comm.topology == hosts
    half = comm.split(comm.rank % 2)
    assert half is not None
    assert half.topology.num_hosts == half.size  # every other rank: one of each pair
    half.free()
    comm.free()
    with pytest.raises(ValueError, match="does not fit"):
        collectives.wrap(MPI.COMM_WORLD, topology=Topology.consecutive(world.size + 1, 1))
