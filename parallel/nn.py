"""Layers with an explicit forward and backward, and the model built of them.

A layer is two functions: `y, saved = forward(x)` and `dx = backward(dy, saved)`, where `dx` is the
derivative of the loss by `x`.  `backward` *adds* to the layer's gradients, so that micro-batches
accumulate, and what it needs from the forward pass is handed out and back in (`saved`) instead of
kept, so that several batches may be under way.  Arrays are NumPy's or CuPy's; the array itself says
which, through its array namespace.

A layer owns no memory.  It states what parameters it has (`specs`) and is given views to work on
(`bind`), for as long as a strategy wants to have them in memory.  All parameters of one named layer
of a model are one flat array, a *unit*, and so are its gradients: a unit travels without packing.

Two-byte numbers (float16, bfloat16) are what is kept and sent.  Every function computes with them
in float32 and rounds its result once, as the matrix units of a GPU do.  Within a layer two things
more are rounded, because they are kept, and what follows is computed from them as they are kept:
LayerNorm's normal vectors and attention's chances.  What is added to a gradient is rounded before
and after.
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


class Spec(NamedTuple):
    """A parameter before it exists: its shape, and the normal distribution it is drawn from."""

    shape: Shape
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

    @abstractmethod
    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        """The bytes of floating-point numbers in `saved`, and the shape of the output.

        For an input of `shape`, with numbers of `width` bytes.  What is handed through from the
        layer before counts where it is kept.
        """

    def likeness(self) -> list[Any]:
        """What must be the same on all ranks and shows in no parameter's shape, as can be told."""
        return [type(self).__name__]


class Embedding(Layer):
    """Tokens (batch, up to context) integers -> vectors (..., dim): token's + position's.

    ValueError for more tokens in a row than there are positions.
    """

    def __init__(self, tokens: int, context: int, dim: int) -> None:
        super().__init__()
        self.tokens, self.context, self.dim = tokens, context, dim

    def specs(self) -> dict[str, Spec]:
        shapes = {"token": (self.tokens, self.dim), "position": (self.context, self.dim)}
        return {name: Spec(shape, spread=0.1) for name, shape in shapes.items()}

    def forward(self, x: Array) -> tuple[Array, Any]:
        if x.shape[1] > self.context:
            raise ValueError(f"{x.shape[1]} tokens in a row, and positions for {self.context}")
        xp = array_namespace(x)
        rows = xp.take(self.value["token"], xp.reshape(x, (-1,)), axis=0)
        return xp.reshape(rows, (*x.shape, self.dim)) + self.value["position"][: x.shape[1]], x

    def backward(self, dy: Array, saved: Any) -> Array:
        """Adds each vector's derivative to its token's row.  Tokens have none: returns None.

        By a product with a one-hot matrix: unlike a scattered addition it sums in one fixed order
        on a GPU too, and it is in the array API.
        """
        xp = array_namespace(dy)
        picked = one_hot(xp.reshape(saved, (-1,)), self.tokens, dy.dtype)
        self.gradient["token"] += product(picked.T, rows_of(dy))
        over_batch = xp.sum(wide(dy), axis=0)
        self.gradient["position"][: dy.shape[1]] += narrow(over_batch, dy.dtype)
        return None

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return 0, (*shape, self.dim)  # the tokens are integers


class Linear(Layer):
    """x (..., inputs) -> x @ weight + bias (..., outputs)."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        super().__init__()
        self.inputs, self.outputs, self.gain = inputs, outputs, gain

    def specs(self) -> dict[str, Spec]:
        spread = self.gain / math.sqrt(self.inputs)
        return {"weight": Spec((self.inputs, self.outputs), spread), "bias": Spec((self.outputs,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        y = wide(rows_of(x)) @ wide(self.value["weight"]) + wide(self.value["bias"])
        return narrow(y, x.dtype).reshape(*x.shape[:-1], self.outputs), x

    def backward(self, dy: Array, saved: Any) -> Array:
        dys = rows_of(dy)
        self.gradient["weight"] += product(rows_of(saved).T, dys)
        self.gradient["bias"] += sum_of_rows(dys)
        return product(dys, self.value["weight"].T).reshape(saved.shape)

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), (*shape[:-1], self.outputs)


class Unembedding(Layer):
    """Vectors (..., dim) -> logits (..., tokens): the products with the rows of a table.

    The table may be the embedding's own, if the model ties them (Press & Wolf 2017).
    """

    def __init__(self, dim: int, tokens: int) -> None:
        super().__init__()
        self.dim, self.tokens = dim, tokens

    def specs(self) -> dict[str, Spec]:
        # Small: the first loss is that of a uniform guess, and its gradients are mild.
        return {"table": Spec((self.tokens, self.dim), spread=0.1 / math.sqrt(self.dim))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        logits = product(rows_of(x), self.value["table"].T)
        return logits.reshape(*x.shape[:-1], self.tokens), x

    def backward(self, dy: Array, saved: Any) -> Array:
        dys = rows_of(dy)
        self.gradient["table"] += product(dys.T, rows_of(saved))
        return product(dys, self.value["table"]).reshape(saved.shape)

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), (*shape[:-1], self.tokens)


class Gelu(Layer):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the tanh form of Hendrycks & Gimpel 2016."""

    SCALE = math.sqrt(2 / math.pi)
    CUBIC = 0.044715

    def forward(self, x: Array) -> tuple[Array, Any]:
        return narrow(0.5 * wide(x) * (1 + self._tanh(wide(x))), x.dtype), x

    def backward(self, dy: Array, saved: Any) -> Array:
        x = wide(saved)
        tanh = self._tanh(x)
        inner = self.SCALE * (1 + 3 * self.CUBIC * x * x)
        return narrow(dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner), dy.dtype)

    def _tanh(self, x: Array) -> Array:
        return array_namespace(x).tanh(self.SCALE * x * (1 + self.CUBIC * x * x))

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape), shape


