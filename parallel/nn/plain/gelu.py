"""The Gaussian error linear unit."""

from __future__ import annotations

import math
from typing import Any

from parallel.nn.functional import Array, cast, namespace_of, upcast
from parallel.nn.layer import Activations, ArraySpec, Layer, Step


class Gelu(Layer):
    """The Gaussian error linear unit in its tanh form, element by element.

    It is x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).  Hendrycks & Gimpel 2016.
    """

    SCALE = math.sqrt(2 / math.pi)
    CUBIC = 0.044715

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return cast(0.5 * upcast(x) * (1 + self._tanh(upcast(x))), x.dtype), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        x = upcast(saved)
        tanh = self._tanh(x)
        inner = self.SCALE * (1 + 3 * self.CUBIC * x * x)
        return cast(dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner), dy.dtype), None

    def _tanh(self, x: Array) -> Array:
        return namespace_of(x).tanh(self.SCALE * x * (1 + self.CUBIC * x * x))

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(x.nbytes, x)
