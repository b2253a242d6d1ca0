"""Types of arguments of the commands that simulate and export."""

from __future__ import annotations

import argparse
from pathlib import Path

from collectives.export.files import unwritable

_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


def output_file(word: str) -> Path:
    """A file that can be written; an argument type.  For commands that are not run under MPI."""
    if reason := unwritable(path := Path(word)):
        raise argparse.ArgumentTypeError(reason)
    return path


def num_bytes(word: str) -> int:
    """268435456 for "256M"; an argument type."""
    factor = _SUFFIXES.get(word[-1:].upper(), 1)
    digits = word[:-1] if factor > 1 else word
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes, such as 256M")
    return int(digits) * factor


def at_least_one(word: str) -> int:
    """A number of at least 1; an argument type."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of at least 1")
    return int(word)
