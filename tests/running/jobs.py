"""Tests that start jobs say how many ranks these have, and wait for places (`budget.py`).

``pytest.mark.ranks(n=4)`` marks a test or a file; ``pytest.mark.ranks(n="num_ranks")`` takes the
number from a parameter of the test.  A test that starts more ranks than it says fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.running.budget import Budget

STARTERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "collectives.launch"}


def ranks_of(item: pytest.Item) -> int:
    """Return how many ranks a test says that it starts."""
    mark = item.get_closest_marker("ranks")
    return 0 if mark is None else int(mark.kwargs["n"])


def resolve(item: pytest.Item) -> None:
    """Put the number in the place of the name of a parameter; no such parameter means no ranks."""
    mark = item.get_closest_marker("ranks")
    if mark is not None and isinstance(name := mark.kwargs["n"], str):
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        item.add_marker(pytest.mark.ranks(n=parameters.get(name, 0)), append=False)


def started_by(words: Sequence[Any]) -> int:
    """Return how many ranks a command starts; 0 if it starts no job."""
    text = [str(word) for word in words]
    starts = [place for place, word in enumerate(text) if Path(word).name in STARTERS]
    options = text[starts[0] :] if starts else []
    numbers = [value for option, value in pairwise(options) if option == "-n"]
    return int(numbers[0]) if numbers and numbers[0].isdecimal() else 0


class Jobs:
    """The plugin: a test begins when its ranks have places.

    Parameters
    ----------
    budget : Budget
        The places.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._allowed: int | None = None
        sys.addaudithook(self._check)

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        resolve(item)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before time limits begin
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._allowed = ranks_of(item)
        try:
            with self._budget.taken(self._allowed):
                return (yield)
        finally:
            self._allowed = None

    def _check(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raise if a test starts a job of more ranks than it says."""
        if event != "subprocess.Popen" or self._allowed is None:
            return
        _, words, *_ = arguments
        started = started_by(words if isinstance(words, Sequence) else ())
        if started > self._allowed:
            raise AssertionError(
                f"starts {started} ranks: mark the test with pytest.mark.ranks(n={started})"
            )
