"""Chooses some combinations of several parameters, in which all pairs of their values occur.

    @pytest.mark.parametrize(("size", "op", "dtype"), pairwise([1, 2, 3], OPS, DTYPES))

Mistakes depend on one parameter or on two far more often than on three, and all combinations would
take many times as long (Kuhn, Wallace and Gallo, "Software fault interactions and implications for
software testing", 2004).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]  # a value of each parameter, or its position


def pairwise(*values: Iterable[Any], where: Callable[..., bool] = lambda *_: True) -> list[Any]:
    """Combinations with one value of each parameter, as tuples; the same in every process.

    Any two values that are together in a combination are together in one of the result.
    Combinations for which `where`, called with the values, is false do not count.
    """
    axes = [list(axis) for axis in values]

    def at(row: Row) -> tuple[Any, ...]:
        return tuple(axis[n] for axis, n in zip(axes, row, strict=True))

    every = product(*(range(len(axis)) for axis in axes))
    return [at(row) for row in covering([row for row in every if where(*at(row))])]


def covering(rows: list[Row]) -> list[Row]:
    """Some rows, with all pairs that occur: one after another the row with most new pairs."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
