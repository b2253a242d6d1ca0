"""Consoles are as wide as the terminal, JSON may go to standard output, and files are checked."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collectives.console import (
    add_output_options,
    at_least,
    console_for,
    num_bytes,
    number,
    positive_number,
    progress,
    seconds,
    write_json,
)


def parsed(*words: str) -> Namespace:
    parse = argparse.ArgumentParser()
    add_output_options(parse)
    return parse.parse_args(words)


def test_text_is_80_columns_wide_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console_for(0, parsed()).print("word " * 40)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) == 3


def test_no_word_is_broken_and_lines_may_stay_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console, path = console_for(0, parsed()), "/a" * 60
    console.print(f"there is no file {path}")
    console.print("word " * 40, soft_wrap=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["there is no file", path, "word " * 40]


def test_columns_of_the_environment_are_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "123")
    assert console_for(0, parsed()).width == 123


def test_with_wide_a_line_has_no_limit(capsys: pytest.CaptureFixture[str]) -> None:
    console_for(0, parsed("--wide")).print("word " * 400)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_only_the_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        console_for(rank, parsed()).print(f"rank {rank} [bold]")
    assert capsys.readouterr().out == "rank 0 [bold]\n"


def test_json_on_standard_output_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = parsed("--json", "-")
    console = console_for(0, options)
    console.print("a table")
    with progress(console, 2, lines=True) as show:
        show(1, "step 1")
    write_json({"a": float("nan"), "path": Path("x")}, options.json)
    assert json.loads(capsys.readouterr().out) == {"a": None, "path": "x"}


def test_json_is_written_to_a_file(tmp_path: Path) -> None:
    options = parsed("--json", str(tmp_path / "a.json"))
    write_json([1, float("inf")], options.json)
    assert json.loads((tmp_path / "a.json").read_text()) == [1, None]
    write_json([], None)


def test_a_file_in_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("--json", str(tmp_path / "nowhere" / "a.json"))
    assert "cannot be written: there is no folder" in capsys.readouterr().err


def test_progress_prints_few_lines_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress(console_for(), 45, lines=True) as show:
        for done in range(1, 46):
            show(done, f"step {done}")
    with progress(console_for(), 45) as show:
        show(1, "nothing")
    assert capsys.readouterr().out.split("\n") == ["step 1", "step 20", "step 40", "step 45", ""]


@pytest.mark.parametrize(
    ("kind", "word", "value"),
    [
        (at_least(1), "3", 3),
        (number, "80G", 80e9),
        (number, "300e9", 3e11),
        (positive_number, "0.5", 0.5),
        (seconds, "2", 2.0),
        (num_bytes, "256M", 256 << 20),
        (num_bytes, "7", 7),
    ],
)
def test_arguments_are_read_as_their_values(
    kind: Callable[[str], Any], word: str, value: float
) -> None:
    assert kind(word) == value


@pytest.mark.parametrize(
    ("kind", "word", "sentence"),
    [
        (at_least(1), "0", "0 is less than 1"),
        (at_least(1), "x", "'x' is not a whole number"),
        (number, "G", "'G' is not a number"),
        (number, "-1", "-1 is not more than 0"),
        (number, "nan", "nan is not more than 0"),
        (positive_number, "inf", "'inf' is not a number greater than 0"),
        (seconds, "0", "'0' is not a time in seconds"),
        (num_bytes, "1.5M", "'1.5M' is not a number of bytes"),
    ],
)
def test_wrong_arguments_are_refused(kind: Callable[[str], Any], word: str, sentence: str) -> None:
    with pytest.raises(ArgumentTypeError, match=sentence):
        kind(word)
