"""What is measured, and what follows from times, against answers known beforehand."""

from __future__ import annotations

import math

from bench.choosing.algorithms import LEVEL, for_devices, promising, rankings, reachable, rows
from collectives import Topology, algorithms
from collectives.selection.decisions import Row


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


def test_on_devices_everything_is_measured_that_is_not_cut():
    measured = for_devices("broadcast", on(4), 8)
    cut = {"pipeline", "chain", "double_binary_tree"}
    assert cut <= set(algorithms.names("broadcast")) and not cut & set(measured)
    assert {"linear", "scatter_all_gather", "knomial(radix=16)"} <= set(measured)
    assert "neighbour_exchange" not in for_devices("all_gather", on(3), 8)


def test_among_the_fastest_the_rule_for_devices_stands():
    measured = times(direct=[LEVEL], recursive_doubling=[1])
    assert rankings("all_gather", on(4), measured)[0][0] == "recursive_doubling"
    assert rankings("all_gather", on(4), measured, on_device=True)[0][0] == "direct"
    (row,) = rows("all_gather", on(4), measured, on_device=True)
    assert row.labels[0] == "direct"


def test_the_fastest_comes_first():
    measured = times(bruck=[1, 2, 3], direct=[3, 1, 2], sparbit=[2, 3, 1])
    assert rankings("all_gather", on(4), measured) == [
        ["bruck", "sparbit", "direct"],
        ["direct", "bruck", "sparbit"],
        ["sparbit", "direct", "bruck"],
    ]


def test_among_the_fastest_comes_first_what_is_so_most_often():
    measured = times(bruck=[1, 9, 9], direct=[LEVEL, LEVEL, 1], sparbit=[1.01 * LEVEL, 1, 9])
    best = [ranking[0] for ranking in rankings("all_gather", on(4), measured)]
    assert best == ["direct", "direct", "direct"]


def test_among_the_fastest_the_built_in_rule_stands():
    measured = times(bruck=[1, 1], recursive_doubling=[LEVEL, 1.01 * LEVEL])
    best = [ranking[0] for ranking in rankings("all_gather", on(4), measured)]
    assert best == ["recursive_doubling", "bruck"]


def test_limits_lie_between_the_sizes_and_equal_neighbours_are_one_row():
    measured = times(bruck=[1, 1, 9, 9], direct=[2, 2, 1, 1])
    assert rows("all_gather", on(4), measured) == (Row(64, ("bruck",)), Row(math.inf, ("direct",)))
    assert rows("barrier", on(4), {0: {"tree": 1.0}}) == (Row(math.inf, ("tree",)),)


def test_what_is_never_reached_is_left_out():
    assert reachable("all_gather", ["swing", "sparbit", "direct"]) == ("swing", "sparbit")
    assert reachable("all_gather", ["swing", "neighbour_exchange", "recursive_doubling"]) == (
        "swing",
        "recursive_doubling",
    ), "what serves even numbers covers even numbers only"
    assert reachable("all_reduce", ["ring", "swing", "linear", "two_shot"]) == ("ring", "linear")
    assert reachable("all_reduce", ["linear", "ring"]) == ("linear",)
