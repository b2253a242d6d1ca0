"""The layer: on any number of ranks it computes what one rank computes, and sends what it says."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from moe.dispatch.options import Options
from moe.exchange import SavedExchange
from moe.gates import GATES
from moe.layers.mixture import MixtureOfExperts
from moe.routing import RoutingLog
from parallel import Mesh, TrafficMismatch
from parallel.nn import Model
from tests.covering import pairwise
from tests.moe.experts import (
    CLOSE,
    CONTEXT,
    DIM,
    ROWS,
    SIZES,
    STEP_NUMBER,
    Setup,
    alone,
    bytes_of,
    check_all,
    check_equal,
    mlp,
    moved,
)
from tests.moe.routing.tables import digests
from tests.parallel.nn.tensor.split_layers import bound_by_name

PADDED = ["gshard", "switch", "expert-choice", "v-moe", "stable"]
GROUPS_OF_TWO = Setup("gshard", hidden=2, rows_per_group=2, num_rows=4)
COUNTS = {"none": {"counts"}, "needed": {"slots"}, "capacity": set()}


def label(value: Any) -> str:
    """Of a parameter of a test."""
    if isinstance(value, Setup):
        return value.gate + "-groups" * (value.rows_per_group > 1)
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.mark.parametrize(
    ("name", "padding", "size", "dtype"),
    pairwise(
        GATES,
        COUNTS,
        SIZES,
        CLOSE,
        where=lambda name, padding, *_: padding != "capacity" or name in PADDED,
    ),
)
@pytest.mark.slow
def test_outputs_losses_and_derivatives_are_as_on_one_rank(
    name: str, padding: str, size: int, dtype: str
) -> None:
    """Outputs, losses, all derivatives; ranks without rows (8 ranks) and without experts (5)."""
    setup = Setup(name, size=size, padding=padding, num_parts=1 + size % 3, dtype=dtype)
    found = check_all(setup, alone(setup), dtype)
    if size > 1:
        assert set(bytes_of(found)) == {"dispatch", "combine"} | COUNTS[padding]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", COUNTS)
def test_groups_of_several_rows_are_as_on_one_rank(padding: str, size: int) -> None:
    """On 8 ranks too, for 4 groups of 2 rows: ranks do not divide a group."""
    setup = Setup("gshard", size=size, padding=padding, rows_per_group=2, num_rows=8)
    check_all(setup, alone(setup))
    of_rows = alone(setup._replace(rows_per_group=1)).log
    assert digests([of_rows], CONTEXT) != digests([alone(setup).log], CONTEXT)


@pytest.mark.parametrize("setup", [*map(Setup, GATES), GROUPS_OF_TWO], ids=label)
@pytest.mark.slow
def test_routing_is_the_same_for_all_ranks_and_micro_batches(setup: Setup) -> None:
    """The SHA-256 of (token, expert, slot, dropped) over the batch, in all 15 combinations."""
    wanted = digests([alone(setup).log], CONTEXT)
    for size, num_parts in product(SIZES, [1, 2, 4]):
        logs = setup._replace(size=size).routed(num_parts)
        assert digests(logs, CONTEXT) == wanted, (size, num_parts)


@pytest.mark.parametrize("name", GATES)
def test_routing_that_depends_on_the_rows_of_a_rank_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: all rows of a rank's micro-batch are routed together."""
    setup, wanted = Setup(name), []
    monkeypatch.setattr(Options, "num_groups", lambda self, num_rows: min(1, num_rows))
    for size, num_parts in [(1, 1), (2, 1), (1, 2)]:
        wanted.append(digests(setup._replace(size=size).routed(num_parts), CONTEXT))
    assert wanted[0] != wanted[1] and wanted[0] != wanted[2]


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
def test_more_and_fewer_experts_than_ranks_are_as_on_one_rank(num_experts: int) -> None:
    setup = Setup("stable", num_experts, size=4)
    check_equal(setup.run(alone(setup).log), alone(setup), 1e-12)


DERIVATIVES = [
    (setup, what)
    for setup in [*(Setup(name, hidden=2, num_rows=3) for name in GATES), GROUPS_OF_TWO]
    for what in ("router", "experts.up.weight", "x")
    if what != "router" or setup.gate != "hash"
]


@pytest.mark.parametrize(("setup", "what"), DERIVATIVES, ids=label)
@pytest.mark.slow
def test_derivatives_are_those_of_finite_differences(setup: Setup, what: str) -> None:
    """By every element, of the outputs and of the auxiliary losses together."""
    layer = setup.make(None, RoutingLog())
    made = bound_by_name(Model({"only": layer}))
    step, x, dy = setup.step(0), setup.whole("x"), setup.whole("dy")
    target = x if what == "x" else layer.value[what]

    def loss() -> float:
        step.losses.clear()
        y, _ = layer.forward(x, step)
        return float((y * dy).sum()) + step.loss_scale * sum(step.losses)

    dx = layer.backward(dy, layer.forward(x, step)[1])
    found = dx if what == "x" else made.named_gradients()[f"only.{what}"]
    wanted = np.empty_like(target)
    for index in np.ndindex(target.shape):
        before, ends = target[index], []
        for sign in (1, -1):
            target[index] = before + sign * 1e-5
            ends.append(loss())
        target[index] = before
        wanted[index] = (ends[0] - ends[1]) / 2e-5
    assert found == pytest.approx(wanted, abs=1e-6, rel=1e-6)
    assert found.any()


WITHOUT = [(name, "weights") for name in GATES if name != "hash"]
WITHOUT += [(name, "losses") for name in GATES if Setup(name).make_gate().losses]


