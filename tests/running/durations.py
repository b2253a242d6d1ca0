"""How long each test took when it last ran; pytest's cache keeps it from one run to the next.

A test that has never run is expected to take as long as the others of its file do on average, or
as long as all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import pytest

KEY = "durations/seconds"  # in pytest's cache


def file_of(nodeid: str) -> str:
    """Return the file of a test."""
    return nodeid.partition("::")[0]


class Durations:
    """The seconds that tests are expected to take.

    Parameters
    ----------
    last : Mapping
        The seconds of each test when it last ran, by its name.
    """

    def __init__(self, last: Mapping[str, float]) -> None:
        self._last = last
        by_file = defaultdict[str, list[float]](list)
        for nodeid, seconds in last.items():
            by_file[file_of(nodeid)].append(seconds)
        self._means = {file: mean(seconds) for file, seconds in by_file.items()}
        self._mean = mean(last.values()) or 1.0

    def expected(self, nodeid: str) -> float:
        """Return the seconds that a test is expected to take."""
        known = self._last.get(nodeid, self._means.get(file_of(nodeid), self._mean))
        return max(known, 1e-4)


def mean(numbers: Iterable[float]) -> float:
    """Return the arithmetic mean; 0 if there are no numbers."""
    listed = list(numbers)
    return sum(listed) / len(listed) if listed else 0.0


def of_last_run(config: pytest.Config) -> Durations:
    """Read the durations that pytest's cache has, if there is one."""
    cache = cache_of(config)
    return Durations(cache.get(KEY, {}) if cache else {})


def keep(config: pytest.Config, seconds: Mapping[str, float]) -> None:
    """Write the durations of tests to pytest's cache, beside those of tests that did not run."""
    if cache := cache_of(config):
        rounded = {nodeid: round(taken, 3) for nodeid, taken in seconds.items()}
        cache.set(KEY, {**cache.get(KEY, {}), **rounded})


def cache_of(config: pytest.Config) -> pytest.Cache | None:
    """Return pytest's cache; None if the user has switched it off."""
    return getattr(config, "cache", None)
