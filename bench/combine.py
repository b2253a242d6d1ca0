"""How fast arrays are combined in this process: NumPy's functions, and what the library uses.

GB/s are bytes of the result per second, of `left = left + right` on arrays that stay in the cache:
the best of some samples, which take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import sizes
from bench.options import dtype_of
from bench.oracle import Array
from collectives import halves
from collectives.arrays import HOST, BinaryFunction
from collectives.reduction import OPERATORS
from parallel.show import print_table, table_with
from parallel.train import at_least

DTYPES = ["float32", "float64", "float16", "bfloat16"]
OPS = ["sum", "max"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of combine."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("-b", dest="first", type=sizes.parse, default="64K", metavar="MIN",
        help="least size in bytes; default: %(default)s")  # fmt: skip
    add("-e", dest="last", type=sizes.parse, default="512K", metavar="MAX",
        help="greatest size, always included; default: %(default)s")  # fmt: skip
    add("-n", dest="samples", type=at_least(1), default=30, metavar="N",
        help="samples of each function; default: %(default)s")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    table = table_with("dtype", "op", numbers=["size (B)", "NumPy GB/s", "ours GB/s", "ours/NumPy"])
    for num_bytes in sizes.series(options.first, options.last, 2):
        for dtype in DTYPES:
            for op in OPS:
                _add_row(table, dtype, op, num_bytes, options.samples)
    print_table(table, Console())
    return 0


def _add_row(table: Table, name: str, op: str, num_bytes: int, samples: int) -> None:
    """One line; where the library uses NumPy's function itself there is nothing to compare."""
    dtype, function = dtype_of(name), str(OPERATORS[op].function)
    numpys, ours = halves.numpys(function), HOST.binary(function, dtype_of(name))
    shape = (2, num_bytes // dtype.itemsize)
    left, right = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    found = [numpys] if ours is numpys else [numpys, ours]
    rates = [num_bytes / seconds / 1e9 for seconds in times(found, left, right, samples)]
    ratio = f"{rates[1] / rates[0]:.2f}" if ours is not numpys else "the same"
    table.add_row(name, op, str(num_bytes), f"{rates[0]:.2f}", f"{rates[-1]:.2f}", ratio)


def times(
    functions: Sequence[BinaryFunction], left: Array, right: Array, samples: int
) -> list[float]:
    """The least seconds that each function took in place, with the same operands every time."""
    taken = [[_seconds(function, left.copy(), right) for function in functions]
             for _ in range(samples)]  # fmt: skip
    return [min(column) for column in zip(*taken, strict=True)]


def _seconds(function: BinaryFunction, left: Array, right: Array) -> float:
    begin = time.perf_counter()
    function(left, right, left)
    return time.perf_counter() - begin
