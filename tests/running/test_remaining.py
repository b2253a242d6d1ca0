"""While tests run, one sees how much is done and for how long the rest will take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import remaining
from tests.running.durations import Durations

ROOT = Path(__file__).parents[2]
TESTS = ["a.py::one", "a.py::two", "b.py::three"]
KNOWN = Durations({"a.py::one": 100.0, "a.py::two": 200.0, "b.py::three": 700.0})


def progress(durations: Durations, *done: str) -> remaining.Progress:
    made = remaining.Progress(durations)
    made.begin(TESTS)
    for nodeid in done:
        made.end(nodeid)
    return made


@pytest.mark.parametrize(
    ("done", "seconds", "line"),
    [
        (["a.py::one"], 50.0, "[ 10%, about 8 min left]"),  # two tests at a time
        (["a.py::two", "a.py::one"], 600.0, "[ 30%, about 23 min left]"),  # a slow machine
        (["a.py::one", "b.py::three"], 200.0, "[ 80%, less than a minute left]"),
        (TESTS, 1000.0, "[100%, less than a minute left]"),
        ([], 10.0, ""),
    ],
)
def test_the_share_and_the_rest_are_of_time(done: list[str], seconds: float, line: str) -> None:
    assert progress(KNOWN, *done).line(seconds) == line


def test_without_durations_they_are_of_tests() -> None:
    assert progress(Durations({}), TESTS[2]).line(60.0) == "[ 33%, about 2 min left]"


def test_a_test_that_ends_twice_counts_once() -> None:
    """As one does that is run again after its process has crashed."""
    twice, once = progress(KNOWN, TESTS[0], TESTS[0]), progress(KNOWN, TESTS[0])
    assert twice.line(50.0) == once.line(50.0)


def test_who_collects_in_the_midst_of_the_run_does_not_begin_it_again() -> None:
    """As a process does that takes the place of one that has crashed."""
    again, once = progress(KNOWN, TESTS[0]), progress(KNOWN, TESTS[0])
    again.begin(TESTS)
    assert again.line(50.0) == once.line(50.0)


PLUGIN = """
from tests.running import remaining
remaining.SECONDS = 0.0
def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(remaining.Remaining(config))
"""
FILE = """
import pytest, time
@pytest.mark.parametrize("seconds", [0.1, 0.6, 0.3])
def test_it(seconds):
    time.sleep(seconds)
"""


@pytest.mark.slow
def test_lines_are_printed_between_quiet_ones_too(tmp_path: Path) -> None:
    """Of one process, whose durations are those that two processes show the share of."""
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    of_tests, of_time = (shares(tmp_path, workers) for workers in ("0", "2"))
    assert of_tests == [33, 66, 100]
    assert len(of_time) == 3 and not {33, 66} & set(of_time), of_time


def shares(folder: Path, workers: str) -> list[int]:
    """The shares in the lines that pytest prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", workers, str(folder)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return [int(share) for share in re.findall(r"^\[ *(\d+)%, ", done.stdout, re.MULTILINE)]
