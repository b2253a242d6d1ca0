"""Layers: what they compute and keep, and every derivative against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from parallel import MemoryTracker
from parallel.nn import (
    ArraySpec,
    Attention,
    CausalAttention,
    CrossEntropy,
    Embedding,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Residual,
    Sequential,
    Step,
    Unembedding,
    matmul,
)
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import (
    Bound,
    Values,
    alone,
    check_gradients,
    in_float32,
    spec_of,
)

DTYPES = ["float64", "float32", "bfloat16", "float16"]
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the most that a number changes, relatively


class Case(NamedTuple):
    """A layer, and the shape of an input that it takes: of tokens if there are so many."""

    make: Callable[[], Layer]
    shape: tuple[int, ...]
    tokens: int = 0

    def input(self, dtype: str = "float64", seed: int = 1) -> Values:
        rng = np.random.default_rng(seed)
        if self.tokens:
            return rng.integers(0, self.tokens, self.shape)
        return rng.standard_normal(self.shape).astype(dtype_of(dtype))

    def slope(self, dtype: str = "float64") -> Values:
        """Some derivative by the output."""
        shape = self.make().activation_bytes(spec_of(self.input(), 8)).out.shape
        return np.random.default_rng(2).standard_normal(shape).astype(dtype_of(dtype))


def mlp() -> dict[str, Layer]:
    return {"up": Linear(5, 7), "gelu": Gelu(), "down": Linear(7, 5)}


CASES = {
    "embedding": Case(lambda: Embedding(6, 5, 3), (3, 4), tokens=6),  # shorter than its context
    "linear": Case(lambda: Linear(5, 4), (2, 3, 5)),
    "linear of vectors": Case(lambda: Linear(5, 4), (3, 5)),
    "unembedding": Case(lambda: Unembedding(5, 7), (2, 3, 5)),
    "gelu": Case(Gelu, (2, 3, 5)),
    "norm": Case(lambda: LayerNorm(5), (2, 3, 5)),
    "attention": Case(lambda: CausalAttention(2), (2, 4, 18)),
    "attention to all": Case(lambda: Attention(2), (2, 4, 18)),
    "attention of one head": Case(lambda: CausalAttention(1), (2, 4, 9)),
    "attention to itself": Case(lambda: CausalAttention(2), (2, 1, 12)),
    "sequential": Case(lambda: Sequential(mlp()), (2, 3, 5)),
    "residual": Case(lambda: Residual(mlp()), (2, 3, 5)),
    "nested": Case(
        lambda: Sequential({"norm": LayerNorm(5), "mlp": Residual(mlp()), "out": Linear(5, 2)}),
        (2, 3, 5),
    ),
}
WITH_PARAMETERS = [name for name, case in CASES.items() if case.make().specs()]
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_small_dtype = pytest.mark.parametrize("dtype", ROUNDING)


# Derivatives


@each_case
def test_gradients_are_finite_differences(case: Case) -> None:
    check_gradients(case.make(), case.input(), case.slope())


class Off(Sequential):
    """Backward is wrong by a ten-thousandth: for the input, or for the parameters."""

    def __init__(self, layer: Layer, is_for_input: bool) -> None:
        super().__init__({"layer": layer})
        self.is_for_input = is_for_input

    def backward(self, dy: Any, saved: Any) -> Any:
        if self.is_for_input:
            return super().backward(dy, saved) * (1 + 1e-4)
        dx = super().backward(dy * (1 + 1e-4), saved)
        return dx if dx is None else dx / (1 + 1e-4)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.tokens])
def test_a_wrong_derivative_by_the_input_is_noticed(name: str) -> None:
    """The negative control: the check can fail, for every layer."""
    wrong = Off(CASES[name].make(), is_for_input=True)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_gradients(wrong, CASES[name].input(), CASES[name].slope())


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_a_wrong_derivative_by_a_parameter_is_noticed(name: str) -> None:
    wrong = Off(CASES[name].make(), is_for_input=False)
    with pytest.raises(AssertionError, match="layer"):
        check_gradients(wrong, CASES[name].input(), CASES[name].slope())


@each_case
def test_backward_adds_and_changes_nothing_else(case: Case) -> None:
    lone = alone(layer := case.make())
    x, dy = case.input(), case.slope()
    held = [x, dy, *lone.values.values()]
    before = [array.copy() for array in held]
    _, saved = layer.forward(x, Step())
    first = layer.backward(dy, saved)
    once = {unit: slope.copy() for unit, slope in lone.gradients.items()}
    np.testing.assert_array_equal(layer.backward(dy, saved), first)
    for unit, slope in lone.gradients.items():
        assert slope.any()
        np.testing.assert_array_equal(slope, 2 * once[unit])
    for array, copy in zip(held, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@each_case
def test_several_batches_may_be_under_way(case: Case) -> None:
    lone, other = alone(layer := case.make()), alone(again := case.make())
    dy, batches = case.slope(), [case.input(seed=1), case.input(seed=2)]
    kept = [layer.forward(x, Step())[1] for x in batches]
    for x, saved in zip(batches, kept, strict=True):
        np.testing.assert_array_equal(
            layer.backward(dy, saved), again.backward(dy, again.forward(x, Step())[1])
        )
    for unit, slope in lone.gradients.items():
        np.testing.assert_array_equal(slope, other.gradients[unit])


@each_dtype
@each_case
def test_a_batch_of_no_rows_adds_nothing(case: Case, dtype: str) -> None:
    lone = alone(layer := case.make(), dtype)
    y, saved = layer.forward(case.input(dtype)[:0], Step())
    dx = layer.backward(y, saved)
    assert y.shape == case.slope()[:0].shape
    assert dx is None or dx.shape == (0, *case.shape[1:])
    assert not any(slope.any() for slope in lone.gradients.values())


# What layers compute


def plain_attention(x: Values, heads: int) -> Values:
    """One row after the other, one head after the other, one position after the other."""
    batch, context, dim = x.shape[0], x.shape[1], x.shape[2] // 3
    y, width = np.zeros((batch, context, dim)), dim // heads
    for b, head, t in np.ndindex(batch, heads, context):
        of = [
            slice(part * dim + head * width, part * dim + (head + 1) * width) for part in range(3)
        ]
        query, keys, values = x[b, t, of[0]], x[b, : t + 1, of[1]], x[b, : t + 1, of[2]]
        powers = np.exp(keys @ query / math.sqrt(width))
        y[b, t, of[0]] = powers @ values / powers.sum()
    return y


def plain_norm(x: Values, gain: Values, bias: Values) -> Values:
    mean = x.mean(axis=-1)[..., None]
    return (x - mean) / np.sqrt(x.var(axis=-1)[..., None] + 1e-5) * gain + bias


def plain_gelu(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


PLAIN: dict[str, Callable[..., Values]] = {
    "embedding": lambda x, token, position: np.array(
        [[token[t] + position[i] for i, t in enumerate(row)] for row in x]
    ),
    "linear": lambda x, weight, bias: np.einsum("bci,io->bco", x, weight) + bias,
    "unembedding": lambda x, table: np.einsum("bci,oi->bco", x, table),
    "gelu": lambda x: np.vectorize(plain_gelu)(x),
    "norm": plain_norm,
    "attention": lambda x: plain_attention(x, 2),
    "attention of one head": lambda x: plain_attention(x, 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_forward_is_the_plain_formula(name: str) -> None:
    lone, x = alone(layer := CASES[name].make()), CASES[name].input()
    parameters = {key.removeprefix("only."): v for key, v in lone.named_values().items()}
    wanted = PLAIN[name](x, **parameters)
    np.testing.assert_allclose(layer.forward(x, Step())[0], wanted, rtol=1e-13, atol=1e-14)


def test_a_residual_adds_what_is_inside_to_its_input() -> None:
    layer, inner, x = Residual(mlp()), Sequential(mlp()), CASES["residual"].input()
    alone(layer), alone(inner)
    np.testing.assert_array_equal(layer.forward(x, Step())[0], x + inner.forward(x, Step())[0])


def check_causal(context: int = 5) -> None:
    """No position changes when a later one does; those from there on do."""
    attention, x = CausalAttention(2), np.random.default_rng(5).standard_normal((2, context, 12))
    before, _ = attention.forward(x, Step())
    for t in range(context):
        changed = x.copy()
        changed[:, t] += 1
        after, _ = attention.forward(changed, Step())
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).all()


def test_attention_looks_back_only() -> None:
    check_causal()


def test_a_look_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: attention whose softmax goes over all positions."""
    monkeypatch.setattr("parallel.nn.plain.attention.causal", lambda scores: scores)
    with pytest.raises(AssertionError):
        check_causal()


