"""Files that the microbenchmark wrote with -J, for the commands that read them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from bench.results.measurement import FORMS, Measurement
from collectives.selection.fields import fields, shown, texts

KEYS = ("collective", "dtype", "op", "root", "size", "name")
_NUMBERS = ("root", "size")
_OPTIONAL = ("portbw", "wrong", "of_copy")  # of a measurement


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
    measurements: dict[Key, Measurement]


def result(text: str) -> Result:
    """Return a file that `python -m bench <collective> -J FILE` wrote; an argument type."""
    path = Path(text)
    try:
        read = fields(json.loads(path.read_bytes()), "the file")
        facts, measurements = _facts_and_measurements(read)
        _check_printable([*chain(*facts.items(), *measurements)])
    except (OSError, ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(
            f"{path} was not written by python -m bench COLLECTIVE -J ({error})"
        ) from None
    return Result(path, facts, measurements)


def _facts_and_measurements(read: dict[str, Any]) -> tuple[dict[str, Any], dict[Key, Measurement]]:
    """Return how it was measured, and what.  Raises ValueError, with the place of an error."""
    rows = read.pop("rows", None)
    if not isinstance(rows, list):
        raise ValueError("rows must be a list")
    if missing := {"ranks", "mpi"} - set(read):
        raise ValueError(f"there is no field {min(missing)!r}")
    measurements = {
        key: value
        for number, row in enumerate(rows)
        for key, value in _measurements(row, f"rows[{number}]")
    }
    return read, measurements


def _check_printable(values: Iterable[object]) -> None:
    """Raise ValueError for characters with which a file could control a terminal."""
    for value in values:
        if not str(value).isprintable():
            raise ValueError(f"{str(value)!r} cannot be printed")


def _measurements(value: object, place: str) -> list[tuple[Key, Measurement]]:
    row = fields(value, place)
    if missing := {*KEYS, *FORMS} - set(row):
        raise ValueError(f"{place} has no field {min(missing)!r}")
    texts({name: row[name] for name in KEYS if name not in _NUMBERS}, place)
    for name in _NUMBERS:
        if type(row[name]) is not int or not -1 <= row[name] < 2**63:
            raise ValueError(f"{place}.{name} must be a number, not {shown(row[name])}")
    key = {name: row[name] for name in KEYS}
    return [
        (Key(**key, form=form), _measurement(row[form], f"{place}.{form}"))
        for form in FORMS
        if row[form] is not None
    ]


def _measurement(value: object, place: str) -> Measurement:
    numbers = fields(value, place, Measurement._fields)
    for name, number in numbers.items():
        if number is None and name in _OPTIONAL:
            continue
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"{place}.{name} must be a number of at least 0, not {shown(number)}")
    if not numbers["seconds"]:
        raise ValueError(f"{place}.seconds must be more than 0")
    return Measurement(**numbers)
