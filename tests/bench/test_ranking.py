"""What is measured, and what follows from times, against answers known beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.ranking import (
    LEVEL,
    Samples,
    fitted,
    promising,
    rankings,
    reachable,
    rows,
    samples,
    typical_error,
)
from collectives import Topology, algorithms
from collectives.selection.cost import Machine
from collectives.selection.decisions import Row

MACHINE = Machine(2e-6, 3e-10, 5e-11)


def on(size: int) -> Topology:
    """Ranks of one host."""
    return Topology.consecutive(size, size)


def times(**seconds: list[float]) -> dict[int, dict[str, float]]:
    """Seconds of each algorithm at 8, 32, 128 ... bytes."""
    columns = zip(*seconds.values(), strict=True)
    return {8 * 4**i: dict(zip(seconds, column, strict=True)) for i, column in enumerate(columns)}


def test_the_hopeless_are_not_measured():
    # Start-ups decide: on 32 ranks 5 of the doubling, 62 of the ring.
    assert set(promising("all_reduce", on(2), 8)) == set(algorithms.names("all_reduce"))
    assert "recursive_doubling" in promising("all_reduce", on(32), 8)
    assert "ring" not in promising("all_reduce", on(32), 8)
    # Bytes do: 5 n of the doubling, 2 n of the ring, 31 n of one shot.
    assert {"ring", "recursive_doubling"} <= set(promising("all_reduce", on(32), 1 << 24))
    assert "one_shot" not in promising("all_reduce", on(32), 1 << 24)
    assert "neighbour_exchange" not in promising("all_gather", on(3), 8), "it serves even numbers"


def test_the_fastest_comes_first():
    found = times(bruck=[1, 2, 3], direct=[3, 1, 2], sparbit=[2, 3, 1])
    assert rankings("all_gather", on(4), found) == [
        ["bruck", "sparbit", "direct"],
        ["direct", "bruck", "sparbit"],
        ["sparbit", "direct", "bruck"],
    ]


def test_among_the_fastest_comes_first_what_is_so_most_often():
    found = times(bruck=[1, 9, 9], direct=[LEVEL, LEVEL, 1], sparbit=[1.01 * LEVEL, 1, 9])
    best = [ranking[0] for ranking in rankings("all_gather", on(4), found)]
    assert best == ["direct", "direct", "direct"]


def test_among_the_fastest_the_built_in_rule_stands():
    found = times(bruck=[1, 1], recursive_doubling=[LEVEL, 1.01 * LEVEL])
    best = [ranking[0] for ranking in rankings("all_gather", on(4), found)]
    assert best == ["recursive_doubling", "bruck"]


def test_limits_lie_between_the_sizes_and_equal_neighbours_are_one_row():
    found = times(bruck=[1, 1, 9, 9], direct=[2, 2, 1, 1])
    assert rows("all_gather", on(4), found) == (Row(64, ("bruck",)), Row(math.inf, ("direct",)))
    assert rows("barrier", on(4), {0: {"tree": 1.0}}) == (Row(math.inf, ("tree",)),)


def test_what_is_never_reached_is_left_out():
    assert reachable("all_gather", ["swing", "sparbit", "direct"]) == ("swing", "sparbit")
    assert reachable("all_gather", ["swing", "neighbour_exchange", "recursive_doubling"]) == (
        "swing",
        "recursive_doubling",
    ), "what serves even numbers covers even numbers only"
    assert reachable("all_reduce", ["ring", "swing", "linear", "two_shot"]) == ("ring", "linear")
    assert reachable("all_reduce", ["linear", "ring"]) == ("linear",)


def predicted(machine: Machine) -> Samples:
    """What would be measured if the model were true."""
    names, sizes = ["ring", "linear", "rabenseifner"], [8, 4096, 1 << 20]
    found = samples(on(4), {"all_reduce": {n: dict.fromkeys(names, 1.0) for n in sizes}})
    assert len(found.seconds) == 9
    return found._replace(seconds=found.costs @ np.array(machine))


def test_samples_know_what_an_algorithm_costs():
    found = samples(
        on(4), {"all_reduce": {1000: {"ring": 0.5}}, "barrier": {0: {"dissemination": 2.0}}}
    )
    assert found.costs.tolist() == [[6, 1500, 750], [2, 0, 0]]
    assert found.seconds.tolist() == [0.5, 2.0]


def test_the_machine_is_found_again():
    found = predicted(MACHINE)
    machine = fitted(found, start=Machine(1.0, 1.0, 1.0))
    assert machine == pytest.approx(MACHINE)
    assert typical_error(found, machine) == pytest.approx(0, abs=1e-9)
    twice = Machine(*(2 * rate for rate in MACHINE))
    assert typical_error(found, twice) == pytest.approx(1)


def test_small_times_count_as_much_as_large_ones():
    found = predicted(MACHINE)
    wrong = found.seconds.copy()
    wrong[-1] *= 1.2  # by itself this would be a hundred times all the small ones
    machine = fitted(found._replace(seconds=wrong), start=MACHINE)
    assert machine.alpha == pytest.approx(MACHINE.alpha, rel=0.05)


def test_no_rate_is_negative():
    found = predicted(Machine(2e-6, 3e-10, -2e-10))
    plain = np.linalg.lstsq(found.costs / found.seconds[:, None], np.ones(9), rcond=None)[0]
    assert min(plain) < 0
    machine = fitted(found, start=MACHINE)
    assert machine.gamma == 0 and machine.alpha > 0 and machine.beta > 0


def test_what_the_samples_say_nothing_about_stays():
    found = samples(on(4), {"barrier": {0: {"dissemination": 2.0}}})
    assert fitted(found, start=MACHINE) == (1.0, MACHINE.beta, MACHINE.gamma)