def test_attention_of_large_scores_does_not_overflow() -> None:
    y, saved = CausalAttention(1).forward(np.full((1, 3, 3), 1e3), Step())
    np.testing.assert_array_equal(y, 1e3)
    assert np.isfinite(CausalAttention(1).backward(y, saved)).all()


def test_more_tokens_than_positions_are_refused() -> None:
    for context in (1, 4):
        alone(layer := Embedding(6, context, 3))
        layer.forward(np.zeros((2, context), np.int64), Step())
        words = f"{context + 1} tokens in a row, but positions for {context} only"
        with pytest.raises(ValueError, match=words):
            layer.forward(np.zeros((2, context + 1), np.int64), Step())
        with pytest.raises(ValueError, match=words):  # this rank has one of them
            layer.forward(np.zeros((2, 1), np.int64), Step(positions=[0], context=context + 1))


@pytest.mark.parametrize(
    ("num_heads", "width", "words"), [(4, None, "4 heads"), (0, None, "0 heads"), (2, 4, "of 4")]
)
def test_other_than_whole_heads_are_refused(num_heads: int, width: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"30 elements are not queries, keys and values.* {words}"):
        CausalAttention(num_heads, width).forward(np.ones((1, 3, 30)), Step())


def test_a_class_that_is_excluded_adds_nothing_to_the_loss() -> None:
    """By a logit of minus infinity."""
    logits, step = np.array([[[1.0, -np.inf, 2.0]]]), Step(np.array([[0]]))
    loss, saved = CrossEntropy().forward(logits, step)
    assert loss == pytest.approx(np.log(1 + np.e))
    assert saved[0, 0, 1] == 0 and np.isfinite(saved).all()


