"""Optimisers: they change values in place, given gradients under the same names.

Values and states are what an update is computed in (float32 where the model computes in two bytes);
gradients may be of a smaller dtype and scaled, as they come out of backward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import numpy as np
from array_api_compat import array_namespace

from parallel.nn import Array

PIECE = 1 << 14  # elements updated at a time: with their temporaries they stay in the cache


def pieces(*arrays: Array) -> Iterator[list[Array]]:
    """The same elements of each of these arrays: all at once on a GPU, else as the cache holds."""
    size = arrays[0].shape[0]
    step = PIECE if isinstance(arrays[0], np.ndarray) else max(size, 1)
    for start in range(0, size, step):
        yield [x[start : start + step] for x in arrays]


def zeros_like(x: Array) -> Array:
    """Zeros of x's shape, dtype and device."""
    return array_namespace(x).zeros_like(x)


def check(name: str, option: float, below: float = math.inf, *, may_be_zero: bool = True) -> None:
    """ValueError unless this option is from 0 to below `below`, and so a finite number."""
    if not 0 <= option < below or (option == 0 and not may_be_zero):
        least = "at least" if may_be_zero else "more than"
        most = "finite" if below == math.inf else f"less than {below:g}"
        raise ValueError(f"{name} is {option}: it must be {least} 0 and {most}")


class Optimizer(ABC):
    """Element by element, so that any part of a model can be updated without the rest.

    `values`: arrays of at least one dimension by name; kept, not copied.  `new` makes the states,
    arrays of zeros like a value.  ValueError unless `lr` is finite and at least 0.
    """

    STATES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        values: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        new: Callable[[Array], Array] = zeros_like,
    ) -> None:
        check("lr", lr)
        self.values, self.lr = dict(values), lr
        self.steps = 0
        self.states = {
            state: {name: new(x) for name, x in self.values.items()} for state in self.STATES
        }

    def step(
        self, gradients: Iterable[tuple[str, Array]] | Mapping[str, Array], scale: float = 1.0
    ) -> None:
        """One update from gradients that are to be multiplied by `scale` first.

        What gets no gradient stays as it is.  Raises ValueError for one that belongs to nothing, or
        has another shape than its value.
        """
        self.steps += 1
        pairs = gradients.items() if isinstance(gradients, Mapping) else gradients
        for name, gradient in pairs:
            if name not in self.values:
                raise ValueError(f"a gradient for {name!r}, which is not among the parameters")
            self._update_whole(name, gradient, scale)

    def _update_whole(self, name: str, gradient: Array, scale: float) -> None:
        x, states = self.values[name], [state[name] for state in self.states.values()]
        if gradient.shape != x.shape:
            raise ValueError(f"{name!r}: a gradient {gradient.shape} for values {x.shape}")
        for part, slope, *others in pieces(x, gradient, *states):
            slope = slope if slope.dtype == x.dtype else slope.astype(x.dtype)
            self._update(part, slope if scale == 1 else slope * scale, *others)

    @abstractmethod
    def _update(self, x: Array, g: Array, *states: Array) -> None:
        """Change x and its states in place.  g may not be changed."""

    def arrays(self) -> list[Array]:
        """All that an update changes, beside `steps`: the values and their states."""
        return [*self.values.values(), *(x for s in self.states.values() for x in s.values())]


class SGD(Optimizer):
    """x - lr g, where g may be an average of the past: v = momentum v + g.  Polyak 1964.

    ValueError unless `momentum` is at least 0 and less than 1.
    """

    STATES = ("velocity",)

    def __init__(
        self, values: Mapping[str, Array], *, momentum: float = 0.9, **more: object
    ) -> None:
        check("momentum", momentum, below=1)
        super().__init__(values, **more)  # type: ignore[arg-type]
        self.momentum = momentum

    def _update(self, x: Array, g: Array, *states: Array) -> None:
        (v,) = states
        v *= self.momentum
        v += g
        x -= self.lr * v


class Adam(Optimizer):
    """Kingma & Ba 2015, algorithm 1.

    `decay`: of the weights, apart from the gradient, in units of the rate (Loshchilov & Hutter
    2019); 0 in Adam, 0.01 in AdamW.  ValueError unless both `betas` are at least 0 and less than 1,
    `epsilon` is finite and more than 0, and `decay` is finite and at least 0.
    """

    STATES = ("first", "second")
    DECAY = 0.0

    def __init__(
        self,
        values: Mapping[str, Array],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        decay: float | None = None,
        **more: object,
    ) -> None:
        self.betas, self.epsilon = betas, epsilon
        self.decay = self.DECAY if decay is None else decay
        self._check_options()
        super().__init__(values, **more)  # type: ignore[arg-type]

    def _check_options(self) -> None:
        beta1, beta2 = self.betas
        check("the first of betas", beta1, below=1)
        check("the second of betas", beta2, below=1)
        check("epsilon", self.epsilon, may_be_zero=False)
        check("decay", self.decay)

    def _update(self, x: Array, g: Array, *states: Array) -> None:
        m, v = states
        beta1, beta2 = self.betas
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        root = array_namespace(v).sqrt(v)
        root *= 1 / math.sqrt(1 - beta2**self.steps)
        root += self.epsilon
        if self.decay:
            x *= 1 - self.lr * self.decay
        x -= (self.lr / (1 - beta1**self.steps)) * m / root


class AdamW(Adam):
    """Adam with decoupled weight decay.  Loshchilov & Hutter 2019."""

    DECAY = 0.01