class LayerNorm(Layer):
    """Each vector of x (..., dim) to mean 0, variance 1, then gain and bias.  Ba et al. 2016."""

    EPSILON = 1e-5

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def specs(self) -> dict[str, Spec]:
        return {"gain": Spec((self.dim,), centre=1.0), "bias": Spec((self.dim,))}

    def forward(self, x: Array) -> tuple[Array, Any]:
        xp = array_namespace(x)
        centred = wide(x) - xp.mean(wide(x), axis=-1, keepdims=True)
        variance = xp.mean(centred * centred, axis=-1, keepdims=True)
        inverse = 1 / xp.sqrt(variance + self.EPSILON)
        normal = narrow(centred * inverse, x.dtype)
        y = wide(normal) * wide(self.value["gain"]) + wide(self.value["bias"])
        return narrow(y, x.dtype), (normal, inverse)

    def backward(self, dy: Array, saved: Any) -> Array:
        """The mean and the variance depend on x too: their two terms are the subtracted means."""
        xp = array_namespace(dy)
        normal, inverse = wide(saved[0]), saved[1]
        self.gradient["gain"] += narrow(sum_of_rows(rows_of(dy * normal)), dy.dtype)
        self.gradient["bias"] += sum_of_rows(rows_of(dy))
        d = wide(dy) * wide(self.value["gain"])
        along = normal * xp.mean(d * normal, axis=-1, keepdims=True)
        return narrow(inverse * (d - xp.mean(d, axis=-1, keepdims=True) - along), dy.dtype)

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        return width * math.prod(shape) + max(width, 4) * math.prod(shape[:-1]), shape


class CausalAttention(Layer):
    """(batch, context, 3 dim), queries beside keys beside values -> (batch, context, dim).

    Every position looks at itself and what comes before it, with `heads` heads of dim / heads each.
    Vaswani et al. 2017.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def likeness(self) -> list[Any]:
        return [*super().likeness(), self.heads]

    def forward(self, x: Array) -> tuple[Array, Any]:
        q, k, v = self._split(x)
        chances = narrow(causal_softmax(wide(q) @ transposed(wide(k)) * self._scale(q)), x.dtype)
        return self._join(product(chances, v)), (x, chances)

    def backward(self, dy: Array, saved: Any) -> Array:
        x, chances = saved
        (q, k, v), xp = self._split(x), array_namespace(x)
        dy = xp.permute_dims(dy.reshape(*dy.shape[:2], *q.shape[1::2]), (0, 2, 1, 3))
        dscores = wide(dy) @ transposed(wide(v))
        dscores -= xp.sum(dscores * chances, axis=-1, keepdims=True)
        dscores *= wide(chances) * self._scale(q)
        dq, dk = dscores @ wide(k), transposed(dscores) @ wide(q)
        dv = transposed(wide(chances)) @ wide(dy)
        return xp.concat([narrow(self._join(part), x.dtype) for part in (dq, dk, dv)], axis=-1)

    def _split(self, x: Array) -> tuple[Array, Array, Array]:
        """Queries, keys and values, each (batch, heads, context, dim / heads)."""
        width = x.shape[-1] // (3 * self.heads)
        parts = x.reshape(*x.shape[:2], 3, self.heads, width)
        q, k, v = array_namespace(x).permute_dims(parts, (2, 0, 3, 1, 4))
        return q, k, v

    def _join(self, y: Array) -> Array:
        """The heads side by side again: (batch, context, dim)."""
        batch, heads, context, width = y.shape
        xp = array_namespace(y)
        return xp.permute_dims(y, (0, 2, 1, 3)).reshape(batch, context, heads * width)

    @staticmethod
    def _scale(q: Array) -> float:
        return float(1 / math.sqrt(q.shape[-1]))

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        batch, context, dim = shape
        chances = batch * self.heads * context * context
        return width * (math.prod(shape) + chances), (batch, context, dim // 3)


class Sequential(Layer):
    """Named layers, one after the other.  Parameter `weight` of layer `up` is `up.weight`."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.layers = dict(layers)

    def specs(self) -> dict[str, Spec]:
        inner = ((name, layer.specs()) for name, layer in self.layers.items())
        return {f"{name}.{key}": spec for name, specs in inner for key, spec in specs.items()}

    def likeness(self) -> list[Any]:
        inner = [[name, *layer.likeness()] for name, layer in self.layers.items()]
        return [*super().likeness(), inner]

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        for name, layer in self.layers.items():
            layer.bind(under(values, name), under(gradients, name))

    def forward(self, x: Array) -> tuple[Array, Any]:
        kept = []
        for layer in self.layers.values():
            x, saved = layer.forward(x)
            kept.append(saved)
        return x, kept

    def backward(self, dy: Array, saved: Any) -> Array:
        for layer, kept in zip(reversed(self.layers.values()), reversed(saved), strict=True):
            dy = layer.backward(dy, kept)
        return dy

    def kept(self, shape: Shape, width: int) -> tuple[int, Shape]:
        total = 0
        for layer in self.layers.values():
            nbytes, shape = layer.kept(shape, width)
            total += nbytes
        return total, shape


