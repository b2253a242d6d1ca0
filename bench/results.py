"""Files that the microbenchmark wrote with -J, for the commands that read them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from bench.report import FORMS, Measurement

KEYS = ("collective", "dtype", "op", "root", "size", "name")


class Key(NamedTuple):
    """Which measurement it is."""

    collective: str
    dtype: str
    op: str
    root: int
    size: int
    name: str
    form: str


class Result(NamedTuple):
    """A file: how it was measured, and everything by its key."""

    path: Path
    facts: dict[str, Any]
    found: dict[Key, Measurement]


def result(text: str) -> Result:
    """An argument's type: a file that `python -m bench <collective> -J FILE` wrote."""
    path = Path(text)
    try:
        read = json.loads(path.read_text())
        rows = read.pop("rows")
        found = {key: value for row in rows for key, value in _measurements(row)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(
            f"{path} was not written by python -m bench COLLECTIVE -J ({what})"
        ) from None
    return Result(path, read, found)


def _measurements(row: dict[str, Any]) -> list[tuple[Key, Measurement]]:
    return [
        (Key(**{name: row[name] for name in KEYS}, form=form), Measurement(**row[form]))
        for form in FORMS
        if row[form] is not None
    ]
