"""The layers of transformers for images.

Images become patches, which are tokens: Dosovitskiy et al. 2021 (ViT).  Attention among all of
them, or within windows that are shifted in every other block: Liu et al. 2021 (Swin).  The tokens
of a grid are in the order of its rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from parallel.nn.functional import (
    Array,
    cast,
    flatten_rows,
    matmul,
    namespace_of,
    one_hot,
    softmax,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, Layer, ParameterSpec, Step
from parallel.nn.layers import CausalAttention, Linear, check_classes
from parallel.nn.tensor.region import Whole
from parallel.placement import Shape

PIXELS = 256  # a pixel is a byte


class Grid(NamedTuple):
    """So many rows and columns of tokens, or of pixels."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.rows * self.columns

    def divided(self, by: int, what: str) -> Grid:
        """Return a grid of squares of `by` x `by` of these; ValueError if they are not whole.

        `what` is the name of such a square.
        """
        if by < 1 or self.rows % by or self.columns % by:
            raise ValueError(
                f"{what} of {by} x {by} do not divide a grid of {self.rows} x {self.columns}"
            )
        return Grid(self.rows // by, self.columns // by)


def tokens_of_rows(x: ArraySpec, num_tokens: int, dim: int) -> ArraySpec:
    """Return the spec of `num_tokens` vectors of `dim` elements for each row of `x`."""
    made = x.of_shape(x.shape[0], num_tokens, dim)
    return replace(made, context=num_tokens, length=num_tokens)


class PatchEmbedding(Layer):
    """Make a vector of each patch of an image, and add a vector for its position.

    Images, int64 (batch, rows, columns, `channels`) from 0 to 255, become vectors (batch, patches,
    `dim`): the product of a patch, of which pixels become numbers from -1 to 1, and a matrix.
    Dosovitskiy et al. 2021.  As tokens of a text, images do not count as memory.  `forward` raises
    ValueError for images of another shape, and for a pixel out of range.

    Parameters
    ----------
    image : Grid
        The rows and columns of pixels.
    channels : int
    patch : int
        The rows, and columns, of pixels of a patch.  Raises ValueError unless patches divide
        images.
    dim : int
    has_positions : bool
        Whether a vector is added for each position; if not, later layers know positions.
    """

    def __init__(
        self, image: Grid, channels: int, patch: int, dim: int, *, has_positions: bool = True
    ) -> None:
        super().__init__()
        self.image, self.grid = image, image.divided(patch, "patches")
        self.channels, self.patch, self.has_positions = channels, patch, has_positions
        self.linear = Linear(patch * patch * channels, dim)

    def specs(self) -> dict[str, ParameterSpec]:
        shape = (self.grid.size, self.linear.out_features)
        positions = {"position": ParameterSpec(shape, std=0.1)} if self.has_positions else {}
        return self.linear.specs() | positions

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        self.linear.bind(values, gradients)

    def config(self) -> list[Any]:
        return [*super().config(), *self.image, self.channels, self.patch]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.check_shape(x.shape[1:])
        check_classes("pixel", step.on_host(x), PIXELS)
        y, _ = self.linear.forward(self._patches(x, self.value["weight"].dtype), step)
        return (y + self.value["position"] if self.has_positions else y), x

    def check_shape(self, found: Shape) -> None:
        """Raise ValueError unless images have this shape."""
        if found != (shape := (*self.image, self.channels)):
            raise ValueError(f"images have the shape {found}, but the model is for {shape}")

    def check_input(self, x: ArraySpec) -> None:
        if x.shape[1:] != (x.context,):  # which stands for a row of any shape
            self.check_shape(x.shape[1:])

    def _patches(self, x: Array, dtype: Any) -> Array:
        """Return the pixels of each patch as numbers: (batch, patches, pixels)."""
        (rows, columns), p = self.grid, self.patch
        squares = x.reshape(x.shape[0], rows, p, columns, p, self.channels)
        patches = namespace_of(x).permute_dims(squares, (0, 1, 3, 2, 4, 5))
        patches = patches.reshape(x.shape[0], self.grid.size, self.linear.in_features)
        return cast(patches * (2 / (PIXELS - 1)) - 1, dtype)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return None as the derivative: pixels have none."""
        return None, (saved, dy)

    def backward_weight(self, rest: Any) -> None:
        x, dy = rest
        self.linear.backward_weight((self._patches(x, dy.dtype), flatten_rows(dy)))
        if self.has_positions:
            over_batch = namespace_of(dy).sum(upcast(dy), axis=0)
            self.gradient["position"] += cast(over_batch, dy.dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        vectors = tokens_of_rows(x, self.grid.size, self.linear.out_features)
        return Activations(0, vectors, rest=vectors.nbytes, is_dy_in_rest=True)


class Attention(CausalAttention):
    """Multi-head attention of each position to all; shapes are those of `CausalAttention`."""

    def _probabilities(self, scores: Array) -> Array:
        return softmax(scores)


class WindowAttention(CausalAttention):
    """Multi-head attention within windows of a grid of tokens.  Liu et al. 2021 (Swin).

    To the product of a query and a key, a number is added that depends on the head and on where
    the two tokens are relatively to each other.  Queries, keys and values of all tokens of the
    grid, (batch, tokens, 3 dim), become (batch, tokens, dim).

    Parameters
    ----------
    num_heads, width : int
        Of all ranks together, and the elements of a head.
    grid : Grid
        Of the tokens.
    window : int
        The rows, and columns, of a window.  Raises ValueError unless windows divide the grid.
    shift : int
        By how many rows and columns windows are moved, less than `window`.  Those at the end of
        the grid continue at its beginning, but tokens of both do not attend to each other.  Raises
        ValueError if it is out of range.
    region : Whole, optional
        The ranks that divide the heads, if any.
    """

    saves_input = False  # but a copy in the order of windows

    def __init__(
        self,
        num_heads: int,
        width: int,
        grid: Grid,
        window: int,
        shift: int = 0,
        *,
        region: Whole | None = None,
    ) -> None:
        super().__init__(num_heads, width)
        grid.divided(window, "windows")
        if not 0 <= shift < window:
            raise ValueError(f"shift is {shift}: it must be from 0 to less than {window}, a window")
        self.grid, self.window, self.shift, self.region = grid, window, shift, region
        self.order = order_of_windows(grid, window, shift)
        self.mask = mask_of_windows(grid, window, shift) if shift else None
        self.pairs = relative_positions(window)

    def specs(self) -> dict[str, ParameterSpec]:
        shape = ((2 * self.window - 1) ** 2, self.num_heads)
        splits = () if self.region is None else ((1, self.region.axis),)
        return {"bias": ParameterSpec(shape, 0.02, splits=splits)}

    def config(self) -> list[Any]:
        return [*super().config(), *self.grid, self.window, self.shift]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        y, saved = super().forward(self._windows(x), step)
        return self._tokens(y), saved

    def _windows(self, x: Array) -> Array:
        """Return tokens (batch, tokens, features) as (windows, tokens of each, features)."""
        xp = namespace_of(x)
        ordered = xp.take(x, xp.asarray(self.order), axis=1)
        per_window = self.window**2
        return ordered.reshape(x.shape[0] * self.grid.size // per_window, per_window, x.shape[-1])

    def _tokens(self, y: Array) -> Array:
        """Do the reverse."""
        xp, size = namespace_of(y), self.grid.size
        ordered = y.reshape(y.shape[0] * y.shape[1] // size, size, y.shape[-1])
        return xp.take(ordered, xp.asarray(np.argsort(self.order)), axis=1)

    def _probabilities(self, scores: Array) -> Array:
        xp = namespace_of(scores)
        size, num_heads = scores.shape[-1], scores.shape[1]
        bias = xp.take(upcast(self.value["bias"]), xp.asarray(self.pairs), axis=0)
        scores = scores + xp.permute_dims(bias.reshape(size, size, num_heads), (2, 0, 1))
        if self.mask is not None:
            mask = xp.asarray(self.mask)[:, None]  # (windows, 1, tokens, tokens)
            by_image = (scores.shape[0] // len(self.mask), len(self.mask), *scores.shape[1:])
            closed = xp.asarray(-math.inf, dtype=scores.dtype)
            scores = xp.where(mask, scores.reshape(by_image), closed).reshape(scores.shape)
        return softmax(scores)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, dscores = self._backward(self._windows(dy), saved)
        # The bias is added to the products after these are divided by the square root.
        dbias = namespace_of(dy).sum(dscores, axis=0) * math.sqrt(self._width(saved[0].shape[-1]))
        return self._tokens(dx), dbias

    def backward_weight(self, rest: Any) -> None:
        xp, gradient = namespace_of(rest), self.gradient["bias"]
        by_pair = xp.permute_dims(rest, (1, 2, 0)).reshape(len(self.pairs), rest.shape[0])
        selected = one_hot(xp.asarray(self.pairs), gradient.shape[0], rest.dtype)
        gradient += cast(matmul(selected.T, by_pair), gradient.dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        batch, num_tokens, dim = x.shape
        per_window, num_heads = self.window**2, dim // (3 * self._width(dim))
        probabilities = x.of_shape(batch, num_heads, num_tokens, per_window)
        rest = max(x.width, 4) * num_heads * per_window**2
        out = x.of_shape(batch, num_tokens, dim // 3)
        return Activations(x.nbytes + probabilities.nbytes, out, rest)


def order_of_windows(grid: Grid, window: int, shift: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens of a `grid` window by window; windows are moved by `shift`."""
    numbers = np.roll(np.arange(grid.size).reshape(grid), (-shift, -shift), (0, 1))
    return squares_of(numbers, window).ravel()


def mask_of_windows(grid: Grid, window: int, shift: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which tokens of each window attend to which: (windows, tokens, tokens).

    Those of a window do that are on the same side of the ends of the grid.
    """
    row, column = np.indices(grid)
    side = 2 * (row >= grid.rows - shift) + (column >= grid.columns - shift)
    sides = squares_of(side, window)
    found: np.ndarray[Any, np.dtype[np.bool_]] = sides[:, :, None] == sides[:, None, :]
    return found


def squares_of(
    numbers: np.ndarray[Any, np.dtype[np.int64]], size: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of a grid by squares of `size` x `size`: (squares, numbers of each)."""
    rows, columns = (n // size for n in numbers.shape)
    squares = numbers.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    return squares.reshape(rows * columns, size * size)


def relative_positions(window: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a number for where two tokens of a window are to each other, (window^4,).

    It is the same for all pairs with the same distances, and less than (2 `window` - 1)^2.
    """
    row, column = np.indices((window, window)).reshape(2, -1)
    rows, columns = (x[:, None] - x[None, :] + window - 1 for x in (row, column))
    found: np.ndarray[Any, np.dtype[np.int64]] = (rows * (2 * window - 1) + columns).ravel()
    return found


class MergePatches(Layer):
    """Put the vectors of 2 x 2 neighbours side by side.  Liu et al. 2021 (Swin).

    Vectors (batch, tokens of `grid`, dim) become (batch, tokens / 4, 4 dim).  Raises ValueError
    unless the rows and columns of the grid are even.
    """

    saves_input = False
    ORDER = (0, 1, 3, 4, 2, 5)  # of batch, row, row in a square, column, column in it, features

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid, self.merged = grid, grid.divided(2, "squares")

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        rows, columns = self.merged
        squares = x.reshape(x.shape[0], rows, 2, columns, 2, x.shape[-1])
        merged = namespace_of(x).permute_dims(squares, self.ORDER)
        return merged.reshape(x.shape[0], rows * columns, 4 * x.shape[-1]), None

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        (rows, columns), dim = self.merged, dy.shape[-1] // 4
        merged = dy.reshape(dy.shape[0], rows, columns, 2, 2, dim)
        back = tuple(self.ORDER.index(i) for i in range(len(self.ORDER)))
        squares = namespace_of(dy).permute_dims(merged, back)
        return squares.reshape(dy.shape[0], self.grid.size, dim), None

    def config(self) -> list[Any]:
        return [*super().config(), *self.grid]

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, tokens_of_rows(x, self.merged.size, 4 * x.shape[-1]))


class MeanPool(Layer):
    """Return the mean of all vectors of a row: (batch, tokens, dim) becomes (batch, 1, dim)."""

    saves_input = False

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return cast(namespace_of(x).mean(upcast(x), axis=1, keepdims=True), x.dtype), x.shape[1]

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        each = cast(upcast(dy) / saved, dy.dtype)
        return namespace_of(dy).repeat(each, saved, axis=1), None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, tokens_of_rows(x, 1, x.shape[-1]))
