"""A test that starts neither a job nor a browser runs on one core.

Its ranks are threads, of which Python runs one at a time.  On several cores each turn of a thread
wakes another core, and the same tests take up to half as long again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.running.jobs import ranks_of


class Cores:
    """The plugin: a test has one core, or all of them if it starts other processes.

    Parameters
    ----------
    number : int
        The number of this process among those that run tests side by side.
    """

    def __init__(self, number: int) -> None:
        self._all = os.sched_getaffinity(0)
        self._one = {sorted(self._all)[number % len(self._all)]}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        starts_others = ranks_of(item) or item.get_closest_marker("site")
        os.sched_setaffinity(0, self._all if starts_others else self._one)
        try:
            return (yield)
        finally:
            os.sched_setaffinity(0, self._all)


def number_of(worker: str) -> int:
    """Return the number in the name of a worker: 3 of "gw3", 0 without one."""
    return int(worker.removeprefix("gw") or 0)
