"""Sizes in bytes, such as 8, 64K, 64M, 1G, and the series of sizes of a benchmark."""

from __future__ import annotations

import argparse
import os

FACTOR = 8  # between two sizes, unless the user says otherwise
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse(text: str) -> int:
    """Return the number of bytes that `text` means.  An argparse type: refuses with one sentence.

    No more than this machine has: a system that promises memory it has not would end the process.
    """
    digits, unit = text[:-1], text[-1:].upper()
    if unit.isdigit():
        digits, unit = text, ""
    if unit not in _UNITS or not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 8, 64K, 64M or 1G")
    if (number := int(digits) * _UNITS[unit]) > memory():
        raise argparse.ArgumentTypeError(f"{text} is more than the {memory()} bytes of memory here")
    return number


def memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def text(num_bytes: int) -> str:
    """Return a size as people write it: 64 MiB, in the largest unit of which it is a multiple."""
    whole = (unit for unit, size in _UNITS.items() if num_bytes >= size and num_bytes % size == 0)
    prefix = max(whole, key=_UNITS.__getitem__, default="")
    return f"{num_bytes // _UNITS[prefix]} {prefix and prefix + 'i'}B"


def series(first: int, last: int, factor: int | None = None, step: int | None = None) -> list[int]:
    """Return sizes from `first` to at most `last`, each `factor` times the last, or `step` more.

    Raises ValueError if there are none.
    """
    if first > last:
        raise ValueError(f"the least size, {first}, is greater than the greatest, {last}")
    if step is not None:
        return list(range(first, last + 1, step))
    sizes = [first]
    while (size := sizes[-1] * (factor or FACTOR)) <= last:
        sizes.append(size)
    return sizes


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Return the sizes that `options.add_sizes` has read.  ValueError if there are none."""
    if options.sizes is not None:
        if has_series(options):
            raise ValueError("--sizes says which; leave out -b, -e, -i and -f")
        return list(options.sizes)
    first, last = options.usual
    return series(options.first or first, options.last or last, options.factor, options.step)


def has_series(options: argparse.Namespace) -> bool:
    """Return whether the user has said something of a series."""
    given = options.first, options.last, options.step, options.factor
    return any(value is not None for value in given)


def whole_blocks(num_bytes: int, itemsize: int, num_blocks: int) -> int:
    """Return the elements in `num_bytes`, rounded up to a multiple of `num_blocks`, never none."""
    per_block = -(-num_bytes // (itemsize * num_blocks))
    return per_block * num_blocks