class Residual(Sequential):
    """x + inner(x).  He et al. 2016."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        y, kept = super().forward(x)
        return x + y, kept

    def backward(self, dy: Array, saved: Any) -> Array:
        return dy + super().backward(dy, saved)


class Model:
    """Named layers that are run one after the other, and what each needs to be bound to.

    The parameters of a layer are its unit, a flat array that somebody else allocates.  `ties` says
    which parameters are another layer's: `{"head.table": "embedding.token"}`; the later layer then
    needs two units, and a unit's gradient is complete when backward has passed its first layer.
    ValueError for a tie between what is not there, or has other shapes, or is tied itself.
    """

    def __init__(self, layers: Mapping[str, Layer], ties: Mapping[str, str] | None = None) -> None:
        self.layers, self.ties = dict(layers), dict(ties or {})
        self._check_ties()
        named = {name: self._own(name) for name in self.layers}
        self.units = {name: specs for name, specs in named.items() if specs}
        self.sizes = {unit: num_elements(specs) for unit, specs in self.units.items()}
        self._owners = {name: self._owners_of(name) for name in self.layers}
        self.worked_on: object = None  # the parameters of the strategy that made the last step

    def _check_ties(self) -> None:
        shapes = {
            f"{name}.{key}": spec.shape
            for name, layer in self.layers.items() for key, spec in layer.specs().items()
        }  # fmt: skip
        for here, there in self.ties.items():
            if there in self.ties or here not in shapes or shapes[here] != shapes.get(there):
                raise ValueError(f"{here!r} cannot be tied to {there!r}")

    def _own(self, layer: str) -> dict[str, Spec]:
        specs = self.layers[layer].specs()
        return {key: spec for key, spec in specs.items() if f"{layer}.{key}" not in self.ties}

    def _owners_of(self, layer: str) -> tuple[str, ...]:
        tied = [there for here, there in self.ties.items() if here.startswith(f"{layer}.")]
        units = [layer, *(there.partition(".")[0] for there in tied)]
        return tuple(dict.fromkeys(unit for unit in units if unit in self.units))

    @property
    def num_parameters(self) -> int:
        """The elements of all units."""
        return sum(self.sizes.values())

    def uses(self, layer: str | None) -> tuple[str, ...]:
        """The units that a layer computes with: its own, and those it is tied to."""
        return () if layer is None else self._owners[layer]

    def completes(self, layer: str) -> tuple[str, ...]:
        """The units whose gradients are complete once backward has passed this layer."""
        before = self.before(layer)
        earlier = () if before is None else self.used_until(before)
        return tuple(unit for unit in self.uses(layer) if unit not in earlier)

    def used_until(self, layer: str) -> list[str]:
        """The units that this layer and those before it use, each once."""
        names = [*self._before(layer), layer]
        return list(dict.fromkeys(unit for name in names for unit in self.uses(name)))

    def before(self, layer: str) -> str | None:
        """The layer that runs before this one."""
        return next(reversed(self._before(layer)), None)

    def after(self, layer: str) -> str | None:
        """The layer that runs after this one."""
        return next(iter(list(self.layers)[len(self._before(layer)) + 1 :]), None)

    def _before(self, layer: str) -> list[str]:
        names = list(self.layers)
        return names[: names.index(layer)]

    def times_gathered(self) -> dict[str, int]:
        """How often each unit comes and goes in a pass that holds what a layer and the next use."""
        times = dict.fromkeys(self.units, 0)
        for layer in self.layers:
            for unit in set(self.uses(layer)) - set(self.uses(self.before(layer))):
                times[unit] += 1
        return times

    def route(self) -> list[str]:
        """The layers that the next forward pass runs, in order: all; a subclass may skip some."""
        return list(self.layers)

    def draw(self, unit: str, seed: int) -> np.ndarray[Any, Any]:
        """A unit's initial values: 1-d, float64, on the host; a function of the names and seed."""
        specs = self.units[unit]
        drawn = (spec.draw(seed, f"{unit}.{key}").ravel() for key, spec in specs.items())
        return np.concatenate(list(drawn))

    def bind(
        self, layer: str, values: Mapping[str, Array], gradients: Mapping[str, Array] | None = None
    ) -> None:
        """Let a layer work on these flat units; without gradients it can only go forward."""
        views = self._views(layer, values), self._views(layer, gradients or {})
        self.layers[layer].bind(*views)

    def unbind(self, layer: str) -> None:
        """Let go of the arrays: what is not there cannot be used by mistake."""
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
        """Views of whole units by full name, in the parameters' own shapes."""
        return {
            f"{unit}.{key}": view
            for unit, specs in self.units.items()
            for key, view in split_flat(flats[unit], specs).items()
        }

    def kept(self, shape: Shape, width: int) -> dict[str, tuple[int, int]]:
        """Per layer the bytes of floating-point numbers that forward keeps, and those of its input.

        For tokens of `shape` (batch, context) and numbers of `width` bytes.
        """
        found, entering = {}, 0  # the tokens are integers
        for name, layer in self.layers.items():
            nbytes, shape = layer.kept(shape, width)
            found[name] = nbytes, entering
            entering = width * math.prod(shape)
        return found


