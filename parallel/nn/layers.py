"""The layers of a transformer.

Beside the outputs, what backward needs is rounded to the model's dtype: the normalized vectors of
`LayerNorm` and the probabilities of `CausalAttention`.  An addition to a gradient is rounded before
and after.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from parallel.nn.functional import (
    Array,
    cast,
    causal_softmax,
    flatten_rows,
    matmul,
    mean_of,
    namespace_of,
    one_hot,
    sum_rows,
    transpose,
    upcast,
)
from parallel.nn.int8 import check_int8, int8_matmul
from parallel.nn.layer import Activations, ArraySpec, Layer, ParameterSpec, Step
from parallel.placement import Shape


class Embedding(Layer):
    """Add a vector for each token and a vector for its position.

    Tokens, integers (batch, up to `context`), become vectors (batch, tokens, `dim`).  `forward`
    raises ValueError if a row, of which ranks may have parts, has more tokens than there are
    positions.
    """

    context: int

    def __init__(self, vocab_size: int, context: int, dim: int) -> None:
        super().__init__()
        self.vocab_size, self.context, self.dim = vocab_size, context, dim

    def specs(self) -> dict[str, ParameterSpec]:
        shapes = {"token": (self.vocab_size, self.dim), "position": (self.context, self.dim)}
        return {name: ParameterSpec(shape, std=0.1) for name, shape in shapes.items()}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.check(x, step)
        xp = namespace_of(x)
        rows = xp.take(self.value["token"], xp.reshape(x, (-1,)), axis=0)
        at = positions_of(step, x)
        vectors = xp.reshape(rows, (*x.shape, self.dim)) + self.value["position"][at]
        return vectors, (x, at)

    def check(self, x: Array, step: Step) -> None:
        """Raise ValueError unless there are positions for all tokens, and all are known."""
        self.check_length(max(x.shape[1], step.context))
        check_classes("token", step.on_host(x), self.vocab_size)

    def check_length(self, length: int) -> None:
        """Raise ValueError unless there are positions for `length` tokens of a row."""
        if length > self.context:
            raise ValueError(f"{length} tokens in a row, but positions for {self.context} only")

    def check_input(self, x: ArraySpec) -> None:
        self.check_length(x.context)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return None as the derivative: tokens have none."""
        return None, (*saved, dy)

    def backward_weight(self, rest: Any) -> None:
        tokens, at, dy = rest
        # A product with a one-hot matrix adds in one fixed order, on a GPU too, and is part of the
        # array API; a scattered addition is neither.
        xp = namespace_of(dy)
        selected = self._selected(tokens, dy.dtype)
        self.gradient["token"] += matmul(selected.T, flatten_rows(dy))
        over_batch = xp.sum(upcast(dy), axis=0)
        self.gradient["position"][at] += cast(over_batch, dy.dtype)

    def _selected(self, tokens: Array, dtype: Any) -> Array:
        """Return a matrix with a row for each token, which has a one in its column."""
        return one_hot(tokens.reshape(-1), self.vocab_size, dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        vectors = x.of_shape(*x.shape, self.dim)
        return Activations(0, vectors, rest=vectors.nbytes, is_dy_in_rest=True)


def positions_of(step: Step, x: Array) -> Any:
    """Return the index of the positions of the tokens `x` (rows, length), on their device."""
    return slice(x.shape[1]) if step.positions is None else namespace_of(x).asarray(step.positions)


def flat_matrix(weight: Array) -> Array:
    """Return a weight of several dimensions as a matrix with the rows of the first."""
    return weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))


class Linear(Layer):
    """Return ``x @ weight + bias``: (..., `in_features`) becomes (..., `out_features`).

    `out_features` may be several dimensions of the weight, such as (3, heads, width), so that one
    of them can be divided; the output has their product.  The initial weights have standard
    deviation `gain` / sqrt(`in_features`); biases begin at 0.

    With `int8`, ``"rowwise"`` or ``"tensorwise"``, forward multiplies in 8-bit integers with such
    scales (`parallel.nn.int8`); backward multiplies in the layer's dtype, as if forward had too.
    Raises ValueError for another word, and for so many `in_features` that a sum may overflow.

    Attributes
    ----------
    first_out_dims : dict of str to int
        The dimension of each parameter that is the first one of the output.
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

    The table may be that of the embedding, if the model ties them (Press & Wolf 2017).
    """

    first_out_dims: ClassVar[dict[str, int]] = {"table": 0}

    def __init__(self, dim: int, vocab_size: int, *, int8: str | None = None) -> None:
        super().__init__(dim, vocab_size, int8=int8)

    def specs(self) -> dict[str, ParameterSpec]:
        # Small: the first loss is that of a uniform distribution, and its gradients are moderate.
        shape, std = (self.out_features, self.in_features), 0.1 / math.sqrt(self.in_features)
        return {"table": ParameterSpec(shape, std)}

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return self.product(x), x

    def backward_weight(self, rest: Any) -> None:
        x, dys = rest
        self.gradient["table"] += matmul(dys.T, flatten_rows(x))

    def _weight(self) -> Array:
        return self.value["table"].T


