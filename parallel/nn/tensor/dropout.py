"""Dropout that sets the same elements to 0 on any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from parallel.mesh import Mesh
from parallel.nn.functional import Array, cast, mix64, namespace_of, upcast
from parallel.nn.layer import Activations, ArraySpec, Layer, Step, token_numbers
from parallel.nn.tensor.region import Whole

WEYL = np.uint64(0x9E3779B97F4A7C15)  # between successive numbers of SplitMix64
BITS = 53  # the bits of the fraction of a float64


class Dropout(Layer):
    """Set a fraction of all elements to 0, and divide the others by the fraction that is left.

    Srivastava et al. 2014.  Vectors (..., features) keep their shape.  Whether an element is set to
    0 depends on the seed and the step of the training run, the number of its token in the batch,
    its feature and `name`, and not on the ranks.  The layer keeps nothing: backward draws the same
    elements again.  Nothing is set to 0 if `Step.batch` is None.

    Parameters
    ----------
    rate : float
        The fraction, from 0 to less than 1.
    name : str
        Layers with different names draw different elements.
    mesh : Mesh, optional
        The ranks; by default one rank.
    region : Whole, optional
        The ranks that divide the layers around this layer, if any.
    width : int, optional
        The number of all features, if these ranks divide the features.

    Raises
    ------
    ValueError
        If `rate` is out of range.
    """

    saves_input = False
    needs_rows = True

    def __init__(
        self,
        rate: float,
        name: str,
        *,
        mesh: Mesh | None = None,
        region: Whole | None = None,
        width: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"the rate of dropout is {rate}: it must be from 0 to less than 1")
        self.rate, self.name, self.mesh = rate, name, mesh or Mesh(None)
        self.region, self.width = region, width

    def config(self) -> list[Any]:
        return [*super().config(), repr(self.rate), self.name]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        if step.batch is None or step.batch.seed is None:
            return x, None
        drawn = self._numbers(step), (step.batch.seed, step.batch.step)
        return self._masked(x, drawn), drawn

    def _numbers(self, step: Step) -> Array:
        """Return the numbers of the tokens that this rank computes."""
        if step.numbers is not None:
            return step.numbers
        part = None  # all tokens
        if self.region is not None and self.region.gathers and self.width is None:
            part = self.region.part(step.length)
        return token_numbers(step, self.mesh.rank, part)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return dy if saved is None else self._masked(dy, saved), None

    def _masked(self, x: Array, drawn: tuple[Any, tuple[int, int]]) -> Array:
        """Return `x` with zeros, for the numbers of its tokens, the seed, and the step."""
        numbers, stream = drawn
        xp = namespace_of(x)
        words = np.random.SeedSequence([*stream, *self.name.encode()]).generate_state(1, np.uint64)
        of_token = mix64(xp.asarray(numbers.ravel().astype(np.uint64)) + xp.asarray(words))
        first = self.region.part(self.width).start if self.region and self.width else 0
        feature = xp.arange(first + 1, first + x.shape[-1] + 1, dtype=np.uint64) * WEYL
        drawn_bits = mix64(of_token[:, None] + feature[None, :]) >> np.uint64(64 - BITS)
        is_kept = (drawn_bits >= np.uint64(int(self.rate * 2**BITS))).reshape(x.shape)
        zero = xp.zeros((), dtype=upcast(x[:0]).dtype)
        return cast(xp.where(is_kept, upcast(x) / (1 - self.rate), zero), x.dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, x)
