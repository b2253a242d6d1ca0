"""Linear layers of which every rank has some columns or some rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from parallel.mesh import Shape, Split, length
from parallel.nn.functional import Array, cast, namespace_of, upcast
from parallel.nn.layer import Activations, ArraySpec, Layer, LayerTraffic, ParameterSpec, Step
from parallel.nn.plain import Linear
from parallel.nn.tensor.region import Whole, gathered

Splits: TypeAlias = Mapping[str, tuple[Split, ...]]


class Columns(Layer):
    """A linear layer of which every rank computes some columns: `f`, then its part of the product.

    In `backward`, the product for the gradient of the weights is computed while `f` backward sums
    the derivative of the input over ranks.  (`Step.add_wait` gets the time that this rank waits for
    the sum.)  The two halves of backward do this one after the other, with the same bits.

    Parameters
    ----------
    linear : Linear
        The whole layer, such as an `Unembedding`.  If it multiplies in 8 bits with a scale for
        every column, the scales are those of one rank.  With one scale for a matrix, every rank has
        a scale for its part.
    region : Whole
        The ranks, and what they have outside.
    dim : int
        The dimension of the linear layer's `out_shape` that ranks divide, as evenly as possible.
    is_gathered : bool
        Whether every rank gets all columns: the simplest model parallelism, with an all-gather of
        the outputs forward and an all-reduce of the derivatives of the inputs backward.

    Raises
    ------
    ValueError
        If the output has no dimension `dim`.
    """

    def __init__(
        self, linear: Linear, region: Whole, dim: int = 0, *, is_gathered: bool = False
    ) -> None:
        super().__init__()
        if not 0 <= dim < len(linear.out_shape):
            raise ValueError(f"dim is {dim}: the output has the shape {linear.out_shape}")
        self.linear, self.region, self.dim = linear, region, dim
        self.is_gathered = is_gathered
        self.saves_input = region.keeps_input

    def specs(self) -> dict[str, ParameterSpec]:
        firsts = self.linear.first_out_dims
        splits = {name: ((first + self.dim, self.region.axis),) for name, first in firsts.items()}
        return with_splits(self.linear.specs(), splits)

    def config(self) -> list[Any]:
        return [*self.linear.config(), *self.region.config(), self.dim, self.is_gathered]

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        self.linear.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        entered = self.region.f(x, step.length)
        y, _ = self.linear.forward(entered, step)
        kept = self.region.kept(x, entered)
        return self._gather(y) if self.is_gathered else y, (kept, step)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, rest = self._own_backward_input(dy, saved)
        return saved[1].overlap(self.region.start_f_backward(dx), lambda: None), rest

    def backward(self, dy: Array, saved: Any) -> Array:
        """Sum the derivative of the input while the gradient of the weights is computed."""
        dx, rest = self._own_backward_input(dy, saved)
        return saved[1].overlap(
            self.region.start_f_backward(dx), lambda: self.linear.backward_weight(rest)
        )

    def _own_backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return this rank's part of the sum that is dx, and what `backward_weight` needs."""
        kept, step = saved
        entered = self.region.kept_again(kept, step.length)
        return self.linear.backward_input(self._own(dy) if self.is_gathered else dy, entered)

    def backward_weight(self, rest: Any) -> None:
        self.linear.backward_weight(rest)

    def _gather(self, y: Array) -> Array:
        """Return the columns of all ranks."""
        lead, region = y.shape[:-1], self.region
        parts = y.reshape(*lead, *self._shape_of())
        counts = region.counts(self.linear.out_shape[self.dim])
        whole = gathered(region.comm, parts, len(lead) + self.dim, counts, region.algorithm)
        return whole.reshape(*lead, self.linear.out_features)

    def _own(self, dy: Array) -> Array:
        """Return a copy of this rank's columns."""
        lead, shape = dy.shape[:-1], self.linear.out_shape
        mine = self.region.part(shape[self.dim])
        parts = dy.reshape(*lead, *shape)[(*[slice(None)] * (len(lead) + self.dim), mine)]
        return namespace_of(dy).asarray(parts, copy=True).reshape(*lead, self._width())

    def _shape_of(self, rank: int | None = None) -> Shape:
        """Return the shape of the columns of a `rank`, by default this one."""
        shape = list(self.linear.out_shape)
        shape[self.dim] = length(self.region.part(shape[self.dim], rank))
        return tuple(shape)

    def _width(self, rank: int | None = None) -> int:
        """Return the number of columns of a `rank`, by default this one."""
        return math.prod(self._shape_of(rank))

    def activation_bytes(self, x: ArraySpec) -> Activations:
        entered = self.region.entered(x)
        mine = entered.of_shape(*entered.shape[:-1], self._width(x.rank))
        whole = entered.of_shape(*entered.shape[:-1], self.linear.out_features)
        return Activations(
            self.region.kept_bytes(x),
            whole if self.is_gathered else mine,
            rest=entered.nbytes + mine.nbytes,
            is_input_in_rest=not self.region.gathers,
            is_dy_in_rest=not self.is_gathered,
        )

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, backward = self.region.f_traffic(x)
        if self.is_gathered:
            entered, shape = self.region.entered(x), self.linear.out_shape
            others = math.prod(entered.shape[:-1]) * self.linear.out_features // shape[self.dim]
            counts = tuple(others * n for n in self.region.counts(shape[self.dim]))
            forward = (*forward, self.region.call("all_gather", counts, entered))
        return LayerTraffic(forward, backward)


class Rows(Layer):
    """A linear layer of which every rank has some rows: its part of the product, then `g`.

    The input is divided as the rows are.  The bias is added once, to the sum.

    Parameters
    ----------
    linear : Linear
        The whole layer.  If it multiplies in 8 bits, every rank has scales for its part of a row or
        column, so that the result differs by rounding from the result of one rank.
    region : Whole
        The ranks, and what they have outside.
    block : int
        The number of rows that stay together when ranks divide the rows.  With the width of a head,
        ranks divide the heads.

    Raises
    ------
    ValueError
        If `block` does not divide the rows, or if the layer has no rows: `Unembedding` has none.
    """

    def __init__(self, linear: Linear, region: Whole, block: int = 1) -> None:
        super().__init__()
        if "weight" not in linear.first_out_dims:
            raise ValueError(f"{type(linear).__name__} has no weight whose rows ranks could divide")
        self.linear, self.region, self.block = linear, region, block
        self.specs()  # checks `block`

    def specs(self) -> dict[str, ParameterSpec]:
        return with_splits(self.linear.specs(), {"weight": ((0, self.region.axis, self.block),)})

    def config(self) -> list[Any]:
        return [*self.linear.config(), *self.region.config(), self.block]

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        self.linear.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        product = self.region.g(self.linear.product(x))
        y = upcast(product) + upcast(self.value["bias"].reshape(-1))
        return cast(y, x.dtype), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.linear.backward_input(self.region.g_backward(dy, saved.shape[1]), saved)

    def backward_weight(self, rest: Any) -> None:
        self.linear.backward_weight(rest)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = self.linear.activation_bytes(x)
        return inner._replace(
            out=self.region.left(inner.out), is_dy_in_rest=not self.region.gathers
        )

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        return self.region.g_traffic(self.linear.activation_bytes(x).out)


def with_splits(specs: Mapping[str, ParameterSpec], splits: Splits) -> dict[str, ParameterSpec]:
    """Return `specs` in which the parameters are divided as `splits` say, and others are whole."""
    return {name: replace(spec, splits=splits.get(name, ())) for name, spec in specs.items()}
