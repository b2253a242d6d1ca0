"""Algorithms that know hosts serve all of them, and send the least possible from host to host."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest

import collectives
from collectives import Topology, algorithms
from collectives.schedule import SPECS, count, even_sizes, original, outgoing

KNOW_HOSTS = [
    (collective, name)
    for collective in algorithms.collectives()
    for name in algorithms.names(collective)
    if "per_host" in algorithms.info(collective, name).options
]
each_that_knows_hosts = pytest.mark.parametrize(("collective", "name"), KNOW_HOSTS)

UNEVEN = [(3, 2, 1), (1, 2, 3), (8, 3), (1, 1, 4), (4, 4, 3), (5, 1, 3, 2)]
EVEN = [(1, 1, 1), (3, 3), (2, 2, 2), (4, 4), (2, 2, 2, 2, 2)]


def placements(per_host: tuple[int, ...]) -> Iterator[Topology]:
    """Consecutive ranks on each host, and ranks that are dealt to hosts in turn."""
    consecutive = Topology.consecutive(sum(per_host), per_host)
    yield consecutive
    order = sorted(range(consecutive.size), key=lambda rank: (consecutive.place(rank), -rank))
    yield consecutive.among(order)


@pytest.mark.parametrize("per_host", [*UNEVEN, *EVEN], ids=str)
@each_that_knows_hosts
def test_all_hosts_are_served_wherever_their_ranks_are(
    collective: str, name: str, per_host: tuple[int, ...]
) -> None:
    for hosts in placements(per_host):
        for root in range(hosts.size) if SPECS[collective].is_rooted else [None]:
            algorithms.verify(collective, name, hosts.size, root, per_host=hosts)


@pytest.mark.parametrize("per_host", [*UNEVEN, *EVEN], ids=str)
@each_that_knows_hosts
def test_costs_are_as_counted_on_all_hosts(
    collective: str, name: str, per_host: tuple[int, ...]
) -> None:
    entry = algorithms.info(collective, name)
    for hosts in placements(per_host):
        n = 5040 * hosts.size
        sizes = even_sizes(collective, entry.case(hosts.size, per_host=hosts), n)
        roots = range(hosts.size) if SPECS[collective].is_rooted else [None]
        all_counts = [
            count(
                [
                    entry.schedule(rank, hosts.size, root, per_host=hosts)
                    for rank in range(hosts.size)
                ],
                sizes,
            )
            for root in roots
        ]
        for cost in all_counts[0]._fields:
            stated = getattr(entry, cost)(hosts.size, n, per_host=hosts)
            assert stated == max(getattr(counts, cost) for counts in all_counts), cost


def off_host(collective: str, name: str, hosts: Topology) -> list[Fraction]:
    """What each host sends to others, in n, if blocks are equal."""
    entry = algorithms.info(collective, name)
    options = {"per_host": hosts} if "per_host" in entry.options else {}
    sizes = even_sizes(collective, entry.case(hosts.size, **options), hosts.size)
    leaving = [Fraction(0)] * hosts.num_hosts
    for rank in range(hosts.size):
        for operations in entry.schedule(rank, hosts.size, None, **options):
            for op in outgoing(operations):
                if hosts.host_of[op.peer] != hosts.host_of[rank]:
                    names = (original(block, sizes) for block in op.blocks)
                    leaving[hosts.host_of[rank]] += sum(sizes[name] for name in names)
    return [num_bytes / hosts.size for num_bytes in leaving]


@pytest.mark.parametrize("per_host", [(8, 8), (8, 8, 8), (4, 4, 4), *UNEVEN], ids=str)
def test_hierarchical_algorithms_send_the_least_between_hosts(per_host: tuple[int, ...]) -> None:
    for hosts in placements(per_host):
        num_hosts, size = hosts.num_hosts, hosts.size
        others = [Fraction(size - ranks, size) for ranks in hosts.ranks_per_host]
        assert off_host("reduce_scatter", "hierarchical", hosts) == others
        assert sum(off_host("all_gather", "hierarchical", hosts)) == num_hosts - 1
        least = Fraction(2 * (num_hosts - 1), num_hosts)
        assert off_host("all_reduce", "hierarchical", hosts) == [least] * num_hosts
        sent = off_host("all_to_all", "hierarchical", hosts)
        # Nothing is saved but messages: the blocks of all ranks must go.
        own = hosts.ranks_per_host
        assert sent == [part * ranks for part, ranks in zip(others, own, strict=True)]
        assert off_host("all_to_all", "fast", hosts) == sent


def test_ranks_in_their_natural_order_send_far_more() -> None:
    hosts = Topology.consecutive(32, 8)
    assert min(off_host("all_reduce", "circulant", hosts)) > 13
    assert min(off_host("all_reduce", "ring", Topology(list(range(4)) * 8))) > 15, "dealt in turn"


# Bytes that the busiest host sends to others in an all-reduce, in n, by number of hosts and ranks
# per host; Rabenseifner's on powers of two.
COLUMNS = ("ring", "rabenseifner", "circulant", "swing", "circulant_strided", "hierarchical")
LOADS = {
    (2, 8): (1.875, 8.0, 10.625, 2.25, 1.0, 1.0),
    (3, 8): (1.917, None, 12.0, 3.0, 1.333, 1.333),
    (4, 8): (1.938, 12.0, 13.312, 2.75, 1.5, 1.5),
    (8, 8): (1.969, 14.0, 14.656, 3.0, 1.75, 1.75),
    (5, 3): (1.867, None, None, None, 5.6, 1.6),
}


@pytest.mark.parametrize("shape", LOADS)
def test_flat_algorithms_load_a_network_adapter_as_known(shape: tuple[int, int]) -> None:
    num_hosts, per_host = shape
    hosts = Topology.consecutive(num_hosts * per_host, per_host)
    for name, load in zip(COLUMNS, LOADS[shape], strict=True):
        if load is not None:
            assert max(off_host("all_reduce", name, hosts)) == pytest.approx(load, abs=6e-4), name


# All-to-all with balanced hosts


def skewed(size: int, seed: int) -> list[list[int]]:
    """Few ranks have nearly everything to send, and few receive it."""
    draw = np.random.default_rng(seed)
    uniform = np.outer(draw.pareto(1.0, size), draw.pareto(1.0, size)) * 40
    table: list[list[int]] = np.minimum(uniform, 5000).astype(int).tolist()
    return table


def imbalance(name: str, hosts: Topology, counts: list[list[int]]) -> int:
    """The most by which ranks of a host differ in the bytes that they send to another host."""
    sent = collectives.predict(
        "all_to_all", hosts.size, counts, algorithm=name, topology=hosts
    ).bytes
    loads = [
        sent[np.ix_(ranks, others)].sum(axis=1)
        for ranks in hosts.hosts
        for others in hosts.hosts
        if ranks != others
    ]
    return max(int(load.max() - load.min()) for load in loads)


@pytest.mark.parametrize("seed", range(4))
def test_ranks_of_a_host_send_as_much_as_their_neighbours(seed: int) -> None:
    hosts = Topology.consecutive(12, 4)
    counts = skewed(12, seed)
    assert imbalance("hierarchical", hosts, counts) > 1000, "nothing to balance"
    # A piece of a block is at most one byte larger than another, and 16 blocks have a piece each.
    assert imbalance("fast", hosts, counts) <= 16


def test_remainders_of_small_blocks_are_balanced() -> None:
    hosts = Topology.consecutive(12, 4)
    assert imbalance("fast", hosts, [[1] * 12] * 12) == 0
    assert imbalance("fast", hosts, [[6] * 12] * 12) == 0


def test_only_counterparts_exchange_between_hosts() -> None:
    hosts = Topology.consecutive(12, 4)
    sent = collectives.predict("all_to_all", 12, skewed(12, 0), algorithm="fast", topology=hosts)
    for rank, peer in np.argwhere(sent.messages):
        same_host = hosts.host_of[rank] == hosts.host_of[peer]
        assert same_host or hosts.place(int(rank)) == hosts.place(int(peer))
