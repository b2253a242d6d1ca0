"""Types of arguments: each returns the value of a word, or refuses it in one sentence."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

STANDARD_OUTPUT = Path("-")
BINARY = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: an integer that is at least `least`."""

    def integer(word: str) -> int:
        try:
            value = int(word)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def number(word: str) -> float:
    """Return 80e9 for "80G" and 3e11 for "300e9"; an argument type for numbers above 0."""
    factor = DECIMAL.get(word[-1:].upper(), 1)
    try:
        value = float(Decimal(word[:-1] if factor > 1 else word) * factor)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number, such as 80G") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is not more than 0")
    return value


def positive_number(word: str) -> float:
    """Return a number greater than 0; an argument type."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number greater than 0")
    return value


def seconds(word: str) -> float:
    """Return a time that ends, greater than 0; an argument type."""
    try:
        return positive_number(word)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a time in seconds") from None


def num_bytes(word: str) -> int:
    """Return 268435456 for "256M"; an argument type."""
    factor = BINARY.get(word[-1:].upper(), 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes, such as 256M")
    return int(digits) * factor


def output_file(word: str) -> Path:
    """Return the path of a file that can be written; an argument type.

    For commands that are not run under MPI, whose ranks may be on hosts without the file.
    """
    if reason := unwritable(path := Path(word)):
        raise argparse.ArgumentTypeError(reason)
    return path


def unwritable(path: Path) -> str | None:
    """Return why no file of this name can be written, as a sentence; None if it can."""
    if path == STANDARD_OUTPUT:
        return None
    folder = path.parent
    if not folder.is_dir():
        return f"{path} cannot be written: there is no folder {folder}"
    if path.is_dir():
        return f"{path} cannot be written: it is a folder"
    if not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path} cannot be written: this user may not write there"
    return None
