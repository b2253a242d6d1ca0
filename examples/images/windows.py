"""Attention within windows of a grid of tokens.  Liu et al. 2021 (Swin)."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from examples.images.patches import Grid
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    Attention,
    ParameterSpec,
    Step,
    cast,
    matmul,
    namespace_of,
    softmax,
    upcast,
)
from parallel.nn.tensor import Whole

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class WindowAttention(Attention):
    """Multi-head attention of each token to the tokens of its window.

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
    width: int  # is always given

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
        self.num_biases = (2 * window - 1) ** 2

    def specs(self) -> dict[str, ParameterSpec]:
        shape = (self.num_biases, self.num_heads)
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

    def probabilities(self, scores: Array) -> Array:
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
        dx, dproducts = self.derivatives(self._windows(dy), saved)
        # The bias is added to the products after these are divided by the square root.
        dbias = namespace_of(dy).sum(dproducts, axis=0) * math.sqrt(self.width)
        return self._tokens(dx), dbias

    def backward_weight(self, rest: Any) -> None:
        xp, gradient = namespace_of(rest), self.gradient["bias"]
        by_pair = xp.permute_dims(rest, (1, 2, 0)).reshape(len(self.pairs), rest.shape[0])
        is_pair = xp.asarray(np.eye(self.num_biases)[self.pairs].T, dtype=rest.dtype)
        gradient += cast(matmul(is_pair, by_pair), gradient.dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        batch, num_tokens, dim = x.shape
        per_window, num_heads = self.window**2, dim // (3 * self.width)
        probabilities = x.of_shape(batch, num_heads, num_tokens, per_window)
        rest = max(x.width, 4) * num_heads * per_window**2
        out = x.of_shape(batch, num_tokens, dim // 3)
        return Activations(x.nbytes + probabilities.nbytes, out, rest)


def order_of_windows(grid: Grid, window: int, shift: int) -> Numbers:
    """Return the tokens of a `grid` window by window; windows are moved by `shift`."""
    numbers = np.roll(np.arange(grid.size).reshape(grid), (-shift, -shift), (0, 1))
    return squares_of(numbers, window).ravel()


def mask_of_windows(grid: Grid, window: int, shift: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which tokens of each window attend to which: (windows, tokens, tokens).

    Two tokens of a window do if they are on the same side of the ends of the grid.
    """
    row, column = np.indices(grid)
    side = 2 * (row >= grid.rows - shift) + (column >= grid.columns - shift)
    sides = squares_of(side, window)
    mask: np.ndarray[Any, np.dtype[np.bool_]] = sides[:, :, None] == sides[:, None, :]
    return mask


def squares_of(numbers: Numbers, size: int) -> Numbers:
    """Return the numbers of a grid by squares of `size` x `size`: (squares, numbers of each)."""
    rows, columns = (n // size for n in numbers.shape)
    squares = numbers.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    return squares.reshape(rows * columns, size * size)


def relative_positions(window: int) -> Numbers:
    """Return a number for where two tokens of a window are to each other: (window^4,).

    It is the same for all pairs with the same distances, and less than (2 `window` - 1)^2.
    """
    row, column = np.indices((window, window)).reshape(2, -1)
    rows, columns = (x[:, None] - x[None, :] + window - 1 for x in (row, column))
    numbers: Numbers = (rows * (2 * window - 1) + columns).ravel()
    return numbers