@pytest.mark.parametrize(("name", "without"), WITHOUT)
def test_an_incomplete_derivative_of_the_router_is_another(
    name: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: without that of the weights or of the losses, by more than 1e-5."""
    setup = Setup(name)

    def derivative(loss_scale: float) -> Any:
        step, layer = setup.step(0), setup.make(None, RoutingLog())
        step.loss_scale = loss_scale
        made = bound_by_name(Model({"only": layer}))
        layer.backward(setup.whole("dy"), layer.forward(setup.whole("x"), step)[1])
        return made.named_gradients()["only.router"].copy()

    right = derivative(2.0)
    if without == "weights":
        monkeypatch.setattr(
            SavedExchange, "slopes_of", lambda self, weights, dy: np.zeros_like(weights)
        )
    incomplete = derivative(2.0 if without == "weights" else 0.0)
    assert np.abs(right - incomplete).max() > 1e-5


def test_a_prediction_from_another_routing_fails() -> None:
    """The negative control: the log says that one token went to an expert on another rank."""
    setup = Setup("switch", size=4)
    table = setup.run(moved(alone(setup).log, 1))[0].table
    assert table is not None
    with pytest.raises(TrafficMismatch):
        table.check()


# Extreme routings

DISPATCHERS: list[dict[str, Any]] = [
    {"padding": "none"},
    {"padding": "needed"},
    {"dispatch": "hierarchical", "ranks_per_host": 2},
]
ALL_TO_ONE = [
    Setup("switch", 8, options=(("capacity_factor", 8.0),)),
    Setup("bias", 8, options=(("k", 1),)),
    Setup("hash", 8),
    Setup("stable", 8, options=(("k", 2), ("capacity_factor", 8.0))),
]


def loads_of(setup: Setup) -> Any:
    """The rows of each expert, on one rank."""
    return alone(setup).log.whole(STEP_NUMBER, "moe").load


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize(
    ("setup", "way"),
    [(setup, way) for setup in ALL_TO_ONE for way in DISPATCHERS]
    + [(ALL_TO_ONE[0], {"padding": "capacity"})],
    ids=label,
)
@pytest.mark.slow
def test_all_tokens_may_go_to_one_expert(setup: Setup, way: dict[str, Any], size: int) -> None:
    """With one choice, the other experts have no tokens; with two, they have the second choices.

    On 8 ranks the rank of the last expert has no tokens of its own.
    """
    forced, k = setup._replace(all_to_one=True), setup.make_gate().k
    num_tokens = ROWS * CONTEXT
    assert loads_of(forced).max() == num_tokens and loads_of(forced).sum() == k * num_tokens
    assert (loads_of(forced) > 0).sum() == 1 or k > 1
    assert loads_of(setup).max() < num_tokens, "the negative control"
    check_all(forced._replace(size=size, **way), alone(forced))


ONE = [(name, 1, 1) for name in ("switch", "expert-choice", "v-moe", "stable", "bias", "hash")]
ALL = [("gshard", 2, 2)] + [(name, 4, 4) for name in ("v-moe", "stable", "bias", "sigmoid", "hash")]


@pytest.mark.parametrize("way", DISPATCHERS, ids=label)
@pytest.mark.parametrize(("name", "num_experts", "k"), ONE + ALL)
def test_one_expert_and_tokens_that_have_all_experts_are_as_on_one_rank(
    name: str, num_experts: int, k: int, way: dict[str, Any]
) -> None:
    """On 4 ranks, of which 3 have no expert if there is one."""
    has_k = "k" in inspect.signature(GATES[name]).parameters
    options: dict[str, Any] = {"k": k} if has_k else {}
    if name == "sigmoid":
        options["most_nodes"] = 2
    setup = Setup(name, num_experts, options=tuple(options.items()))
    routing = alone(setup).log.whole(STEP_NUMBER, "moe")
    if name != "expert-choice":  # in which an expert chooses some tokens
        assert (routing.choices == ROWS * CONTEXT).all()
    check_all(setup._replace(size=4, **way), alone(setup))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_parts": 0}, "num_parts is 0"),
        ({"rows_per_group": 0}, "rows_per_group is 0"),
        ({"payload": "int4"}, "payload is 'int4'"),
        ({"gate": "bias", "padding": "capacity"}, "needs a gate with a capacity rule"),
        ({"padding": "some"}, "padding is 'some'"),
    ],
)
def test_impossible_layers_are_refused(change: dict[str, Any], words: str) -> None:
    gate = Setup(change.pop("gate", "switch")).make_gate()
    with pytest.raises(ValueError, match=words):
        MixtureOfExperts(DIM, gate, mlp, **change)


def test_padding_needs_to_know_the_rows_of_all_ranks() -> None:
    """It is refused before anything is sent."""

    def fn(comm: Communicator) -> Any:
        mesh, setup = Mesh(comm, expert=2), Setup("switch", size=2, padding="needed")
        (layer, _), step = setup.bound(mesh, RoutingLog()), setup.step(comm.rank)
        step.batch = None
        x = setup.whole("x")[list(setup.rows()[comm.rank])]
        words = "padding 'needed' of the layer moe needs the numbers of rows"
        with comm.record() as ledger, pytest.raises(ValueError, match=words):
            layer.forward(x, step)
        return ledger.gather()

    ledger, _ = collectives.run(fn, size=2)
    assert ledger.rows() == []


def test_groups_of_several_rows_must_be_whole() -> None:
    setup = Setup("switch")
    layer = MixtureOfExperts(DIM, setup.make_gate(), mlp, mesh=Mesh(None), rows_per_group=2)
    bound_by_name(Model({"only": layer}))
    with pytest.raises(ValueError, match="7 rows of a rank are not whole groups of 2"):
        layer.forward(setup.whole("x"), setup.step(0))