def cross_entropy(
    logits: Array, targets: Array, total: int, scale: float = 1.0
) -> tuple[float, Array]:
    """The loss, and `scale` times its derivative by the logits (..., classes), in their dtype.

    Summed over the targets (...) given and divided by `total`, the number of them in the *whole*
    batch: the parts of a batch, however uneven, then add up to the mean over all of it.  Nats.
    """
    xp = array_namespace(logits)
    flat = wide(rows_of(logits))
    shifted = flat - xp.max(flat, axis=-1, keepdims=True)
    powers = xp.exp(shifted)
    sums = xp.sum(powers, axis=-1, keepdims=True)
    truth = one_hot(xp.reshape(targets, (-1,)), flat.shape[-1], flat.dtype)
    loss = xp.sum(xp.log(sums) - xp.sum(truth * shifted, axis=-1, keepdims=True))
    dlogits = (powers / sums - truth) * (scale / total)
    return float(loss) / total, narrow(dlogits, logits.dtype).reshape(logits.shape)


def causal_softmax(scores: Array) -> Array:
    """Along the last axis, over the positions up to that of the last axis but one."""
    xp = array_namespace(scores)
    position = xp.arange(scores.shape[-1], device=scores.device)
    is_seen = position[:, None] >= position[None, :]
    scores = xp.where(is_seen, scores, xp.asarray(-math.inf, dtype=scores.dtype))
    powers = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


def one_hot(index: Array, classes: int, dtype: Any) -> Array:
    """Integers (rows,) -> (rows, classes) of `dtype`, a one in each row."""
    xp = array_namespace(index)
    return (index[:, None] == xp.arange(classes, device=index.device)[None, :]).astype(dtype)


# Two-byte numbers


def wide(x: Array) -> Array:
    """`x` to compute with: two-byte numbers as float32, others as they are."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def narrow(x: Array, dtype: Any) -> Array:
    """A result in the dtype that is kept."""
    return x.astype(dtype) if x.dtype != dtype else x


def product(a: Array, b: Array) -> Array:
    """a @ b, rounded once to a's dtype."""
    return narrow(wide(a) @ wide(b), a.dtype)


def sum_of_rows(x: Array) -> Array:
    """Over axis 0, rounded once to x's dtype."""
    return narrow(array_namespace(x).sum(wide(x), axis=0), x.dtype)


# Places and shapes


def on_host(array: Array) -> np.ndarray[Any, Any]:
    """The array in host memory; CuPy's `get` copies it there."""
    host: np.ndarray[Any, Any] = array.get() if hasattr(array, "get") else array
    return host


def rows_of(x: Array) -> Array:
    """(..., n) -> (rows, n)."""
    return x.reshape(-1, x.shape[-1])


def transposed(x: Array) -> Array:
    """The last two axes exchanged."""
    return array_namespace(x).matrix_transpose(x)


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
