"""The result of every collective, computed serially from all ranks' inputs.

It is simple and independent of the library, because the library is checked against it.  Inputs and
results are lists by rank; a rank without a result has None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

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


class Call(NamedTuple):
    """The arguments of `expected` but the name of the collective."""

    inputs: Sequence[Any]
    op: str | Combine
    root: int
    counts: Any

    def on_all(self, result: Array) -> Results:
        """Return a copy of a result for every rank."""
        return [result.copy() for _ in self.inputs]

    def on_root(self, result: Array) -> Results:
        """Return a result for the root, and none for others."""
        return [result if rank == self.root else None for rank in range(len(self.inputs))]

    def combined(self, number: int | None = None) -> Array:
        """Return the first inputs combined, by default all."""
        return combined(self.inputs[:number], self.op)

    def parts(self, x: Array, counts: Any = None) -> list[Array]:
        """Return the rows of an array in a part for each rank."""
        return divided(x, len(self.inputs), counts)

    def exchanged(self) -> Results:
        """Return what each rank gets if all send a part to all."""
        rows = self.counts or [None] * len(self.inputs)
        sent = [self.parts(x, row) for x, row in zip(self.inputs, rows, strict=True)]
        return [joined(column) for column in zip(*sent, strict=True)]


def expected(
    collective: str,
    inputs: Sequence[Any],
    *,
    op: str | Combine = "sum",
    root: int = 0,
    counts: Any = None,
) -> Results:
    """Return every rank's result, from every rank's input.

    Broadcast and scatter read the root's input only.  Raises ValueError for an unknown collective.

    Parameters
    ----------
    collective : str
    inputs : sequence of array
    op : str or function
        A function of two arrays is applied in rank order.
    root : int
    counts : sequence, optional
        The rows of each rank; for all_to_all a table of the rows from each rank (row) to each rank
        (column).  By default rows are divided as evenly as possible, larger parts first.
    """
    if collective not in _RESULTS:
        raise ValueError(f"unknown collective {collective!r}; known: {', '.join(_RESULTS)}")
    return _RESULTS[collective](Call(inputs, op, root, counts))


def combined(inputs: Sequence[Array], op: str | Combine) -> Array:
    """Return all inputs combined element by element, in rank order, in their own dtype."""
    total = np.array(reduce(_COMBINE[op] if isinstance(op, str) else op, inputs))
    return np.array(total / len(inputs), total.dtype) if op == "avg" else total


def joined(parts: Sequence[Array]) -> Array:
    """Return the rows of all parts in order; 0-d arrays become the entries of a vector."""
    return np.concatenate([np.atleast_1d(part) for part in parts])


def divided(x: Array, num_parts: int, counts: Any) -> list[Array]:
    """Return the rows of `x` in parts: `counts[r]` of them in part r."""
    if counts is None:
        return [part.copy() for part in np.array_split(x, num_parts)]
    if sum(counts) != len(x):
        raise ValueError(f"counts {counts} do not add up to {len(x)} rows")
    return [part.copy() for part in np.split(x, np.cumsum(counts)[:-1])]


_RESULTS: dict[str, Callable[[Call], Results]] = {
    "broadcast": lambda call: call.on_all(call.inputs[call.root]),
    "scatter": lambda call: [*call.parts(call.inputs[call.root], call.counts)],
    "gather": lambda call: call.on_root(joined(call.inputs)),
    "reduce": lambda call: call.on_root(call.combined()),
    "reduce_scatter": lambda call: [*call.parts(call.combined(), call.counts)],
    "all_gather": lambda call: call.on_all(joined(call.inputs)),
    "all_reduce": lambda call: call.on_all(call.combined()),
    "all_to_all": lambda call: call.exchanged(),
    "scan": lambda call: [call.combined(rank + 1) for rank in range(len(call.inputs))],
    "exscan": lambda call: [None, *(call.combined(rank) for rank in range(1, len(call.inputs)))],
}
