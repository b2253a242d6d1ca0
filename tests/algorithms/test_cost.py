"""Prices, lower bounds, and which algorithms meet them exactly."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from collectives import algorithms
from collectives.algorithms import Formula
from collectives.selection.cost import Bound, Machine, bounds_met, lower_bound, price
from tests.algorithms.catalogue import EVERY, each_algorithm

# What each meets exactly at every number of ranks it serves; the others meet nothing.
MEETS = {
    "broadcast.pipeline": "bytes",
    "broadcast.binomial": "rounds",
    "broadcast.bine": "rounds",
    "broadcast.double_binary_tree": "bytes",
    "broadcast.circulant": "rounds",
    "broadcast.hierarchical": "rounds",  # two ranks a host
    "reduce.pipeline": "bytes",
    "reduce.binomial": "rounds",
    "reduce.bine": "rounds",
    "reduce.double_binary_tree": "bytes",
    "reduce.reduce_scatter_gather": "work",
    "reduce.ring_reduce_scatter_gather": "work",
    "reduce.circulant": "rounds",
    "reduce.hierarchical": "rounds",
    "all_reduce.ring": "bytes work",
    "all_reduce.segmented_ring": "bytes work",
    "all_reduce.two_shot": "bytes work",
    "all_reduce.circulant": "bytes work",
    "all_reduce.circulant_strided": "bytes work",
    "all_reduce.swing": "bytes work",
    "all_reduce.swing_latency": "rounds",
    "all_reduce.census": "rounds",
    "all_reduce.all_gather_reduce": "rounds",
    "all_reduce.hierarchical": "bytes work",
    "all_reduce.invariant": "bytes work",
    "scatter.linear_bounded": "bytes",
    "scatter.linear": "bytes",
    "scatter.knomial": "bytes",
    "scatter.binomial": "rounds bytes",
    "scatter.bine": "rounds bytes",
    "gather.linear_bounded": "bytes",
    "gather.linear": "bytes",
    "gather.knomial": "bytes",
    "gather.binomial": "rounds bytes",
    "gather.bine": "rounds bytes",
    "all_gather.ring": "bytes",
    "all_gather.bidirectional_ring": "bytes",
    "all_gather.neighbour_exchange": "bytes",
    "all_gather.bruck": "rounds bytes",
    "all_gather.sparbit": "rounds bytes",
    "all_gather.circulant": "rounds bytes",
    "all_gather.swing": "rounds bytes",
    "all_gather.pat": "bytes",
    "all_gather.direct": "bytes",
    "all_gather.all_broadcast": "bytes",
    "all_gather.hierarchical": "rounds bytes",
    "reduce_scatter.ring": "bytes work",
    "reduce_scatter.pairwise": "bytes work",
    "reduce_scatter.direct": "bytes work",
    "reduce_scatter.circulant": "rounds bytes work",
    "reduce_scatter.swing": "rounds bytes work",
    "reduce_scatter.pat": "bytes work",
    "reduce_scatter.hierarchical": "rounds bytes work",
    "reduce_scatter.invariant": "bytes work",
    "all_to_all.linear_sync": "bytes",
    "all_to_all.linear": "bytes",
    "all_to_all.pairwise": "bytes",
    "all_to_all.one_factor": "bytes",
    "all_to_all.bruck": "rounds",
    "all_to_all.bine": "rounds",
    "scan.linear": "bytes",
    "scan.doubling": "rounds",
    "exscan.linear": "bytes",
    "exscan.min_round": "rounds",
    "barrier.dissemination": "rounds",
}
POWERS = [1, 2, 4, 8, 16, 32, 64]


@each_algorithm
def test_algorithms_meet_the_bounds_listed_and_no_others(collective: str, name: str) -> None:
    met = bounds_met(algorithms.info(collective, name))
    assert " ".join(met) == MEETS.get(f"{collective}.{name}", "")


def test_some_meet_more_where_p_is_a_power_of_two() -> None:
    def met(collective: str, name: str) -> list[str]:
        return bounds_met(algorithms.info(collective, name), POWERS)

    assert met("reduce_scatter", "recursive_halving") == ["rounds", "bytes", "work"]
    assert met("reduce_scatter", "butterfly") == ["rounds", "bytes", "work"]
    assert met("all_gather", "recursive_doubling") == ["rounds", "bytes"]
    assert met("all_reduce", "rabenseifner") == ["bytes", "work"]
    assert met("all_reduce", "bine") == ["bytes", "work"]
    assert met("all_reduce", "recursive_doubling") == ["rounds"]
    assert met("all_reduce", "bine_latency") == ["rounds"]


def test_bine_meets_more_where_p_is_even() -> None:
    evens = range(2, 65, 2)
    assert bounds_met(algorithms.info("reduce_scatter", "bine"), evens) == [
        "rounds",
        "bytes",
        "work",
    ]
    assert bounds_met(algorithms.info("all_gather", "bine"), evens) == ["rounds", "bytes"]


def test_pat_meets_the_bound_of_rounds_where_whole_halves_travel_together() -> None:
    for name in ("all_gather", "reduce_scatter"):
        entry = algorithms.info(name, "pat")
        for p in range(2, 65):
            assert entry.rounds(p=p, aggregation=p) == lower_bound(name, p, 1).rounds
            assert entry.rounds(p=p, aggregation=1) == p - 1


@each_algorithm
def test_no_algorithm_beats_a_bound(collective: str, name: str) -> None:
    entry = algorithms.info(collective, name)
    for p in filter(entry.serves, range(1, 65)):
        bound = lower_bound(collective, p, 5040 * p)
        assert entry.startups(p=p, n=5040 * p) >= bound.rounds
        assert entry.max_bytes_per_rank(p=p, n=5040 * p) >= bound.bytes
        assert entry.reduction_bytes(p=p, n=5040 * p) >= bound.work


@pytest.mark.parametrize("formula", ["startups", "max_bytes_per_rank", "reduction_bytes"])
def test_a_bound_that_is_missed_by_one_is_not_met(formula: str) -> None:
    entry = algorithms.info("reduce_scatter", "circulant")
    worse = replace(entry, **{formula: Formula(f"{getattr(entry, formula)} + (p == 37)")})
    assert len(bounds_met(worse)) == 2


def test_a_pipelined_broadcast_cannot_be_faster_than_the_circulant_one() -> None:
    for collective in ("broadcast", "reduce"):
        entry = algorithms.info(collective, "circulant")
        for p in range(2, 40):
            for pieces in range(1, 20):
                bound = lower_bound(collective, p, 1, pieces)
                assert entry.rounds(p=p, segments=pieces) == bound.rounds


def test_bounds_are_exact() -> None:
    assert lower_bound("all_reduce", 3, 10) == Bound(2, Fraction(40, 3), Fraction(20, 3))
    assert lower_bound("broadcast", 1, 10) == Bound(0, 0, 0)
    assert lower_bound("all_to_all", 8, 64) == Bound(3, 56, 0)
    assert lower_bound("exscan", 4, 8) == Bound(2, 8, 4)
    assert lower_bound("barrier", 9, 0) == Bound(4, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("allreduce", 4, 1), "unknown collective 'allreduce'"),
        (("all_reduce", 0, 1), "no bound for 0 ranks"),
        (("broadcast", 4, 1, 0), "0 pieces"),
    ],
)
def test_bounds_of_what_cannot_be_are_refused(arguments: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lower_bound(*arguments)


def test_every_entry_of_the_list_is_an_algorithm() -> None:
    assert set(MEETS) <= {".".join(entry) for entry in EVERY}


def test_a_price_is_the_sum_of_start_ups_bytes_and_work() -> None:
    ring = algorithms.info("all_reduce", "ring")  # 2 (p - 1) start-ups, 2 f n bytes, f n combined
    assert price(ring, 4, 1000, Machine(1, 0, 0)) == 6
    assert price(ring, 4, 1000, Machine(0, 1, 0)) == 1500
    assert price(ring, 4, 1000, Machine(0, 0, 1)) == 750
    assert price(ring, 4, 1000, Machine(100, 10, 2)) == 600 + 15000 + 1500


def test_a_price_depends_on_the_options() -> None:
    bruck = algorithms.info("all_gather", "bruck")
    assert price(bruck, 16, 0, Machine(1, 0, 0)) == 4
    assert price(bruck, 16, 0, Machine(1, 0, 0), radix=4) == 6
