"""Initial values of parameters: drawn by seed and name."""

from __future__ import annotations

import numpy as np
import pytest

from parallel.nn import ParameterSpec


def test_a_draw_depends_on_seed_and_name_alone() -> None:
    spec = ParameterSpec((3, 2), std=2.0, mean=1.0)
    drawn = spec.draw(5, "a")
    np.random.default_rng(5).standard_normal(9)
    np.testing.assert_array_equal(spec.draw(5, "a"), drawn)
    assert drawn.shape == (3, 2) and drawn.dtype == np.float64
    others = [spec.draw(5, "b"), spec.draw(6, "a"), spec.draw(5, "aa")]
    assert all((other != drawn).all() for other in others)


def test_a_draw_has_the_std_and_mean() -> None:
    drawn = ParameterSpec((200, 200), std=2.0, mean=1.0).draw(0, "a")
    assert drawn.mean() == pytest.approx(1, abs=0.05) and drawn.std() == pytest.approx(2, abs=0.05)
    np.testing.assert_array_equal(ParameterSpec((3,), mean=1.0).draw(0, "a"), 1)
