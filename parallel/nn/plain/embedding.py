"""Vectors for tokens and for their positions."""

from __future__ import annotations

from typing import Any

from parallel.nn.functional import (
    Array,
    cast,
    check_classes,
    flatten_rows,
    matmul,
    namespace_of,
    one_hot,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, Layer, ParameterSpec, Step


class Embedding(Layer):
    """Add a vector for each token and a vector for its position.

    Tokens, integers (batch, up to `context`), become vectors (batch, tokens, `dim`).

    Parameters
    ----------
    vocab_size, context, dim : int
        The numbers of tokens and of positions, and the width of the vectors.

    Raises
    ------
    ValueError
        From `forward`, if a whole row has more tokens than there are positions.
    """

    context: int

    def __init__(self, vocab_size: int, context: int, dim: int) -> None:
        super().__init__()
        self.vocab_size, self.context, self.dim = vocab_size, context, dim

    def specs(self) -> dict[str, ParameterSpec]:
        shapes = {"token": (self.vocab_size, self.dim), "position": (self.context, self.dim)}
        return {name: ParameterSpec(shape, std=0.1) for name, shape in shapes.items()}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.check(x, step)
        xp = namespace_of(x)
        rows = xp.take(self.value["token"], xp.reshape(x, (-1,)), axis=0)
        at = step.position_index(x)
        vectors = xp.reshape(rows, (*x.shape, self.dim)) + self.value["position"][at]
        return vectors, (x, at)

    def check(self, x: Array, step: Step) -> None:
        """Raise ValueError unless there are positions for all tokens, and all tokens are known."""
        self.check_length(max(x.shape[1], step.context))
        check_classes("token", step.on_host(x), self.vocab_size)

    def check_length(self, length: int) -> None:
        """Raise ValueError unless there are positions for `length` tokens of a row."""
        if length > self.context:
            raise ValueError(f"{length} tokens in a row, but positions for {self.context} only")

    def check_input(self, x: ArraySpec) -> None:
        self.check_length(x.context)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return None as the derivative, because tokens have none."""
        return None, (*saved, dy)

    def backward_weight(self, rest: Any) -> None:
        tokens, at, dy = rest
        # A product with a one-hot matrix adds in one fixed order, on a GPU too, and is part of the
        # array API; a scattered addition is neither.
        xp = namespace_of(dy)
        selected = self._selected(tokens, dy.dtype)
        self.gradient["token"] += matmul(selected.T, flatten_rows(dy))
        over_batch = xp.sum(upcast(dy), axis=0)
        self.gradient["position"][at] += cast(over_batch, dy.dtype)

    def _selected(self, tokens: Array, dtype: Any) -> Array:
        """Return a matrix with a row for each token, which has a one in its column."""
        return one_hot(tokens.reshape(-1), self.vocab_size, dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        vectors = x.of_shape(*x.shape, self.dim)
        return Activations(0, vectors, rest=vectors.nbytes, is_dy_in_rest=True)
