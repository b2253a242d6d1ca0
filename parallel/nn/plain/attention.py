"""Multi-head attention of positions that are all on one rank."""

from __future__ import annotations

import math
from typing import Any

from parallel.nn.functional import (
    Array,
    cast,
    causal,
    matmul,
    namespace_of,
    softmax,
    transpose,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, Layer, Step


class Attention(Layer):
    """Multi-head attention of every position to all positions.

    Queries, keys and values side by side, (batch, context, 3 dim), become (batch, context, dim).
    Vaswani et al. 2017.  A subclass defines in `probabilities` which positions attend to which.

    Parameters
    ----------
    num_heads : int
        The number of heads, which have dim / `num_heads` of the elements each.
    width : int, optional
        The number of elements of a head, if ranks divide the heads, so that dim differs.  Then
        `num_heads` is not used.

    Raises
    ------
    ValueError
        From `forward`, if the input does not consist of whole heads.
    """

    def __init__(self, num_heads: int, width: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.width = num_heads, width

    def config(self) -> list[Any]:
        return [*super().config(), self.num_heads]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        q, k, v = self._split(x)
        if step.cache is not None:
            k, v = step.cache.extended(self, k, v)
        scores = upcast(q) @ transpose(upcast(k)) * (1 / math.sqrt(q.shape[-1]))
        probabilities = cast(self.probabilities(scores), x.dtype)
        return self._join(matmul(probabilities, v)), (x, probabilities)

    def probabilities(self, scores: Array) -> Array:
        """Return how much queries attend to keys, from `scores` (..., context, context)."""
        return softmax(scores)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.derivatives(dy, saved)[0], None

    def derivatives(self, dy: Array, saved: Any) -> tuple[Array, Array]:
        """Return the derivatives by the input, and by the products of queries and keys.

        `dy` and `saved` are as in `backward_input`.
        """
        x, probabilities = saved
        (q, k, v), xp = self._split(x), namespace_of(x)
        dy = xp.permute_dims(dy.reshape(*dy.shape[:2], *q.shape[1::2]), (0, 2, 1, 3))
        dscores = upcast(dy) @ transpose(upcast(v))
        dscores -= xp.sum(dscores * probabilities, axis=-1, keepdims=True)
        dscores *= upcast(probabilities) * (1 / math.sqrt(q.shape[-1]))
        dq, dk = dscores @ upcast(k), transpose(dscores) @ upcast(q)
        dv = transpose(upcast(probabilities)) @ upcast(dy)
        parts = [cast(self._join(part), x.dtype) for part in (dq, dk, dv)]
        return xp.concat(parts, axis=-1), dscores

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Return the queries, keys and values, arrays (batch, heads, context, dim / heads)."""
        width = self._width(x.shape[-1])
        parts = x.reshape(*x.shape[:2], 3, x.shape[-1] // (3 * width), width)
        q, k, v = namespace_of(x).permute_dims(parts, (2, 0, 3, 1, 4))
        return q, k, v

    def _width(self, size: int) -> int:
        """Return the number of elements of a head, if queries, keys and values have this `size`."""
        if not size:
            return self.width or 1
        unit = 3 * (self.width or self.num_heads)
        if not unit or size % unit:
            heads = f"heads of {self.width}" if self.width else f"{self.num_heads} heads"
            raise ValueError(f"{size} elements are not queries, keys and values of {heads}")
        return self.width or size // unit

    def _join(self, y: Array) -> Array:
        """Put the heads side by side again: (batch, context, dim)."""
        batch, heads, context, width = y.shape
        xp = namespace_of(y)
        return xp.permute_dims(y, (0, 2, 1, 3)).reshape(batch, context, heads * width)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        batch, context, dim = x.shape
        num_heads = dim // (3 * self._width(dim))
        probabilities = x.of_shape(batch, num_heads, context, context)
        return Activations(x.nbytes + probabilities.nbytes, x.of_shape(batch, context, dim // 3))


class CausalAttention(Attention):
    """Multi-head attention of every position to itself and to the positions before it."""

    def probabilities(self, scores: Array) -> Array:
        """Return how much queries attend to keys, which are not behind the query's position."""
        return softmax(causal(scores))
