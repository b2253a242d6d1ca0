"""What the registry states is what counting finds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

from collectives import Topology, algorithms
from collectives.algorithms import Formula
from collectives.algorithms.extending import compare
from collectives.algorithms.registry import COSTS
from collectives.algorithms.sources import SOURCES
from collectives.programs.placement import compile_lane
from collectives.schedule.contracts import SPECS
from tests.algorithms.catalogue import EVERY, LARGE, cases, each_algorithm


@each_algorithm
@pytest.mark.slow
def test_formulas_agree_with_counting(collective: str, name: str) -> None:
    for size, options in cases(collective, name, up_to=64, large=LARGE):
        places = [0, size // 3, *([size // 2, size - 1] if size <= 16 else [])]
        roots = dict.fromkeys(places if SPECS[collective].is_rooted else [None])
        compare(algorithms.info(collective, name), size, roots, **options)


@pytest.mark.parametrize("wrong", COSTS)
def test_a_wrong_formula_is_noticed(wrong: str) -> None:
    right = algorithms.info("all_reduce", "ring")
    compare(right, 5, [None])
    entry = replace(right, **{wrong: Formula(f"{getattr(right, wrong)} + 1", is_cost=True)})
    with pytest.raises(ValueError, match=f"5 ranks, 25 bytes.*: {wrong} is .* counted"):
        compare(entry, 5, [None])


@pytest.mark.parametrize(
    ("cost", "lucky"), [("rounds", "2 * (n / p - 1)"), ("total_bytes", "2 * p * p * (p - 1)")]
)
def test_a_formula_that_is_right_for_one_size_only_is_noticed(cost: str, lucky: str) -> None:
    entry = replace(algorithms.info("all_reduce", "ring"), **{cost: Formula(lucky)})
    with pytest.raises(ValueError, match=f"125 bytes.*: {cost} is"):
        compare(entry, 5, [None])


@each_algorithm
@pytest.mark.slow
def test_scratch_is_bounded_as_stated(collective: str, name: str) -> None:
    entry = algorithms.info(collective, name)
    assert entry.scratch_bytes is not None
    shares = []
    for size, options in cases(collective, name, up_to=17, large=[24, 33]):
        pieces = entry.case(size, **options).num_pieces
        n = size * (1 if collective == "all_to_all" else pieces)
        needed = scratch(collective, name, size, n, options)
        stated = entry.scratch_bytes(size, n, **options)
        assert needed <= stated, f"{size} ranks, {options}: {needed / n} n, not {stated}"
        shares.append(needed / stated if stated else 1)
    assert max(shares) > 0.6, "the bound says too little"


def scratch(collective: str, name: str, size: int, n: int, options: dict[str, int]) -> int:
    """The most scratch, in elements, that a rank's program needs for a vector of n."""
    entry = algorithms.info(collective, name)
    counts: Any = (n // size,) * size
    if SPECS[collective].has_pieces:
        counts = n
    elif collective == "all_to_all":
        counts = (counts,) * size
    elif collective == "barrier":
        counts = (0,) * size
    return max(
        compile_lane(entry, rank, size, root, counts, tuple(options.items())).num_scratch
        for root in ({0, size // 3, size - 1} if SPECS[collective].is_rooted else {0})
        for rank in range(size)
    )


def test_formulas_are_exact() -> None:
    assert Formula("n * (p - 1) / p")(p=3, n=10) == Fraction(20, 3)
    assert Formula("n * (p - 1) / p")(p=5, n=2**62) == Fraction(2**62 * 4, 5)
    assert Formula("(p - 1) / p * n")(p=3, n=2**62) == Fraction(2**63, 3)
    assert algorithms.info("all_reduce", "rabenseifner").max_bytes_per_rank(p=8, n=2**55 + 8) == (
        Fraction(14, 8) * (2**55 + 8)
    )
    assert isinstance(Formula("2 * (p - 1) * n")(p=5, n=7), int)
    for text in ("0.5 * p", "'7'"):
        with pytest.raises(ValueError, match="not a whole number or a fraction"):
            Formula(text).checked()


def test_a_formula_cannot_reach_anything_else() -> None:
    with pytest.raises(ValueError, match="'__import__' is not defined"):
        Formula("__import__('os')").checked()
    with pytest.raises(ValueError, match="cannot use the attribute"):
        Formula("().__class__.__base__").checked()


@each_algorithm
def test_every_entry_is_documented(collective: str, name: str) -> None:
    algorithm = algorithms.info(collective, name)
    assert algorithm.function.__doc__
    assert algorithm.source in SOURCES
    assert algorithm.restrictions


def test_every_source_is_used() -> None:
    entries = [algorithms.info(*entry) for entry in EVERY]
    assert {entry.source for entry in entries} == set(SOURCES)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: ring, segmented_ring, linear, "):
        algorithms.info("all_reduce", "rign")
    with pytest.raises(ValueError, match="unknown collective 'allreduce'; known: broadcast"):
        algorithms.names("allreduce")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rank": 5, "size": 5}, "no rank 5 among 5"),
        ({"rank": 0, "size": 0}, "no rank 0 among 0"),
        ({"rank": 0, "size": 5, "root": 5}, "no root 5"),
        ({"rank": 0, "size": 5, "radix": 2}, "knows no option 'radix'"),
        ({"rank": 0, "size": 5, "segments": 0}, "at least 1"),
    ],
)
def test_schedules_that_cannot_be_are_refused(arguments: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        algorithms.schedule("broadcast", "chain", **arguments)


def test_restrictions_are_enforced() -> None:
    with pytest.raises(ValueError, match="serves a power of two of ranks, not 6"):
        algorithms.schedule("all_reduce", "swing_latency", rank=0, size=6)
    with pytest.raises(ValueError, match="serves an even number of ranks, not 5"):
        algorithms.schedule("all_gather", "swing", rank=0, size=5)
    hosts = Topology.consecutive(5, 2)
    with pytest.raises(ValueError, match="a topology of 5 ranks does not fit 6 ranks"):
        algorithms.schedule("all_gather", "hierarchical", rank=0, size=6, per_host=hosts)
    with pytest.raises(ValueError, match=r"serves a multiple of x \* y ranks, not 18"):
        algorithms.schedule("all_to_all", "torus", rank=0, size=18, x=2, y=2)
    with pytest.raises(ValueError, match="has no root"):
        algorithms.schedule("all_gather", "ring", rank=0, size=6, root=0)


def test_an_all_to_all_on_a_torus_sends_along_its_lines_only() -> None:
    sizes = 3, 2, 4
    for rank, number in product(range(24), range(sum(sizes) - 3)):
        (send, _) = algorithms.schedule("all_to_all", "torus", rank=rank, size=24, x=3, y=2)[number]
        assert send.peer is not None
        places = [np.unravel_index(node, sizes[::-1]) for node in (rank, send.peer)]
        changed = [axis for axis, pair in enumerate(zip(*places, strict=True)) if len({*pair}) > 1]
        assert changed == [2 if number < 2 else 1 if number < 3 else 0]


def test_an_operation_is_a_named_tuple() -> None:
    send, receive = algorithms.schedule("all_reduce", "ring", rank=2, size=5)[0]
    assert (send.kind, send.peer, send.blocks) == ("send", 3, (1,))
    assert (receive.kind, receive.peer, receive.blocks) == ("recv_reduce", 1, (0,))
