"""The layers for images: derivatives, what is kept, and what windows see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from examples.images.patches import Grid, MeanPool, MergePatches, PatchEmbedding
from examples.images.windows import WindowAttention, mask_of_windows
from parallel import MemoryTracker
from parallel.nn import ArraySpec, Attention, Layer, Sequential, Step
from parallel.optim import DTYPES, dtype_of
from tests.fakes.arrays import FAKE, bare, crossed
from tests.parallel.nn.bound_models import Values, alone, check_gradients
from tests.parallel.nn.tensor.split_layers import check_halves

GRID = Grid(4, 6)
WIDE = {"float64": 1e-12, "float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}


class Case(NamedTuple):
    """A layer and the shape of its input: numbers, or pixels."""

    make: Callable[[], Layer]
    shape: tuple[int, ...]
    are_pixels: bool = False

    def input(self, dtype: str = "float64") -> Values:
        rng = np.random.default_rng(1)
        if self.are_pixels:
            return rng.integers(0, 256, self.shape)
        return rng.standard_normal(self.shape).astype(dtype_of(dtype))

    def spec(self, dtype: str = "float64") -> ArraySpec:
        width = dtype_of(dtype).itemsize
        if self.are_pixels:
            return ArraySpec.tokens(self.shape[0], 1, width)
        return ArraySpec(self.shape, width, context=self.shape[1], length=self.shape[1])

    def slope(self, dtype: str = "float64") -> Values:
        shape = self.make().out(self.spec()).shape
        return np.random.default_rng(2).standard_normal(shape).astype(dtype_of(dtype))


CASES = {
    "patches": Case(lambda: PatchEmbedding(Grid(4, 6), 3, 2, 5), (2, 4, 6, 3), are_pixels=True),
    "patches without positions": Case(
        lambda: PatchEmbedding(Grid(4, 2), 1, 2, 3, has_positions=False),
        (3, 4, 2, 1),
        are_pixels=True,
    ),
    "attention": Case(lambda: Attention(2), (2, 4, 18)),
    "windows": Case(lambda: WindowAttention(2, 3, GRID, 2), (2, 24, 18)),
    "shifted windows": Case(lambda: WindowAttention(2, 2, GRID, 2, 1), (2, 24, 12)),
    "one window": Case(lambda: WindowAttention(1, 3, Grid(3, 3), 3), (2, 9, 9)),
    "shifted by two": Case(lambda: WindowAttention(1, 2, Grid(3, 6), 3, 2), (1, 18, 6)),
    "merging": Case(lambda: MergePatches(GRID), (2, 24, 3)),
    "mean": Case(MeanPool, (3, 4, 5)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
OF_NUMBERS = [name for name, case in CASES.items() if not case.are_pixels]


@each_case
def test_gradients_are_finite_differences(case: Case) -> None:
    check_gradients(case.make(), case.input(), case.slope())


class Off(Sequential):
    """The derivative by the input is wrong by a ten-thousandth."""

    def backward(self, dy: Any, saved: Any) -> Any:
        return super().backward(dy, saved) * (1 + 1e-4)


@pytest.mark.parametrize("name", OF_NUMBERS)
def test_a_wrong_derivative_is_noticed(name: str) -> None:
    """The negative control."""
    case = CASES[name]
    with pytest.raises(AssertionError):
        check_gradients(Off({"layer": case.make()}), case.input(), case.slope())


@pytest.mark.parametrize("dtype", DTYPES)
@each_case
def test_what_layers_keep_is_what_formulas_say(case: Case, dtype: str) -> None:
    """By forward, and between the halves of backward; with the shape and dtype of the output."""
    layer = case.make()
    made, x = alone(layer, dtype), case.input(dtype)
    y, saved = layer.forward(x, Step())
    memory = MemoryTracker()
    memory.track("saved", saved)
    formula = layer.activation_bytes(case.spec(dtype))
    dy = case.slope(dtype)
    rest = check_halves(made, layer, dy, saved, layer.backward(dy, saved))
    assert (formula.saved, formula.rest) == (memory.now["saved"], rest)
    assert (formula.out.shape, formula.out.context) == (y.shape, y.shape[1] if y.ndim > 2 else 0)
    assert y.dtype == dtype_of(dtype) and formula.out.length == formula.out.context


@pytest.mark.parametrize("dtype", WIDE)
@each_case
def test_small_dtypes_are_close_to_float64(case: Case, dtype: str) -> None:
    results = {}
    for kind in ("float64", dtype):
        layer = case.make()
        made = alone(layer, kind)
        y, saved = layer.forward(case.input(kind), Step())
        dx = layer.backward(case.slope(kind), saved)
        results[kind] = [y, *([] if dx is None else [dx]), *made.named_gradients().values()]
    for a, b in zip(results[dtype], results["float64"], strict=True):
        bound = WIDE[dtype] * max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a.astype(float), b, rtol=0, atol=bound)


@each_case
def test_without_rows_a_layer_has_an_empty_output_and_no_gradient(case: Case) -> None:
    empty = case._replace(shape=(0, *case.shape[1:]))
    layer = empty.make()
    made = alone(layer)
    y, saved = layer.forward(empty.input(), Step())
    assert y.shape == empty.slope().shape
    layer.backward(empty.slope(), saved)
    assert not any(gradient.any() for gradient in made.named_gradients().values())


@each_case
def test_a_device_gives_the_same_bits(case: Case) -> None:
    """And no array of numbers crosses to the host."""
    results = []
    for xp in (np, FAKE):
        layer = case.make()
        values = {key: xp.asarray(x) for key, x in drawn(layer).items()}
        layer.bind(values, {key: xp.zeros_like(x) for key, x in values.items()})
        x, dy = xp.asarray(on_host := case.input()), xp.asarray(case.slope())
        crossed().clear()
        y, saved = layer.forward(x, Step(copied={id(x): on_host}))
        dx = layer.backward(dy, saved)
        assert crossed()["get"] == 0
        results.append([y, *([] if dx is None else [dx]), *layer.gradient.values()])
    for here, there in zip(*results, strict=True):
        np.testing.assert_array_equal(here, bare(there))


def drawn(layer: Layer) -> dict[str, Values]:
    return {name: spec.draw(7, name) + 0.1 for name, spec in layer.specs().items()}


# Windows


def plain_attention(layer: WindowAttention, x: Values) -> Values:
    """Token by token: who is in the same window and did not come around the end of the grid."""
    (rows, columns), w, s = layer.grid, layer.window, layer.shift
    batch, heads, width = len(x), layer.num_heads, x.shape[-1] // (3 * layer.num_heads)
    parts = x.reshape(batch, rows, columns, 3, heads, width)
    y = np.zeros((batch, rows, columns, heads, width))

    def window_of(row: int, column: int) -> tuple[int, ...]:
        """Windows begin at `s`; what is before is a part of another, at each end of the grid."""
        return tuple((at - s) // w for at in (row, column))

    places = list(np.ndindex(rows, columns))
    for b, row, column, head in np.ndindex(batch, rows, columns, heads):
        seen = [place for place in places if window_of(*place) == window_of(row, column)]
        scores = []
        for r, c in seen:
            at = (row - r + w - 1) * (2 * w - 1) + column - c + w - 1
            product = parts[b, row, column, 0, head] @ parts[b, r, c, 1, head] / np.sqrt(width)
            scores.append(product + layer.value["bias"][at, head])
        powers = np.exp(np.array(scores) - max(scores))
        values = np.array([parts[b, r, c, 2, head] for r, c in seen])
        y[b, row, column, head] = powers @ values / powers.sum()
    return y.reshape(batch, rows * columns, heads * width)


SHIFTS = [(GRID, 2, 0), (GRID, 2, 1), (Grid(3, 6), 3, 1), (Grid(3, 6), 3, 2), (Grid(4, 4), 4, 0)]


@pytest.mark.parametrize(("grid", "window", "shift"), SHIFTS)
def test_windows_are_what_they_are_token_by_token(grid: Grid, window: int, shift: int) -> None:
    layer = WindowAttention(2, 3, grid, window, shift)
    alone(layer)
    x = np.random.default_rng(3).standard_normal((2, grid.size, 18))
    np.testing.assert_allclose(layer.forward(x, Step())[0], plain_attention(layer, x), atol=1e-12)


def test_without_the_mask_ends_of_the_grid_meet() -> None:
    """The negative control."""
    layer = WindowAttention(2, 3, GRID, 2, 1)
    alone(layer)
    x = np.random.default_rng(3).standard_normal((1, GRID.size, 18))
    layer.mask = None
    assert np.abs(layer.forward(x, Step())[0] - plain_attention(layer, x)).max() > 1e-3


def test_a_token_of_a_shifted_window_sees_the_tokens_of_its_part() -> None:
    """Of 2 x 3 windows: all of those inside, half at an end, a quarter at a corner."""
    seen = mask_of_windows(GRID, 2, 1).sum(axis=-1)
    assert seen.tolist() == [[4] * 4, [4] * 4, [2] * 4, [2] * 4, [2] * 4, [1] * 4]


def test_attention_is_that_of_one_window_without_a_bias() -> None:
    one = WindowAttention(2, 3, Grid(3, 3), 3)
    one.bind({"bias": np.zeros((25, 2))}, {})
    x = np.random.default_rng(3).standard_normal((2, 9, 18))
    np.testing.assert_allclose(
        one.forward(x, Step())[0], Attention(2).forward(x, Step())[0], atol=1e-13
    )


def test_merging_puts_neighbours_side_by_side() -> None:
    x = np.arange(8.0).reshape(1, 8, 1)  # 0 1 2 3 above 4 5 6 7
    y, _ = MergePatches(Grid(2, 4)).forward(x, Step())
    assert y.tolist() == [[[0, 4, 1, 5], [2, 6, 3, 7]]]


def test_patches_are_squares_of_pixels() -> None:
    """The sum of the 12 numbers of each patch, from -1 to 1."""
    layer = PatchEmbedding(Grid(4, 4), 3, 2, 1)
    made = alone(layer)
    for name, x in made.named_values().items():
        x[...] = name.endswith("weight")
    image = np.zeros((1, 4, 4, 3), np.int64)
    image[0, :2, 2:] = 255
    assert layer.forward(image, Step())[0].ravel().tolist() == [-12, 12, -12, -12]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PatchEmbedding(Grid(4, 6), 1, 3, 5), "patches of 3 x 3 do not divide a grid of 4"),
        (lambda: PatchEmbedding(Grid(4, 6), 1, 0, 5), "patches of 0 x 0"),
        (lambda: WindowAttention(1, 2, GRID, 4), "windows of 4 x 4 do not divide"),
        (lambda: WindowAttention(1, 2, GRID, 2, 2), "shift is 2: it must be from 0 to less than 2"),
        (lambda: MergePatches(Grid(3, 4)), "squares of 2 x 2 do not divide a grid of 3 x 4"),
    ],
)
def test_impossible_layers_are_refused(make: Callable[[], Layer], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("shape", "pixel", "words"),
    [
        ((1, 6, 4, 3), 0, r"images have the shape \(6, 4, 3\), but the model is for \(4, 6, 3\)"),
        ((1, 4, 6, 3), 256, "a pixel is 256: there are classes 0 to 255"),
        ((1, 4, 6, 3), -1, "a pixel is -1"),
    ],
)
def test_impossible_images_are_refused(shape: tuple[int, ...], pixel: int, words: str) -> None:
    layer = CASES["patches"].make()
    alone(layer)
    with pytest.raises(ValueError, match=words):
        layer.forward(np.full(shape, pixel), Step())


def test_specs_of_whole_rows_follow_the_tokens() -> None:
    """Of a model that makes 4 patches, and one vector of them."""
    patches = PatchEmbedding(Grid(4, 4), 1, 2, 3)
    model = Sequential({"patches": patches, "merge": MergePatches(Grid(2, 2)), "mean": MeanPool()})
    images = ArraySpec.tokens(2, 1, 8)
    assert [x.shape for _, _, x in model.inputs(images)] == [(2, 1), (2, 4, 3), (2, 1, 12)]
    assert [x.context for _, _, x in model.inputs(images)] == [1, 4, 1]
    out = model.out(images)
    assert (out.shape, out.context, out.length) == ((2, 1, 12), 1, 1)
