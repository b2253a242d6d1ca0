"""The vocabulary and its picture."""

from __future__ import annotations

from collectives.schedule import Copy, Recv, RecvReduce, Send, grid, incoming, outgoing

EVERYTHING = (Send(1, [0]), Recv(2, [1]), RecvReduce(3, [(0, 1)]), Copy([0], [1]))


def test_operations_of_different_kinds_are_never_equal() -> None:
    assert Send(1, [0]) != Recv(1, [0])
    assert Send(1, [0]) == Send(1, (0,))


def test_blocks_may_be_any_iterable() -> None:
    assert Send(1, range(3)).blocks == (0, 1, 2)


def test_messages_of_a_round_are_told_apart() -> None:
    assert [op.kind for op in outgoing(EVERYTHING)] == ["send"]
    assert [op.kind for op in incoming(EVERYTHING)] == ["recv", "recv_reduce"]


def test_the_grid_shows_every_operation_and_missing_rounds() -> None:
    lines = grid([[EVERYTHING, ()], [()]], mark=(1, 0)).splitlines()
    assert lines == [
        "rank  round 0                round 1",
        "0     >1:0 <2:1 +3:0.1 =0:1  .",
        "1     [.]                    (none)",
    ]