# Numbers of two bytes


@each_dtype
@each_case
def test_everything_stays_in_the_dtype(case: Case, dtype: str) -> None:
    lone = alone(layer := case.make(), dtype)
    y, saved = layer.forward(case.input(dtype), Step())
    dx = layer.backward(case.slope(dtype), saved)
    assert y.dtype == dtype_of(dtype)
    assert dx is None or dx.dtype == dtype_of(dtype)
    assert all(slope.dtype == dtype_of(dtype) for slope in lone.gradients.values())


def both(case: Case, dtype: str) -> tuple[list[Values], list[Values]]:
    """Output and derivatives in two bytes; and the same from the same numbers in float32."""

    def all_of(lone: Bound, x: Values, dy: Values) -> list[Values]:
        y, saved = lone.whole.forward(x, Step())
        dx = lone.whole.backward(dy, saved)
        return [y, *([] if dx is None else [dx]), *lone.gradients.values()]

    x, dy = case.input(dtype), case.slope(dtype)
    small = alone(case.make(), dtype)
    wide = in_float32(case.make(), small)
    x32 = x if case.tokens else x.astype(np.float32)
    return all_of(small, x, dy), all_of(wide, x32, dy.astype(np.float32))


LONG = {  # long enough for sums in two bytes to go astray
    "embedding": Case(lambda: Embedding(6, 30, 3), (40, 30), tokens=6),
    "linear": Case(lambda: Linear(300, 41), (30, 300)),
    "unembedding": Case(lambda: Unembedding(300, 41), (30, 300)),
    "gelu": Case(Gelu, (50, 30)),
}
TWICE = {  # these keep numbers that they then compute with
    "norm": Case(lambda: LayerNorm(300), (30, 300)),
    "attention": Case(lambda: CausalAttention(2), (3, 50, 48)),
}


