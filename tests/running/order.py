"""The longest tests run first: at the end no process waits long for the last test of another.

The tests of a file stay beside each other, so that what its fixtures make is made once.
"""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.running.durations import Durations, file_of


def sort(items: list[pytest.Item], durations: Durations) -> None:
    """Sort tests by the longest one of their file, and then by whether they may take long."""
    longest = defaultdict[str, float](float)
    for item in items:
        file = file_of(item.nodeid)
        longest[file] = max(longest[file], durations.expected(item.nodeid))
    items.sort(key=lambda item: (-longest[file_of(item.nodeid)], not may_take_long(item)))


def may_take_long(item: pytest.Item) -> bool:
    """Return whether a test has a time limit of its own."""
    return item.get_closest_marker("timeout") is not None
