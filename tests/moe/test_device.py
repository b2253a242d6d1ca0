"""Experts on a device: rows of tokens stay there, and logits and weights of choices cross."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe import RoutingLog
from moe.gates import GATES
from parallel import Mesh
from parallel.nn import Model
from tests.moe.experts import CONTEXT, ROWS, Setup
from tests.parallel.split_layers import bound_by_name
from tests.parallel.test_offload import FAKE, bare, crossed

SIZE = 4
FORMS: dict[str, dict[str, Any]] = {
    "flat": {}, "parts": {"num_parts": 2}, "capacity": {"padding": "capacity"},
    "needed": {"padding": "needed"}, "hierarchical": {"dispatch": "hierarchical"},
    "weights": {"dispatch": "weights"}, "cheaper": {"dispatch": "cheaper"},
    "int8": {"payload": "int8"}, "bfloat16": {"payload": "bfloat16"}, "dropout": {"dropout": 0.3},
}  # fmt: skip


def check(setup: Setup) -> None:
    """The same layer on the host and on the device of each rank."""

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, expert=setup.size)
        here, there = (setup.make(mesh, RoutingLog()) for _ in range(2))
        for axis in here.comm_axes:
            mesh[axis]
        bound_by_name(Model({"only": here}, mesh=mesh), setup.dtype)
        gradients = {key: np.zeros_like(x) for key, x in here.value.items()}
        there.bind(
            {key: FAKE.asarray(x) for key, x in here.value.items()},
            {key: FAKE.asarray(x) for key, x in gradients.items()},
        )
        rows = setup.rows()[comm.rank]
        x, dy = (setup.whole(name)[rows.start : rows.stop].copy() for name in ("x", "dy"))
        y, saved = here.forward(x, setup.step(comm.rank))
        dx = here.backward(dy, saved)
        arrays, step = (FAKE.asarray(x), FAKE.asarray(dy)), setup.step(comm.rank)
        crossed().clear()
        y_there, saved = there.forward(arrays[0], step)
        dx_there = there.backward(arrays[1], saved)
        np.testing.assert_array_equal(bare(y_there), y)
        np.testing.assert_array_equal(bare(dx_there), dx)
        for key, gradient in here.gradient.items():
            np.testing.assert_array_equal(bare(there.gradient[key]), gradient)
        check_crossed(crossed(), setup, len(rows))

    collectives.run(fn, size=setup.size, timeout=60)


def check_crossed(moved: Counter[str], setup: Setup, rows: int) -> None:
    """To the host: logits, and derivatives of weights; 8 bytes each.

    That is less than one row of 64 numbers for each token, so no rows have crossed.  In the
    hierarchical dispatch the derivatives are of the entries that a rank receives, at most all.
    """
    num_entries = setup.make_gate().num_entries(CONTEXT)
    computed = ROWS if setup.dispatch == "hierarchical" else rows
    most = 8 * (rows * CONTEXT * setup.num_experts + computed * num_entries)
    assert moved["get"] <= most
    assert moved["get"] > 0 or rows == 0


@pytest.mark.parametrize("form", FORMS)
def test_every_way(form: str) -> None:
    options = dict(FORMS[form])
    on_host = 2 if form == "hierarchical" else None
    check(Setup("stable", size=SIZE, dim=64, ranks_per_host=on_host)._replace(**options))


@pytest.mark.parametrize("name", GATES)
def test_every_gate(name: str) -> None:
    check(Setup(name, size=2, dim=64))
