"""Layers with an explicit forward and backward, and the model built of them.

A layer is two functions: `y, saved = forward(x)` and `dx = backward(dy, saved)`, where `dx` is the
derivative of the loss by `x`.  `backward` *adds* to the layer's gradients, so that micro-batches
accumulate, and what it needs from the forward pass is handed out and back in (`saved`) instead of
kept, so that several batches may be under way.  Arrays are NumPy's or CuPy's; the array itself says
which, through its array namespace.

A layer owns no memory.  It states what parameters it has (`specs`) and is given views to work on
(`bind`).  The model lays the parameters of one named layer one after the other in one flat array,
and its gradients likewise, so that a layer travels as one array without any packing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import numpy as host

Array: TypeAlias = Any  # numpy.ndarray or cupy.ndarray; the array API has no type to name


class Spec(NamedTuple):
    """A parameter before it exists: its shape, and the normal distribution it is drawn from."""

    shape: tuple[int, ...]
    spread: float = 0.0
    centre: float = 0.0

    def draw(self, seed: int, name: str) -> np.ndarray[Any, Any]:
        """Float64 values of `shape`; a function of (seed, name) alone, whoever asks."""
        rng = np.random.default_rng([seed, *name.encode()])
        return self.centre + self.spread * rng.standard_normal(self.shape)


class Layer(ABC):
    """One differentiable function; see the module's docstring for the contract."""

    def __init__(self) -> None:
        self.value: dict[str, Array] = {}
        self.gradient: dict[str, Array] = {}

    def specs(self) -> dict[str, Spec]:
        """The parameters this layer needs, by name; none by default."""
        return {}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        """Take the arrays to read parameters from and to add gradients to."""
        self.value, self.gradient = values, gradients

    @abstractmethod
    def forward(self, x: Array) -> tuple[Array, Any]:
        """The output, and what `backward` will need."""

    @abstractmethod
    def backward(self, dy: Array, saved: Any) -> Array:
        """The derivative by the input; adds the parameters' derivatives to `gradient`."""


class Embedding(Layer):
    """Tokens (batch, context) integers -> vectors (batch, context, dim): rows of a table."""

    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.tokens, self.dim = tokens, dim

    def specs(self) -> dict[str, Spec]:
        return {"table": Spec((self.tokens, self.dim), spread=1.0)}

    def forward(self, x: Array) -> tuple[Array, Any]:
        xp = array_namespace(x)
        rows = xp.take(self.value["table"], xp.reshape(x, (-1,)), axis=0)
        return xp.reshape(rows, (*x.shape, self.dim)), x

    def backward(self, dy: Array, saved: Any) -> Array:
        """Adds each vector's derivative to its token's row.  Tokens have none: returns None.

        By a product with a one-hot matrix: unlike a scattered addition it sums in one fixed order
        on a GPU too, and it is in the array API.
        """
        xp = array_namespace(dy)
        picked = one_hot(xp.reshape(saved, (-1,)), self.tokens, dy.dtype)
        self.gradient["table"] += picked.T @ xp.reshape(dy, (-1, self.dim))
        return None


