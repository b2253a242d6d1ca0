"""The layer: on any number of ranks it computes what one rank computes, and sends what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe.gates import GATES
from moe.layer import MixtureOfExperts
from moe.log import RoutingLog
from parallel import Mesh, TrafficMismatch
from parallel.nn import Model
from tests.moe.experts import (
    CLOSE,
    DIM,
    SIZES,
    Setup,
    alone,
    bytes_of,
    check_all,
    check_equal,
    mlp,
    moved,
)
from tests.parallel.split_layers import bound_by_name

PADDED = ["gshard", "switch", "expert-choice", "v-moe", "stable"]
FORMS = [(name, padding) for name in GATES for padding in ("none", "needed")]
FORMS += [(name, "capacity") for name in PADDED]
COUNTS = {"none": {"counts"}, "needed": {"slots"}, "capacity": set()}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "padding"), FORMS)
def test_all_is_as_on_one_rank(name: str, padding: str, size: int, dtype: str) -> None:
    """Outputs, losses, all derivatives; ranks without rows (8 ranks) and without experts (5)."""
    setup = Setup(name, size=size, padding=padding, num_parts=1 + size % 3, dtype=dtype)
    found = check_all(setup, alone(setup), dtype)
    if size > 1:
        assert set(bytes_of(found)) == {"dispatch", "combine"} | COUNTS[padding]


@pytest.mark.parametrize("payload", ["bfloat16", "int8"])
@pytest.mark.parametrize("padding", ["none", "capacity"])
def test_rounded_payloads_are_as_on_one_rank_too(payload: str, padding: str) -> None:
    """Rounding changes the result, but equally; fewer bytes are sent, as predicted."""
    setup = Setup("stable", size=4, padding=padding, num_parts=2, payload=payload)
    one = alone(setup)
    found = setup.run(one.log)
    check_equal(found, one, 1e-12)
    assert found[0].table is not None and found[0].table.check()
    exact = setup._replace(payload="same")
    difference = np.abs(one.y - alone(exact).y).max()
    assert 1e-4 < difference < 0.1
    whole = exact.run(alone(exact).log)[0].table
    assert whole is not None
    assert found[0].table.matrix.sum() < whole.matrix.sum() / 2
    for each in found:
        for formula, other in zip(each.formulas, found, strict=True):
            assert (formula.saved, formula.rest) == (other.saved, other.rest)


@pytest.mark.parametrize("num_experts", [2, 3, 5, 8])
def test_more_and_fewer_experts_than_ranks(num_experts: int) -> None:
    setup = Setup("stable", num_experts, size=4)
    check_equal(setup.run(alone(setup).log), alone(setup), 1e-12)


@pytest.mark.parametrize("what", ["router", "experts.up.weight", "x"])
@pytest.mark.parametrize("name", GATES)
def test_derivatives_are_those_of_finite_differences(name: str, what: str) -> None:
    """Of the outputs and of the auxiliary losses together."""
    setup = Setup(name)
    layer = setup.make(None, RoutingLog())
    made = bound_by_name(Model({"only": layer}))
    step, x, dy = setup.step(0), setup.whole("x"), setup.whole("dy")
    target = x if what == "x" else layer.value.get(what)
    if target is None:
        assert name == "hash"
        return

    def loss() -> float:
        step.losses.clear()
        y, _ = layer.forward(x, step)
        return float((y * dy).sum()) + step.loss_scale * sum(step.losses)

    dx = layer.backward(dy, layer.forward(x, step)[1])
    found = dx if what == "x" else made.named_gradients()[f"only.{what}"]
    rng = np.random.default_rng(1)
    for _ in range(24):
        index = tuple(rng.integers(0, n) for n in target.shape)
        before, ends = target[index], []
        for sign in (1, -1):
            target[index] = before + sign * 1e-5
            ends.append(loss())
        target[index] = before
        assert found[index] == pytest.approx((ends[0] - ends[1]) / 2e-5, abs=1e-6, rel=1e-6)
    assert found.any()


def test_without_the_auxiliary_losses_the_derivative_is_another() -> None:
    """The negative control of the above, by more than 1e-6."""
    setup = Setup("switch")
    with_losses, without = setup.step(0), setup.step(0)
    without.loss_scale = 0.0
    found = []
    for step in (with_losses, without):
        layer = setup.make(None, RoutingLog())
        made = bound_by_name(Model({"only": layer}))
        layer.backward(setup.whole("dy"), layer.forward(setup.whole("x"), step)[1])
        found.append(made.named_gradients()["only.router"].copy())
    assert np.abs(found[0] - found[1]).max() > 1e-6


def test_a_prediction_from_another_routing_fails() -> None:
    """The negative control: the log says that one token went to an expert on another rank."""
    setup = Setup("switch", size=4)
    table = setup.run(moved(alone(setup).log, 1))[0].table
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


def test_all_tokens_to_one_expert() -> None:
    """On another rank than most tokens; the other experts have none."""
    setup = Setup("hash", 8, size=4)
    found = setup.run(alone(setup).log)
    check_equal(found, alone(setup), 1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_parts": 0}, "num_parts is 0"), ({"rows_per_group": 0}, "rows_per_group is 0"),
        ({"payload": "int4"}, "payload is 'int4'"),
        ({"gate": "bias", "padding": "capacity"}, "needs a gate with a capacity rule"),
        ({"padding": "some"}, "padding is 'some'"),
    ],
)  # fmt: skip
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    gate = Setup(change.pop("gate", "switch")).make_gate()
    with pytest.raises(ValueError, match=words):
        MixtureOfExperts(DIM, gate, mlp, **change)


def test_groups_of_several_rows_must_be_whole() -> None:
    setup = Setup("switch")
    layer = MixtureOfExperts(DIM, setup.make_gate(), mlp, mesh=Mesh(None), rows_per_group=2)
    bound_by_name(Model({"only": layer}))
    with pytest.raises(ValueError, match="7 rows of a rank are not whole groups of 2"):
        layer.forward(setup.whole("x"), setup.step(0))
