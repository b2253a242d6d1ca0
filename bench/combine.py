"""Measure how fast this process combines arrays: by NumPy's functions, and by compiled kernels.

GB/s are bytes of the result per second, of `left = left + right` on arrays that stay in the cache:
the best of several samples in turn.  Programs on MPI use the kernels for all dtypes; ranks that are
threads use them for two-byte dtypes.  If there is no kernel, both use NumPy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import sizes
from bench.names import dtype_of
from bench.oracle import Array
from collectives.arrays import kernels
from collectives.arrays.half_precision import COMBINE
from collectives.arrays.operators import OPERATORS
from parallel.cli import at_least, print_table, table_with

Prepare = Callable[[Array, Array], Callable[[], object]]  # what combines these two in place

DTYPES = ["float32", "float64", "float16", "bfloat16"]
OPS = ["sum", "max"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add(
        "-b",
        dest="first",
        type=sizes.parse,
        default="64K",
        metavar="MIN",
        help="least size in bytes; default: %(default)s",
    )
    add(
        "-e",
        dest="last",
        type=sizes.parse,
        default="512K",
        metavar="MAX",
        help="no size is greater; default: %(default)s",
    )
    add(
        "-n",
        dest="samples",
        type=at_least(1),
        default=30,
        metavar="N",
        help="samples of each function; default: %(default)s",
    )


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0, or 2 for invalid sizes."""
    console = Console()
    try:
        series = sizes.series(options.first, options.last, factor=2)
    except ValueError as error:
        console.print(f"bench: {error}", markup=False)
        return 2
    rates = ["size (B)", "NumPy GB/s", "kernel GB/s", "kernel/NumPy"]
    table = table_with("dtype", "op", numbers=rates)
    for num_bytes in series:
        for dtype in DTYPES:
            for op in OPS:
                _add_row(table, dtype, op, num_bytes, options.samples)
    print_table(table, console)
    return 0


def _add_row(table: Table, name: str, op: str, num_bytes: int, samples: int) -> None:
    """Add one line; the kernel's rate is empty if there is no kernel."""
    dtype, function = dtype_of(name), str(OPERATORS[op].function)
    shape = (2, num_bytes // dtype.itemsize)
    left, right = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    address = kernels.combine(function, dtype)
    found = [_numpys(function)] + ([] if address is None else [_kernel(address)])
    rates = [num_bytes / seconds / 1e9 for seconds in times(found, left, right, samples)]
    rates += [rates[1] / rates[0]] if address is not None else []
    words = [f"{rate:.3g}" for rate in rates] + ["-"] * (3 - len(rates))
    table.add_row(name, op, str(num_bytes), *words)


def _numpys(function: str) -> Prepare:
    return lambda left, right: partial(kernels.numpys(function), left, right, left)


def _kernel(address: int) -> Prepare:
    """The kernel, called with addresses that are already known, as in a program."""

    def prepare(left: Array, right: Array) -> Callable[[], object]:
        at = left.ctypes.data
        return partial(COMBINE(address), at, at, right.ctypes.data, left.size)

    return prepare


def times(found: Sequence[Prepare], left: Array, right: Array, samples: int) -> list[float]:
    """The shortest time of each in seconds, in place, with the same operands every time."""
    taken = [[_seconds(prepare, left.copy(), right) for prepare in found] for _ in range(samples)]
    return [min(column) for column in zip(*taken, strict=True)]


def _seconds(prepare: Prepare, left: Array, right: Array) -> float:
    run = prepare(left, right)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
