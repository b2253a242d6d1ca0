"""What command-line programs share: types of arguments, and tables that rank 0 prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from array_api_compat import numpy as numpy_namespace
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

MAX_WIDTH = 1 << 16  # characters: wider than any table


# Arguments


def at_least(least: int) -> Callable[[str], int]:
    """Return an argument type: an integer that is at least `least`."""

    def integer(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return integer


def can_be_written(path: Path) -> bool:
    """Return whether a file of this name exists or can be made, and can be written."""
    return os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()


def device_namespace(device: str, rank: int) -> Any:
    """Return the array namespace of a device: NumPy's for "cpu", CuPy's for "cuda".

    Ranks use the GPUs of the machine in turn.  Raises ValueError without CuPy or without a GPU.
    """
    if device == "cpu":
        return numpy_namespace
    try:
        import cupy  # noqa: PLC0415 - an optional dependency
        from array_api_compat import cupy as cupy_namespace  # noqa: PLC0415

        cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    except Exception as error:  # noqa: BLE001 - no CuPy, driver or GPU: each has its own error
        raise ValueError(f"--device cuda needs CuPy and a GPU: {error}") from None
    return cupy_namespace


# Output


def console_of(rank: int) -> Console:
    """Return a console that prints on rank 0 only, in plain text if that is not a terminal.

    Under Open MPI standard output is a terminal on every rank, wherever the launcher writes to;
    standard error is a terminal only if the launcher's is.
    """
    is_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    return Console(quiet=rank != 0, highlight=False, soft_wrap=True, force_terminal=is_terminal)


def table_with(*words: str, numbers: Iterable[object]) -> Table:
    """Return an empty table with columns of words, then columns of numbers."""
    table = Table()
    for head in words:
        table.add_column(head, no_wrap=True)
    for number in numbers:
        table.add_column(str(number), justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table as wide as it must be to cut off no digit; in ASCII if not on a terminal."""
    table.box = box.SIMPLE_HEAD if console.is_terminal else box.ASCII
    options = console.options.update(width=MAX_WIDTH)
    table.width = Measurement.get(console, options, table).maximum
    console.print(table, crop=False)
