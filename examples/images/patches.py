"""The layers that make tokens of an image: of its patches, of 2 x 2 tokens, and one of all.

Dosovitskiy et al. 2021 (ViT).  The tokens of a grid are in the order of its rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    Layer,
    Linear,
    ParameterSpec,
    Shape,
    Step,
    cast,
    check_classes,
    flatten_rows,
    namespace_of,
    upcast,
)

PIXELS = 256  # a pixel is a byte


class Grid(NamedTuple):
    """A number of rows and of columns, of tokens or of pixels."""

    rows: int
    columns: int

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.rows * self.columns

    def divided(self, by: int, what: str) -> Grid:
        """Return the grid of squares of `by` x `by`, of which `what` is the name.

        Raises ValueError if squares do not divide this grid.
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
    Images do not count as memory, nor do tokens of a text.  `forward` raises ValueError for images
    of another shape, and for a pixel out of range.

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

    def check_shape(self, shape: Shape) -> None:
        """Raise ValueError unless the model takes images of this `shape`."""
        if shape != (wanted := (*self.image, self.channels)):
            raise ValueError(f"images have the shape {shape}, but the model is for {wanted}")

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
        share = cast(upcast(dy) / saved, dy.dtype)  # of each token
        return namespace_of(dy).repeat(share, saved, axis=1), None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, tokens_of_rows(x, 1, x.shape[-1]))
