"""Combinations of parameters contain every pair of values."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

from tests.covering import pairwise

SIZES, OPS, DTYPES, PLACES = [1, 2, 3, 4, 5], ["sum", "max"], ["f4", "i8", "c8"], [True, False]


def pairs_of(rows: list[Any]) -> set[Any]:
    return {((i, row[i]), (j, row[j])) for row in rows for i, j in combinations(range(len(row)), 2)}


def test_all_pairs_are_in_few_combinations() -> None:
    values = SIZES, OPS, DTYPES, PLACES
    rows = pairwise(*values)
    assert pairs_of(rows) == pairs_of(list(product(*values)))
    assert len(rows) < 20 < len(list(product(*values)))


def test_combinations_that_are_not_wanted_are_left_out_and_no_pair_is_lost() -> None:
    def where(size: int, op: str, dtype: str, _: bool) -> bool:
        return size > 1 or (op, dtype) == ("sum", "f4")

    rows = pairwise(SIZES, OPS, DTYPES, PLACES, where=where)
    wanted = [row for row in product(SIZES, OPS, DTYPES, PLACES) if where(*row)]
    assert set(rows) <= set(wanted)
    assert pairs_of(rows) == pairs_of(wanted)


def test_a_pair_that_is_missing_is_noticed() -> None:
    """The negative control: one combination of each pair is needed."""
    rows = pairwise(SIZES, DTYPES)
    assert any(pairs_of(rows) != pairs_of([*rows[:n], *rows[n + 1 :]]) for n in range(len(rows)))
