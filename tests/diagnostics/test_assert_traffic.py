"""`assert_traffic` passes if what is expected is sent, and says what was not; `Ledger.diff`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.testing import Traffic, assert_traffic, at_most

RING = 4 * 2 * 3 * 1000  # bytes: each of 4 ranks sends 2 * 3 blocks of 1,000 bytes


def a_step(comm: Communicator) -> None:
    with collectives.phase("backward"):
        comm.all_reduce(np.ones(4000, np.uint8), algorithm="ring")
    comm.barrier()


def said(**expected: Any) -> str:
    """What is raised on every rank if `expected` of a step is not met; empty if it is."""

    def one_rank(comm: Communicator) -> str:
        try:
            with assert_traffic(comm, **expected):
                a_step(comm)
        except AssertionError as error:
            return str(error)
        return ""

    texts = collectives.run(one_rank, size=4)
    assert len(set(texts)) == 1
    return texts[0]


BARRIER = Traffic(bytes=0, messages=8)
HALVES = {"left": [0, 1], "right": [2, 3]}


@pytest.mark.parametrize(
    "expected",
    [
        {},
        {"bytes": RING, "messages": 24 + 8},
        {"bytes": at_most(RING), "messages": at_most(40)},
        {"phases": {"backward": Traffic(RING, 24), "": BARRIER}},
        {"phases": {"backward": Traffic(messages=24), "": Traffic()}},
        {"between": {("left", "right"): Traffic(6000, at_most(12))}, "groups": HALVES},
    ],
)
def test_what_is_expected_passes(expected: dict[str, Any]) -> None:
    assert said(**expected) == ""


@pytest.mark.parametrize(
    ("expected", "sentence"),
    [
        ({"bytes": RING - 1}, "all ranks: sent 24000 bytes, expected 23999"),
        ({"bytes": at_most(RING - 1)}, "all ranks: sent 24000 bytes, expected at most 23999"),
        ({"messages": 0}, "all ranks: sent 32 messages, expected 0"),
        (
            {"phases": {"backward": Traffic(RING)}},
            "outside every phase: sent 8 messages, expected 0",
        ),
        ({"phases": {"x": Traffic(bytes=1)}}, "phase 'x': sent 0 bytes, expected 1"),
        (
            {"between": {("left", "right"): Traffic(0)}, "groups": HALVES},
            "from left to right: sent 6000 bytes, expected 0",
        ),
    ],
)
def test_every_rank_says_what_was_not_expected(expected: dict[str, Any], sentence: str) -> None:
    text = said(**expected)
    assert sentence in text.splitlines()
    assert "  backward/all_reduce: 1 calls, 24 messages, 24000 bytes" in text.splitlines()


def refused(sentence: str, **expected: Any) -> Callable[[Communicator], None]:
    def one_rank(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=re.escape(sentence)), assert_traffic(comm, **expected):
            pytest.fail("the block must not begin")

    return one_rank


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({}, "between: there is no group 'a'; groups has []"),
        ({"a": [4]}, "groups: 'a' has rank 4, but there are 4 ranks"),
    ],
)
def test_groups_that_do_not_exist_are_refused_before_the_block(
    groups: dict[str, list[int]], sentence: str
) -> None:
    between = {("a", "a"): Traffic()}
    collectives.run(refused(sentence, between=between, groups=groups), size=4)


def test_an_exception_of_the_block_is_not_replaced() -> None:
    def one_rank(comm: Communicator) -> None:
        with pytest.raises(KeyError), assert_traffic(comm, bytes=1):
            raise KeyError

    collectives.run(one_rank, size=2)


def test_diff_lists_the_groups_whose_totals_differ() -> None:
    def one_rank(comm: Communicator) -> None:
        with comm.record() as before:
            a_step(comm)
        with comm.record() as after:
            a_step(comm)
            comm.all_gather(np.ones(10, np.uint8), algorithm="ring")
        assert before.diff(before) == {}
        ((key, difference),) = after.diff(before).items()
        assert key == ("", "all_gather")
        assert difference.here == (1, 3, 30) and difference.there == (0, 0, 0)
        assert before.diff(after)[key] == (difference.there, difference.here)
        assert set(after.diff(before, by=["algorithm"])) == {("ring",)}

    collectives.run(one_rank, size=4)
