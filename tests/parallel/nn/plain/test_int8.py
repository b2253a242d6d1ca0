"""Products in 8-bit integers: exact sums, bounded errors, and what one outlier costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator, even_counts
from parallel import Mesh
from parallel.nn import Linear, Model, Step, Unembedding
from parallel.nn.plain.int8 import LARGEST, MOST_TERMS, SCALES, int8_matmul, quantized
from parallel.nn.tensor import Columns, Rows, Whole
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import Values
from tests.parallel.nn.tensor.split_layers import bound_by_name

AXES = {"rowwise": (1, 0), "tensorwise": (None, None)}
each_scales = pytest.mark.parametrize("scales", SCALES)


def matrices(outliers: int = 0, seed: int = 0) -> tuple[Values, Values]:
    """Normal numbers; a few elements of the left matrix, in rows of their own, are 100."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((40, 64)), rng.standard_normal((64, 30))
    a[np.arange(outliers), np.arange(outliers)] = 100.0
    return a, b


def bound_of(a: Values, b: Values, scales: str) -> Values:
    """The most that each element may be off: half a scale of each factor times the other's."""
    half_a, half_b = (quantized(x, n)[1] / 2 for x, n in zip((a, b), AXES[scales], strict=True))
    row_sums, column_sums = np.abs(a).sum(1, keepdims=True), np.abs(b).sum(0, keepdims=True)
    most: Values = row_sums * half_b + column_sums * half_a + a.shape[1] * half_a * half_b
    return most


def relative_error(a: Values, b: Values, scales: str) -> float:
    return float(np.linalg.norm(int8_matmul(a, b, scales) - a @ b) / np.linalg.norm(a @ b))


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_integers_and_scales_are_within_half_a_step(axis: int | None, dtype: str) -> None:
    x = matrices(3)[0].astype(dtype)
    integers, scales = quantized(x, axis)
    assert integers.dtype == np.int8 and scales.dtype == x.dtype
    assert np.abs(integers.astype(int)).max() == LARGEST
    assert (np.abs(integers * scales.astype(float) - x) <= scales / 2 * (1 + 1e-5)).all()
    assert scales.shape == {None: (1, 1), 0: (1, 64), 1: (40, 1)}[axis]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_smallest_numbers_keep_their_signs(dtype: str) -> None:
    """A scale that was denormal would have few digits, or would be zero."""
    unit = np.finfo(dtype).smallest_subnormal
    for factor in (1, 2, 130, 1000):
        x = np.array([[unit, -unit]], dtype) * np.array(factor, dtype)
        integers, scales = quantized(x, None)
        assert (integers * np.sign(x) >= 0).all()
        assert (np.abs(integers * scales - x) <= scales / 2).all()


@each_scales
@pytest.mark.parametrize("outliers", [0, 3])
def test_every_element_is_within_its_bound(scales: str, outliers: int) -> None:
    """The negative control: a hundredth of the bound is exceeded."""
    a, b = matrices(outliers)
    error, most = np.abs(int8_matmul(a, b, scales) - a @ b), bound_of(a, b, scales)
    assert (error <= most).all() and (error > most / 100).any()


def test_sums_are_exact_integers() -> None:
    """In 32 bits, where 16 overflow, and float32 rounds."""
    a, b = np.full((1, 3000), 127.0), np.full((3000, 1), 127.0)
    b[0] = 126.0
    wanted = 2999 * 127 * 127 + 127 * 126
    assert int8_matmul(a, b, "rowwise")[0, 0] == wanted > 2**24
    assert wanted % 2 == 1  # no float32 near it


def test_scales_for_rows_keep_the_error_small_beside_outliers() -> None:
    """1 % either way without them; with three, one scale for all loses most rows."""
    without = {scales: relative_error(*matrices(), scales) for scales in SCALES}
    assert 0.005 < without["rowwise"] < without["tensorwise"] < 0.02
    a, b = matrices(outliers=3)
    others = {scales: relative_error(a[3:], b, scales) for scales in ["rowwise"]}
    lost = np.linalg.norm((int8_matmul(a, b, "tensorwise") - a @ b)[3:]) / np.linalg.norm(a[3:] @ b)
    assert others["rowwise"] < 0.02 and lost > 0.15
    assert relative_error(a, b, "rowwise") < relative_error(a, b, "tensorwise")


