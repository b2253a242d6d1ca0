"""The longest tests come first, and those of a file stay together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.running.durations import Durations
from tests.running.order import sort

TESTS = ["a::1", "a::2", "b::1", "c::1", "c::2", "c::3"]


def items(*limited: str) -> list[Any]:
    """Tests, of which some have time limits of their own."""
    return [
        SimpleNamespace(
            nodeid=nodeid, get_closest_marker={"timeout": nodeid in limited or None}.get
        )
        for nodeid in TESTS
    ]


def order(durations: dict[str, float], *limited: str) -> list[str]:
    made = items(*limited)
    sort(made, Durations(durations))
    return [item.nodeid for item in made]


def test_files_are_ordered_by_their_longest_test() -> None:
    known = {"a::1": 1.0, "a::2": 1.0, "b::1": 4.0, "c::1": 1.0, "c::2": 9.0, "c::3": 1.0}
    assert order(known) == ["c::1", "c::2", "c::3", "b::1", "a::1", "a::2"]


def test_without_durations_those_with_time_limits_come_first() -> None:
    assert order({}, "b::1") == ["b::1", *(nodeid for nodeid in TESTS if nodeid != "b::1")]
    assert order({}) == TESTS
