"""Durations of the last run say what this one will take."""

from __future__ import annotations

import pytest

from tests.running.durations import Durations

KNOWN = {"a.py::one": 1.0, "a.py::two": 3.0, "b.py::one[x::y]": 5.0}


@pytest.mark.parametrize(
    ("nodeid", "seconds"),
    [("a.py::two", 3.0), ("a.py::new", 2.0), ("b.py::new", 5.0), ("c.py::new", 3.0)],
)
def test_what_is_not_known_is_taken_from_the_file_or_from_all(nodeid: str, seconds: float) -> None:
    assert Durations(KNOWN).expected(nodeid) == seconds


def test_where_nothing_is_known_all_tests_take_as_long() -> None:
    assert Durations({}).expected("a.py::one") == Durations({}).expected("b.py::two") > 0
