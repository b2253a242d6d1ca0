"""Check arguments: each function raises an error with one sentence, before any message is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from collectives.arrays.backends import Array, Backend, backend_of, check_dtype

_LONGEST = 1e9  # seconds, about 30 years; locks of Python do not accept infinity


def integer(value: object, what: str) -> int:
    """Return an argument of any integer type as an int; bool and float are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} must be an integer, not {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{what} must be an integer, not {value!r}") from None


def rank(value: object, size: int, what: str) -> int:
    """Return a rank of a communicator of `size` ranks."""
    number = integer(value, what)
    if not 0 <= number < size:
        raise ValueError(f"{what} must be a rank from 0 to {size - 1}, got {number}")
    return number


def readable(x: object, what: str = "x") -> tuple[Backend, Array]:
    """Return the backend of an array to read from, and the array itself or a C-contiguous copy."""
    backend = backend_of(x, what)
    check_dtype(x.dtype, what)  # type: ignore[attr-defined]
    return backend, backend.contiguous(x)


def writable(x: object, what: str) -> tuple[Backend, Array]:
    """Return the backend of an array to write into, which must be C-contiguous."""
    backend = backend_of(x, what)
    check_dtype(x.dtype, what)  # type: ignore[attr-defined]
    if backend.contiguous(x) is not x:
        raise ValueError(f"{what} must be C-contiguous to be written into; this array is not")
    if not backend.is_writable(x):
        raise ValueError(f"{what} is read-only")
    return backend, x


def result(out: object, backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return `out` if it fits exactly, or a new array if it is None."""
    if out is None:
        return backend.empty(shape, dtype)
    out_backend, array = writable(out, "out")
    if out_backend is not backend:
        raise TypeError(f"x is on {backend.name} and out on {out_backend.name}; use one kind")
    if array.dtype != dtype:
        raise TypeError(f"out has dtype {array.dtype}, the result has {dtype}")
    if tuple(array.shape) != shape:
        raise ValueError(f"out has shape {tuple(array.shape)}, the result has {shape}")
    return array


def rows(x: Array, collective: str) -> int:
    """Return the length of axis 0 of an array that a collective divides or joins."""
    if x.ndim == 0:
        raise ValueError(f"{collective} splits along axis 0, and a 0-d array has none")
    return int(x.shape[0])


def row_counts(counts: object, size: int, what: str = "counts") -> tuple[int, ...]:
    """Return one non-negative number of rows per rank."""
    if isinstance(counts, (str, bytes)) or not isinstance(counts, (Sequence, np.ndarray)):
        raise TypeError(f"{what} must be a sequence of {size} integers, got {counts!r}")
    numbers = tuple(integer(count, f"an entry of {what}") for count in counts)
    if len(numbers) != size:
        raise ValueError(f"{what} has {len(numbers)} entries for {size} ranks")
    if min(numbers) < 0:
        raise ValueError(f"{what} has a negative entry: {min(numbers)}")
    return numbers


def total_counts(counts: object, size: int, num_rows: int, what: str = "counts") -> tuple[int, ...]:
    """Return row counts, which must add up to `num_rows`."""
    numbers = row_counts(counts, size, what)
    if sum(numbers) != num_rows:
        raise ValueError(f"{what} add up to {sum(numbers)} rows, the array has {num_rows}")
    return numbers


def count_table(counts: object, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the p x p table of an all-to-all: row s holds the rows from rank s to each rank."""
    table = list(counts)  # type: ignore[call-overload]
    if len(table) != size:
        raise ValueError(f"counts has {len(table)} rows; a table for {size} ranks is square")
    return tuple(row_counts(row, size) for row in table)


def is_table(counts: object) -> bool:
    """Return whether counts are given for all pairs of ranks, instead of for this rank only."""
    entries = counts if isinstance(counts, (Sequence, np.ndarray)) else ()
    return any(isinstance(entry, (Sequence, np.ndarray)) for entry in entries)


def seconds(timeout: object) -> float | None:
    """Return a time limit: None, or a number of seconds that is not negative."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:  # also refuses NaN
        raise ValueError(f"timeout must not be negative, got {timeout}")
    return float(min(timeout, _LONGEST))


def small_integer(value: object, what: str) -> int:
    """Return an integer that fits in 64 bits."""
    number = integer(value, what)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{what} must fit in 64 bits, got {number}")
    return number


def aliasing(
    backend: Backend, source: Array | None, result: Array | None
) -> int | Literal["none", "odd"]:
    """Return the offset of the output from the input in memory; see `compile_lane`."""
    if source is None or result is None:
        return "none"
    if source is result:
        return 0
    if backend.is_host and not np.may_share_memory(source, result):
        return "none"  # the same result as below, in a tenth of the time
    start, stop = backend.extent(source)
    out_start, out_stop = backend.extent(result)
    if not (source.size and result.size and start < out_stop and out_start < stop):
        return "none"
    offset, rest = divmod(out_start - start, source.dtype.itemsize)
    return "odd" if rest else offset
