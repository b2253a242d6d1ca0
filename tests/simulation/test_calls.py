"""Calls that are simulated with fewer programs, lanes or rates than they have."""

from __future__ import annotations

import gc

import pytest

from collectives.algorithms import names
from collectives.programs import compile_call
from collectives.simulation import DEFAULT, Network, network_of, simulate, simulate_call
from collectives.simulation.calls import RESOLUTION, has_many_messages, repeated
from collectives.simulation.engine import simulate_rows
from collectives.simulation.tables import rows_of
from tests.simulation.rows import programs, spec

TEXT = "hosts:8x4,nics=2,rack=4,oversubscription=2"


def network(text: str = TEXT, *, is_folded: bool = False) -> Network:
    return network_of(text, DEFAULT, is_folded=is_folded)


@pytest.mark.parametrize("name", ["ring", "segmented_ring"])
def test_one_group_stands_for_all_ranks(name: str) -> None:
    call = spec(name, 32, 32 * 4096)
    full = simulate(programs(name, 32, 32 * 4096), DEFAULT, network())
    folded = simulate_call(call, DEFAULT, network(is_folded=True))
    assert folded.seconds == full.seconds
    assert folded.class_bytes.tolist() == full.class_bytes.tolist()


def test_a_group_does_not_stand_for_ranks_that_do_something_else() -> None:
    with pytest.raises(ValueError, match=r"linear: the ranks do not all do the same"):
        simulate_call(spec("linear", 32, 4096), DEFAULT, network(is_folded=True))
    with pytest.raises(ValueError, match="do not all do the same"):  # blocks of 128 and 127 bytes
        simulate_call(spec("ring", 32, 32 * 128 - 1), DEFAULT, network(is_folded=True))


@pytest.mark.parametrize("name", names("all_reduce"))
@pytest.mark.parametrize("size", [2, 5, 8, 12])
def test_what_repeats_for_some_ranks_repeats_for_all(name: str, size: int) -> None:
    try:
        call = spec(name, size, 64 * size)
    except ValueError:
        return  # it does not serve so many ranks
    first = repeated(call, DEFAULT, size)
    assert first is not None or name not in ("ring", "segmented_ring")
    for rank in range(size if first is not None else 0):
        rows = rows_of(compile_call(call, rank, size), DEFAULT)
        assert first is not None and first.moved(rank, size).equals(rows)


@pytest.mark.parametrize("name", ["recursive_doubling", "linear", "census", "reduce_broadcast"])
def test_many_lanes_are_extended_from_few(name: str) -> None:
    call = spec(name, 8, 30 * 2**19)
    assert call.segments == 30
    few = simulate_call(call, DEFAULT, network("hosts:2x4"))
    all_lanes = simulate(programs(name, 8, 30 * 2**19), DEFAULT, network("hosts:2x4"))
    assert few.is_extended
    assert few.seconds == pytest.approx(all_lanes.seconds, rel=0.01)
    assert few.link_bytes == pytest.approx(all_lanes.link_bytes)


def test_rates_that_are_computed_less_often_change_little() -> None:
    assert has_many_messages(spec("one_shot", 32, 2**19), 32)
    assert not has_many_messages(spec("ring", 32, 2**19), 32)
    rows = [rows_of(program, DEFAULT) for program in programs("one_shot", 32, 2**19)]
    exact, rough = (
        simulate_rows(rows, DEFAULT, network("hosts:8x4"), resolution=part).seconds
        for part in (0.0, RESOLUTION)
    )
    assert rough == pytest.approx(exact, rel=2 * RESOLUTION)
    assert rough != exact


def test_ranks_of_several_groups_make_their_calls_at_the_same_time() -> None:
    call = spec("linear", 2, 2**20, "broadcast")
    apart, around = (
        simulate_call(call, DEFAULT, network("hosts:4x1"), groups=groups)
        for groups in ([(0, 1), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 0)])
    )
    assert around.class_bytes.sum() == 2 * apart.class_bytes.sum() == 4 * 2**20
    assert around.seconds < 1.1 * apart.seconds
    ring, two = spec("ring", 2, 64), [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match="only if they have one round"):
        simulate_call(ring, DEFAULT, network("hosts:4x1"), groups=two)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        simulate_call(spec("linear", 4, 64), DEFAULT, network("hosts:4x1"))
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_straggler_makes_a_call_longer() -> None:
    call = spec("ring", 32, 32 * 4096)
    plain, slowed = (
        simulate_call(call, DEFAULT, network(), stragglers=slow).seconds for slow in ({}, {3: 50.0})
    )
    assert slowed > 2 * plain
    with pytest.raises(ValueError, match="there is no rank 32 among 32 ranks"):
        simulate_call(call, DEFAULT, network(), stragglers={32: 2.0})
    with pytest.raises(ValueError, match="only if each has its own program"):
        simulate_call(call, DEFAULT, network(is_folded=True), stragglers={3: 2.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring:4", "a topology is hosts, fat-tree, torus"),
        ("hosts:4", "is not like hosts:512x8"),
        ("hosts:0x4", "'0' is not a number of at least 1"),
        ("hosts:4x4,nic=0", "nic is not a number of more than 0"),
        ("hosts:4x4,color=3", "hosts has no option 'color'"),
        ("hosts:4x4,nics=1.5", "nics must be a whole number"),
        ("fat-tree:levels=3", "is not like fat-tree:radix=16,levels=3"),
        ("fat-tree:radix=16,oversubscription=2", "16 ports cannot be divided by 2 to 1"),
        ("torus:4x", "'' is not a number of at least 1"),
    ],
)
def test_texts_that_name_no_network_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network(text)


def test_more_ranks_than_there_is_room_for_are_refused() -> None:
    with pytest.raises(ValueError, match="has room for 16 ranks, not for 17"):
        network_of("hosts:4x4", DEFAULT, 17)
    with pytest.raises(ValueError, match="a torus of 16 ranks has no 15 ranks"):
        network_of("torus:4x4", DEFAULT, 15)


def test_a_fat_tree_has_the_hosts_and_links_of_its_switches() -> None:
    tree = network("fat-tree:radix=16,levels=3")
    assert tree.num_ranks == 16**3 // 4
    kinds = tree.links.kind_names
    ups = [tree.links.kinds == kinds.index(f"links out of level {n}, out") for n in (1, 2)]
    assert [int(up.sum()) for up in ups] == [128, 16]
    rate = DEFAULT.bytes_per_second("other_host")
    totals = [float(tree.links.capacities[up].sum()) for up in ups]
    assert totals == pytest.approx([1024 * rate] * 2)  # no level has less than the hosts
    lean = network("fat-tree:radix=16,levels=2,oversubscription=3")
    assert lean.num_ranks == 12 * 16
