"""Ranks that wait for each other for ever are noticed, and no others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from collectives.devices import standstill
from collectives.devices.standstill import Standstill
from collectives.engines import Board, HostMemory
from collectives.engines.host_memory import num_bytes, of_threads

SIZE = 4


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Standstill]:
    """Ranks that are processes, as far as they know; they look as often as they are asked to."""
    monkeypatch.setattr(standstill, "_SECONDS", -1.0)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    memory = of_threads(SIZE)
    assert memory.size == num_bytes(SIZE)
    boards = [Board(HostMemory(memory, SIZE, r), range(SIZE), r, "world") for r in range(SIZE)]
    return [Standstill(board, []) for board in boards]


def look(ranks: list[Standstill], waits: dict[int, list[int]], num_looks: int = 6) -> set[int]:
    """Let ranks look whether they go on; return those that are told that they do not."""
    told = set[int]()
    for _ in range(num_looks):
        for rank, missing in waits.items():
            if ranks[rank].look(missing, f"rank {rank} waits"):
                told.add(rank)
    return told


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        ({0: [1], 1: [0]}, {0, 1}),
        ({0: [1], 1: [2], 2: [0]}, {0, 1, 2}),
        ({0: [1, 2], 1: [3], 2: [0]}, {0, 2}),
        ({0: [1], 1: [2], 2: [1]}, {0, 1, 2}),  # the first one waits for a circle
        ({0: [1], 1: [2]}, set()),
        ({0: [1, 2, 3]}, set()),
        ({0: [1, 2, 3], 1: [2, 3], 2: [3]}, set()),
    ],
)
def test_ranks_in_a_circle_are_told(
    ranks: list[Standstill], waits: dict[int, list[int]], wanted: set[int]
) -> None:
    assert look(ranks, waits) == wanted


def test_the_sentence_names_the_waits(ranks: list[Standstill]) -> None:
    look(ranks, {0: [1], 1: [0]})
    assert "rank 0 waits; rank 1 waits" in ranks[0].look([1], "rank 0 waits").replace(
        "rank 1 waits; rank 0 waits", "rank 0 waits; rank 1 waits"
    )


def test_a_rank_that_does_not_look_again_may_have_gone_on(ranks: list[Standstill]) -> None:
    look(ranks, {1: [0]}, 10)
    assert look(ranks, {0: [1]}, 10) == set()
    assert look(ranks, {0: [1], 1: [0]}) == {0, 1}


def test_a_rank_that_waits_for_something_else_has_gone_on(ranks: list[Standstill]) -> None:
    for turn in range(10):
        assert ranks[0].look([1], "rank 0 waits") == ""
        assert ranks[1].look([0], f"rank 1 waits in call {turn}") == ""


def test_a_rank_is_told_once_of_each_wait(ranks: list[Standstill]) -> None:
    assert look(ranks, {0: [1], 1: [0]}) == {0, 1}
    assert ranks[0].look([1], "rank 0 waits in another call") == ""


def test_another_thread_or_a_call_under_way_may_end_a_wait(
    ranks: list[Standstill], monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Any = object()
    ranks[0]._in_flight = [call]
    assert look(ranks, {0: [1], 1: [0]}, 10) == set()
    ranks[0]._in_flight = []
    monkeypatch.undo()
    others = [
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    ]
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert look(ranks, {0: [1], 1: [0]}, 10) == set()
    end.set()
    thread.join()
    for each in others:
        monkeypatch.setattr(each, "name", "collectives watch")
    assert look(ranks, {0: [1], 1: [0]}, 10) == {0, 1}
