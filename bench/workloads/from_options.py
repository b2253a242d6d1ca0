"""The cases that a command line asks for: every datatype, operator, root and size."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.workloads import sizes
from bench.workloads.collective import JOINS, SPLITS, Case, Counts
from bench.workloads.datatypes import ALL
from collectives import Communicator
from collectives.arrays import validation
from collectives.arrays.backends import HOST, Backend
from collectives.arrays.operators import operator, operators
from collectives.schedule.contracts import SPECS
from collectives.selection import select
from collectives.selection.fields import shown


def cases(
    comm: Communicator, collective: str, options: argparse.Namespace, backend: Backend = HOST
) -> list[Case]:
    """Return the cases of a collective, each once: sizes are rounded up to equal blocks.

    Raises TypeError or ValueError, on every rank, for options that do not go together.
    """
    settings = [
        partial(
            Case,
            collective,
            comm.rank,
            comm.size,
            dtype=dtype,
            op=op,
            root=root,
            backend=backend,
            topology=comm.topology,
        )
        for dtype in options.dtypes
        for op in ops(collective, options.op, dtype)
        for root in roots(collective, options.root, comm.size)
    ]
    if collective == "barrier":
        return [make(0) for make in settings]
    if options.counts is not None:
        counts = read_counts(collective, options, comm.size)
        return [make(num_elements(counts), counts=counts) for make in settings]
    wanted = sizes.sizes_of(options)
    num_blocks = comm.size if collective in SPLITS | JOINS else 1
    return [
        make(count)
        for make in settings
        for count in dict.fromkeys(
            sizes.whole_blocks(size, make.keywords["dtype"].itemsize, num_blocks) for size in wanted
        )
    ]


def ops(collective: str, wanted: str, dtype: np.dtype[Any]) -> list[str]:
    """Return the operator, or all that the dtype has.  TypeError or ValueError if it has none."""
    if not SPECS[collective].is_reduction:
        return ["sum"]
    if wanted == ALL:
        return [name for name in operators(collective) if is_defined(collective, name, dtype)]
    operator(wanted, collective).check(dtype)
    return [wanted]


def is_defined(collective: str, op: str, dtype: np.dtype[Any]) -> bool:
    """Return whether an operator combines numbers of this dtype."""
    try:
        operator(op, collective).check(dtype)
    except (TypeError, ValueError):
        return False
    return True


def roots(collective: str, wanted: str, size: int) -> list[int]:
    """Return the root, or all ranks.  ValueError if there is no such rank."""
    if not SPECS[collective].is_rooted:
        return [0]
    return list(range(size)) if wanted == ALL else [validation.rank(int(wanted), size, "root")]


def num_elements(counts: Counts) -> int:
    """Return the elements of the whole vector; of an all-to-all those of the mean input."""
    return select.num_bytes_of(counts, 1)


def read_counts(collective: str, options: argparse.Namespace, size: int) -> Counts:
    """Return the elements of the blocks, from the file that rank 0 reads.

    Raises ValueError, on every rank, if they do not fit.
    """
    if collective not in SPLITS | JOINS:
        raise ValueError(f"--counts: {collective} has no blocks; it serves {_with_blocks()}")
    if sizes.has_series(options) or options.sizes is not None:
        raise ValueError("--counts says how much is sent; leave out -b, -e, -i and -f, and --sizes")
    text = MPI.COMM_WORLD.bcast(_text(options.counts) if MPI.COMM_WORLD.rank == 0 else None)
    if text is None:
        raise ValueError(f"--counts: {options.counts} cannot be read")
    counts = _parsed(collective, text, size, options.counts)
    if num_elements(counts) == 0:
        raise ValueError(f"--counts: {options.counts} has no elements at all")
    if num_elements(counts) * max(dtype.itemsize for dtype in options.dtypes) > sizes.memory():
        raise ValueError(f"--counts: {options.counts} has more elements than fit in memory")
    return counts


def _with_blocks() -> str:
    return ", ".join(sorted(SPLITS | JOINS))


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _parsed(collective: str, text: str, size: int, path: Path) -> Counts:
    """Return a list, or for all_to_all a table, of the numbers in a text."""
    lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    words = [word for line in lines for word in line]
    if odd := [word for word in words if not word.isdecimal() or len(word) > 18]:
        raise ValueError(f"--counts: {path}: {shown(odd[0])} is not a number of elements")
    if collective == "all_to_all":
        return validation.count_table([list(map(int, line)) for line in lines], size)
    return validation.row_counts(list(map(int, words)), size, f"--counts: {path}")


def every_case(comm: Communicator, options: argparse.Namespace, backend: Backend) -> Iterator[Case]:
    """Yield the cases of all collectives that are measured."""
    for collective in options.collectives:
        yield from cases(comm, collective, options, backend)
