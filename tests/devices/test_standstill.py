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
WAITS = [object() for _ in range(SIZE)]  # one of each rank


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[Standstill]:
    """Ranks that are processes, as far as they know; they look as often as they are asked to."""
    monkeypatch.setattr(standstill, "SECONDS", -1.0)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    memory = of_threads(SIZE)
    assert memory.size == num_bytes(SIZE)
    boards = [Board(HostMemory(memory, SIZE, r), range(SIZE), r, "world") for r in range(SIZE)]
    return [Standstill(board, []) for board in boards]


def look(ranks: list[Standstill], waits: dict[int, list[int]], num_looks: int = 20) -> set[int]:
    """Let ranks look whether they go on; return those that are told that they do not."""
    told = set[int]()
    for _ in range(num_looks):
        for rank, missing in waits.items():
            if ranks[rank].look(WAITS[rank], missing, f"rank {rank} waits"):
                told.add(rank)
    return told


def all_end(ranks: list[Standstill]) -> None:
    for rank in ranks:
        rank.end()


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        ({0: [1], 1: [0]}, {0, 1}),
        ({0: [1], 1: [2], 2: [0]}, {0, 1, 2}),
        ({0: [1, 2], 1: [3], 2: [0]}, {0, 2}),
        ({0: [1], 1: [2], 2: [1]}, {0, 1, 2}),  # the first one waits for the others
        ({0: [1, 2], 1: [2], 2: [1]}, {0, 1, 2}),
        ({0: [1], 1: [2]}, set()),
        ({0: [1, 2, 3]}, set()),
        ({0: [1, 2, 3], 1: [2, 3], 2: [3]}, set()),
    ],
)
def test_ranks_that_wait_for_each_other_are_told(
    ranks: list[Standstill], waits: dict[int, list[int]], wanted: set[int]
) -> None:
    assert look(ranks, waits) == wanted


def test_the_sentence_names_all_waits(ranks: list[Standstill]) -> None:
    look(ranks, {0: [1], 1: [0]})
    for rank, other in ((0, 1), (1, 0)):
        why = ranks[rank].look(WAITS[rank], [other], f"rank {rank} waits")
        assert why.endswith(": rank 0 waits; rank 1 waits")


def test_a_rank_that_does_not_look_again_may_have_gone_on(ranks: list[Standstill]) -> None:
    look(ranks, {1: [0]})
    assert look(ranks, {0: [1]}) == set()
    assert look(ranks, {0: [1], 1: [0]}) == {0, 1}


def test_a_rank_that_has_gone_on_hides_no_others(ranks: list[Standstill]) -> None:
    look(ranks, {3: [0, 1, 2]})
    assert look(ranks, {0: [1, 3], 1: [0, 3]}) == {0, 1}
    all_end(ranks)
    look(ranks, {2: [0, 1, 3]})
    ranks[2].end()
    assert look(ranks, {0: [1, 2], 1: [0, 2]}) == {0, 1}


def test_a_rank_that_waits_for_something_else_has_gone_on(ranks: list[Standstill]) -> None:
    """Also if it says the same of it."""
    for _ in range(20):
        assert ranks[0].look(WAITS[0], [1], "rank 0 waits") == ""
        assert ranks[1].look(object(), [0], "rank 1 waits") == ""


def test_a_rank_is_told_of_one_wait_only(ranks: list[Standstill]) -> None:
    assert look(ranks, {0: [1], 1: [0]}) == {0, 1}
    assert ranks[0].look(object(), [1], "rank 0 waits") == ""
    all_end(ranks)
    assert ranks[0].look(WAITS[0], [1], "rank 0 waits") == ""


def test_ranks_that_look_seldom_are_told_later(ranks: list[Standstill]) -> None:
    told = set()
    for turn in range(200):
        for rank in (0, 1) if turn % 20 == 0 else (0,):
            if ranks[rank].look(WAITS[rank], [1 - rank], f"rank {rank} waits"):
                told.add(rank)
    assert told == {0, 1}


def test_another_thread_or_a_call_under_way_may_end_a_wait(
    ranks: list[Standstill], monkeypatch: pytest.MonkeyPatch
) -> None:
    call: Any = object()
    ranks[0].in_flight = [call]
    assert look(ranks, {0: [1], 1: [0]}) == set()
    ranks[0].in_flight = []
    monkeypatch.undo()
    me, end = threading.current_thread(), threading.Event()
    others = [thread for thread in threading.enumerate() if thread is not me]
    thread = threading.Thread(target=end.wait)
    thread.start()
    assert look(ranks, {0: [1], 1: [0]}) == set()
    end.set()
    thread.join()
    for each in others:
        monkeypatch.setattr(each, "name", "collectives watch")
    assert look(ranks, {0: [1], 1: [0]}) == {0, 1}
