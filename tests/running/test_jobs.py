"""A test that starts more ranks than it says fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.jobs import started_by

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("/opt/bin/mpirun -n 3 --oversubscribe python x.py -n 7", 3),
        ("python -c code /opt/bin/prterun -n 8 python x.py", 8),
        ("ip netns exec h python -m collectives.launch -n 4 x.py", 4),
        ("python -m pytest -n 2", 0),
        ("mpirun --version", 0),
        ("mpirun -n", 0),
        ("python -m collectives.launch -n many x.py", 0),
    ],
)
def test_the_ranks_of_a_command_are_counted(command: str, ranks: int) -> None:
    assert started_by(command.split()) == ranks


PLUGIN = """
from pathlib import Path
from tests.running.budget import Budget
from tests.running.jobs import Jobs
def pytest_configure(config):
    config.addinivalue_line("markers", "ranks(n)")
    config.pluginmanager.register(Jobs(Budget(Path(__file__).parent, 4)))
"""
FILE = """
import subprocess, pytest
def start(number):
    subprocess.run(["env", "true", "mpirun", "-n", str(number)], check=True)
def test_none():
    start(1)
@pytest.mark.ranks(n=2)
def test_two():
    start(2)
@pytest.mark.ranks(n=2)
def test_two_and_three():
    start(3)
@pytest.mark.parametrize("number", [2, 9])
@pytest.mark.ranks(n="number")
def test_as_many(number):
    start(number)
"""


def test_a_job_that_is_not_announced_fails_the_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "2 failed, 3 passed" in done.stdout, done.stdout
    assert "starts 1 ranks: mark the test with pytest.mark.ranks(n=1)" in done.stdout
    assert "starts 3 ranks: mark the test with pytest.mark.ranks(n=3)" in done.stdout
