"""Experts on a device: rows of tokens and all derivatives stay there, and logits cross."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe import MixtureOfExperts, RoutingLog
from moe.gates import GATES
from parallel import Mesh
from parallel.nn import Model, Step
from tests.fakes.arrays import FAKE, bare, crossed
from tests.moe.experts import CONTEXT, Setup
from tests.parallel.nn.tensor.split_layers import bound_by_name

SIZE = 4
FORMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "parts": {"num_parts": 2},
    "capacity": {"padding": "capacity"},
    "needed": {"padding": "needed"},
    "hierarchical": {"dispatch": "hierarchical"},
    "weights": {"dispatch": "weights"},
    "cheaper": {"dispatch": "cheaper"},
    "int8": {"payload": "int8"},
    "bfloat16": {"payload": "bfloat16"},
    "dropout": {"dropout": 0.3},
}


class Both(NamedTuple):
    """Outputs, derivatives and gradients of a rank, in host memory."""

    here: list[Any]
    there: list[Any]
    moved: Counter[str]  # between host and device
    num_rows: int


def run(setup: Setup, xp: Any, to_host: Callable[[Any], Any]) -> list[Both]:
    """The same layer on the host and on the device of each rank."""

    def fn(comm: Communicator) -> Both:
        mesh = Mesh(comm, expert=setup.size)
        here, there = (setup.make(mesh, RoutingLog()) for _ in range(2))
        for axis in here.comm_axes:
            mesh[axis]
        bound_by_name(Model({"only": here}, mesh=mesh), setup.dtype)
        values = {key: xp.asarray(x) for key, x in here.value.items()}
        there.bind(values, {key: xp.zeros_like(x) for key, x in values.items()})
        rows = setup.rows()[comm.rank]
        x, dy = (setup.whole(name)[rows.start : rows.stop].copy() for name in ("x", "dy"))
        on_host = both_ways(here, x, dy, setup.step(comm.rank))
        arrays = xp.asarray(x), xp.asarray(dy)
        crossed().clear()
        on_device = both_ways(there, *arrays, setup.step(comm.rank))
        moved = Counter(crossed())
        return Both(on_host, list(map(to_host, on_device)), moved, len(rows))

    found: list[Both] = collectives.run(fn, size=setup.size, timeout=60)
    return found


def both_ways(layer: MixtureOfExperts, x: Any, dy: Any, step: Step) -> list[Any]:
    y, saved = layer.forward(x, step)
    return [y, layer.backward(dy, saved), *layer.gradient.values()]


def setup_of(form: str) -> Setup:
    on_host = 2 if form == "hierarchical" else None
    return Setup("stable", size=SIZE, dim=64, ranks_per_host=on_host)._replace(**FORMS[form])


def check(setup: Setup) -> None:
    for rank in run(setup, FAKE, bare):
        for there, here in zip(rank.there, rank.here, strict=True):
            np.testing.assert_array_equal(there, here)
        check_crossed(rank.moved, setup, rank.num_rows)


def check_crossed(moved: Counter[str], setup: Setup, rows: int) -> None:
    """To the host: logits, of 8 bytes each, if the gate has any."""
    num_logits = rows * CONTEXT * setup.num_experts * setup.make_gate().has_router
    assert moved["get"] == 8 * num_logits


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_dispatch_keeps_tokens_on_the_device(form: str) -> None:
    check(setup_of(form))


@pytest.mark.parametrize("name", GATES)
def test_every_gate_keeps_tokens_on_the_device(name: str) -> None:
    check(Setup(name, size=2, dim=64))
