"""Layers with an explicit forward and backward pass, and models built of them.

A layer is two functions: ``y, saved = forward(x)`` and ``dx = backward(dy, saved)``, where ``dx``
is the derivative of the loss with respect to ``x``.  `backward` *adds* to the gradients of the
layer's parameters, so that micro-batches accumulate.  What `backward` needs from the forward pass
is returned in ``saved`` and passed back, not stored in the layer, so that several batches may be
in progress.  Arrays are NumPy's or CuPy's; each function takes the array namespace of its input.

A layer owns no memory.  It states which parameters it has (`Layer.specs`) and is given views to
work on (`Layer.bind`).  All parameters of one named layer of a model form one flat parameter, a
1-d array called a *unit* as in PyTorch's FSDP, and so do their gradients: a unit is sent without
packing.

Two-byte dtypes (float16, bfloat16) are used for storage and communication.  Every function
computes with them in float32 and rounds its result once, as the matrix units of a GPU do.  Two
intermediate results are rounded as well, because `backward` needs them: the normalized vectors of
`LayerNorm` and the probabilities of `CausalAttention`.  An addition to a gradient is rounded
before and after.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import array_namespace

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray; the array API has no type to name
Shape: TypeAlias = tuple[int, ...]


class ParameterSpec(NamedTuple):
    """A parameter before it is allocated: its shape and the normal distribution of its values.

    Attributes
    ----------
    shape : tuple of int
    std, mean : float
        Of the initial values.
    """

    shape: Shape
    std: float = 0.0
    mean: float = 0.0

    def draw(self, seed: int, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return initial values, float64 of `shape`: a function of `seed` and `name` alone."""
        rng = np.random.default_rng([seed, *name.encode()])
        return self.mean + self.std * rng.standard_normal(self.shape)


class Layer(ABC):
    """One differentiable function with parameters; the base class of all layers.

    A subclass defines `forward`, `backward` and `activation_bytes`, and `specs` if it has
    parameters.  Arrays may be NumPy's or CuPy's, of any dtype of `parallel.precision.DTYPES`.

    Attributes
    ----------
    value : dict of str to array
        The parameters, in the shapes of `specs`, as long as the layer is bound.
    gradient : dict of str to array
        The gradients, of the same shapes; empty if the layer is bound for forward only.
    """

    def __init__(self) -> None:
        self.value: dict[str, Array] = {}
        self.gradient: dict[str, Array] = {}

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the parameters of this layer by name; none by default."""
        return {}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        """Read parameters from the arrays `values`, and add gradients to the arrays `gradients`.

        Both are views by name, of the shapes in `specs`.
        """
        self.value, self.gradient = values, gradients

    @abstractmethod
    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output for input `x`, and what `backward` needs."""

    @abstractmethod
    def backward(self, dy: Array, saved: Any) -> Array:
        """Return the derivative of the loss with respect to the input.

        `dy` is the derivative with respect to the output, of its shape and dtype; `saved` is what
        `forward` returned.  The derivatives with respect to the parameters are added to `gradient`.
        """

    @abstractmethod
    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        """Return the bytes of floating-point numbers in `saved`, and the shape of the output.

        The input has this `shape`, and its elements have `width` bytes.  An array that a previous
        layer saved and this one passes through is not counted again.
        """

    def config(self) -> list[Any]:
        """Return what must be equal on all ranks and is not visible in the parameters' shapes.

        The result consists of lists, strings and numbers; ranks compare its digest.
        """
        return [type(self).__name__]


