"""What the registry states is what counting finds."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from collectives import algorithms
from collectives.algorithms import Algorithm, Formula
from collectives.layout import even
from collectives.program import block_sizes
from collectives.schedule import Schedule, incoming, outgoing
from collectives.spec import SPECS, Case

EVERY = [(c, a) for c in algorithms.collectives() for a in algorithms.names(c)]


def counts(collective: str, size: int, n: int):
    if SPECS[collective].has_pieces:
        return n
    return (even(n, size),) * size if collective == "all_to_all" else even(n, size)


def carried(schedule: Schedule, pick, sizes) -> list[int]:
    """The elements of each message that a rank sends (or receives)."""
    return [sum(sizes[b] for b in op.blocks) for ops in schedule for op in pick(ops)]


def count(algorithm: Algorithm, size: int, root: int | None, segments: int) -> None:
    """Count the schedules of all ranks against the formulas."""
    collective, options = algorithm.collective, {"segments": segments} if algorithm.options else {}
    n = 0 if collective == "barrier" else size * segments
    case = Case(size, root or 0, algorithm.num_pieces(size, options))
    sizes = block_sizes(collective, counts(collective, size, n), case)
    schedules = [algorithm.schedule(rank, size, root, **options) for rank in range(size)]
    sent = [carried(schedule, outgoing, sizes) for schedule in schedules]
    received = [carried(schedule, incoming, sizes) for schedule in schedules]
    at = {"p": size, "n": n, "segments": segments}
    assert algorithm.rounds(**at) == len(schedules[0])
    assert algorithm.messages(**at) == sum(map(len, sent))
    assert algorithm.total(**at) == sum(map(sum, sent))
    assert algorithm.busiest(**at) == max(map(sum, sent + received))


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_formulas_agree_with_counting(collective: str, name: str, segments: int) -> None:
    algorithm = algorithms.info(collective, name)
    for size in filter(algorithm.serves, range(1, 65)):
        for root in {0, size // 3} if SPECS[collective].is_rooted else {None}:
            count(algorithm, size, root, segments)


@pytest.mark.parametrize("wrong", ["rounds", "messages", "busiest", "total"])
def test_a_wrong_formula_is_noticed(wrong: str) -> None:
    right = algorithms.info("all_reduce", "ring")
    count(right, 5, None, 1)
    with pytest.raises(AssertionError):
        count(replace(right, **{wrong: Formula(f"{getattr(right, wrong)} + 1")}), 5, None, 1)


def test_formulas_are_exact() -> None:
    assert Formula("n * (p - 1) / p")(p=3, n=10) == Fraction(20, 3)
    assert Formula("n * (p - 1) / p")(p=5, n=2**62) == Fraction(2**62 * 4, 5)
    assert isinstance(Formula("2 * (p - 1) * n")(p=5, n=7), int)


def test_a_formula_cannot_reach_anything_else() -> None:
    with pytest.raises(NameError):
        Formula("__import__('os')")(p=2)


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_entry_is_documented(collective: str, name: str) -> None:
    algorithm = algorithms.info(collective, name)
    assert algorithm.function.__doc__
    assert algorithm.source
    assert algorithm.restrictions


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known: ring, reduce_broadcast, recursive_doubling"):
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
    with pytest.raises(ValueError, match="serves power of two ranks, not 6"):
        algorithms.schedule("reduce_scatter", "recursive_halving", rank=0, size=6)
    with pytest.raises(ValueError, match="has no root"):
        algorithms.schedule("all_gather", "ring", rank=0, size=6, root=0)


def test_an_operation_is_a_named_tuple() -> None:
    send, receive = algorithms.schedule("all_reduce", "ring", rank=2, size=5)[0]
    assert (send.kind, send.peer, send.blocks) == ("send", 3, (1,))
    assert (receive.kind, receive.peer, receive.blocks) == ("recv_reduce", 1, (0,))
