"""The result of every collective, computed serially from all ranks' inputs.

It is simple and independent of the library, because the library is checked against it.  Inputs and
results are lists by rank; a rank without a result has None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Results: TypeAlias = list[Array | None]

Combine: TypeAlias = Callable[[Array, Array], Array]

_COMBINE: dict[str, Combine] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def expected(
    collective: str,
    inputs: Sequence[Any],
    *,
    op: str | Combine = "sum",
    root: int = 0,
    counts: Any = None,
) -> Results:
    """Every rank's result, from every rank's input.

    Broadcast and scatter read the root's input only.  `op`: a name, or a function of two arrays,
    which is applied in rank order.  `counts`: the rows of each rank; for
    all_to_all a table of the rows from each rank (row) to each rank (column).  Without it rows are
    divided as evenly as possible, larger parts first.  ValueError for an unknown collective.
    """
    if collective not in _RESULTS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(_RESULTS)}")
    return _RESULTS[collective](inputs, op, root, counts)


def combined(inputs: Sequence[Array], op: str | Combine) -> Array:
    """All inputs combined element by element, in rank order, in their own dtype."""
    total = np.array(reduce(_COMBINE[op] if isinstance(op, str) else op, inputs))
    return np.array(total / len(inputs), total.dtype) if op == "avg" else total


def joined(parts: Sequence[Array]) -> Array:
    """The rows of all parts in order; 0-d arrays become the entries of a vector."""
    return np.concatenate([np.atleast_1d(part) for part in parts])


def divided(x: Array, num_parts: int, counts: Any) -> list[Array]:
    """The rows of `x` in parts: `counts[r]` of them in part r."""
    if counts is None:
        return [part.copy() for part in np.array_split(x, num_parts)]
    if sum(counts) != len(x):
        raise ValueError(f"counts {counts} do not add up to {len(x)} rows")
    return [part.copy() for part in np.split(x, np.cumsum(counts)[:-1])]


def _only(root: int, result: Array, num_ranks: int) -> Results:
    return [result if rank == root else None for rank in range(num_ranks)]


def _each(result: Array, num_ranks: int) -> Results:
    return [result.copy() for _ in range(num_ranks)]


def _broadcast(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return _each(inputs[root], len(inputs))


def _scatter(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return [*divided(inputs[root], len(inputs), counts)]


def _gather(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return _only(root, joined(inputs), len(inputs))


def _reduce(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return _only(root, combined(inputs, op), len(inputs))


def _reduce_scatter(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return [*divided(combined(inputs, op), len(inputs), counts)]


def _all_gather(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return _each(joined(inputs), len(inputs))


def _all_reduce(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return _each(combined(inputs, op), len(inputs))


def _scan(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return [combined(inputs[: rank + 1], op) for rank in range(len(inputs))]


def _exscan(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    return [None, *_scan(inputs[:-1], op, root, counts)]


def _all_to_all(inputs: Sequence[Array], op: str | Combine, root: int, counts: Any) -> Results:
    rows = [None] * len(inputs) if counts is None else counts
    sent = [divided(x, len(inputs), row) for x, row in zip(inputs, rows, strict=True)]
    return [joined([parts[rank] for parts in sent]) for rank in range(len(inputs))]


_RESULTS: dict[str, Callable[[Sequence[Array], str | Combine, int, Any], Results]] = {
    "broadcast": _broadcast,
    "scatter": _scatter,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "scan": _scan,
    "exscan": _exscan,
}
