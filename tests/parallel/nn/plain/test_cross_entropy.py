"""The loss: its formula, its gradient, and targets that no class has."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.nn import Embedding, Step
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import CLOSE, alone, cross_entropy, numerical

each_dtype = pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
each_small_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_cross_entropy_is_the_formula_and_its_gradient_the_central_difference(
    shape: tuple[int, ...],
) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((*shape, 6)), rng.integers(0, 6, shape)
    loss, slope = cross_entropy(logits, targets, 10)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    true = np.take_along_axis(chances, targets[..., None], axis=-1)
    assert loss == pytest.approx(-np.sum(np.log(true)) / 10, rel=1e-14)
    wanted = numerical(lambda: cross_entropy(logits, targets, 10)[0], logits)
    np.testing.assert_allclose(slope, wanted, rtol=CLOSE, atol=CLOSE)


def test_a_scale_multiplies_the_gradient_only() -> None:
    logits, targets = np.random.default_rng(0).standard_normal((4, 6)), np.array([0, 5, 2, 2])
    loss, slope = cross_entropy(logits, targets, 4)
    scaled_loss, scaled = cross_entropy(logits, targets, 4, 1024.0)
    assert scaled_loss == loss
    np.testing.assert_array_equal(scaled, 1024 * slope)  # a power of two changes no digit


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((7, 3, 6)), rng.integers(0, 6, (7, 3))
    loss, slope = cross_entropy(logits, targets, 21)
    parts = [cross_entropy(logits[s], targets[s], 21) for s in (slice(0, 5), slice(5, 7))]
    assert sum(part for part, _ in parts) == pytest.approx(loss, rel=1e-14)
    np.testing.assert_array_equal(np.concatenate([part for _, part in parts]), slope)


def test_large_logits_do_not_overflow() -> None:
    loss, slope = cross_entropy(np.array([[1e4, 0.0]]), np.array([1]), 1)
    assert loss == 1e4
    np.testing.assert_array_equal(slope, [[1, -1]])


@each_dtype
def test_no_rows_have_no_loss(dtype: str) -> None:
    none = np.zeros((0, 3, 6), dtype_of(dtype))
    loss, slope = cross_entropy(none, np.zeros((0, 3), np.int64), 5)
    assert loss == 0 and slope.shape == none.shape and slope.dtype == none.dtype


@each_small_dtype
def test_the_loss_of_two_bytes_is_float32s(dtype: str) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((9, 50)), rng.integers(0, 50, 9)
    small = logits.astype(dtype_of(dtype))
    loss, slope = cross_entropy(small, targets, 9, 256.0)
    wanted, wide = cross_entropy(small.astype(np.float32), targets, 9, 256.0)
    assert loss == wanted
    np.testing.assert_array_equal(slope, wide.astype(small.dtype))


@pytest.mark.parametrize("wrong", [-1, 6, 300])
def test_targets_and_tokens_out_of_range_are_refused(wrong: int) -> None:
    """They would train to a plausible loss otherwise."""
    with pytest.raises(ValueError, match=f"a target is {wrong}: there are classes 0 to 5"):
        cross_entropy(np.zeros((2, 6)), np.array([0, wrong]), 2)
    embedding = alone(Embedding(6, 3, 4)).whole
    with pytest.raises(ValueError, match=f"a token is {wrong}: there are classes 0 to 5"):
        embedding.forward(np.array([[0, wrong]]), Step())
