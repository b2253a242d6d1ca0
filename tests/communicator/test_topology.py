"""A communicator knows the hosts of its ranks, and so do the groups made from it."""

from __future__ import annotations

import pytest

import collectives
from collectives import Communicator, Topology
from tests.scenarios.sessions import counts_travel_ahead_of_blocks_that_are_sent_on


def test_threads_are_on_one_host_unless_others_are_given() -> None:
    hosts = Topology("aab")
    assert collectives.run(lambda comm: comm.topology.hosts, size=3) == [((0, 1, 2),)] * 3
    found = collectives.run(lambda comm: comm.topology, size=3, topology=hosts)
    assert found == [hosts] * 3


def test_a_group_has_the_hosts_of_its_ranks_and_sends_nothing_to_know_them() -> None:
    def hosts(comm: Communicator) -> tuple[Topology, Topology, int]:
        half = comm.split(comm.rank % 2, key=-comm.rank)
        with comm.record() as ledger:
            found = half.topology, comm.subgroup([comm.rank]).topology
        return *found, len([row for row in ledger.rows() if row.collective != "subgroup"])

    found = collectives.run(hosts, size=6, topology=Topology.consecutive(6, (3, 2, 1)))
    # Ranks 4, 2, 0 are on hosts 1, 0, 0; ranks 5, 3, 1 on hosts 2, 1, 0.
    assert [each[0] for each in found] == [Topology("baa"), Topology("cba")] * 3
    assert all(alone == Topology("a") and num_sent == 0 for _, alone, num_sent in found)


def test_a_topology_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a topology of 2 ranks does not fit 3 ranks"):
        collectives.run(lambda comm: None, size=3, topology=Topology("ab"))


def test_counts_travel_ahead_to_the_ranks_that_stand_for_others() -> None:
    hosts = Topology("aabac")
    collectives.run(counts_travel_ahead_of_blocks_that_are_sent_on, size=5, topology=hosts)
