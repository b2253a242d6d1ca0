"""Links that several messages share: rates, routes and loads, against what follows by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from collectives.schedule import trees
from collectives.simulation import Apart, Level, Link, Machine, Network, Torus, Tree, simulate
from tests.simulation.rows import one_way, programs

RATE = 10.0  # bytes a second between hosts
MACHINE = Machine(
    {
        "same_host": (Link(seconds_per_byte=0.01),),
        "other_host": (Link(seconds_per_byte=1 / RATE),),
        "island": (Link(seconds_per_byte=0.001),),
    }
)
SIZE = 1001  # of a message: the first byte costs nothing, the others 1000 / rate


def tree(num_ranks: int, per_host: int = 1, lanes: int = 1, *more: Level, island: int = 1) -> Tree:
    levels = Level("NIC", per_host, lanes, RATE), *more
    return Tree(MACHINE, num_ranks, levels, island=island)


def ends(network: Network, *pairs: tuple[int, int]) -> list[float]:
    """When the last message of each receiver is there."""
    times = simulate(one_way(network.num_ranks, *pairs, size=SIZE), MACHINE, network)
    return [float(times.rank_seconds[destination]) for _, destination in pairs]


def test_two_messages_from_a_host_share_its_nic() -> None:
    assert ends(tree(6, 2), (0, 2)) == [100]
    assert ends(tree(6, 2), (0, 2), (1, 4)) == [200, 200]


def test_a_host_with_two_nics_sends_two_messages_at_full_speed() -> None:
    assert ends(tree(6, 2, 2), (0, 2), (1, 4)) == [100, 100]


def test_the_rate_rises_when_a_message_leaves() -> None:
    """The message within the host of the receiver is ten times as fast, and shares no NIC."""
    rows = one_way(4, (0, 2), (1, 3))
    short = one_way(4, (1, 3), size=501)
    rows[1], rows[3] = short[1], short[3]
    seconds = simulate(rows, MACHINE, tree(4, 2)).rank_seconds
    # Both have 5 bytes a second until 500 bytes are sent; the other 500 of the first take 50.
    assert (seconds[3], seconds[2]) == (100, 150)


def test_rates_are_max_min_fair() -> None:
    """Three messages into host 1 get a third each; the fourth gets the rest of its sender's NIC."""
    network = tree(8, 2)
    assert ends(network, (0, 2), (4, 3), (6, 2)) == [300, 300, 300]
    seconds = ends(network, (4, 2), (0, 3), (6, 2), (1, 7))
    # Host 0 sends two messages: one gets 10/3, the other 20/3 bytes a second.
    assert seconds == pytest.approx([300, 300, 300, 150])


def test_ranks_on_one_host_do_not_use_the_nic() -> None:
    times = simulate(one_way(4, (0, 1), size=SIZE), MACHINE, tree(4, 2))
    assert times.seconds == pytest.approx(10)
    assert times.link_bytes[tree(4, 2).links.kinds == 1].sum() == 0


def test_messages_into_one_rank_share_its_port() -> None:
    assert ends(tree(4, 4), (0, 3), (1, 3)) == pytest.approx([20, 20])


def test_an_island_is_faster_and_may_span_hosts() -> None:
    network = tree(8, 2, 1, island=4)
    assert ends(network, (0, 3), (1, 2)) == pytest.approx([1, 1])
    assert ends(network, (0, 4)) == [100]


def test_an_oversubscribed_uplink_is_shared_by_its_hosts() -> None:
    rack = Level("rack", 4, 1, 2 * RATE)
    assert ends(tree(8, 1, 1, rack), (0, 1), (2, 3)) == [100, 100]
    assert ends(tree(8, 1, 1, rack), *((r, r + 4) for r in range(4))) == [200] * 4


def test_a_slow_machine_is_not_limited_by_fast_links() -> None:
    wide = Tree(MACHINE, 4, (Level("NIC", 2, 1, 1e9),))
    assert ends(wide, (0, 2), (1, 3)) == [100, 100]


def test_neighbours_on_a_torus_share_no_link() -> None:
    torus = Torus(MACHINE, (4, 4))
    assert ends(torus, *((r, r ^ 1) for r in range(16))) == [100] * 16


def test_a_torus_routes_one_dimension_after_the_other_on_the_shorter_way() -> None:
    torus = Torus(MACHINE, (4, 5))
    # From (0, 0) to (3, 3): two steps down along the last dimension, then one down along the first.
    (route,) = torus.routes(np.array([0]), np.array([18]))
    kinds = [torus.links.kind_names[torus.links.kinds[link]] for link in route if link >= 0]
    assert kinds == ["dimension 1, down", "dimension 1, down", "dimension 0, down"]
    assert ends(torus, (0, 2), (1, 3)) == [200, 200]  # both on the link from 1 to 2


