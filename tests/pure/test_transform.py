"""Schedules made from schedules."""

from __future__ import annotations

import pytest

from collectives import algorithms
from collectives.schedule import Recv, RecvReduce, Send
from collectives.transform import dual, relabelled, rooted


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
    rounds = [(Send(1, [0, 1]),)]
    renamed = relabelled(rounds, peer=lambda r: r + 10, block=lambda b: f"b{b}")
    assert list(renamed) == [(Send(11, ["b0", "b1"]),)]


@pytest.mark.parametrize(("blocks_are_ranks", "block"), [(True, 0), (False, 1)])
def test_rooted_rotates_ranks_and_rank_named_blocks(blocks_are_ranks: bool, block: int) -> None:
    @rooted(blocks_are_ranks=blocks_are_ranks)
    def to_the_next(rank, size):
        yield (Send(1, [1]),) if rank == 0 else ()

    assert list(to_the_next(2, 3, root=2)) == [(Send(0, [block]),)]
    assert list(to_the_next(0, 3, root=2)) == [()]
