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
from itertools import product

import numpy as np

from bench.commands.options import BYTES, COUNT, add_output, option
from bench.workloads import sizes
from bench.workloads.datatypes import dtype_of
from bench.workloads.expected import Array
from collectives.arrays import kernels
from collectives.arrays.half_precision import COMBINE
from collectives.arrays.operators import OPERATORS
from collectives.console import Cell, Command, Number, Table, console_for, refusing, write_json

Prepare = Callable[[Array, Array], Callable[[], object]]  # what combines these two in place

DTYPES = ["float32", "float64", "float16", "bfloat16"]
OPS = ["sum", "max"]


def add_options(parse: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    about = "least size in bytes"
    option(parse, "-b --minbytes", about, dest="first", default="64K", metavar="MIN", **BYTES)
    about = "no size is greater"
    option(parse, "-e --maxbytes", about, dest="last", default="512K", metavar="MAX", **BYTES)
    about = "samples of each function"
    option(parse, "-n --iters", about, dest="samples", default=30, **COUNT)
    add_output(parse)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0.  Raises Refused for invalid sizes."""
    with refusing():
        series = sizes.series(options.first, options.last, factor=2)
    rates = [Number(f"{name} GB/s", ".2f") for name in ("NumPy", "kernel")]
    table = Table("dtype", "op", Number("size (B)"), *rates, Number("kernel/NumPy", ".2f"))
    for num_bytes, dtype, op in product(series, DTYPES, OPS):
        table.add(dtype, op, num_bytes, *rates_of(dtype, op, num_bytes, options.samples))
    table.print(console_for(0, options))
    write_json(table.as_dicts(), options.json)
    return 0


def rates_of(name: str, op: str, num_bytes: int, samples: int) -> list[Cell]:
    """Return the rates of NumPy and of the kernel, and their ratio; "-" if there is no kernel."""
    dtype, function = dtype_of(name), str(OPERATORS[op].function)
    shape = (2, num_bytes // dtype.itemsize)
    left, right = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    address = kernels.combine(function, dtype)
    contenders = [numpys(function)] + ([] if address is None else [kernel(address)])
    rates = [num_bytes / seconds / 1e9 for seconds in times(contenders, left, right, samples)]
    return [rates[0], "-", "-"] if address is None else [*rates, rates[1] / rates[0]]


def numpys(function: str) -> Prepare:
    """Return NumPy's function."""
    return lambda left, right: partial(kernels.numpys(function), left, right, left)


def kernel(address: int) -> Prepare:
    """Return the kernel, called with addresses that are already known, as in a program."""

    def prepare(left: Array, right: Array) -> Callable[[], object]:
        at = left.ctypes.data
        return partial(COMBINE(address), at, at, right.ctypes.data, left.size)

    return prepare


def times(contenders: Sequence[Prepare], left: Array, right: Array, samples: int) -> list[float]:
    """Return the shortest seconds of each, in place, with the same operands every time."""
    taken = [
        [seconds(prepare, left.copy(), right) for prepare in contenders] for _ in range(samples)
    ]
    return [min(column) for column in zip(*taken, strict=True)]


def seconds(prepare: Prepare, left: Array, right: Array) -> float:
    """Return the seconds of one combination."""
    run = prepare(left, right)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


COMMAND = Command("bench.calls.combine", __doc__, add_options, run)
