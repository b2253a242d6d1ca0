"""How far messages go on a ring of all ranks: Bine against binomial trees, and tripling."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import pytest

from collectives import algorithms
from collectives.schedule import negabinary, outgoing
from collectives.schedule.count import even_sizes

# The algorithms whose partners Bine brings nearer; each has the rounds and bytes of the other.
COUNTERPARTS = [
    ("broadcast", "bine", "binomial"),
    ("reduce", "bine", "binomial"),
    ("scatter", "bine", "binomial"),
    ("gather", "bine", "binomial"),
    ("all_gather", "bine", "recursive_doubling"),
    ("reduce_scatter", "bine", "recursive_halving"),
    ("all_reduce", "bine_latency", "recursive_doubling"),
    ("all_reduce", "bine", "rabenseifner"),
    ("all_to_all", "bine", "bruck"),
]


class Message(NamedTuple):
    """A message of `num_bytes`, in a round, that goes `distance` ranks ahead (or back, if < 0)."""

    source: int
    number: int
    distance: int
    num_bytes: Fraction


def messages(collective: str, name: str, size: int) -> Iterator[Message]:
    """All messages of an algorithm, on the shorter way around the ring."""
    entry = algorithms.info(collective, name)
    sizes = even_sizes(collective, entry.case(size), size)
    for rank in range(size):
        for number, operations in enumerate(entry.schedule(rank, size)):
            for op in outgoing(operations):
                assert op.peer is not None
                distance = (op.peer - rank + size // 2) % size - size // 2
                num_bytes = Fraction(sum(sizes[block] for block in op.blocks))
                yield Message(rank, number, distance, num_bytes)


def hops(collective: str, name: str, size: int) -> int:
    return sum(abs(message.distance) for message in messages(collective, name, size))


def byte_hops(collective: str, name: str, size: int) -> Fraction:
    return sum(
        (abs(m.distance) * m.num_bytes for m in messages(collective, name, size)), Fraction()
    )


@pytest.mark.parametrize(("size", "share"), [(64, 0.703), (256, 0.694), (1024, 0.689)])
def test_bine_trees_need_two_thirds_of_the_hops_of_binomial_trees(size: int, share: float) -> None:
    for collective in ("broadcast", "reduce"):
        ratio = hops(collective, "bine", size) / hops(collective, "binomial", size)
        assert round(ratio, 3) == share


@pytest.mark.parametrize(("collective", "bine", "binomial"), COUNTERPARTS)
def test_bytes_go_a_third_less_far(collective: str, bine: str, binomial: str) -> None:
    assert byte_hops(collective, bine, 64) < Fraction(704, 1000) * byte_hops(
        collective, binomial, 64
    )


@pytest.mark.parametrize(("collective", "bine", "binomial"), COUNTERPARTS)
def test_bine_trees_change_distances_only(collective: str, bine: str, binomial: str) -> None:
    for cost in ("rounds", "startups", "messages", "max_bytes_per_rank", "total_bytes"):
        of_bine, of_binomial = (
            getattr(algorithms.info(collective, n), cost) for n in (bine, binomial)
        )
        assert of_bine(p=64, n=64) == of_binomial(p=64, n=64)


def test_roots_that_stand_elsewhere_are_further_away(monkeypatch: pytest.MonkeyPatch) -> None:
    right = negabinary.halves

    def in_the_middle(line: range, root: int) -> tuple[range, range, int]:
        kept, other, _ = right(line, root)
        return kept, other, other[len(other) // 2]

    monkeypatch.setattr(negabinary, "halves", in_the_middle)
    assert hops("broadcast", "bine", 64) / hops("broadcast", "binomial", 64) > 0.8


@pytest.mark.parametrize("num_bits", range(1, 8))
def test_for_a_power_of_two_the_trees_are_those_of_the_paper(num_bits: int) -> None:
    size, holders = 1 << num_bits, [0]
    edges = set()
    for number in range(num_bits):
        step = sum((-2) ** j for j in range(num_bits - number))
        new = [(rank + (step if rank % 2 == 0 else -step)) % size for rank in holders]
        edges |= {(number, *pair) for pair in zip(holders, new, strict=True)}
        holders += new
    assert sorted(holders) == list(range(size))
    bine = algorithms.info("broadcast", "bine")
    assert edges == {
        (number, rank, op.peer)
        for rank in range(size)
        for number, operations in enumerate(bine.schedule(rank, size))
        for op in outgoing(operations)
    }


def test_for_any_number_of_ranks_no_tree_reaches_further_than_the_binomial_one() -> None:
    for size in (*range(2, 40), 48, 63, 96, 100, 127, 129):
        assert hops("broadcast", "bine", size) <= hops("broadcast", "binomial", size)
        assert byte_hops("scatter", "bine", size) <= byte_hops("scatter", "binomial", size)


def num_runs(blocks: list[int], size: int) -> int:
    """How many stretches of the ring the blocks are."""
    return sum((block - 1) % size not in blocks for block in blocks)


@pytest.mark.parametrize("collective", ["scatter", "gather", "all_gather", "reduce_scatter"])
def test_what_bine_sends_at_once_lies_together(collective: str) -> None:
    for size in (2, 6, 8, 14, 16, 20, 32):
        for rank in range(size):
            for operations in algorithms.schedule(collective, "bine", rank=rank, size=size):
                for op in outgoing(operations):
                    assert num_runs(list(op.blocks), size) == 1
    swing = algorithms.schedule("reduce_scatter", "swing", rank=0, size=16)
    assert num_runs(list(outgoing(swing[0])[0].blocks), 16) > 1


def test_pieces_of_an_all_reduce_by_bine_lie_together_as_well() -> None:
    for size in (2, 8, 32, 33):
        for rank in range(size):
            for operations in algorithms.schedule("all_reduce", "bine", rank=rank, size=size):
                for op in outgoing(operations):
                    assert list(op.blocks) == list(range(op.blocks[0], op.blocks[-1] + 1))


def test_three_of_four_bytes_of_an_all_reduce_by_bine_go_to_neighbours() -> None:
    sent = list(messages("all_reduce", "bine", 64))
    near = sum(message.num_bytes for message in sent if abs(message.distance) == 1)
    assert near / sum(message.num_bytes for message in sent) == Fraction(3, 4) / Fraction(63, 64)


def test_partners_in_a_butterfly_are_each_others() -> None:
    for size in range(2, 40, 2):
        for step in range(6):
            for rank in range(size):
                partner = negabinary.partner(rank, size, step)
                assert negabinary.partner(partner, size, step) == rank != partner


@pytest.mark.parametrize("size", [3, 9, 27, 81])
def test_tripling_sends_both_ways_at_distances_that_triple(size: int) -> None:
    sent = list(messages("all_reduce", "tripling", size))
    for rank in range(size):
        arrows = [(m.number, m.distance) for m in sent if m.source == rank]
        assert sorted(arrows) == [
            (number, sign * 3**number)
            for number in range(max(m.number for m in sent) + 1)
            for sign in (-1, 1)
        ]


def test_tripling_takes_the_fewest_rounds_that_two_messages_allow() -> None:
    entry = algorithms.info("all_reduce", "tripling")
    for size in range(2, 250):
        rounds = entry.rounds(p=size)
        assert 3 ** (rounds - 1) < size <= 3**rounds
        for operations in entry.schedule(size // 2, size):
            assert sum(op.kind == "send" for op in operations) <= 2


def test_rings_of_tripling_carry_a_third_of_what_windows_on_one_side_need() -> None:
    def busiest_link(distances: list[int]) -> int:
        """The messages on a link, if each rank sends these distances: the same on all links."""
        return max(sum(d for d in distances if d > 0), -sum(d for d in distances if d < 0))

    both = [m.distance for m in messages("all_reduce", "tripling", 81) if m.source == 0]
    one_sided = [hop * 3**k for k in range(4) for hop in (1, 2)]
    assert 3 * busiest_link(both) == busiest_link(one_sided)
