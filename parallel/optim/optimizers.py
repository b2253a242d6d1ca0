"""Optimizers, which change flat arrays of values in place.

Values and states have the dtype of updates; gradients have the model's dtype and the loss scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from parallel.nn import Array, cast, namespace_of

PIECE = 1 << 14  # elements updated at a time, so that they stay in the cache with temporaries


def pieces(*arrays: Array) -> Iterator[list[Array]]:
    """Yield views of the same elements of each array: as many as fit in a CPU's cache, or all."""
    size = arrays[0].shape[0]
    step = PIECE if isinstance(arrays[0], np.ndarray) else max(size, 1)
    for start in range(0, size, step):
        yield [x[start : start + step] for x in arrays]


def zeros_like(x: Array) -> Array:
    """Return zeros of the shape, dtype and device of `x`."""
    return namespace_of(x).zeros_like(x)


def check(name: str, option: float, below: float = math.inf, *, may_be_zero: bool = True) -> None:
    """Raise ValueError unless 0 <= `option` < `below`, or 0 < `option` if it may not be zero."""
    if not 0 <= option < below or (option == 0 and not may_be_zero):
        least = "at least" if may_be_zero else "more than"
        most = "finite" if below == math.inf else f"less than {below:g}"
        raise ValueError(f"{name} is {option}: it must be {least} 0 and {most}")


class Optimizer(ABC):
    """The base class of optimizers, which work element by element.

    Any part of a model can therefore be updated without the rest.  `values` are the arrays to
    update by name, at least 1-d; they are not copied.  `lr` is the learning rate.  `make_state` is
    called with a value and returns a state of its shape, filled with zeros.  Attributes: `states`
    has each of `STATES` by the names of the values, and `steps` is the number of updates so far.
    An option that is out of range or not finite raises ValueError.
    """

    STATES: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        values: Mapping[str, Array],
        *,
        lr: float = 1e-3,
        make_state: Callable[[Array], Array] = zeros_like,
    ) -> None:
        check("lr", lr)
        self.values, self.lr = dict(values), lr
        self.steps = 0
        self.states = {
            state: {name: make_state(x) for name, x in self.values.items()} for state in self.STATES
        }

    def step(
        self, gradients: Iterable[tuple[str, Array]] | Mapping[str, Array], scale: float = 1.0
    ) -> None:
        """Update the values in place from `gradients`, by name or in pairs, times `scale`.

        A value without a gradient is not changed.  Raises ValueError for a gradient of an unknown
        name, or of another shape than its value.
        """
        self.steps += 1
        pairs = gradients.items() if isinstance(gradients, Mapping) else gradients
        for name, gradient in pairs:
            if (x := self.values.get(name)) is None:
                raise ValueError(f"there is a gradient for {name!r}, which is not a parameter")
            states = [state[name] for state in self.states.values()]
            if gradient.shape != x.shape:
                raise ValueError(
                    f"the gradient of {name!r} has shape {gradient.shape}, its values {x.shape}"
                )
            for part, g, *others in pieces(x, gradient, *states):
                g = cast(g, x.dtype)
                self._update(part, g if scale == 1 else g * scale, *others)

    @abstractmethod
    def _update(self, x: Array, g: Array, *states: Array) -> None:
        """Change `x` and its states in place, but not the gradient `g`."""

    def arrays(self) -> list[Array]:
        """Return all arrays that an update changes: the values, then their states."""
        return [*self.values.values(), *(x for s in self.states.values() for x in s.values())]


class SGD(Optimizer):
    """Stochastic gradient descent with momentum: v = momentum v + g, then x -= lr v.  Polyak 1964.

    `momentum` is at least 0 and less than 1; `values` and other options are as in `Optimizer`.

    Examples
    --------
    >>> import numpy as np
    >>> from parallel import SGD
    >>> x = np.ones(3)
    >>> SGD({"x": x}, lr=0.5, momentum=0).step({"x": x})
    >>> x
    array([0.5, 0.5, 0.5])
    """

    STATES = ("velocity",)

    def __init__(
        self, values: Mapping[str, Array], *, momentum: float = 0.9, **options: Any
    ) -> None:
        check("momentum", momentum, below=1)
        super().__init__(values, **options)
        self.momentum = momentum

    def _update(self, x: Array, g: Array, *states: Array) -> None:
        (v,) = states
        v *= self.momentum
        v += g
        x -= self.lr * v


class Adam(Optimizer):
    """Adam: Kingma & Ba 2015, algorithm 1.

    `betas`, at least 0 and less than 1, are the decay rates of the averages of the gradient and of
    its square; `eps`, more than 0, is added to the root of the latter.  `weight_decay` is decoupled
    and in units of `lr`.  `values` and other options are as in `Optimizer`.
    """

    STATES = ("first", "second")
    WEIGHT_DECAY = 0.0

    def __init__(
        self,
        values: Mapping[str, Array],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        self.betas, self.eps = betas, eps
        self.weight_decay = self.WEIGHT_DECAY if weight_decay is None else weight_decay
        check("the first of betas", betas[0], below=1)
        check("the second of betas", betas[1], below=1)
        check("eps", eps, may_be_zero=False)
        check("weight_decay", self.weight_decay)
        super().__init__(values, **options)

    def _update(self, x: Array, g: Array, *states: Array) -> None:
        m, v = states
        beta1, beta2 = self.betas
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        root = namespace_of(v).sqrt(v)
        root *= 1 / math.sqrt(1 - beta2**self.steps)
        root += self.eps
        if self.weight_decay:
            x *= 1 - self.lr * self.weight_decay
        x -= (self.lr / (1 - beta1**self.steps)) * m / root


class AdamW(Adam):
    """Adam with a decoupled weight decay of 0.01.  Loshchilov & Hutter 2019.

    `values`, `betas`, `eps` and the other options are as in `Adam`.
    """

    WEIGHT_DECAY = 0.01