class Embedding(Layer):
    """Add a vector for each token and a vector for its position.

    Tokens, integers (batch, up to `context`), become vectors (batch, tokens, `dim`).  `forward`
    raises ValueError if a row has more tokens than there are positions.
    """

    def __init__(self, vocab_size: int, context: int, dim: int) -> None:
        super().__init__()
        self.vocab_size, self.context, self.dim = vocab_size, context, dim

    def specs(self) -> dict[str, ParameterSpec]:
        shapes = {"token": (self.vocab_size, self.dim), "position": (self.context, self.dim)}
        return {name: ParameterSpec(shape, std=0.1) for name, shape in shapes.items()}

    def forward(self, x: Array) -> tuple[Array, Any]:
        if x.shape[1] > self.context:
            raise ValueError(f"{x.shape[1]} tokens in a row, but positions for {self.context} only")
        xp = array_namespace(x)
        rows = xp.take(self.value["token"], xp.reshape(x, (-1,)), axis=0)
        return xp.reshape(rows, (*x.shape, self.dim)) + self.value["position"][: x.shape[1]], x

    def backward(self, dy: Array, saved: Any) -> Array:
        """Add each vector's derivative to the row of its token.  Return None: tokens have none.

        A product with a one-hot matrix adds in one fixed order, on a GPU too, and is part of the
        array API; a scattered addition is neither.
        """
        xp = array_namespace(dy)
        selected = one_hot(xp.reshape(saved, (-1,)), self.vocab_size, dy.dtype)
        self.gradient["token"] += matmul(selected.T, flatten_rows(dy))
        over_batch = xp.sum(upcast(dy), axis=0)
        self.gradient["position"][: dy.shape[1]] += cast(over_batch, dy.dtype)
        return None

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return 0, (*shape, self.dim)  # the tokens are integers


class Linear(Layer):
    """Return ``x @ weight + bias``: (..., `in_features`) becomes (..., `out_features`).

    The initial weights have standard deviation `gain` / sqrt(`in_features`); biases begin at 0.
    """

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0) -> None:
        super().__init__()
        self.in_features, self.out_features, self.gain = in_features, out_features, gain

    def specs(self) -> dict[str, ParameterSpec]:
        shape, std = (self.in_features, self.out_features), self.gain / math.sqrt(self.in_features)
        return {"weight": ParameterSpec(shape, std), "bias": ParameterSpec((self.out_features,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        y = upcast(flatten_rows(x)) @ upcast(self.value["weight"]) + upcast(self.value["bias"])
        return cast(y, x.dtype).reshape(*x.shape[:-1], self.out_features), x

    def backward(self, dy: Array, saved: Any) -> Array:
        dys = flatten_rows(dy)
        self.gradient["weight"] += matmul(flatten_rows(saved).T, dys)
        self.gradient["bias"] += sum_rows(dys)
        return matmul(dys, self.value["weight"].T).reshape(saved.shape)

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), (*shape[:-1], self.out_features)


class Unembedding(Layer):
    """Return the products of vectors (..., `dim`) with a table's rows: logits (..., `vocab_size`).

    The table may be that of the embedding, if the model ties them (Press & Wolf 2017).
    """

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__()
        self.dim, self.vocab_size = dim, vocab_size

    def specs(self) -> dict[str, ParameterSpec]:
        # Small: the first loss is that of a uniform distribution, and its gradients are moderate.
        return {"table": ParameterSpec((self.vocab_size, self.dim), std=0.1 / math.sqrt(self.dim))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        logits = matmul(flatten_rows(x), self.value["table"].T)
        return logits.reshape(*x.shape[:-1], self.vocab_size), x

    def backward(self, dy: Array, saved: Any) -> Array:
        dys = flatten_rows(dy)
        self.gradient["table"] += matmul(dys.T, flatten_rows(saved))
        return matmul(dys, self.value["table"]).reshape(saved.shape)

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), (*shape[:-1], self.vocab_size)


class Gelu(Layer):
    """The Gaussian error linear unit in its tanh form, element by element.

    x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Hendrycks & Gimpel 2016.
    """

    SCALE = math.sqrt(2 / math.pi)
    CUBIC = 0.044715

    def forward(self, x: Array) -> tuple[Array, Any]:
        return cast(0.5 * upcast(x) * (1 + self._tanh(upcast(x))), x.dtype), x

    def backward(self, dy: Array, saved: Any) -> Array:
        x = upcast(saved)
        tanh = self._tanh(x)
        inner = self.SCALE * (1 + 3 * self.CUBIC * x * x)
        return cast(dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner), dy.dtype)

    def _tanh(self, x: Array) -> Array:
        return array_namespace(x).tanh(self.SCALE * x * (1 + self.CUBIC * x * x))

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), shape