class Gelu(Layer):
    """The Gaussian error linear unit in its tanh form, element by element.

    x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Hendrycks & Gimpel 2016.
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


class LayerNorm(Layer):
    """Normalize vectors (..., `dim`) to mean 0 and variance 1, then apply gain and bias.

    Along the axes `partial` of a mesh, ranks have different vectors.  Ba et al. 2016.
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


class CausalAttention(Layer):
    """Multi-head attention of each position to itself and to those before it.

    Queries, keys and values side by side, (batch, context, 3 dim), become (batch, context, dim).
    Each of `num_heads` heads has dim / `num_heads` of the elements; or `width`, if ranks divide the
    heads, so that dim differs.  `forward` raises ValueError if the input does not consist of whole
    heads.  Vaswani et al. 2017.
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
        probabilities = cast(self._probabilities(scores), x.dtype)
        return self._join(matmul(probabilities, v)), (x, probabilities)

    def _probabilities(self, scores: Array) -> Array:
        """Return how much each position attends to each, from `scores` (..., context, context)."""
        return causal_softmax(scores)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self._backward(dy, saved)[0], None

    def _backward(self, dy: Array, saved: Any) -> tuple[Array, Array]:
        """Return the derivatives by the input, and by the products of queries and keys."""
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
        """Return queries, keys and values, each (batch, heads, context, dim / heads)."""
        width = self._width(x.shape[-1])
        parts = x.reshape(*x.shape[:2], 3, x.shape[-1] // (3 * width), width)
        q, k, v = namespace_of(x).permute_dims(parts, (2, 0, 3, 1, 4))
        return q, k, v

    def _width(self, size: int) -> int:
        """Return the elements of a head, if queries, keys and values have this `size`."""
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


class CrossEntropy(Layer):
    """The loss, the last layer of a model that is trained: the mean of -log p(target), in nats.

    Logits (..., classes) become the sum over the targets of this micro-batch, divided by the number
    of targets in the *whole* batch: the losses of all parts of a batch add up to its mean.  The
    derivative is computed during forward, with the loss scale.  Raises ValueError if a target is
    not a class.
    """

    saves_input = False

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        xp = namespace_of(x)
        flat, targets = upcast(flatten_rows(x)), xp.reshape(step.targets, (-1,))
        check_classes("target", step.on_host(step.targets), flat.shape[-1])
        shifted = flat - xp.max(flat, axis=-1, keepdims=True)
        powers = xp.exp(shifted)
        sums = xp.sum(powers, axis=-1, keepdims=True)
        truth = one_hot(targets, flat.shape[-1], flat.dtype)
        loss = xp.sum(xp.log(sums) - xp.sum(chosen(truth, shifted), axis=-1, keepdims=True))
        dlogits = (powers / sums - truth) * (step.loss_scale / step.total)
        return mean_of(loss, step.total), cast(dlogits, x.dtype).reshape(x.shape)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return the derivative by the logits; `dy` is a number, 1 if the loss comes last."""
        if dy == 1:
            return namespace_of(saved).positive(saved), None  # a copy
        return cast(upcast(saved) * dy, saved.dtype), None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(x.nbytes, x.of_shape())


def chosen(truth: Array, values: Array) -> Array:
    """Return `values` where `truth` is 1, and 0 elsewhere, even where a value is infinite."""
    xp = namespace_of(values)
    return xp.where(truth == 1, values, xp.zeros_like(values))


def check_classes(what: str, classes: np.ndarray[Any, Any], num_classes: int) -> None:
    """Raise ValueError unless all `classes`, integers, are at least 0 and below `num_classes`."""
    for extreme in (np.min, np.max) if classes.size else ():
        if not 0 <= (found := float(extreme(classes))) < num_classes:
            raise ValueError(f"a {what} is {found:.0f}: there are classes 0 to {num_classes - 1}")
