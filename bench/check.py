"""Measure the cost of checked mode: the same all-reduces with and without it, side by side.

    python -m collectives.launch -n 2 -m bench check

Times are in microseconds: medians of samples in random order, of the slowest rank.  "plan" is
`comm.plan.all_reduce(x, out=y).run`, and "call" is `comm.all_reduce(x, out=y)`.  "checked" compares
the calls of the ranks first, and "finite" also checks every value of the input and the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.table import Table

import collectives
from bench.options import add_dtype, add_samples, add_sizes
from bench.perf import mpi_version
from bench.sizes import sizes_of
from bench.timing import SMALL, Effort, times
from collectives.arrays.operators import operator
from parallel.cli import console_of, print_table, table_with

SECONDS = 20.0  # after which fewer samples must do
MODES = {"off": False, "checked": True, "finite": "finite"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=run)
    add_sizes(parser, last="2M")
    add_dtype(parser)
    add_samples(parser.add_argument)


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0, or 2 if it cannot be measured."""
    comm = collectives.world(check=False)
    console = console_of(comm.rank)
    try:
        operator("sum", "all_reduce").check(options.dtype)
        series = sizes_of(options)
    except (TypeError, ValueError) as error:
        console.print(f"bench: {error}", markup=False)
        comm.barrier()  # let rank 0 say it before the launcher ends the job
        return 2
    found = {num_bytes: measured(num_bytes, options) for num_bytes in series}
    console.print(f"{mpi_version()}, {comm.size} ranks, {options.dtype}: all-reduce, microseconds")
    print_table(table(found), console)
    return 0


def measured(num_bytes: int, options: argparse.Namespace) -> list[float]:
    """The seconds of the plan in each mode, then those of the call."""
    comms = [collectives.world(check=check) for check in MODES.values()]  # type: ignore[arg-type]
    x = np.zeros(max(1, num_bytes // options.dtype.itemsize), options.dtype)
    y = np.empty_like(x)
    plans = [comm.plan.all_reduce(x, out=y) for comm in comms]
    calls: list[Callable[[], Any]] = [partial(comm.all_reduce, x, out=y) for comm in comms]
    effort = Effort(options.warmup, options.samples, SECONDS)
    runs = [*(plan.run for plan in plans), *calls]
    found = times(runs, x, is_small=x.nbytes <= SMALL, effort=effort)
    for plan in plans:
        plan.free()
    return found


def table(found: Mapping[int, Sequence[float]]) -> Table:
    """One line for each size; seconds of plan and call in each mode, in the order of `MODES`."""
    heads = [f"{how} {mode}" for how in ("plan", "call") for mode in MODES]
    made = table_with(numbers=["size (B)", *heads])
    for num_bytes, seconds in found.items():
        made.add_row(str(num_bytes), *(f"{each * 1e6:.1f}" for each in seconds))
    return made