@each_small_dtype
@pytest.mark.parametrize("name", LONG)
def test_results_are_float32s_rounded_once(name: str, dtype: str) -> None:
    """To the last bit."""
    for small, wide in zip(*both(LONG[name], dtype), strict=True):
        np.testing.assert_array_equal(small, wide.astype(small.dtype))


@each_small_dtype
def test_a_second_rounding_is_noticed(dtype: str) -> None:
    """The negative control: a product that is rounded before the bias is added."""

    class Twice(Linear):
        def forward(self, x: Any, step: Step) -> Any:
            return matmul(x, self.value["weight"]) + self.value["bias"], x

    (small, *_), (wide, *_) = both(LONG["linear"]._replace(make=lambda: Twice(300, 41)), dtype)
    assert 0.1 < np.mean(small != wide.astype(small.dtype)) < 0.9


@each_small_dtype
def test_a_norm_rounds_its_normal_vectors_beside_its_results(dtype: str) -> None:
    case = TWICE["norm"]
    lone = alone(layer := case.make(), dtype)
    gain, bias = (v.astype(np.float32) for v in lone.named_values().values())
    x, dy = case.input(dtype).astype(np.float32), case.slope(dtype).astype(np.float32)
    centered = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    normal = (centered * inverse).astype(dtype_of(dtype)).astype(np.float32)
    y, saved = layer.forward(case.input(dtype), Step())
    np.testing.assert_array_equal(y, (normal * gain + bias).astype(y.dtype))
    d = dy * gain
    slope = d - d.mean(axis=-1, keepdims=True) - normal * (d * normal).mean(axis=-1, keepdims=True)
    dx = layer.backward(case.slope(dtype), saved)
    assert_rounded_once(dx, inverse * slope)
    assert_rounded_once(lone.named_gradients()["only.gain"], (dy * normal).sum(axis=0))
    assert_rounded_once(lone.named_gradients()["only.bias"], dy.sum(axis=0))


@each_small_dtype
def test_attention_rounds_its_chances_beside_its_results(dtype: str) -> None:
    """One head, whose formula is short."""
    x = np.random.default_rng(3).standard_normal((1, 40, 30)).astype(dtype_of(dtype))
    dy = np.random.default_rng(4).standard_normal((1, 40, 10)).astype(dtype_of(dtype))
    q, k, v = np.split(x[0].astype(np.float64), 3, axis=-1)
    scores = np.where(np.tri(40) > 0, q @ k.T / math.sqrt(10), -np.inf)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    y, saved = CausalAttention(1).forward(x, Step())
    chances = saved[1][0, 0].astype(np.float64)
    assert_rounded_once(saved[1][0, 0], powers / powers.sum(axis=-1, keepdims=True))
    assert_rounded_once(y[0], chances @ v)
    d = dy[0].astype(np.float64)
    slope = d @ v.T
    slope = (slope - (slope * chances).sum(axis=-1, keepdims=True)) * chances / math.sqrt(10)
    wanted = np.concatenate([slope @ k, slope.T @ q, chances.T @ d], axis=-1)
    assert_rounded_once(CausalAttention(1).backward(dy, saved)[0], wanted)


def assert_rounded_once(small: Values, wanted: Values) -> None:
    """Within half a step of the dtype, but for what float32 itself may be off."""
    error = np.abs(small.astype(np.float64) - wanted)
    half = ROUNDING[small.dtype.name]
    least = 2.0**-25 if small.dtype == np.float16 else 0.0  # half a step of its smallest numbers
    assert (error <= half * np.abs(wanted) + least + 1e-6 * np.abs(wanted).max()).all()


@each_small_dtype
@pytest.mark.parametrize("case", (CASES | LONG | TWICE).values())
def test_two_bytes_are_close_to_float32(case: Case, dtype: str) -> None:
    for small, wide in zip(*both(case, dtype), strict=True):
        error = np.abs(small.astype(np.float32) - wide).max()
        assert error <= 4 * ROUNDING[dtype] * np.abs(wide).max()