class LayerNorm(Layer):
    """Normalize vectors (..., `dim`) to mean 0 and variance 1, then apply gain and bias.

    Ba et al. 2016.
    """

    EPSILON = 1e-5

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def specs(self) -> dict[str, ParameterSpec]:
        return {"gain": ParameterSpec((self.dim,), mean=1.0), "bias": ParameterSpec((self.dim,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        xp = array_namespace(x)
        centered = upcast(x) - xp.mean(upcast(x), axis=-1, keepdims=True)
        variance = xp.mean(centered * centered, axis=-1, keepdims=True)
        inverse = 1 / xp.sqrt(variance + self.EPSILON)
        normalized = cast(centered * inverse, x.dtype)
        y = upcast(normalized) * upcast(self.value["gain"]) + upcast(self.value["bias"])
        return cast(y, x.dtype), (normalized, inverse)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Return the derivative; its subtracted means are those of the mean and of the variance."""
        xp = array_namespace(dy)
        normalized, inverse = upcast(saved[0]), saved[1]
        self.gradient["gain"] += cast(sum_rows(flatten_rows(dy * normalized)), dy.dtype)
        self.gradient["bias"] += sum_rows(flatten_rows(dy))
        d = upcast(dy) * upcast(self.value["gain"])
        along = normalized * xp.mean(d * normalized, axis=-1, keepdims=True)
        return cast(inverse * (d - xp.mean(d, axis=-1, keepdims=True) - along), dy.dtype)

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape) + max(width, 4) * math.prod(shape[:-1]), shape


class CausalAttention(Layer):
    """Multi-head attention of each position to itself and to those before it.

    Queries, keys and values side by side, (batch, context, 3 dim), become (batch, context, dim).
    Each of `num_heads` heads has dim / `num_heads` of the elements.  Vaswani et al. 2017.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def config(self) -> list[Any]:
        return [*super().config(), self.num_heads]

    def forward(self, x: Array) -> tuple[Array, Any]:
        q, k, v = self._split(x)
        scores = upcast(q) @ transpose(upcast(k)) * self._scale(q)
        probabilities = cast(causal_softmax(scores), x.dtype)
        return self._join(matmul(probabilities, v)), (x, probabilities)

    def backward(self, dy: Array, saved: Any) -> Array:
        x, probabilities = saved
        (q, k, v), xp = self._split(x), array_namespace(x)
        dy = xp.permute_dims(dy.reshape(*dy.shape[:2], *q.shape[1::2]), (0, 2, 1, 3))
        dscores = upcast(dy) @ transpose(upcast(v))
        dscores -= xp.sum(dscores * probabilities, axis=-1, keepdims=True)
        dscores *= upcast(probabilities) * self._scale(q)
        dq, dk = dscores @ upcast(k), transpose(dscores) @ upcast(q)
        dv = transpose(upcast(probabilities)) @ upcast(dy)
        return xp.concat([cast(self._join(part), x.dtype) for part in (dq, dk, dv)], axis=-1)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Return queries, keys and values, each (batch, heads, context, dim / heads)."""
        width = x.shape[-1] // (3 * self.num_heads)
        parts = x.reshape(*x.shape[:2], 3, self.num_heads, width)
        q, k, v = array_namespace(x).permute_dims(parts, (2, 0, 3, 1, 4))
        return q, k, v

    def _join(self, y: Array) -> Array:
        """Put the heads side by side again: (batch, context, dim)."""
        batch, heads, context, width = y.shape
        xp = array_namespace(y)
        return xp.permute_dims(y, (0, 2, 1, 3)).reshape(batch, context, heads * width)

    @staticmethod
    def _scale(q: Array) -> float:
        return float(1 / math.sqrt(q.shape[-1]))

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        batch, context, dim = shape
        num_probabilities = batch * self.num_heads * context * context
        return width * (math.prod(shape) + num_probabilities), (batch, context, dim // 3)


class Sequential(Layer):
    """Named layers that run one after the other.

    Parameter ``weight`` of the layer ``up`` has the name ``up.weight`` here.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.layers = dict(layers)

    def specs(self) -> dict[str, ParameterSpec]:
        inner = ((name, layer.specs()) for name, layer in self.layers.items())
        return {f"{name}.{key}": spec for name, specs in inner for key, spec in specs.items()}

    def config(self) -> list[Any]:
        inner = [[name, *layer.config()] for name, layer in self.layers.items()]
        return [*super().config(), inner]

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        for name, layer in self.layers.items():
            layer.bind(entries_of(values, name), entries_of(gradients, name))

    def forward(self, x: Array) -> tuple[Array, Any]:
        saved_by_layer = []
        for layer in self.layers.values():
            x, saved = layer.forward(x)
            saved_by_layer.append(saved)
        return x, saved_by_layer

    def backward(self, dy: Array, saved: Any) -> Array:
        for layer, layer_saved in zip(reversed(self.layers.values()), reversed(saved), strict=True):
            dy = layer.backward(dy, layer_saved)
        return dy

    def activation_bytes(self, shape: Shape, width: int) -> tuple[int, Shape]:
        total = 0
        for layer in self.layers.values():
            nbytes, shape = layer.activation_bytes(shape, width)
            total += nbytes
        return total, shape


class Residual(Sequential):
    """Layers one after the other, whose result is added to their input.  He et al. 2016."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, saved = super().forward(x)
        return x + y, saved

    def backward(self, dy: Array, saved: Any) -> Array:
        return dy + super().backward(dy, saved)


class Model:
    """Named layers that run one after the other, and the flat parameters they work on.

    The model allocates nothing: a strategy allocates the flat parameter of each layer (its unit)
    and binds the layer to it.

    Parameters
    ----------
    layers : mapping of str to Layer
        In the order in which forward runs them.
    ties : mapping of str to str, optional
        Parameters that are those of another layer: ``{"head.out.table": "embedding.token"}``.  The
        layer on the left then uses two units, and the gradient of a unit is complete when backward
        has passed the first layer that uses it.

    Raises
    ------
    ValueError
        If a tie names a parameter that does not exist, two of different shapes, or one that is
        tied itself.

    Attributes
    ----------
    layers, ties : dict
        As given.
    units : dict of str to (dict of str to ParameterSpec)
        For each layer with parameters of its own: their specifications, in their order in the unit.
    unit_sizes : dict of str to int
        The number of elements of each unit.

    Examples
    --------
    >>> from parallel.nn import Linear, Model
    >>> model = Model({"first": Linear(4, 8), "second": Linear(8, 2)})
    >>> model.unit_sizes
    {'first': 40, 'second': 18}
    """

    def __init__(self, layers: Mapping[str, Layer], ties: Mapping[str, str] | None = None) -> None:
        self.layers, self.ties = dict(layers), dict(ties or {})
        self._check_ties()
        named = {name: self._own_specs(name) for name in self.layers}
        self.units = {name: specs for name, specs in named.items() if specs}
        self.unit_sizes = {unit: num_elements(specs) for unit, specs in self.units.items()}
        self._units_of = {name: self._find_units(name) for name in self.layers}
        self.bound_to: object = None  # the parameters of the strategy that made the last step

    def _check_ties(self) -> None:
        shapes = {
            f"{name}.{key}": spec.shape
            for name, layer in self.layers.items() for key, spec in layer.specs().items()
        }  # fmt: skip
        for here, there in self.ties.items():
            if there in self.ties or here not in shapes or shapes[here] != shapes.get(there):
                raise ValueError(
                    f"{here!r} cannot be tied to {there!r}: both must exist, have the same shape,"
                    " and the second must not be tied itself"
                )

    def _own_specs(self, layer: str) -> dict[str, ParameterSpec]:
        specs = self.layers[layer].specs()
        return {key: spec for key, spec in specs.items() if f"{layer}.{key}" not in self.ties}

    def _find_units(self, layer: str) -> tuple[str, ...]:
        tied = [there for here, there in self.ties.items() if here.startswith(f"{layer}.")]
        units = [layer, *(there.partition(".")[0] for there in tied)]
        return tuple(dict.fromkeys(unit for unit in units if unit in self.units))

    @property
    def num_parameters(self) -> int:
        """The number of elements of all units."""
        return sum(self.unit_sizes.values())

    def units_of(self, layer: str | None) -> tuple[str, ...]:
        """Return the units a layer computes with: its own and those it is tied to.

        There are none for None.
        """
        return () if layer is None else self._units_of[layer]

    def completed_units(self, layer: str) -> tuple[str, ...]:
        """Return the units whose gradients are complete once backward has passed `layer`."""
        previous = self.previous_layer(layer)
        earlier = () if previous is None else self.units_until(previous)
        return tuple(unit for unit in self.units_of(layer) if unit not in earlier)

    def units_until(self, layer: str) -> list[str]:
        """Return the units that `layer` and the layers before it use, each once."""
        names = [*self._layers_before(layer), layer]
        return list(dict.fromkeys(unit for name in names for unit in self.units_of(name)))

    def previous_layer(self, layer: str) -> str | None:
        """Return the layer that runs before `layer`; None for the first."""
        return next(reversed(self._layers_before(layer)), None)

    def next_layer(self, layer: str) -> str | None:
        """Return the layer that runs after `layer`; None for the last."""
        return next(iter(list(self.layers)[len(self._layers_before(layer)) + 1 :]), None)

    def _layers_before(self, layer: str) -> list[str]:
        names = list(self.layers)
        return names[: names.index(layer)]

    def num_gathers(self) -> dict[str, int]:
        """Return how often each unit is gathered in a pass that keeps two adjacent layers' units.

        A unit that several layers use is gathered again for each of them, unless they are adjacent.
        """
        times = dict.fromkeys(self.units, 0)
        for layer in self.layers:
            for unit in set(self.units_of(layer)) - set(self.units_of(self.previous_layer(layer))):
                times[unit] += 1
        return times

    def active_layers(self) -> list[str]:
        """Return the layers that the next forward pass runs: all.  A subclass may skip some."""
        return list(self.layers)

    def draw(self, unit: str, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the initial values of a unit: 1-d float64 in host memory.

        They are a function of `seed` and of the names and shapes of the parameters.
        """
        specs = self.units[unit]
        drawn = (spec.draw(seed, f"{unit}.{key}").ravel() for key, spec in specs.items())
        return np.concatenate(list(drawn))

    def bind(
        self, layer: str, values: Mapping[str, Array], gradients: Mapping[str, Array] | None = None
    ) -> None:
        """Let a `layer` work on flat arrays: `values` and `gradients`, by unit.

        Without gradients the layer can run forward only.
        """
        views = self._views(layer, values), self._views(layer, gradients or {})
        self.layers[layer].bind(*views)

    def unbind(self, layer: str) -> None:
        """Remove a layer's arrays, so that it cannot use memory that has been freed."""
        self.layers[layer].bind({}, {})

    def _views(self, layer: str, flats: Mapping[str, Array]) -> dict[str, Array]:
        views = split_flat(flats[layer], self.units[layer]) if layer in flats else {}
        for here, there in self.ties.items():
            unit, _, key = there.partition(".")
            if here.startswith(f"{layer}.") and unit in flats:
                view = split_flat(flats[unit], self.units[unit])[key]
                views[here.removeprefix(f"{layer}.")] = view
        return views

    def named(self, flats: Mapping[str, Array]) -> dict[str, Array]:
        """Return views of the parameters in `flats`, given by unit, by name and in their shapes.

        The names are those of a `Model`: ``block0.mlp.up.weight``.
        """
        return {
            f"{unit}.{key}": view
            for unit, specs in self.units.items()
            for key, view in split_flat(flats[unit], specs).items()
        }

    def activation_bytes(self, shape: Shape, width: int) -> dict[str, tuple[int, int]]:
        """Return for each layer the bytes that forward saves, and the bytes of the layer's input.

        The input of the model is tokens of `shape` (batch, context); floating-point numbers have
        `width` bytes.  Integers are not counted.
        """
        found, entering = {}, 0  # the tokens are integers
        for name, layer in self.layers.items():
            nbytes, shape = layer.activation_bytes(shape, width)
            found[name] = nbytes, entering
            entering = width * math.prod(shape)
        return found


def cross_entropy(
    logits: Array, targets: Array, total: int, scale: float = 1.0
) -> tuple[float, Array]:
    """Return the cross-entropy loss, and `scale` times its derivative with respect to `logits`.

    Parameters
    ----------
    logits : array, (..., classes)
    targets : array of int, (...)
        The right classes.
    total : int
        The number of targets in the *whole* batch, by which the sum over these targets is divided:
        the losses of any parts of a batch then add up to the mean over all of it.
    scale : float
        The loss scale.

    Returns
    -------
    loss : float
        In nats.
    dlogits : array
        Of the shape and dtype of `logits`.
    """
    xp = array_namespace(logits)
    flat = upcast(flatten_rows(logits))
    shifted = flat - xp.max(flat, axis=-1, keepdims=True)
    powers = xp.exp(shifted)
    sums = xp.sum(powers, axis=-1, keepdims=True)
    truth = one_hot(xp.reshape(targets, (-1,)), flat.shape[-1], flat.dtype)
    loss = xp.sum(xp.log(sums) - xp.sum(truth * shifted, axis=-1, keepdims=True))
    dlogits = (powers / sums - truth) * (scale / total)
    return float(loss) / total, cast(dlogits, logits.dtype).reshape(logits.shape)


def causal_softmax(scores: Array) -> Array:
    """Return the softmax over the last axis; row i of the axis before it uses columns 0 to i."""
    xp = array_namespace(scores)
    position = xp.arange(scores.shape[-1], device=scores.device)
    is_seen = position[:, None] >= position[None, :]
    scores = xp.where(is_seen, scores, xp.asarray(-math.inf, dtype=scores.dtype))
    powers = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


def one_hot(classes: Array, num_classes: int, dtype: Any) -> Array:
    """Return a matrix (rows, `num_classes`) with a one in each row, for integers (rows,)."""
    xp = array_namespace(classes)
    columns = xp.arange(num_classes, device=classes.device)
    return (classes[:, None] == columns[None, :]).astype(dtype)


# Two-byte dtypes


def upcast(x: Array) -> Array:
    """Return `x` in the dtype to compute in: float32 for two-byte dtypes, else unchanged."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def cast(x: Array, dtype: Any) -> Array:
    """Return `x` in this dtype, without a copy if it has it."""
    return x.astype(dtype) if x.dtype != dtype else x


def matmul(a: Array, b: Array) -> Array:
    """Return ``a @ b``, rounded once to the dtype of `a`."""
    return cast(upcast(a) @ upcast(b), a.dtype)


def sum_rows(x: Array) -> Array:
    """Return the sum over axis 0, rounded once to the dtype of `x`."""
    return cast(array_namespace(x).sum(upcast(x), axis=0), x.dtype)


# Shapes and memory


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """Return a NumPy array: a copy in host memory if `array` is on a device."""
    host: np.ndarray[Any, Any] = array.get() if hasattr(array, "get") else array
    return host


def flatten_rows(x: Array) -> Array:
    """Return `x` (..., n) as (rows, n)."""
    return x.reshape(-1, x.shape[-1])


def transpose(x: Array) -> Array:
    """Return `x` with its last two axes exchanged."""
    return array_namespace(x).matrix_transpose(x)


def entries_of(arrays: dict[str, Array], layer: str) -> dict[str, Array]:
    """Return the entries of one layer, ``layer.*``, without the prefix."""
    prefix = f"{layer}."
    return {key.removeprefix(prefix): a for key, a in arrays.items() if key.startswith(prefix)}


def num_elements(specs: Mapping[str, ParameterSpec]) -> int:
    """Return how many elements these parameters have together."""
    return sum(math.prod(spec.shape) for spec in specs.values())


def split_flat(flat: Array, specs: Mapping[str, ParameterSpec]) -> dict[str, Array]:
    """Return consecutive views of a 1-d array, one for each parameter, in its shape."""
    views, start = {}, 0
    for name, spec in specs.items():
        stop = start + math.prod(spec.shape)
        views[name] = flat[start:stop].reshape(spec.shape)
        start = stop
    return views
