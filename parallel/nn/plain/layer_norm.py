"""Layer normalization."""

from __future__ import annotations

import math
from typing import Any

from parallel.nn.functional import Array, cast, flatten_rows, namespace_of, sum_rows, upcast
from parallel.nn.layer import Activations, ArraySpec, Layer, ParameterSpec, Step


class LayerNorm(Layer):
    """Normalize vectors (..., `dim`) to mean 0 and variance 1, then apply gain and bias.

    Ba et al. 2016.

    Parameters
    ----------
    dim : int
        The width of the vectors.
    partial : tuple of str
        The axes of a mesh along which ranks have different vectors.
    """

    EPSILON = 1e-5
    saves_input = False

    def __init__(self, dim: int, partial: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.dim, self.partial = dim, partial

    def specs(self) -> dict[str, ParameterSpec]:
        shape, partial = (self.dim,), self.partial
        gain = ParameterSpec(shape, mean=1.0, partial=partial)
        return {"gain": gain, "bias": ParameterSpec(shape, partial=partial)}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        xp = namespace_of(x)
        centered = upcast(x) - xp.mean(upcast(x), axis=-1, keepdims=True)
        variance = xp.mean(centered * centered, axis=-1, keepdims=True)
        inverse = 1 / xp.sqrt(variance + self.EPSILON)
        normalized = cast(centered * inverse, x.dtype)
        y = upcast(normalized) * upcast(self.value["gain"]) + upcast(self.value["bias"])
        return cast(y, x.dtype), (normalized, inverse)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        xp = namespace_of(dy)
        normalized, inverse = upcast(saved[0]), saved[1]
        d = upcast(dy) * upcast(self.value["gain"])
        along = normalized * xp.mean(d * normalized, axis=-1, keepdims=True)
        dx = cast(inverse * (d - xp.mean(d, axis=-1, keepdims=True) - along), dy.dtype)
        return dx, (saved[0], dy)

    def backward_weight(self, rest: Any) -> None:
        normalized, dy = rest
        self.gradient["gain"] += cast(sum_rows(flatten_rows(dy * upcast(normalized))), dy.dtype)
        self.gradient["bias"] += sum_rows(flatten_rows(dy))

    def activation_bytes(self, x: ArraySpec) -> Activations:
        saved = x.nbytes + max(x.width, 4) * math.prod(x.shape[:-1])
        return Activations(saved, x, rest=2 * x.nbytes, is_dy_in_rest=True)
