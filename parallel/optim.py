"""Optimisers: they change parameters in place, given gradients of the same names and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from array_api_compat import array_namespace

from parallel.nn import Array

PIECE = 1 << 14  # elements updated at a time: with their temporaries they stay in the cache


class Adam:
    """Kingma & Ba 2015, algorithm 1, element by element.

    `parameters` and `gradients` map the same names to arrays of the same shape, of at least one
    dimension, and dtype; both are kept, not copied.  The two moments have the parameter's dtype.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        gradients: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        if parameters.keys() != gradients.keys():
            names = sorted(parameters.keys() ^ gradients.keys())
            raise ValueError(f"a parameter without a gradient, or the reverse: {', '.join(names)}")
        self.parameters, self.gradients = dict(parameters), dict(gradients)
        self.lr, self.betas, self.epsilon = lr, betas, epsilon
        self.steps = 0
        self.first = {name: zeros_like(x) for name, x in self.parameters.items()}
        self.second = {name: zeros_like(x) for name, x in self.parameters.items()}

    def step(self) -> None:
        """One update of every parameter from the gradients as they stand."""
        self.steps += 1
        for name, x in self.parameters.items():
            whole = x, self.gradients[name], self.first[name], self.second[name]
            for start in range(0, x.shape[0], PIECE):
                self._update(*(array[start : start + PIECE] for array in whole))

    def state(self) -> list[Array]:
        """All that an update changes, beside `steps`: the parameters and their moments."""
        return [*self.parameters.values(), *self.first.values(), *self.second.values()]

    def _update(self, x: Array, g: Array, m: Array, v: Array) -> None:
        beta1, beta2 = self.betas
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        root = array_namespace(v).sqrt(v)
        root *= 1 / math.sqrt(1 - beta2**self.steps)
        root += self.epsilon
        x -= (self.lr / (1 - beta1**self.steps)) * m / root


def zeros_like(x: Array) -> Array:
    """Zeros of x's shape, dtype and device."""
    return array_namespace(x).zeros_like(x)
