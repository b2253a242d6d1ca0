"""What is known before arrays exist: parameters, activations, and what layers keep and send."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parallel.accounts import PredictedCall
from parallel.mesh import Placement, Shape


@dataclass(frozen=True)
class ParameterSpec(Placement):
    """A parameter before it is allocated: its placement, and the distribution of its values.

    Attributes
    ----------
    std, mean : float
        The standard deviation and the mean of the initial values, which have a normal distribution.
    """

    std: float = 0.0
    mean: float = 0.0

    def draw(self, seed: int, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return initial values, float64 of `shape`: a function of `seed` and `name` alone."""
        rng = np.random.default_rng([seed, *name.encode()])
        return self.mean + self.std * rng.standard_normal(self.shape)


@dataclass(frozen=True)
class BatchRows:
    """Which rows of which batch the ranks compute in a micro-batch.

    Attributes
    ----------
    step : int
        The number of the training step, from 0 on.
    of_rank : tuple of range
        The rows of the whole batch that every rank of the mesh computes, or computes a part of.
    seed : int, optional
        The seed of the training run.  None outside of training, where layers draw nothing.
    """

    step: int
    of_rank: tuple[range, ...]
    seed: int | None = 0

    def random(self, rank: int, name: str) -> list[np.random.Generator] | None:
        """Return a source of random numbers for each row of a `rank`, in the layer `name`.

        The numbers depend on the seed, the step, the row and the name, and not on the ranks.
        Without a seed the result is None.
        """
        if self.seed is None:
            return None
        words = name.encode()
        return [
            np.random.default_rng([self.seed, self.step, row, *words]) for row in self.of_rank[rank]
        ]


@dataclass(frozen=True)
class ArraySpec:
    """What is known of an array between two layers before the array exists.

    Attributes
    ----------
    shape : tuple of int
        The shape of this rank's array.
    width : int
        The bytes of a number of the model.
    are_tokens : bool
        Whether the elements are integers, which do not count as memory.
    context : int
        The number of positions in a whole row, which ranks may divide.
    length : int
        The number of these positions that this rank and the ranks with which it divides parameters
        have together.
    rank : int
        The rank of the mesh that has the array.
    batch : BatchRows, optional
        Which rows of the batch the array has; known if a layer needs them (`Layer.needs_rows`).
    """

    shape: Shape
    width: int
    are_tokens: bool = field(default=False, kw_only=True)
    context: int = field(default=0, kw_only=True)
    length: int = field(default=0, kw_only=True)
    rank: int = field(default=0, kw_only=True)
    batch: BatchRows | None = field(default=None, kw_only=True)

    @classmethod
    def tokens(
        cls, rows: int, length: int, width: int, *, context: int | None = None, **where: Any
    ) -> ArraySpec:
        """Return the spec of tokens (`rows`, `length`), the input of a model.

        `width` and `context` are those of the spec, and `where` are its ``rank`` and ``batch``.  By
        default `context` is `length`.
        """
        context = length if context is None else context
        return cls((rows, length), width, are_tokens=True, context=context, length=length, **where)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that count as memory: none of tokens."""
        return 0 if self.are_tokens else self.width * self.size

    def of_shape(self, *shape: int) -> ArraySpec:
        """Return the spec of an array of numbers of another `shape`, on the same rank."""
        return ArraySpec(  # predictions make many; `replace` takes five times as long
            shape,
            self.width,
            context=self.context,
            length=self.length,
            rank=self.rank,
            batch=self.batch,
        )


class Activations(NamedTuple):
    """The output of a layer, and the bytes of floating-point numbers that the layer keeps.

    Attributes
    ----------
    saved : int
        The bytes kept from forward to backward.
    out : ArraySpec
        The output.
    rest : int
        The bytes kept from `Layer.backward_input` to `Layer.backward_weight`, if other computations
        are between the two.
    extra : int
        The most bytes in addition to `saved` during backward, for what is computed again.
    is_out_saved : bool
        Whether the output itself is a part of `saved`.
    is_input_in_rest, is_dy_in_rest : bool
        Whether the input itself, or the derivative by the output itself, is a part of `rest`.
    """

    saved: int
    out: ArraySpec
    rest: int = 0
    extra: int = 0
    is_out_saved: bool = False
    is_input_in_rest: bool = False
    is_dy_in_rest: bool = False

    def changes(self, kind: str) -> tuple[int, ...]:
        """Return how the bytes that are kept change, one after the other, in an F, B, I or W."""
        backward = (self.extra, -self.extra - self.saved)
        return {"F": (self.saved,), "B": backward, "I": (*backward, self.rest), "W": (-self.rest,)}[
            kind
        ]


class LayerTraffic(NamedTuple):
    """The calls that a layer makes for a micro-batch, in every group along their axes."""

    forward: tuple[PredictedCall, ...] = ()
    backward: tuple[PredictedCall, ...] = ()
