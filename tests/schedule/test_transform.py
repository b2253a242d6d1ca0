"""Schedules made from schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collectives import algorithms
from collectives.schedule import Copy, Recv, RecvReduce, Round, Send
from collectives.schedule.transform import dual, folded, idle, nested, relabelled, rooted


def test_a_dual_reverses_time_and_messages() -> None:
    rounds = [(Send(1, [0]),), (Recv(2, [1]),)]
    assert list(dual(rounds, 0, combine=False)) == [(Send(2, [1]),), (Recv(1, [0]),)]


def test_a_dual_combines_on_the_side_of_the_sender() -> None:
    rounds = [(Send(0, [0]), Send(2, [0]))]
    (operations,) = dual(rounds, 1, combine=True)
    assert operations == (RecvReduce(2, [0], "right"), RecvReduce(0, [0], "left"))


def test_the_dual_of_a_dual_is_the_schedule_again() -> None:
    for rank in range(5):
        rounds = algorithms.schedule("broadcast", "chain", rank=rank, size=5, root=2, segments=3)
        once = dual(rounds, rank, combine=False)
        assert list(dual(once, rank, combine=False)) == rounds


def test_relabelling_renames_ranks_and_blocks() -> None:
    rounds = [(Send(1, [0, 1]), Recv(2, [0], into=[1]))]
    renamed = relabelled(rounds, peer=lambda r: r + 10, expand=lambda b: [f"b{b}"])
    assert list(renamed) == [(Send(11, ["b0", "b1"]), Recv(12, ["b0"], into=["b1"]))]


def test_relabelling_may_put_several_blocks_for_one() -> None:
    rounds = relabelled([(Send(1, [1, 0]),)], peer=int, expand=lambda b: [2 * b, 2 * b + 1])
    assert list(rounds) == [(Send(1, [2, 3, 0, 1]),)]


def test_an_algorithm_nests_among_some_of_the_ranks() -> None:
    def to_the_next(rank: int, size: int) -> Iterator[Round]:
        yield (Send(1, [0]),) if rank == 0 else (Recv(0, [0]),)

    assert list(nested(to_the_next, 5, [5, 9])) == [(Send(9, [0]),)]
    assert list(nested(to_the_next, 9, [5, 9], lambda b: [b + 7])) == [(Recv(5, [7]),)]
    assert list(idle(to_the_next(0, 2))) == [()]


def test_neighbours_fold_and_the_first_takes_part_for_both() -> None:
    def swap(rank: int, size: int) -> Iterator[Round]:
        yield Send(1 - rank, [0]), RecvReduce(1 - rank, [0])

    first, second, third = (list(folded(swap, rank, 3, 2, [0])) for rank in range(3))
    assert first == [
        (RecvReduce(1, [0], "right"),),
        (Send(2, [0]), RecvReduce(2, [0])),
        (Send(1, [0]),),
    ]
    assert second == [(Send(0, [0]),), (), (Recv(0, [0]),)]
    assert third == [(), (Send(0, [0]), RecvReduce(0, [0])), ()]


def test_what_changes_its_name_has_no_dual() -> None:
    for op in (Copy([0], [1]), Recv(1, [0], into=[1])):
        with pytest.raises(AssertionError, match="no dual"):
            list(dual([(op,)], 0, combine=True))


@pytest.mark.parametrize(("blocks_are_ranks", "block"), [(True, 0), (False, 1)])
def test_rooted_rotates_ranks_and_rank_named_blocks(blocks_are_ranks: bool, block: int) -> None:
    @rooted(blocks_are_ranks=blocks_are_ranks)
    def to_the_next(rank, size):
        yield (Send(1, [1]),) if rank == 0 else ()

    assert list(to_the_next(2, 3, root=2)) == [(Send(0, [block]),)]
    assert list(to_the_next(0, 3, root=2)) == [()]