class Flatten(Layer):
    """(batch, ...) -> (batch, product of the rest): a context's vectors side by side."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        return array_namespace(x).reshape(x, (x.shape[0], -1)), x.shape

    def backward(self, dy: Array, saved: Any) -> Array:
        return array_namespace(dy).reshape(dy, saved)


class Linear(Layer):
    """x (batch, inputs) -> x @ weight + bias (batch, outputs)."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.inputs, self.outputs, self.gain = inputs, outputs, gain

    def specs(self) -> dict[str, Spec]:
        spread = self.gain / math.sqrt(self.inputs)
        return {"weight": Spec((self.inputs, self.outputs), spread), "bias": Spec((self.outputs,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        return x @ self.value["weight"] + self.value["bias"], x

    def backward(self, dy: Array, saved: Any) -> Array:
        self.gradient["weight"] += saved.T @ dy
        self.gradient["bias"] += array_namespace(dy).sum(dy, axis=0)
        return dy @ self.value["weight"].T


class Gelu(Layer):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the tanh form of Hendrycks & Gimpel 2016."""

    SCALE = math.sqrt(2 / math.pi)
    CUBIC = 0.044715

    def forward(self, x: Array) -> tuple[Array, Any]:
        tanh = array_namespace(x).tanh(self.SCALE * x * (1 + self.CUBIC * x * x))
        return 0.5 * x * (1 + tanh), (x, tanh)

    def backward(self, dy: Array, saved: Any) -> Array:
        x, tanh = saved
        inner = self.SCALE * (1 + 3 * self.CUBIC * x * x)
        return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner)


class LayerNorm(Layer):
    """Each row of x (batch, dim) to mean 0, variance 1, then gain and bias.  Ba et al. 2016."""

    EPSILON = 1e-5

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def specs(self) -> dict[str, Spec]:
        return {"gain": Spec((self.dim,), centre=1.0), "bias": Spec((self.dim,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        xp = array_namespace(x)
        centred = x - xp.mean(x, axis=-1, keepdims=True)
        variance = xp.mean(centred * centred, axis=-1, keepdims=True)
        inverse = 1 / xp.sqrt(variance + self.EPSILON)
        normal = centred * inverse
        return normal * self.value["gain"] + self.value["bias"], (normal, inverse)

    def backward(self, dy: Array, saved: Any) -> Array:
        """The mean and the variance depend on x too: their two terms are the subtracted means."""
        xp = array_namespace(dy)
        normal, inverse = saved
        self.gradient["gain"] += xp.sum(dy * normal, axis=0)
        self.gradient["bias"] += xp.sum(dy, axis=0)
        d = dy * self.value["gain"]
        along = normal * xp.mean(d * normal, axis=-1, keepdims=True)
        return inverse * (d - xp.mean(d, axis=-1, keepdims=True) - along)


class Sequential(Layer):
    """Named layers, one after the other.  Parameter `weight` of layer `up` is `up.weight`."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.layers = dict(layers)

    def specs(self) -> dict[str, Spec]:
        inner = ((name, layer.specs()) for name, layer in self.layers.items())
        return {f"{name}.{key}": spec for name, specs in inner for key, spec in specs.items()}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        for name, layer in self.layers.items():
            layer.bind(under(values, name), under(gradients, name))

    def forward(self, x: Array) -> tuple[Array, Any]:
        kept = []
        for layer in self.layers.values():
            x, saved = layer.forward(x)
            kept.append(saved)
        return x, kept

    def backward(
        self, dy: Array, saved: Any, on_layer: Callable[[str], None] = lambda name: None
    ) -> Array:
        """Layer by layer from the last; `on_layer(name)` as soon as its gradients are complete."""
        for (name, layer), kept in zip(reversed(self.layers.items()), reversed(saved), strict=True):
            dy = layer.backward(dy, kept)
            on_layer(name)
        return dy


class Residual(Sequential):
    """x + inner(x).  He et al. 2016."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, kept = super().forward(x)
        return x + y, kept

    def backward(
        self, dy: Array, saved: Any, on_layer: Callable[[str], None] = lambda name: None
    ) -> Array:
        return dy + super().backward(dy, saved, on_layer)


class Model(Sequential):
    """Named layers with memory: drawn, laid flat layer by layer, and bound.

    `flat_parameters[layer]` and `flat_gradients[layer]` are 1-d arrays of `dtype` that hold all of
    a layer; `parameters()` and `gradients()` are views of them in the parameters' own shapes.
    """

    def __init__(
        self,
        layers: Mapping[str, Layer],
        *,
        seed: int = 0,
        dtype: str = "float64",
        xp: Any = host,
    ) -> None:
        super().__init__(layers)
        self.xp = xp
        sizes = {name: num_elements(layer.specs()) for name, layer in self.layers.items()}
        self.flat_parameters = {k: xp.zeros(n, dtype=getattr(xp, dtype)) for k, n in sizes.items()}
        self.flat_gradients = {k: xp.zeros_like(flat) for k, flat in self.flat_parameters.items()}
        self.bind(self._views(self.flat_parameters), self._views(self.flat_gradients))
        for name, spec in self.specs().items():
            self.value[name][...] = xp.asarray(spec.draw(seed, name))

    def _views(self, flats: dict[str, Array]) -> dict[str, Array]:
        views = {}
        for name, layer in self.layers.items():
            for key, view in split_flat(flats[name], layer.specs()).items():
                views[f"{name}.{key}"] = view
        return views

    def parameters(self) -> dict[str, Array]:
        """Every parameter by its full name, in the order of the layers."""
        return dict(self.value)

    def gradients(self) -> dict[str, Array]:
        """Every parameter's gradient, under the same names in the same order."""
        return dict(self.gradient)

    def zero_gradients(self) -> None:
        """Before a new batch: `backward` only adds."""
        for flat in self.flat_gradients.values():
            flat[...] = 0


def byte_model(
    *, context: int = 16, dim: int = 32, hidden: int = 256, blocks: int = 2, **options: Any
) -> Model:
    """A language model over bytes: the logits of the next byte from the `context` bytes before.

    Tokens (batch, context) in 0..255 -> logits (batch, 256).  Bengio et al. 2003, with residual
    blocks normalised at their entry.  `options` go to `Model`: seed, dtype, xp.
    """
    embedding = {
        "table": Embedding(256, dim), "flat": Flatten(), "mix": Linear(context * dim, hidden),
    }  # fmt: skip
    layers: dict[str, Layer] = {"embedding": Sequential(embedding)}
    layers |= {f"block{i}": mlp_block(hidden, hidden) for i in range(blocks)}
    # A small last layer: the first loss is that of a uniform guess, and its gradients are mild.
    head = {"norm": LayerNorm(hidden), "out": Linear(hidden, 256, gain=0.1)}
    return Model(layers | {"head": Sequential(head)}, **options)


def mlp_block(hidden: int, inner: int) -> Residual:
    """x + down(gelu(up(norm(x)))), (batch, hidden) -> (batch, hidden)."""
    return Residual({
        "norm": LayerNorm(hidden), "up": Linear(hidden, inner),
        "gelu": Gelu(), "down": Linear(inner, hidden),
    })  # fmt: skip


def cross_entropy(logits: Array, targets: Array, total: int) -> tuple[Array, Array]:
    """The loss (1 element) and its derivative by the logits (batch, classes), in the logits' dtype.

    Summed over the rows given and divided by `total`, the rows of the *whole* batch: the parts of
    a batch, however uneven, then add up to the mean over all of it.  Nats.
    """
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    powers = xp.exp(shifted)
    sums = xp.sum(powers, axis=-1, keepdims=True)
    truth = one_hot(targets, logits.shape[-1], logits.dtype)
    loss = xp.sum(xp.log(sums) - xp.sum(truth * shifted, axis=-1, keepdims=True)) / total
    return xp.reshape(loss, (1,)), (powers / sums - truth) / total


def one_hot(index: Array, classes: int, dtype: Any) -> Array:
    """Integers (rows,) -> (rows, classes) of `dtype`, a one in each row."""
    xp = array_namespace(index)
    return xp.astype(index[:, None] == xp.arange(classes)[None, :], dtype)


def under(arrays: dict[str, Array], name: str) -> dict[str, Array]:
    """The entries `name.*`, without the prefix."""
    head = f"{name}."
    return {key.removeprefix(head): a for key, a in arrays.items() if key.startswith(head)}


def num_elements(specs: Mapping[str, Spec]) -> int:
    """How many elements the parameters hold together."""
    return sum(math.prod(spec.shape) for spec in specs.values())


def split_flat(flat: Array, specs: Mapping[str, Spec]) -> dict[str, Array]:
    """Views of a 1-d array, one per spec, one after the other."""
    views, start = {}, 0
    for name, spec in specs.items():
        stop = start + math.prod(spec.shape)
        views[name] = flat[start:stop].reshape(spec.shape)
        start = stop
    return views