@each_scales
def test_zeros_stay_zeros(scales: str) -> None:
    a, b = matrices()
    a[1] = 0
    assert (int8_matmul(a, b, scales)[1] == 0).all()
    assert (int8_matmul(np.zeros((2, 3)), b[:3], scales) == 0).all()
    assert int8_matmul(np.zeros((0, 3)), b[:3], scales).shape == (0, 30)
    assert (int8_matmul(np.zeros((2, 0)), np.zeros((0, 3)), scales) == 0).all()


@each_scales
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(scales: str, wrong: float) -> None:
    """In its row, or everywhere: an overflow must show in the loss."""
    a, b = matrices()
    a[2, 5] = wrong
    is_finite = np.isfinite(int8_matmul(a, b, scales))
    assert not is_finite[2].any()
    assert is_finite[[0, 1, *range(3, 40)]].all() == (scales == "rowwise")


# In layers


def linear(scales: str | None, of: Any = Linear) -> Any:
    made = bound_by_name(Model({"only": of(6, 8, int8=scales)}))
    return made.model.layers["only"], made


@each_scales
@pytest.mark.parametrize("of", [Linear, Unembedding])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_forward_is_in_8_bits_and_backward_in_the_dtype(scales: str, of: Any, dtype: str) -> None:
    """Backward to the bit what it is without."""
    (plain, exact), (small, made) = linear(None, of), linear(scales, of)
    rng = np.random.default_rng(1)
    x, dy = (rng.standard_normal(shape).astype(dtype_of(dtype)) for shape in ((5, 6), (5, 8)))
    (y, saved), (wanted, kept) = small.forward(x, Step()), plain.forward(x, Step())
    error = np.abs(y.astype(float) - wanted.astype(float)).max()
    assert y.dtype == x.dtype and 1e-4 < error < 0.2
    np.testing.assert_array_equal(small.backward(dy, saved), plain.backward(dy, kept))
    for unit, gradient in exact.gradients.items():
        np.testing.assert_array_equal(made.gradients[unit], gradient)


@each_scales
def test_divided_columns_have_the_scales_of_one_rank_and_divided_rows_their_own(
    scales: str,
) -> None:
    """Columns have the scales that they have on one rank; a part of the rows has its own."""
    layer, _ = linear(scales)
    x = np.random.default_rng(2).standard_normal((5, 6))
    wanted, exact = layer.forward(x, Step())[0], linear(None)[0].forward(x, Step())[0]

    def fn(comm: Communicator) -> None:
        mesh = Mesh(comm, tensor=2)
        at, step = Whole(mesh), Step(np.zeros((5, 6)))
        columns = Columns(Linear(6, 8, int8=scales), at, is_gathered=True)
        bound_by_name(Model({"only": columns}, mesh=mesh))
        found = columns.forward(x, step)[0]
        if scales == "rowwise":
            np.testing.assert_allclose(found, wanted, rtol=1e-14)
        assert np.abs(found - exact).max() < 0.1
        rows = Rows(Linear(6, 8, int8=scales), at)
        bound_by_name(Model({"only": rows}, mesh=mesh))
        mine, weight, bias = at.part(6), layer.value["weight"], layer.value["bias"]
        parts = [slice(0, 3), slice(3, 6)]
        assert even_counts(6, 2) == (3, 3) and mine == parts[comm.rank]
        sums = sum(int8_matmul(x[:, part], weight[part], scales) for part in parts) + bias
        result = rows.forward(x[:, mine].copy()[None], step)[0][0]
        np.testing.assert_allclose(result, sums, rtol=1e-14)
        assert np.abs(result - exact).max() < 0.1

    collectives.run(fn, size=2)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(
        ValueError, match="int8 is 'vector': it must be None or one of tensorwise, rowwise"
    ):
        Linear(4, 4, int8="vector")
    Linear(MOST_TERMS, 1, int8="rowwise")
    with pytest.raises(ValueError, match="133145 products of int8 may not fit 32 bits"):
        Linear(MOST_TERMS + 1, 1, int8="rowwise")
    assert Linear(4, 4, int8="rowwise").config() != Linear(4, 4).config()
