"""Gates: derivatives by finite differences, capacity rules, choices, and what is refused."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moe.gates import GATES, RULES, Balance, Gate, Gated
from moe.gates.losses import Importance, Load, LossInput, RouterZ, squared_variation
from moe.gates.scores import SIGMOID, SOFTMAX
from moe.gates.selections import expert_choice, random_second
from moe.layers.mixture import MixtureOfExperts
from moe.routing import Routing, joined, slots_of
from moe.routing.log import RoutingLog
from parallel import Mesh
from tests.moe.experts import DIM, STEP_NUMBER, Setup, alone, mlp
from tests.moe.experts import ROWS as SETUP_ROWS
from tests.moe.routing.tables import digest

TOKENS, EXPERTS, ROWS = 24, 4, 6
OPTIONS: dict[str, dict[str, Any]] = {"sigmoid": {"num_nodes": 2, "most_nodes": 1}}


def made(name: str, num_experts: int = EXPERTS, **options: Any) -> Gate:
    return GATES[name](num_experts, **(OPTIONS.get(name, {}) | options))


def inputs(seed: int = 1, tokens: int = TOKENS, experts: int = EXPERTS) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "logits": rng.standard_normal((tokens, experts)),
        "token_ids": rng.integers(0, 256, tokens),
        "bias": 0.1 * rng.standard_normal(experts),
    }


def streams(first_row: int = 0, rows: int = ROWS) -> list[np.random.Generator]:
    return [np.random.default_rng([7, row]) for row in range(first_row, first_row + rows)]


def route(gate: Gate, given: dict[str, Any], groups: int = 2) -> Gated:
    logits = given["logits"]
    rest = {name: x for name, x in given.items() if name != "logits"}
    return gate.forward(logits, streams(), num_groups=groups, **rest)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("part", ["weights", "losses"])
def test_derivatives_are_those_of_finite_differences(name: str, part: str) -> None:
    """Of a sum of weights, and of the auxiliary losses alone, with factors of order 1."""
    gate = made(name)
    gate = replace(gate, losses=tuple(replace(x, factor=1.0) for x in gate.losses))
    given = inputs()
    slopes = np.random.default_rng(3).standard_normal(3 * TOKENS)
    loss_weight = 0.7 if part == "losses" else 0.0

    def whole(logits: Any) -> float:
        gated = route(gate, given | {"logits": logits})
        chosen = slopes[: len(gated.weights)] * (part == "weights")
        return float(gated.weights @ chosen) + loss_weight * gated.loss

    gated = route(gate, given)
    found = gate.backward(gated, slopes[: len(gated.weights)] * (part == "weights"), loss_weight)
    wanted = differences(whole, given["logits"])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * max(1, np.abs(wanted).max()))
    has_slope = gate.has_router if part == "weights" else bool(gate.losses)
    assert found.any() == has_slope
    if has_slope:  # the control: another derivative is noticed
        assert np.abs(1.001 * found - wanted).max() > 1e-6


def differences(fn: Any, x: Any, step: float = 1e-5) -> Any:
    found = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[index] += sign * step
            ends.append(fn(moved))
        found[index] = (ends[0] - ends[1]) / (2 * step)
    return found


@pytest.mark.parametrize("name", GATES)
def test_routing_does_not_depend_on_how_rows_are_divided(name: str) -> None:
    """Any way to divide whole groups over ranks gives the same table; another noise does not."""
    gate, given = made(name), inputs()
    whole = route(gate, given, groups=ROWS)
    wanted = digest([whole.routing.table()])
    per_row = TOKENS // ROWS
    for parts in (2, 3, 6):
        rows, tables, loss = ROWS // parts, [], 0.0
        for i in range(parts):
            tokens = slice(i * rows * per_row, (i + 1) * rows * per_row)
            gated = gate.forward(
                given["logits"][tokens],
                streams(i * rows, rows),
                num_groups=rows,
                bias=given["bias"],
                token_ids=given["token_ids"][tokens],
            )
            tables.append(gated.routing.table(tokens.start))
            loss += gated.loss
        assert digest(tables) == digest(tables[::-1]) == wanted
        assert loss == pytest.approx(whole.loss, rel=1e-12)
    other = whole.routing.table()
    other[0, 3] ^= 1  # one entry that is dropped, or not
    assert digest([other]) != wanted


def test_no_token_is_lost_or_doubled() -> None:
    """Each (token, expert) pair occurs once; slots of an expert in a group are 0, 1, 2, ..."""
    for name in GATES:
        routing = route(made(name), inputs()).routing
        pairs = list(zip(routing.token.tolist(), routing.expert.tolist(), strict=True))
        assert len(set(pairs)) == len(pairs), name
        for group in range(routing.num_groups):
            for expert in range(EXPERTS):
                mine = (routing.group == group) & (routing.expert == expert) & (routing.slot >= 0)
                assert sorted(routing.slot[mine]) == list(range(mine.sum())), name
        if name != "expert-choice":
            per_token = np.bincount(routing.token, minlength=TOKENS)
            assert (per_token == made(name).k).all(), name


@pytest.mark.parametrize(
    ("rule", "given", "wanted"),
    [
        ("gshard", (1024, 8, 2, 1.0), 256),
        ("gshard", (10, 4, 2, 1.0), 5),
        ("switch", (10, 4, 1, 1.25), 4),
        ("switch", (64, 8, 1, 1.25), 10),
        ("deepspeed", (8, 8, 1, 1.0), 4),
        ("deepspeed", (64, 8, 1, 1.25), 10),
        ("tutel", (10, 4, 2, 1.5), 8),
        ("tutel", (10, 4, 2, 0.1), 0),
        ("v-moe", (196, 32, 2, 1.05), 16),
        ("v-moe", (64, 8, 1, 1.0), 8),
        ("expert-choice", (64, 8, 1, 2.0), 16),
        ("expert-choice", (4, 1, 1, 2.0), 4),
        # Exact where binary fractions are not: 10 * 1.1 = 11.000000000000002 in float64.
        ("gshard", (10, 1, 1, 1.1), 11),
    ],
)
def test_each_rule_gives_its_capacity(
    rule: str, given: tuple[int, int, int, float], wanted: int
) -> None:
    """Also of a factor that is a number of NumPy."""
    *sizes, factor = given
    assert RULES[rule](*given) == RULES[rule](*sizes, np.float64(factor)) == wanted


@pytest.mark.parametrize(
    ("rule", "low", "high"),
    [
        ("gshard", 3, 6),
        ("switch", 3, 6),
        ("deepspeed", 4, 6),
        ("tutel", 2, 4),
        ("v-moe", 4, 8),
        (None, 28, 28),
    ],
)
def test_experts_of_a_layer_take_what_the_rule_says(rule: str | None, low: int, high: int) -> None:
    """Of a group of 28 tokens that all choose the same expert of four, k = 2, with two factors."""
    for factor, wanted in ((0.2, low), (0.4, high)):
        options = (("rule", rule), ("capacity_factor", factor))
        setup = Setup("stable", all_to_one=True, rows_per_group=SETUP_ROWS, options=options)
        routing = alone(setup).log.whole(STEP_NUMBER, "moe")
        assert routing.load.max() == wanted


def test_named_gates_with_a_capacity_take_every_rule() -> None:
    """Expert choice and the dropless gates take none."""
    with_rule = [name for name in GATES if "rule" in inspect.signature(GATES[name]).parameters]
    assert with_rule == ["gshard", "switch", "v-moe", "stable"]
    for name in with_rule:
        assert made(name).rule is not None
        for rule in {*RULES, None} - {"expert-choice"}:
            assert made(name, rule=rule).rule == rule
        with pytest.raises(ValueError, match="does not go with the capacity rule expert-choice"):
            made(name, rule="expert-choice")


def test_an_expert_takes_no_more_than_its_capacity() -> None:
    for name in GATES:
        routing = route(made(name), inputs()).routing
        if routing.capacity is None:
            assert not routing.is_dropped.any()
            continue
        for group in range(routing.num_groups):
            kept = (routing.group == group) & ~routing.is_dropped
            assert np.bincount(routing.expert[kept]).max() <= routing.capacity
        if name == "expert-choice":
            assert routing.load.tolist() == [routing.num_groups * routing.capacity] * EXPERTS


def test_dropped_entries_have_no_weight() -> None:
    gated = route(made("switch", capacity_factor=0.5), inputs())
    assert gated.routing.drop_rate > 0.2
    assert not gated.weights[gated.routing.is_dropped].any()
    assert gated.weights[~gated.routing.is_dropped].all()


def test_weights_add_up() -> None:
    for name, total in {"gshard": 1, "stable": 1, "bias": 1, "sigmoid": 2.5, "hash": 1}.items():
        options = {"capacity_factor": 8.0} if name in ("gshard", "stable") else {}
        gated = route(made(name, **options), inputs())
        sent = gated.routing.slot >= 0
        full = np.bincount(gated.routing.token[sent], minlength=TOKENS) == made(name).k
        sums = np.bincount(gated.routing.token, gated.weights)
        np.testing.assert_allclose(sums[full], total, rtol=1e-12)


def test_gshard_samples_the_second_expert_in_proportion_to_its_weight() -> None:
    """With shares of 0.9 and 0.1, in about 2 of 10 tokens; of two equal ones, always."""
    logits = np.tile(np.log([0.9, 0.1, 1e-9]), (1000, 1))
    gate = made("gshard", 3, capacity_factor=100.0)
    gated = gate.forward(logits, streams(rows=10))
    assert 150 < (gated.routing.slot[1000:] >= 0).sum() < 250
    equal = gate.forward(np.zeros((1000, 3)), streams(rows=10))
    assert (equal.routing.slot >= 0).all()


def test_batch_priority_drops_the_least_sure_tokens() -> None:
    logits = np.array([[1.0, 0], [3.0, 0], [2.0, 0], [4.0, 0], [0.5, 0], [0.1, 0]])
    gate = made("v-moe", 2, k=1, capacity_factor=1.0)  # 3, raised to 4
    routing = gate.forward(logits).routing
    assert routing.token[routing.is_dropped].tolist() == [4, 5]
    first_come = replace(gate, selection=GATES["switch"](2).selection).forward(logits[::-1])
    assert first_come.routing.token[first_come.routing.is_dropped].tolist() == [4, 5]
    assert [logits[::-1][i, 0] for i in (4, 5)] == [3.0, 1.0]  # a sure one is dropped


def test_the_sigmoid_gate_uses_few_nodes() -> None:
    gate = made("sigmoid", 8, num_nodes=4, most_nodes=2, k=3)
    given = inputs(experts=8)
    routing = route(gate, given).routing
    nodes = [set(routing.expert[routing.token == token] // 2) for token in range(TOKENS)]
    assert max(map(len, nodes)) == 2
    free = route(replace(gate, selection=made("bias").selection), given).routing
    nodes = [set(free.expert[free.token == token] // 2) for token in range(TOKENS)]
    assert max(map(len, nodes)) == 3


def test_a_bias_changes_the_choice_but_not_the_weight() -> None:
    gate, logits = made("bias", k=1), np.zeros((4, EXPERTS))
    gate = replace(gate, is_normalized=False)
    bias = np.array([0, 0, 0.5, 0])
    gated = gate.forward(logits, bias=bias)
    assert gated.routing.expert.tolist() == [2] * 4
    assert gated.weights.tolist() == [0.5] * 4
    after = gate.next_bias(bias, gated.routing.choices)
    np.testing.assert_allclose(after, [0.001, 0.001, 0.499, 0.001])


def test_biases_balance_a_skewed_router() -> None:
    """And without changing them the load stays as it is."""
    rng = np.random.default_rng(5)
    gate, bias = made("bias", rate=0.02), np.zeros(EXPERTS)
    skew = np.array([2.0, 0, 0, -2])
    imbalance = []
    for _ in range(200):
        gated = gate.forward(rng.standard_normal((256, EXPERTS)) + skew, bias=bias)
        imbalance.append(gated.routing.imbalance)
        bias = gate.next_bias(bias, gated.routing.choices)
    assert np.mean(imbalance[:5]) > 1.6
    assert np.mean(imbalance[-20:]) < 1.15


def test_hash_routing_depends_on_the_token_alone_and_spreads_the_vocabulary() -> None:
    gate = made("hash", 8)
    ids = np.arange(4096)
    first = gate.forward(np.zeros((4096, 8)), token_ids=ids).routing
    again = gate.forward(np.ones((4096, 8)), token_ids=ids[::-1]).routing
    assert (first.expert == again.expert[::-1]).all()
    assert first.imbalance < 1.1
    with pytest.raises(ValueError, match="needs the tokens"):
        gate.forward(np.zeros((4, 8)))


@pytest.mark.parametrize("name", GATES)
def test_extreme_numbers_of_experts_and_tokens_are_routed(name: str) -> None:
    """One expert, k = E, all tokens to one expert, and no tokens at all."""
    plain = {"sigmoid": {"num_nodes": 1}}.get(name, {})
    has_k = name not in ("gshard", "switch", "expert-choice")
    one = GATES[name](2 if name == "gshard" else 1, **plain | ({"k": 1} if has_k else {}))
    given = inputs(experts=one.num_experts)
    assert route(one, given).routing.load.sum() > 0
    if has_k:
        every = GATES[name](EXPERTS, k=EXPERTS, **plain)
        assert len(route(every, inputs()).routing.token) == EXPERTS * TOKENS
    skewed = inputs()
    skewed["logits"][:, 2] += 50
    gated = route(made(name), skewed)
    assert np.isfinite(gated.weights).all() and np.isfinite(gated.loss)
    empty = made(name).forward(np.zeros((0, EXPERTS)), [], num_groups=0, token_ids=np.zeros(0, int))
    assert len(empty.routing.token) == 0 and empty.loss == 0
    assert made(name).backward(empty, empty.weights, 1.0).shape == (0, EXPERTS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Gate(4, 5), "k is 5: it must be from 1 to 4"),
        (lambda: Gate(4, 0), "k is 0"),
        (lambda: Gate(0), "num_experts is 0"),
        (lambda: Gate(4, rule="none"), "no capacity rule"),
        (lambda: Gate(4, rule="switch", capacity_factor=0.0), "capacity_factor is 0.0"),
        (lambda: Gate(4, rule="switch", capacity_factor=np.inf), "is inf: .*finite"),
        (lambda: Gate(4, rule="switch", capacity_factor=np.nan), "capacity_factor is nan"),
        (lambda: Gate(4, scale=0.0), "scale is 0.0: it must be more than 0"),
        (lambda: Gate(4, noise=-0.1), "noise is -0.1: it must be at least 0"),
        (lambda: Gate(4, noise=np.nan), "noise is nan"),
        (lambda: Gate(4, bias_rate=-0.1), "bias_rate is -0.1: it must be at least 0"),
        (lambda: Gate(4, init_scale=-1.0), "init_scale is -1.0: it must be at least 0"),
        (lambda: Load(1.0, 0.0), "noise is 0.0"),
        (lambda: Gate(4, 1, selection=random_second), "k is 1: the selection random_second"),
        (lambda: Gate(4, 3, selection=random_second), "k is 3: the selection random_second"),
        (lambda: Gate(4, selection=expert_choice), "does not go with the capacity rule None"),
        (lambda: Gate(4, selection=expert_choice, rule="gshard"), "not go with .* rule gshard"),
        (lambda: Gate(4, rule="expert-choice"), "the selection top_k does not go with"),
        (lambda: Gate(4, rule="tutel", capacity_factor=0.1).capacity(8), "take no token"),
        (lambda: made("gshard", 1), "k is 2"),
        (lambda: made("sigmoid", 8, num_nodes=3), "must divide 8 experts"),
        (lambda: made("sigmoid", 8, num_nodes=4, most_nodes=1, k=3), "fewer experts"),
        (lambda: made("switch").forward(np.full((4, 4), np.nan)), "not finite"),
        (lambda: made("switch").forward(np.zeros((4, 4)), num_groups=3), "do not divide 4"),
        (lambda: made("switch").forward(np.zeros((4, 4)), num_groups=0), "do not divide 4"),
    ],
)
def test_impossible_gates_are_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("name", GATES)
def test_all_ranks_have_the_same_configuration(name: str) -> None:
    """Without addresses in memory, which differ from process to process."""
    found = made(name).config()
    assert all(isinstance(each, str) for each in found) and "0x" not in "".join(found)
    assert found == made(name).config() != Gate(EXPERTS + 1).config()


def test_balance_is_least_for_equal_loads() -> None:
    """E sum f P is 1 if all are equal, and E if all tokens choose one expert for sure."""
    even = LossInput(
        np.zeros((8, 4)), np.zeros((8, 4)), np.full((8, 4), 0.25), np.full(4, 2), np.full(4, 2), 1
    )
    assert Balance(4.0)(even).value == pytest.approx(1)
    sure = even._replace(scores=np.eye(4)[[0] * 8], firsts=np.array([8, 0, 0, 0]))
    assert Balance(4.0)(sure).value == pytest.approx(4)
    assert Importance(1.0)(even).value == pytest.approx(0)
    assert Load(1.0, 0.25)(even).value == pytest.approx(0)
    assert RouterZ(1.0)(even).value == pytest.approx(np.log(4) ** 2)


def test_the_loss_of_gshard_is_that_of_its_program_and_with_another_weight_of_its_paper() -> None:
    logits = inputs()["logits"]
    shares = SOFTMAX.forward(logits)
    firsts = np.bincount(shares.argmax(axis=-1), minlength=EXPERTS) / TOKENS
    both = firsts @ shares.mean(axis=0)
    for weight, wanted in ((0.5, 0.5 * EXPERTS * both), (0.5 / EXPERTS**2, 0.5 / EXPERTS * both)):
        gated = made("gshard", weight=weight).forward(logits)
        assert gated.loss / TOKENS == pytest.approx(wanted, rel=1e-12)


def test_squared_variation_is_variance_over_squared_mean() -> None:
    value, _ = squared_variation(np.array([1.0, 3.0]))
    assert value == pytest.approx(0.25)


@pytest.mark.parametrize("scores", [SOFTMAX, SIGMOID])
def test_scores_are_finite_for_large_logits(scores: Any) -> None:
    found = scores.forward(np.array([[1e4, -1e4, 0.0]]))
    assert np.isfinite(found).all() and found[0, 0] == pytest.approx(1)


def test_sigmoids_are_exact_to_rounding() -> None:
    """In float32, down to the smallest numbers; by tanh they would not be (the control)."""
    logits = np.linspace(-100, 100, 401, dtype=np.float32)
    wanted = 1 / (1 + np.exp(-logits.astype(np.float64)))
    close = {"rtol": 1e-6, "atol": np.finfo(np.float32).tiny}
    found = SIGMOID.forward(logits)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, **close)
    assert not np.allclose(0.5 * (1 + np.tanh(0.5 * logits)), wanted, **close)


@pytest.mark.parametrize("name", ["bias", "sigmoid"])
@pytest.mark.parametrize("level", [-30, -95, -200])
def test_tokens_that_no_expert_wants_have_finite_weights(name: str, level: int) -> None:
    """Of logits in float32 whose sigmoids are small, and rounded to 0; and derivatives."""
    given = inputs()
    gate, logits = made(name), (given["logits"] + level).astype(np.float32)
    gated = route(gate, {"logits": logits})
    assert np.isfinite(gated.weights).all() and np.isfinite(gated.loss)
    assert np.isfinite(gate.backward(gated, gated.weights, 1.0)).all()
    sums = np.bincount(gated.routing.token, gated.weights)
    np.testing.assert_allclose(sums, gate.scale if level == -30 else 0, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_router_of_a_two_byte_model_computes_in_float32(dtype: str) -> None:
    """To the bit as one in float32 of the same numbers; what experts make of them is cast back."""
    setup = Setup("switch", dtype=dtype)
    layer, _ = setup.bound(Mesh(None), RoutingLog())
    x = setup.whole("x")
    y, saved = layer.forward(x, setup.step(0))
    assert y.dtype == x.dtype == layer.value["router"].dtype
    logits = saved.tokens.astype(np.float32) @ layer.value["router"].astype(np.float32)
    scores, _ = saved.routed.gated.saved
    assert scores.dtype == saved.routed.weights.dtype == np.float32
    np.testing.assert_array_equal(scores, SOFTMAX.forward(logits))
    rounded = logits.astype(x.dtype).astype(np.float32)  # the control: a two-byte router
    assert (SOFTMAX.forward(rounded) != scores).mean() > 0.5


def test_init_scale_is_a_factor_of_the_variance_of_the_router_alone() -> None:
    def drawn(scale: float) -> dict[str, Any]:
        specs = MixtureOfExperts(DIM, Gate(EXPERTS, init_scale=scale), mlp).specs()
        return {name: spec.draw(3, name) for name, spec in specs.items()}

    usual, smaller = drawn(1.0), drawn(0.25)
    for name, values in usual.items():
        factor = 0.5 if name == "router" else 1.0
        np.testing.assert_array_equal(smaller[name], factor * values, err_msg=name)
    assert usual["router"].any() and usual["experts.up.weight"].any()
    assert made("switch").init_scale == 0.1


def test_parts_of_a_routing_are_joined_to_the_whole() -> None:
    whole = route(made("switch", capacity_factor=0.75), inputs(), groups=ROWS).routing
    parts = [whole.of_groups(0, 2), whole.of_groups(2, 6)]
    np.testing.assert_array_equal(joined(parts).table(), whole.table())
    assert [part.num_groups for part in parts] == [2, 4]
    tokens = np.array([1, 2, 9])
    some = whole.of_tokens(tokens)
    both = whole.table()[np.isin(whole.table()[:, 0], tokens)]
    np.testing.assert_array_equal(some.table()[:, 1:], both[:, 1:])
    np.testing.assert_array_equal(tokens[some.table()[:, 0]], both[:, 0])


def test_slots_follow_the_order_of_entries() -> None:
    queued = np.array([True, True, False, True, True])
    assert slots_of(np.array([1, 0, 1, 1, 0]), queued, 2).tolist() == [0, 0, -1, 1, 1]
    zeros, five = np.zeros(5, int), np.arange(5)
    assert Routing(five, zeros, zeros, five, 5, 2, 1, capacity=3).drop_rate == 0.4
