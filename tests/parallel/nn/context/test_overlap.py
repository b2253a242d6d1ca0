"""The ring's blocks travel while ranks compute, and the results do not depend on it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from parallel.nn import Array, RingAttention, Step
from parallel.nn.context import ring, softmax
from tests.parallel.nn.context.divided_rows import Case, on_ranks


def test_transfers_begin_before_a_rank_computes_and_end_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On each rank: three transfers of blocks forward, each around the work on one block."""
    by_thread: dict[int, list[str]] = defaultdict(list)
    start, add = ring.start_shift, softmax.OnlineSoftmax.add

    def noted(event: str) -> None:
        by_thread[threading.get_ident()].append(event)

    def started(*args: Any) -> Callable[[], Array]:
        noted("start")
        finish = start(*args)
        return lambda: (finish(), noted("finish"))[0]

    def added(*args: Any) -> None:
        noted("compute")
        add(*args)

    class Marked(RingAttention):
        def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
            found = super().forward(x, step)
            noted("end")
            return found

    monkeypatch.setattr(ring, "start_shift", started)
    monkeypatch.setattr(softmax.OnlineSoftmax, "add", added)
    on_ranks(Case(4, 16, 1), Marked)
    assert len(by_thread) == 4
    for events in by_thread.values():
        assert without_repeats(events[: events.index("end")]) == [
            *["start", "compute", "finish"] * 3,
            "compute",
        ]


def without_repeats(events: list[str]) -> list[str]:
    """A rank computes on one to three tiles of a block."""
    return [event for event, _ in groupby(events)]


def bits(case: Case) -> list[bytes]:
    return [x.tobytes() for rank in on_ranks(case, RingAttention) for x in (rank.y, rank.dx)]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_overlap_changes_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    case, start = Case(4, 19, 2, dtype), ring.start_shift
    overlapped = bits(case)

    def at_once(*args: Any) -> Callable[[], Array]:
        arrived = start(*args)()
        return lambda: arrived

    monkeypatch.setattr(ring, "start_shift", at_once)
    assert bits(case) == overlapped


def test_a_block_that_is_used_before_it_arrives_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a rank computes on memory that is still empty."""
    case, start = Case(4, 19, 2), ring.start_shift
    overlapped = bits(case)

    def too_early(*args: Any) -> Callable[[], Array]:
        finish = start(*args)
        return lambda: np.zeros_like(finish())

    monkeypatch.setattr(ring, "start_shift", too_early)
    assert bits(case) != overlapped