@each_small_dtype
def test_gradients_add_up_in_their_dtype(dtype: str) -> None:
    """A sum that is not representable is rounded: 256 + 1 in bfloat16, 2048 + 1 in float16."""
    lone = alone(layer := Linear(1, 1), dtype)
    large = 1 / ROUNDING[dtype]
    for dy in (large, 1.0):
        _, saved = layer.forward(np.zeros((1, 1), dtype_of(dtype)), Step())
        layer.backward(np.full((1, 1), dy, dtype_of(dtype)), saved)
    assert lone.named_gradients()["only.bias"] == large


# Memory


@each_dtype
@each_case
def test_layers_keep_what_forward_hands_out(case: Case, dtype: str) -> None:
    check_kept(case.make(), case.input(dtype), dtype)


def check_kept(layer: Layer, x: Values, dtype: str) -> None:
    """By formula, and counted from the arrays that are alive, each memory once."""
    alone(layer, dtype)
    y, saved = layer.forward(x, Step())
    memory = MemoryTracker()
    memory.track("activations", saved)
    formula = layer.activation_bytes(spec_of(x, dtype_of(dtype).itemsize))
    assert (formula.saved, formula.out.shape) == (memory.now["activations"], y.shape)


@each_dtype
@each_case
def test_the_halves_of_backward_are_the_whole(case: Case, dtype: str) -> None:
    """To the last bit; and what the first hands to the second is what the formula says."""
    whole, halves = alone(case.make(), dtype), alone(case.make(), dtype)
    x, dy = case.input(dtype), case.slope(dtype)
    dx = whole.whole.backward(dy, whole.whole.forward(x, Step())[1])
    found, rest = halves.whole.backward_input(dy, halves.whole.forward(x, Step())[1])
    assert not any(slope.any() for slope in halves.gradients.values())
    memory = MemoryTracker()
    memory.track("rest", rest)
    formula = halves.whole.activation_bytes(spec_of(x, dtype_of(dtype).itemsize))
    assert memory.now["rest"] == formula.rest
    halves.whole.backward_weight(rest)
    np.testing.assert_array_equal(found, dx)
    for unit, slope in whole.gradients.items():
        np.testing.assert_array_equal(halves.gradients[unit], slope)


def test_layers_keep_the_bytes_that_are_computed_by_hand() -> None:
    """Two rows of three positions, four wide, in float16."""
    tokens, vectors = ArraySpec.tokens(2, 3, width=2), ArraySpec((2, 3, 4), 2)
    assert Embedding(9, 3, 4).activation_bytes(tokens)[:2] == (0, tokens.of_shape(2, 3, 4))
    assert Linear(4, 5).activation_bytes(vectors)[:2] == (2 * 24, vectors.of_shape(2, 3, 5))
    assert LayerNorm(4).activation_bytes(vectors)[:2] == (2 * 24 + 4 * 6, vectors)
    heads = CausalAttention(2).activation_bytes(ArraySpec((2, 3, 12), 2))
    assert heads[:2] == (2 * 72 + 2 * 2 * 2 * 9, vectors)


def test_one_array_more_is_noticed() -> None:
    """The negative control: a layer that keeps its output too."""

    class Hoarder(Gelu):
        def forward(self, x: Any, step: Step) -> Any:
            y, saved = super().forward(x, step)
            return y, (saved, y)

    with pytest.raises(AssertionError):
        check_kept(Hoarder(), CASES["gelu"].input(), "float64")


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_an_unbound_layer_cannot_be_used(name: str) -> None:
    case = CASES[name]
    lone = alone(layer := case.make())
    x, dy = case.input(), case.slope()
    _, saved = layer.forward(x, Step())
    lone.model.bind("only", lone.values)
    layer.forward(x, Step())
    with pytest.raises(KeyError):  # there are values, but no gradients
        layer.backward(dy, saved)
    lone.model.unbind("only")
    for use in (lambda: layer.forward(x, Step()), lambda: layer.backward(dy, saved)):
        with pytest.raises(KeyError):
            use()
