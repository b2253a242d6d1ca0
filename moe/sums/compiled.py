"""A loop that adds up rows, compiled by numba: it reads each row once, and writes each sum once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np

import collectives

SIGNATURE = "void({dtype}[:, ::1], int64[::1], int64[::1], {dtype}[::1], {dtype}[:, ::1])"
DTYPES = ("float32", "float64")
Adding: TypeAlias = Callable[..., None]  # of the arguments of `add_rows`


@cache
def adding(dtype: np.dtype[Any]) -> Adding | None:
    """Return the compiled `add_rows` for arrays of this dtype; None if there is none."""
    if dtype.name not in DTYPES or not dtype.isnative:
        return None
    return collectives.compiled(add_rows, SIGNATURE.format(dtype=dtype.name))


def add_rows(rows: Any, row: Any, starts: Any, factors: Any, out: Any) -> None:
    """Set row i of `out` to the sum of some `rows`, or to 0 if there are none.

    The rows are ``row[e]``, times ``factors[e]``, for e from ``starts[i]`` to below
    ``starts[i + 1]``, in this order.
    """
    for i in range(len(starts) - 1):
        first, last = starts[i], starts[i + 1]
        if first == last:
            out[i] = 0
            continue
        factor, chosen = factors[first], row[first]
        for j in range(out.shape[1]):
            out[i, j] = factor * rows[chosen, j]
        for e in range(first + 1, last):
            factor, chosen = factors[e], row[e]
            for j in range(out.shape[1]):
                out[i, j] += factor * rows[chosen, j]
