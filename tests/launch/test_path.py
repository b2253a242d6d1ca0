"""The way from a call to its first message is short, and stays so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collectives.launch import launch

pytestmark = pytest.mark.ranks(n=2)

PROGRAM = str(Path(__file__).parent / "path_program.py")


def test_a_call_that_came_before_reaches_its_first_message_in_under_five_frames() -> None:
    done = launch(2, [PROGRAM], timeout=60, capture=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    found = json.loads(done.stdout)
    assert found["again"]["frames"] < 5
    assert found["again"]["functions"] < 5
    # The first of its kind also checks its arguments, chooses an algorithm and compiles it.
    assert found["first"]["functions"] < 150
    assert found["first"]["files"] < 30
