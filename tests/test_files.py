"""A file that was changed at random is read, or refused in a sentence: no other end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.file_readers import KINDS, fault, fault_of
from tests.mutations import changed_bytes, changed_text

SEEDS = range(150)


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_file_is_read(kind: str, tmp_path: Path) -> None:
    assert fault(kind, None, tmp_path) == ""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_changed_file_is_read_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    faults = {seed: fault(kind, seed, tmp_path) for seed in SEEDS}
    assert {seed: fault for seed, fault in faults.items() if fault} == {}


def raising(error: BaseException) -> Callable[[], object]:
    def use() -> object:
        raise error

    return use


@pytest.mark.parametrize(
    ("use", "part"),
    [
        (raising(TypeError("oops")), "TypeError: oops"),
        (raising(RecursionError()), "RecursionError"),
        (raising(ValueError("\x1b[2J")), "control characters"),
        (raising(ValueError("x" * 3000)), "characters"),
        (raising(SystemExit(2)), "0 characters"),
        (raising(SystemExit(1)), "exit status 1"),
        (lambda: 1, "exit status 1"),
    ],
)
def test_every_other_end_is_a_fault(use: Callable[[], object], part: str) -> None:
    assert part in fault_of(use)
    assert fault_of(raising(ValueError("one sentence"))) == fault_of(lambda: None) == ""


def test_changed_files_differ() -> None:
    data = b'{"a": [1, 2, {"b": "c"}], "d": 3.5}'
    for change in (changed_bytes, changed_text):
        assert len({change(data, Random(seed)) for seed in range(50)}) > 30
