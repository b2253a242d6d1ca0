"""Layers: every derivative against finite differences, and what a model is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parallel.nn import (
    Embedding,
    Flatten,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Sequential,
    Spec,
    byte_model,
    cross_entropy,
    mlp_block,
)

STEP = 1e-6
CLOSE = 1e-7  # of a central difference with this step, on values near 1, in float64
RNG = np.random.default_rng(7)

Values = np.ndarray[Any, np.dtype[np.float64]]


def numerical(f: Callable[[], float], x: Values) -> Values:
    """df/dx by central differences; x is changed in place and put back."""
    slope = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + STEP
        above = f()
        x[i] = kept - STEP
        slope[i] = (above - f()) / (2 * STEP)
        x[i] = kept
    return slope


def check_gradients(layer: Layer, x: Values) -> None:
    """Input's and parameters' derivatives of a random weighting of the outputs."""
    model = Model({"only": layer}, seed=3)
    weights = RNG.standard_normal(model.forward(x)[0].shape)

    def loss() -> float:
        return float(np.sum(weights * model.forward(x)[0]))

    dx = model.backward(weights, model.forward(x)[1])
    if dx is not None:
        np.testing.assert_allclose(dx, numerical(loss, x), rtol=CLOSE, atol=CLOSE)
    for name, value in model.parameters().items():
        slope = model.gradients()[name]
        np.testing.assert_allclose(slope, numerical(loss, value), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize(
    "layer", [Linear(5, 4), Gelu(), LayerNorm(5), mlp_block(5, 7), Sequential({"a": Linear(5, 5)})]
)
def test_gradients(layer: Layer) -> None:
    check_gradients(layer, RNG.standard_normal((3, 5)))


def test_embedding_gradient() -> None:
    check_gradients(Embedding(6, 2), np.array([[0, 3, 3], [5, 0, 3]]))


def test_flatten_gradient() -> None:
    check_gradients(Flatten(), RNG.standard_normal((2, 3, 2)))


def test_a_wrong_backward_is_noticed() -> None:
    """The negative control: the check can fail."""

    class Wrong(Linear):
        def backward(self, dy: Any, saved: Any) -> Any:
            return super().backward(dy, saved) * (1 + 1e-4)

    with pytest.raises(AssertionError):
        check_gradients(Wrong(5, 4), RNG.standard_normal((3, 5)))


def test_cross_entropy_and_its_gradient() -> None:
    logits, targets = RNG.standard_normal((4, 6)), np.array([0, 5, 2, 2])
    loss, slope = cross_entropy(logits, targets, 4)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert loss[0] == pytest.approx(-np.mean(np.log(chances[np.arange(4), targets])), rel=1e-14)
    wanted = numerical(lambda: float(cross_entropy(logits, targets, 4)[0][0]), logits)
    np.testing.assert_allclose(slope, wanted, rtol=CLOSE, atol=CLOSE)


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    logits, targets = RNG.standard_normal((7, 6)), RNG.integers(0, 6, 7)
    loss, slope = cross_entropy(logits, targets, 7)
    parts = [cross_entropy(logits[s], targets[s], 7) for s in (slice(0, 5), slice(5, 7))]
    assert sum(p[0][0] for p in parts) == pytest.approx(loss[0], rel=1e-14)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), slope, rtol=1e-14)


def test_large_logits_do_not_overflow() -> None:
    loss, slope = cross_entropy(np.array([[1e4, 0.0]]), np.array([1]), 1)
    assert loss[0] == 1e4 and np.isfinite(slope).all()


def test_whole_model_gradients() -> None:
    """The real model, small, along random directions in all parameters of each layer."""
    model = byte_model(context=3, dim=2, hidden=4, seed=1)
    tokens, targets = RNG.integers(0, 256, (5, 3)), RNG.integers(0, 256, 5)

    def loss() -> float:
        return float(cross_entropy(model.forward(tokens)[0], targets, 5)[0][0])

    logits, saved = model.forward(tokens)
    model.backward(cross_entropy(logits, targets, 5)[1], saved)
    for layer, flat in model.flat_parameters.items():
        way = RNG.standard_normal(flat.shape)
        flat += STEP * way
        above = loss()
        flat -= 2 * STEP * way
        below = loss()
        flat += STEP * way
        slope = float(way @ model.flat_gradients[layer])
        assert (above - below) / (2 * STEP) == pytest.approx(slope, rel=1e-5, abs=1e-8), layer


def test_backward_adds() -> None:
    model = byte_model(context=3, dim=2, hidden=4)
    logits, saved = model.forward(RNG.integers(0, 256, (5, 3)))
    model.backward(logits, saved)
    once = {name: slope.copy() for name, slope in model.gradients().items()}
    model.backward(logits, saved)
    for name, slope in model.gradients().items():
        np.testing.assert_array_equal(slope, 2 * once[name])
    model.zero_gradients()
    assert not any(slope.any() for slope in model.gradients().values())


def test_layers_report_in_reverse_when_their_gradients_are_complete() -> None:
    model = byte_model(context=3, dim=2, hidden=4)
    logits, saved = model.forward(RNG.integers(0, 256, (5, 3)))
    seen: dict[str, Values] = {}
    model.backward(logits, saved, lambda name: seen.update({name: model.flat_gradients[name] + 0}))
    assert list(seen) == ["head", "block1", "block0", "embedding"]
    for name, slope in seen.items():
        np.testing.assert_array_equal(slope, model.flat_gradients[name])
        assert slope.any()


def test_names_and_views() -> None:
    model = byte_model(context=3, dim=2, hidden=4, dtype="float32")
    assert list(model.flat_parameters) == ["embedding", "block0", "block1", "head"]
    assert list(model.parameters()) == list(model.gradients())
    assert model.parameters()["block0.up.weight"].shape == (4, 4)
    for name, value in model.parameters().items():
        assert value.dtype == np.float32
        assert np.shares_memory(value, model.flat_parameters[name.partition(".")[0]])


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    spec = Spec((3, 2), spread=2.0, centre=1.0)
    np.testing.assert_array_equal(spec.draw(5, "a"), spec.draw(5, "a"))
    assert not np.array_equal(spec.draw(5, "a"), spec.draw(5, "b"))
    assert not np.array_equal(spec.draw(5, "a"), spec.draw(6, "a"))
    small, large = (byte_model(blocks=n, seed=5).parameters() for n in (1, 3))
    for name, value in small.items():
        np.testing.assert_array_equal(value, large[name])


def test_the_first_guess_is_nearly_uniform() -> None:
    logits, _ = byte_model().forward(RNG.integers(0, 256, (64, 16)))
    loss, _ = cross_entropy(logits, RNG.integers(0, 256, 64), 64)
    assert loss[0] == pytest.approx(np.log(256), abs=0.1)