@pytest.mark.parametrize("extent", [2, 3, 4, 5])
def test_routes_on_a_torus_are_as_long_as_distances(extent: int) -> None:
    torus = Torus(MACHINE, (extent, 3))
    pairs = np.arange(torus.num_ranks**2)
    sources, destinations = np.divmod(pairs, torus.num_ranks)
    hops = (torus.routes(sources, destinations) >= 0).sum(axis=1)
    for source, destination, number in zip(sources, destinations, hops, strict=True):
        steps = [abs(int(source // 3) - int(destination // 3)), abs(int(source - destination) % 3)]
        assert number == sum(min(s, n - s) for s, n in zip(steps, (extent, 3), strict=True))


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "circulant"])
def test_without_shared_links_the_network_changes_nothing(name: str) -> None:
    """One message at a time for each rank: the rules of LogGOPSim and of networks agree."""
    link = Link(overhead_seconds=1, latency_seconds=2, gap_seconds=0.5, seconds_per_byte=0.1)
    machine = Machine({"same_host": (link,), "other_host": (link,)}, combine_seconds_per_byte=0.01)
    wide = Tree(machine, 8, (Level("NIC", 1, 1, 1e9),))
    apart = simulate(programs(name, 8, 800), machine, Apart(range(8)))
    times = simulate(programs(name, 8, 800), machine, wide)
    assert times.rank_seconds == pytest.approx(apart.rank_seconds)


def off_host(name: str, num_hosts: int, per_host: int) -> Fraction:
    """The most bytes that a host sends to others, in vectors."""
    size = num_hosts * per_host
    network = tree(size, per_host)
    times = simulate(programs(name, size, 64 * size), MACHINE, network)
    kind = network.links.kind_names.index("NIC, out")
    return Fraction(int(times.link_bytes[network.links.kinds == kind].max()), 64 * size)


@pytest.mark.parametrize(
    ("num_hosts", "ring", "circulant", "swing", "strided"),
    [
        (2, 1.88, 10.6, 2.25, 1.0),
        (3, 1.92, 12.0, 3.0, 4 / 3),
        (4, 1.94, 13.3, 2.75, 1.5),
        (8, 1.97, 14.7, 3.0, 1.75),
    ],
)
def test_the_load_of_a_nic_is_that_of_the_literature(
    num_hosts: int, ring: float, circulant: float, swing: float, strided: float
) -> None:
    """Eight ranks on each host; the strided order meets the bound 2 (N - 1) / N."""
    assert off_host("ring", num_hosts, 8) == pytest.approx(ring, abs=0.006)
    assert off_host("circulant", num_hosts, 8) == pytest.approx(circulant, rel=0.005)
    assert off_host("swing", num_hosts, 8) == pytest.approx(swing)
    assert off_host("circulant_strided(per_host=8)", num_hosts, 8) == pytest.approx(strided)
    assert strided == pytest.approx(2 * (num_hosts - 1) / num_hosts)


@pytest.mark.parametrize("name", ["ring", "segmented_ring"])
def test_the_ranks_of_one_group_stand_for_all(name: str) -> None:
    rack = Level("rack", 8, 1, RATE / 2)
    levels = Level("NIC", 4, 2, RATE), rack
    whole = Tree(MACHINE, 32, levels)
    part = Tree(MACHINE, 32, levels, is_folded=True)
    tables = programs(name, 32, 6400)
    full, folded = simulate(tables, MACHINE, whole), simulate(tables[:8], MACHINE, part)
    assert folded.rank_seconds.tolist() == full.rank_seconds[:8].tolist()
    assert full.link_bytes.sum() == 4 * folded.link_bytes.sum()


def test_groups_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 2 ranks do not make up 3 ranks"):
        tree(6, 2, 1, Level("rack", 3, 1, RATE))
    with pytest.raises(ValueError, match="4 ranks cannot share 3 links"):
        tree(8, 4, 3)
    with pytest.raises(ValueError, match="groups of 4 ranks do not make up 10 ranks"):
        Tree(MACHINE, 10, (Level("NIC", 4, 1, RATE),), is_folded=True)


def test_the_binomial_tree_sends_further_than_its_neighbours() -> None:
    """Bytes times hops on a ring of hosts: a broadcast sends to distances p/2, p/4, ..., 1."""
    size = 64
    torus = Torus(MACHINE, (size,))
    times = simulate(programs("binomial", size, 64, "broadcast"), MACHINE, torus)
    distances = sum(2**k * size // 2 ** (k + 1) for k in range(trees.ceil_log2(size)))
    assert times.link_bytes.sum() == 64 * distances


def bytes_times_hops(name: str, size: int) -> float:
    """Of a broadcast of one byte, on a ring of hosts."""
    torus = Torus(MACHINE, (size,))
    times = simulate(programs(name, size, 1, "broadcast"), MACHINE, torus)
    return float(times.link_bytes.sum())


@pytest.mark.parametrize(("size", "ratio"), [(64, 0.703), (256, 0.694), (1024, 0.689)])
def test_bine_trees_send_less_far_than_binomial_trees(size: int, ratio: float) -> None:
    """De Sensi et al. 2025: up to a third less."""
    assert bytes_times_hops("bine", size) / bytes_times_hops("binomial", size) == pytest.approx(
        ratio, abs=0.0006
    )
