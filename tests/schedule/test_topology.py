"""Which ranks share a host, and which rank of another host stands for a rank."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest

from collectives import Topology

UNEVEN = [(3, 2, 1), (1, 2, 3), (8, 3), (1, 1, 4), (5,), (2, 2, 2)]


def test_ranks_with_equal_keys_share_a_host_whatever_the_keys() -> None:
    by_name, by_number = Topology(["b", "a", "b"]), Topology([7, 0, 7])
    assert by_name == by_number and hash(by_name) == hash(by_number)
    assert by_name.host_of == (0, 1, 0) and by_name.hosts == ((0, 2), (1,))
    assert by_name != Topology([0, 0, 1])
    assert pickle.loads(pickle.dumps(by_name)) == by_name


def test_consecutive_ranks_fill_one_host_after_the_other() -> None:
    assert Topology.consecutive(5, 2).hosts == ((0, 1), (2, 3), (4,))
    assert Topology.consecutive(6, (3, 2, 1)).hosts == ((0, 1, 2), (3, 4), (5,))
    assert Topology.consecutive(3, 8).num_hosts == 1


@pytest.mark.parametrize("per_host", [0, -1, (2, 2), (3, 0), ()])
def test_hosts_that_are_not_hosts_of_these_ranks_are_refused(per_host: int) -> None:
    with pytest.raises(ValueError, match="host"):
        Topology.consecutive(3, per_host)
    with pytest.raises(ValueError, match="at least one rank"):
        Topology([])


def test_a_topology_is_written_in_short() -> None:
    keys = {"3x2": "aabbcc", "3+2+1": "aaabbc", "hosts 0,1,0,1": "abab", "1x2": "aa"}
    assert {str(Topology(ranks)): ranks for ranks in keys.values()} == keys


@pytest.mark.parametrize("per_host", UNEVEN)
def test_every_rank_of_a_host_stands_for_as_many_ranks_as_the_others(
    per_host: tuple[int, ...],
) -> None:
    for shuffled in (False, True):
        topology = Topology.consecutive(sum(per_host), per_host)
        if shuffled:
            order = [(7 * rank) % topology.size for rank in range(topology.size)]
            topology = topology.among(sorted(range(topology.size), key=order.__getitem__))
        for host in range(topology.num_hosts):
            stands = [topology.counterpart(rank, host) for rank in range(topology.size)]
            times = Counter(stands)
            assert set(times) == set(topology.hosts[host])
            assert max(times.values()) - min(times.values()) <= 1
            assert all(stands[rank] == rank for rank in topology.hosts[host])


def test_on_hosts_of_equal_size_counterparts_have_the_same_place() -> None:
    topology = Topology("abcabc")
    for rank, host in itertools.product(range(6), range(3)):
        assert topology.place(topology.counterpart(rank, host)) == topology.place(rank)
    assert topology.mates(4) == (1, 4) and topology.place(4) == 1
