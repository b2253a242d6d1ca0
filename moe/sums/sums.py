"""Sums of rows: each is a sum of rows of an array, times their factors.

All functions are written for any array namespace.  On the host a compiled loop adds up rows, if
there is one for their dtype: it reads each row once and writes each sum once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from moe.routing import Integers
from moe.sums.compiled import Adding, adding
from moe.sums.sorting import stable_order
from parallel.nn import Array, cast, namespace_of, new_array, upcast

CACHED = 2**18  # bytes of a block of rows


class Sums(NamedTuple):
    """Which rows are added up: to sum i, the rows ``row[starts[i] : starts[i + 1]]``, in order."""

    row: Integers
    starts: Integers

    @classmethod
    def of(cls, row: Integers, number: Integers, num_sums: int) -> Sums:
        """Return sums in which row ``row[e]`` is added to sum ``number[e]``, in ascending order."""
        ends = np.cumsum(np.bincount(number, minlength=num_sums))
        return cls(row, np.concatenate([[0], ends]))


def sums_of(values: Array, number: Integers, num_sums: int) -> Array:
    """Return the sums, in float64, of the values of each `number`, in their order."""
    order = stable_order(number, num_sums)
    out = new_array((num_sums, 1), values, np.float64)
    add_up(values.reshape(-1, 1), Sums.of(order, number[order], num_sums), None, out)
    return out.reshape(-1)


def add_up(rows: Array, sums: Sums, factors: Array | None, out: Array) -> None:
    """Set `out` (sums, dim) to the `sums` of `rows` (n, dim), each times its factor.

    The `factors` are in the order of ``sums.row``; None: 1.
    """
    add = kernel_of(rows, factors, out.dtype)
    if add is None:
        add_in_turns(rows, sums, factors, out)
        return
    add(rows, *sums, np.ones(len(sums.row), out.dtype) if factors is None else factors, out)


def kernel_of(rows: Array, factors: Array | None, dtype: Any) -> Adding | None:
    """Return the compiled loop for these arrays, if they are in host memory and there is one."""
    is_fit = rows.dtype == dtype and (factors is None or factors.dtype == dtype)
    if not is_fit or type(rows) is not np.ndarray or not rows.flags.c_contiguous:
        return None
    return adding(rows.dtype)


def add_in_turns(rows: Array, sums: Sums, factors: Array | None, out: Array) -> None:
    """Set `out` to the first rows of all sums, then add the second rows, and so on.

    Blocks of `out` that fit into a cache are completed one after the other.
    """
    xp, counts = namespace_of(out), np.diff(sums.starts)
    out[...] = 0
    for block in blocks(len(counts), out):
        for turn in range(int(counts[block].max(initial=0))):
            number = block.start + np.flatnonzero(counts[block] > turn)
            e = sums.starts[number] + turn
            added = xp.take(rows, xp.asarray(sums.row[e]), axis=0)
            if factors is not None:
                added = upcast(added) * factors[xp.asarray(e)][:, None]
            out[as_slice(number, xp)] += cast(added, out.dtype)


def blocks(num_rows: int, like: Array) -> Iterator[slice]:
    """Yield blocks of rows of an array `like` this one, on the host of `CACHED` bytes each."""
    size = num_rows
    if isinstance(like, np.ndarray):
        size = max(1, CACHED // max(1, like.shape[1] * like.dtype.itemsize))
    for start in range(0, num_rows, max(1, size)):
        yield slice(start, min(start + size, num_rows))


def as_slice(index: Integers, xp: Any) -> Any:
    """Return an ascending `index` as a slice, if it is one, which is faster."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return xp.asarray(index)


def scattered(values: Array, index: Integers, size: int, dtype: Any) -> Array:
    """Return an array with `values` at a different `index` each, and 0 elsewhere."""
    xp = namespace_of(values)
    out = xp.zeros(size, dtype=dtype)
    out[xp.asarray(index)] = values
    return out
