"""Prices, lower bounds, and which algorithms meet them exactly."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from collectives import algorithms
from collectives.algorithms import Formula
from collectives.selection.cost import (
    BUILT_IN,
    MAX_SIMULATED,
    Bound,
    bounds_met,
    lower_bound,
    price_by_formulas,
    price_call,
)
from collectives.selection.select import choose
from collectives.simulation import Link, Machine
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
    "all_to_all.segmented_linear": "bytes",
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


def test_some_algorithms_meet_more_bounds_where_p_is_a_power_of_two() -> None:
    def met(collective: str, name: str) -> list[str]:
        return bounds_met(algorithms.info(collective, name), POWERS)

    assert met("reduce_scatter", "recursive_halving") == ["rounds", "bytes", "work"]
    assert met("reduce_scatter", "butterfly") == ["rounds", "bytes", "work"]
    assert met("all_gather", "recursive_doubling") == ["rounds", "bytes"]
    assert met("all_reduce", "rabenseifner") == ["bytes", "work"]
    assert met("all_reduce", "bine") == ["bytes", "work"]
    assert met("all_reduce", "recursive_doubling") == ["rounds"]
    assert met("all_reduce", "bine_latency") == ["rounds"]


def test_bine_meets_more_bounds_where_p_is_even() -> None:
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
@pytest.mark.slow
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
def test_bounds_of_impossible_calls_are_refused(arguments: tuple, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lower_bound(*arguments)


def test_every_entry_of_the_list_is_an_algorithm() -> None:
    assert set(MEETS) <= {".".join(entry) for entry in EVERY}


LINK = Link(overhead_seconds=1, latency_seconds=10, gap_seconds=3, seconds_per_byte=0.5)
MACHINE = Machine(
    {"same_host": (LINK,), "other_host": (LINK._replace(latency_seconds=1000),)},
    call_seconds=100,
    combine_seconds_per_byte=2,
)


def priced(
    collective: str, name: str, p: int, n: int, hosts: tuple[int, ...] | None = None
) -> float:
    return price_call(choose(collective, name, p, n), p, n, MACHINE, hosts)


def test_the_price_of_a_call_is_what_its_rounds_cost_one_after_the_other() -> None:
    """Ring on 4 ranks: 6 messages of a quarter each, of which 3 are combined."""
    message = 2 * 1 + 10 + 0.5 * (25 - 1)
    assert priced("all_reduce", "ring", 4, 100) == 100 + 6 * message + 3 * 25 * 2
    assert priced("all_reduce", "recursive_doubling", 4, 100) == 100 + 2 * (12 + 0.5 * 99 + 200)
    assert priced("barrier", "dissemination", 4, 0) == 100 + 2 * 12
    assert priced("all_reduce", "ring", 1, 100) == 100


def test_a_price_depends_on_the_hosts() -> None:
    near, far = (priced("all_gather", "ring", 2, 100, hosts) for hosts in ((0, 0), (0, 1)))
    assert far - near == 990


def test_many_ranks_are_priced_by_the_formulas_of_the_algorithm() -> None:
    p, n = MAX_SIMULATED + 1, 17_000  # ring: 2 (p - 1) messages of n / p bytes
    message = 2 * 1 + 10 + 0.5 * (n / p - 1)
    assert priced("all_reduce", "ring", p, n) == pytest.approx(
        100 + 2 * (p - 1) * message + 2 * n * (p - 1) / p
    )
    far = priced("all_reduce", "ring", p, n, tuple(range(p)))
    assert far == pytest.approx(priced("all_reduce", "ring", p, n) + 2 * (p - 1) * 990)


def test_simulation_and_formulas_agree_on_what_has_no_waiting() -> None:
    """The formulas have no gaps and no waiting, and neither has the ring."""
    for n in (64, 6400):
        choice = choose("all_reduce", "ring", 8, n)
        assert price_by_formulas(choice, 8, n, MACHINE) == pytest.approx(
            price_call(choice, 8, n, MACHINE)
        )
    linear = choose("all_reduce", "linear", 8, 64)
    assert price_call(linear, 8, 64, MACHINE) != price_by_formulas(linear, 8, 64, MACHINE)


def test_a_price_depends_on_the_options() -> None:
    two, four = (
        price_by_formulas(choose("all_gather", label, 16, 0), 16, 0, MACHINE) - 100
        for label in ("bruck", "bruck(radix=4)")
    )
    assert (two, four) == (4 * 12, 6 * 12)


def test_without_a_fitted_machine_rough_costs_and_formulas_are_used() -> None:
    choice = choose("all_reduce", "ring", 4, 100)
    assert price_call(choice, 4, 100, None) == price_by_formulas(choice, 4, 100, BUILT_IN)


def test_a_machine_without_the_links_that_are_needed_is_refused() -> None:
    lonely = Machine({"same_host": (LINK,)})
    with pytest.raises(
        ValueError, match="needs a link other_host, which the machine does not have"
    ):
        price_call(choose("all_reduce", "ring", 2, 8), 2, 8, lonely, (0, 1))
