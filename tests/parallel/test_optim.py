"""Adam against the paper's algorithm written out for one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from parallel import optim
from parallel.optim import Adam


def scalar_adam(
    x: float, slopes: list[float], lr: float, beta1: float, beta2: float, epsilon: float
) -> float:
    """Kingma & Ba 2015, algorithm 1, line by line."""
    m = v = 0.0
    for t, g in enumerate(slopes, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        x -= lr * m_hat / (math.sqrt(v_hat) + epsilon)
    return x


@pytest.mark.parametrize("shape", [(1,), (7,), (2 * optim.PIECE + 3,), (3, 4)])
def test_adam_is_the_papers(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape)
    slopes = rng.standard_normal((10, *shape))
    start, g = x.copy(), np.zeros(shape)
    adam = Adam({"x": x}, {"x": g}, lr=0.01, betas=(0.8, 0.95), epsilon=1e-6)
    for slope in slopes:
        g[...] = slope
        adam.step()
    for i in [(0,) * len(shape), tuple(n - 1 for n in shape)]:
        series = [float(slope[i]) for slope in slopes]
        wanted = scalar_adam(float(start[i]), series, 0.01, 0.8, 0.95, 1e-6)
        assert x[i] == pytest.approx(wanted, rel=1e-13)


def test_the_first_step_is_the_rate_whatever_the_gradient() -> None:
    x = np.zeros(2)
    Adam({"x": x}, {"x": np.array([1e-3, -1e3])}, lr=0.5).step()
    np.testing.assert_allclose(x, [-0.5, 0.5], rtol=1e-4)


def test_a_gradient_of_zero_changes_nothing() -> None:
    x = np.ones(3)
    adam = Adam({"x": x}, {"x": np.zeros(3)})
    for _ in range(3):
        adam.step()
    np.testing.assert_array_equal(x, 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_in_place_and_in_the_parameters_dtype(dtype: Any) -> None:
    x = np.ones(3, dtype)
    view = x[:]
    adam = Adam({"x": x}, {"x": np.ones(3, dtype)}, lr=0.1)
    adam.step()
    assert x.dtype == adam.first["x"].dtype == adam.second["x"].dtype == dtype
    np.testing.assert_allclose(view, 0.9, rtol=1e-6)


def test_names_must_match() -> None:
    with pytest.raises(ValueError, match=r"a parameter without a gradient.*: a, b"):
        Adam({"a": np.ones(1)}, {"b": np.ones(1)})
