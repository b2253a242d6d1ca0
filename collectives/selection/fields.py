"""Check values read from JSON.  `place` is the path of a value, for error messages."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

MAX_SECONDS = 1e9  # of anything that is read: sums and products of such times are finite


def shown(value: object) -> str:
    """Return a value as an error message shows it.

    It is printable and short, whatever a file contains.
    """
    return reprlib.repr(value)


def within(place: str, name: str) -> str:
    """Return the place of a field that can have any name."""
    return f"{place}.{name if name.isidentifier() and len(name) < 80 else shown(name)}"


def fields(
    value: object, place: str, names: Sequence[str] | None = None, optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return an object with exactly these fields, or with any fields if `names` is None.

    `optional` are fields that it may have too.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{place} must be an object")
    if names is not None and set(value) - set(optional) != set(names):
        raise ValueError(f"{place} must have {', '.join(names)}, and nothing else")
    return value


def items(value: object, place: str, what: str) -> list[Any]:
    """Return a list that is not empty."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place} must be a list of {what}, and not empty")
    return value


def texts(value: object, place: str) -> dict[str, str]:
    """Return an object whose values are texts."""
    by_name = fields(value, place)
    for name, text in by_name.items():
        if not isinstance(text, str):
            raise ValueError(f"{within(place, name)} must be a text, not {shown(text)}")
    return by_name


def seconds(value: Any, place: str) -> float:
    """Return a number of seconds, at least 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_SECONDS:
        raise ValueError(f"{place} must be a number of seconds, not {shown(value)}")
    return float(value)
