"""Linear layers, with a weight and a bias or with the table of an embedding."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from parallel.mesh import Shape
from parallel.nn.functional import Array, cast, flatten_rows, matmul, sum_rows, upcast
from parallel.nn.layer import Activations, ArraySpec, Layer, ParameterSpec, Step
from parallel.nn.plain.int8 import check_int8, int8_matmul


class Linear(Layer):
    """Return ``x @ weight + bias``: (..., `in_features`) becomes (..., `out_features`).

    Parameters
    ----------
    in_features : int
        The width of the input.
    out_features : int or tuple of int
        The width of the output.  It may be several dimensions of the weight, such as (3, heads,
        width), so that ranks can divide one of them; the output has their product.
    gain : float
        The initial weights have the standard deviation `gain` / sqrt(`in_features`).  Biases begin
        at 0.
    int8 : str, optional
        ``"rowwise"`` or ``"tensorwise"``: forward multiplies in 8-bit integers with such scales
        (`parallel.nn.plain.int8`).  Backward multiplies in the layer's dtype, as if forward did.

    Raises
    ------
    ValueError
        If `int8` is another word, or a sum of so many `in_features` may overflow.

    Attributes
    ----------
    first_out_dims : dict of str to int
        The dimension of every parameter that is the first dimension of the output.
    """

    first_out_dims: ClassVar[dict[str, int]] = {"weight": 1, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int | Shape,
        gain: float = 1.0,
        *,
        int8: str | None = None,
    ) -> None:
        super().__init__()
        check_int8(int8, in_features)
        self.in_features, self.gain, self.int8 = in_features, gain, int8
        self.out_shape = (out_features,) if isinstance(out_features, int) else out_features
        self.out_features = math.prod(self.out_shape)

    def specs(self) -> dict[str, ParameterSpec]:
        shape, std = (self.in_features, *self.out_shape), self.gain / math.sqrt(self.in_features)
        return {"weight": ParameterSpec(shape, std), "bias": ParameterSpec(self.out_shape)}

    def config(self) -> list[Any]:
        return [*super().config(), self.int8 or ""]

    def product(self, x: Array) -> Array:
        """Return ``x @ weight``, rounded to the dtype of `x`."""
        y = self._product(x)
        return cast(y, x.dtype).reshape(*x.shape[:-1], y.shape[-1])

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        y = self._product(x) + upcast(self.value["bias"].reshape(-1))
        return cast(y, x.dtype).reshape(*x.shape[:-1], y.shape[-1]), x

    def _product(self, x: Array) -> Array:
        """Return ``x @ weight`` as a matrix, before it is rounded."""
        rows, weight = upcast(flatten_rows(x)), upcast(self._weight())
        return rows @ weight if self.int8 is None else int8_matmul(rows, weight, self.int8)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dys = flatten_rows(dy)
        return matmul(dys, self._weight().T).reshape(saved.shape), (saved, dys)

    def backward_weight(self, rest: Any) -> None:
        x, dys = rest
        gradient = flat_matrix(self.gradient["weight"])
        gradient += matmul(flatten_rows(x).T, dys)
        bias = self.gradient["bias"].reshape(-1)
        bias += sum_rows(dys)

    def _weight(self) -> Array:
        return flat_matrix(self.value["weight"])

    def activation_bytes(self, x: ArraySpec) -> Activations:
        made = x.of_shape(*x.shape[:-1], self.out_features)
        rest = x.nbytes + made.nbytes
        return Activations(x.nbytes, made, rest, is_input_in_rest=True, is_dy_in_rest=True)


class Unembedding(Linear):
    """Return the products of vectors (..., `dim`) with a table's rows: logits (..., `vocab_size`).

    The table may be the table of the embedding, if the model ties them (Press & Wolf 2017).

    Parameters
    ----------
    dim, vocab_size : int
        The width of the vectors, and the number of logits.
    int8 : str, optional
        As in `Linear`.
    """

    first_out_dims: ClassVar[dict[str, int]] = {"table": 0}

    def __init__(self, dim: int, vocab_size: int, *, int8: str | None = None) -> None:
        super().__init__(dim, vocab_size, int8=int8)

    def specs(self) -> dict[str, ParameterSpec]:
        # Small, so that the first loss is that of a uniform distribution, with moderate gradients.
        shape, std = (self.out_features, self.in_features), 0.1 / math.sqrt(self.in_features)
        return {"table": ParameterSpec(shape, std)}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return self.product(x), x

    def backward_weight(self, rest: Any) -> None:
        x, dys = rest
        self.gradient["table"] += matmul(dys.T, flatten_rows(x))

    def _weight(self) -> Array:
        return self.value["table"].T


def flat_matrix(weight: Array) -> Array:
    """Return a weight of several dimensions as a matrix with the rows of the first."""
    return weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
