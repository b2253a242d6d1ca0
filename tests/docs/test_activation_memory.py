"""Activation memory by the papers' formulas and by ours: each difference has a reason and bytes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from docs.generate.activation_memory import HEADS, ActivationRow, activation_rows
from parallel import MemoryTracker, Mesh
from parallel.nn import Step, gpt
from tests.parallel.nn.tensor.split_layers import bound_by_name

SMALL = {"rows": 2, "context": 8, "hidden": 12, "num_heads": 4}
HOW: list[dict[str, Any]] = [  # is made each row of the table
    {},
    {"sequence_parallel": "gather"},
    {"sequence_parallel": "keep"},
    {"recompute": HEADS},
    {"sequence_parallel": "gather", "recompute": HEADS},
    {"recompute": ["block*"]},
]


def table(size: int, sizes: dict[str, int]) -> list[list[ActivationRow]]:
    """Return the rows of all ranks."""
    tables: list[list[ActivationRow]] = collectives.run(
        lambda comm: activation_rows(Mesh(comm, tensor=size), **sizes), size=size
    )
    return tables


@pytest.mark.parametrize("size", [1, 2, 4])
def test_our_activations_are_the_papers_and_the_differences(size: int) -> None:
    """This holds on every rank, and every difference has bytes if ranks divide layers."""
    tables = table(size, SMALL)
    assert all(of_rank == tables[0] for of_rank in tables)
    for row in tables[0]:
        assert row.ours == row.paper + sum(row.differences.values()), row.technique
        assert size == 1 or all(row.differences.values())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_our_activations_follow_formulas_of_our_own(size: int) -> None:
    """sbh (32 + 2as/h) + 8sb on one rank: what the papers' become without dropout."""
    s, b, h, a = (SMALL[name] for name in ("context", "rows", "hidden", "num_heads"))
    t, n = Fraction(size), s * b * h
    scores = 2 * Fraction(a * s, h) / t
    assert [row.ours for row in table(size, SMALL)[0]] == [
        n * (8 + 24 / t + scores) + 8 * s * b,
        n * (32 / t + scores) + 8 * s * b / t,
        n * (4 + 28 / t + scores) + 8 * s * b / t,
        n * (8 + 24 / t) + 8 * s * b,
        n * 32 / t + 8 * s * b / t,
        2 * n,
    ]
    if size == 1:
        assert table(1, SMALL)[0][0].ours == n * (32 + Fraction(2 * a * s, h)) + 8 * s * b


@pytest.mark.parametrize("size", [1, 2, 4])
def test_our_activations_are_counted_from_arrays(size: int) -> None:
    def fn(comm: Communicator) -> list[int]:
        counted, mesh = [], Mesh(comm, tensor=size)
        tokens = np.zeros((SMALL["rows"], SMALL["context"]), np.int64)
        for how in HOW:
            sizes = {name: n for name, n in SMALL.items() if name != "rows"}
            made = bound_by_name(gpt(num_layers=1, mesh=mesh, **sizes, **how), "bfloat16")
            x, memory = tokens, MemoryTracker()
            for name in ("embedding", "block0"):
                x, saved = made.model.layers[name].forward(x, Step(tokens))
            memory.track("saved", saved)
            counted.append(memory.now["saved"])
        return counted

    for counted, rows in zip(collectives.run(fn, size=size), table(size, SMALL), strict=True):
        assert counted == [row.ours for row in rows]


def test_a_term_that_is_left_out_is_noticed() -> None:
    """The negative control: every difference counts."""
    for row in table(2, SMALL)[0]:
        for reason in row.differences:
            rest = {name: n for name, n in row.differences.items() if name != reason}
            assert row.ours != row.paper + sum(rest.values())


def test_the_formulas_are_those_of_the_paper() -> None:
    """The sizes are those of its 22 B model: s = 2048, b = 4, h = 6144, a = 64, on 8 ranks."""
    sizes = {"rows": 4, "context": 2048, "hidden": 6144, "num_heads": 64}
    n, scores = 2048 * 4 * 6144, Fraction(5 * 64 * 2048, 6144)
    rows = table(8, sizes)[0]
    assert [row.paper for row in rows] == [
        n * (10 + 3 + scores / 8),
        n * (34 + scores) / 8,
        n * (34 + scores) / 8,
        n * 13,
        Fraction(34 * n, 8),
        2 * n,
    ]


def test_unequal_parts_are_refused() -> None:
    for sizes in ({"context": 9}, {"num_heads": 3}):
        with pytest.raises(ValueError, match=r"2 ranks do not divide . tokens and . heads equally"):
            table(2, SMALL | sizes)
