"""Dtypes by name, and the scale that follows the overflows of float16."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from parallel import Recipe, Trainer
from parallel.nn import gpt
from parallel.optim import DTYPES, LossScale, dtype_of, master_dtype


def test_every_dtype_has_its_name() -> None:
    assert [dtype_of(name) for name in DTYPES] == [
        np.float64,
        np.float32,
        np.dtype(ml_dtypes.bfloat16),
        np.float16,
    ]
    assert [dtype_of(name).name for name in DTYPES] == list(DTYPES)


@pytest.mark.parametrize("name", ["int32", "longdouble", "float8", "half", "", "Float32"])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"bfloat16, float16, not in '{name}'"):
        dtype_of(name)


def test_masters_have_four_bytes_at_least() -> None:
    masters = {name: master_dtype(dtype_of(name)).name for name in DTYPES}
    assert masters == {
        "float64": "float64",
        "float32": "float32",
        "bfloat16": "float32",
        "float16": "float32",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_update_is_lost_without_masters(dtype: str) -> None:
    """Why there are masters: a small step does not change a two-byte number."""
    x = np.ones(1, dtype_of(dtype))
    assert x - np.array(1e-4, x.dtype) == x
    assert x.astype(master_dtype(x.dtype)) - np.float32(1e-4) != x


def scaled(**options: float) -> LossScale:
    return LossScale(np.dtype(np.float16), **options)  # type: ignore[arg-type]


def test_an_overflow_halves_the_scale_and_skips_the_update() -> None:
    scale = scaled(initial=8.0)
    assert not scale.update(is_finite=False) and scale.value == 4
    assert not scale.update(is_finite=False) and scale.value == 2
    assert scale.update(is_finite=True) and scale.value == 2


def test_good_updates_double_the_scale_after_the_interval() -> None:
    scale = scaled(initial=8.0, interval=3)
    values = []
    for _ in range(7):
        assert scale.update(is_finite=True)
        values.append(scale.value)
    assert values == [8, 8, 16, 16, 16, 32, 32]


def test_an_overflow_starts_the_interval_anew() -> None:
    scale = scaled(initial=8.0, interval=3)
    for is_finite in (True, True, False, True, True):
        scale.update(is_finite=is_finite)
    assert scale.value == 4
    scale.update(is_finite=True)
    assert scale.value == 8


def test_the_first_scale_is_the_papers() -> None:
    scale = scaled()
    assert scale.is_dynamic and scale.value == 65536 and scale.interval == 2000


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16"])
def test_other_dtypes_have_range_enough(name: str) -> None:
    """Their scale stays 1 and they are never skipped, so that a NaN is seen."""
    scale = LossScale(dtype_of(name), initial=8.0, interval=1)
    assert not scale.is_dynamic
    for is_finite in (True, False, True):
        assert scale.update(is_finite=is_finite) and scale.value == 1


def test_a_step_that_overflows_is_skipped() -> None:
    """Nothing is changed but the scale; the next ones are halved until the gradient is finite."""
    model = gpt(num_layers=1, hidden=4, num_heads=1, context=3)
    strategy = Trainer(None, model, Recipe(dtype="float16"))
    strategy.loss_scale = strategy.arrays.loss_scale = scaled(initial=2.0**30)
    held = [*strategy.parameters.values(), *strategy.optimizer.arrays()]
    before = [x.copy() for x in held]
    tokens = np.arange(12).reshape(4, 3)
    while strategy.updates.num_updates == 0:
        for x, was in zip(held, before, strict=True):
            np.testing.assert_array_equal(x, was)
        assert strategy.loss_scale.value == 2.0 ** (30 - strategy.updates.num_skipped)
        strategy.step(tokens, tokens + 1, tokens.size)
    assert strategy.updates.num_skipped > 5
    assert all((x != was).any() for x, was in zip(held, before, strict=True))
