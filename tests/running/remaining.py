"""Say now and then how much of the tests is done: ``[ 45%, about 5 min left]``.

The share is one of time, not of tests: the durations of the last run say how long each test takes,
and the time that has passed says how quick this run is.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.running import durations

SECONDS = 20.0  # between two lines


class Progress:
    """What is done of the tests, by the seconds that they are expected to take."""

    def __init__(self, expected: durations.Durations) -> None:
        self._expected = expected
        self._left: dict[str, float] = {}
        self._total = 0.0

    def begin(self, nodeids: Iterable[str]) -> None:
        """Begin with these tests; once, though each process that runs tests collects them.

        One that takes the place of a process that has crashed does so in the midst of the run.
        """
        if not self._total:
            self._left = {nodeid: self._expected.expected(nodeid) for nodeid in nodeids}
            self._total = sum(self._left.values())

    def end(self, nodeid: str) -> None:
        """Count a test as done."""
        self._left.pop(nodeid, None)

    def line(self, seconds: float) -> str:
        """Return what to say after so many seconds; nothing if no test has ended."""
        left = sum(self._left.values())
        done = self._total - left
        if done <= 0:
            return ""
        return f"[{int(100 * done / self._total):3d}%, {spoken(seconds * left / done)} left]"


def spoken(seconds: float) -> str:
    """Return a time as one says it."""
    return f"about {round(seconds / 60)} min" if seconds >= 60 else "less than a minute"


class Remaining:
    """The plugin: it prints the lines, and keeps the durations for the next run."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._progress = Progress(durations.of_last_run(config))
        self._seconds = defaultdict[str, float](float)
        self._begun = 0.0  # when the first test began
        self._said = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.begin(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._progress.begin(ids)

    def pytest_runtest_logstart(self) -> None:
        self._begun = self._begun or time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            self._progress.end(report.nodeid)
            self._say()

    def _say(self) -> None:
        now = time.monotonic()
        if now >= self._said + SECONDS and (line := self._progress.line(now - self._begun)):
            self._said = now
            writer = self._config.get_terminal_writer()
            if writer.width_of_current_line:  # the dots of tests that have passed
                writer.line()
            writer.line(line, cyan=True)
            writer.flush()

    def pytest_sessionfinish(self) -> None:
        durations.keep(self._config, self._seconds)
