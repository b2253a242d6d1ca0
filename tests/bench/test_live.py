"""The live display: on a terminal only, and only on rank 0."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.live import live


def shown(*, is_terminal: bool, quiet: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, quiet=quiet, width=100)
    with live(console, 2) as show:
        show("all_reduce, 8 B")
        console.print("a line")
        show("all_reduce, 64 B")
    return file.getvalue()


def test_on_a_terminal_it_says_what_is_measured_and_how_far_it_is():
    said = shown(is_terminal=True, quiet=False)
    assert "all_reduce, 8 B" in said and "0/2" in said
    assert "all_reduce, 64 B" in said and "1/2" in said and "a line" in said


@pytest.mark.parametrize(
    ("is_terminal", "quiet", "text"), [(False, False, "a line\n"), (True, True, "")]
)
def test_elsewhere_there_are_lines_only(is_terminal, quiet, text):
    assert shown(is_terminal=is_terminal, quiet=quiet) == text
