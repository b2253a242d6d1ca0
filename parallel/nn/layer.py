"""What a layer is, and layers made of layers.

A layer has three functions: ``forward`` returns the output and what backward needs of it,
``backward_input`` the derivative by the input, and ``backward_weight`` *adds* to the gradients of
the parameters, so that micro-batches accumulate.  What one needs from another is returned and
passed on, not stored in the layer, so that several micro-batches may be in progress.

A layer owns no memory.  It states which parameters it has (`Layer.specs`) and is given views to
work on (`Layer.bind`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from parallel.accounts.calls import PredictedCall
from parallel.nn.functional import Array
from parallel.placement import Placement, Shape


@dataclass(frozen=True)
class ParameterSpec(Placement):
    """A parameter before it is allocated: its placement, and the normal distribution of its values.

    `shape` and `splits` are those of `Placement`, `std` and `mean` those of the initial values.
    """

    std: float = 0.0
    mean: float = 0.0

    def draw(self, seed: int, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return initial values, float64 of `shape`: a function of `seed` and `name` alone."""
        rng = np.random.default_rng([seed, *name.encode()])
        return self.mean + self.std * rng.standard_normal(self.shape)


class Activations(NamedTuple):
    """The bytes of floating-point numbers that a layer keeps, and the shape of its output.

    Attributes
    ----------
    saved : int
        From forward to backward.
    shape : tuple of int
        Of the output.
    rest : int
        From `Layer.backward_input` to `Layer.backward_weight`, if these do not follow each other.
    extra : int
        In addition to `saved`, the most at a time during backward: what is computed again.
    """

    saved: int
    shape: Shape
    rest: int = 0
    extra: int = 0


class LayerTraffic(NamedTuple):
    """The calls that a layer makes for a micro-batch, in each group along their axes."""

    forward: tuple[PredictedCall, ...] = ()
    backward: tuple[PredictedCall, ...] = ()


@dataclass
class Step:
    """What layers may know of the training step that they are a part of.

    Attributes
    ----------
    targets : array of int64, optional
        The right classes, (rows, context), of this micro-batch.
    total : int
        The number of targets in the batch of all ranks.
    micro_batch : int
        The number of the micro-batch.
    loss_scale : float
        The factor of the loss.
    track : function
        Called with arrays that a layer computes again during backward.
    num_recomputed : int
        How many forward passes of layers have run again.
    losses : list of float
        Auxiliary losses of layers, which are added to the loss.
    """

    targets: Array = None
    total: int = 1
    micro_batch: int = 0
    loss_scale: float = 1.0
    track: Callable[[Any], object] = id
    num_recomputed: int = 0
    losses: list[float] = field(default_factory=list)


class Layer(ABC):
    """One differentiable function with parameters; the base class of all layers.

    A subclass defines `forward`, `backward_input` and `activation_bytes`; `specs` and
    `backward_weight` if it has parameters; and `traffic` if it communicates.  Arrays may be NumPy's
    or CuPy's, of any dtype of `parallel.optim.precision.DTYPES`.

    Attributes
    ----------
    value : dict of str to array
        This rank's boxes of the parameters, as long as the layer is bound.
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
        """Read parameters from the arrays `values`, and add gradients to the arrays `gradients`."""
        self.value, self.gradient = values, gradients

    @abstractmethod
    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        """Return the output for input `x` in a `step`, and what backward needs."""

    @abstractmethod
    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return the derivative of the loss by the input, and what `backward_weight` needs.

        `dy` is the derivative by the output, of its shape and dtype; `saved` is what `forward`
        returned.
        """

    def backward_weight(self, rest: Any) -> None:
        """Add the derivatives by the parameters to `gradient`.

        `rest` is what `backward_input` returned; None if the layer has no parameters.
        """
        assert rest is None, f"{type(self).__name__} does not define backward_weight"

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves of backward (see `backward_input` for `dy` and `saved`); return dx."""
        dx, rest = self.backward_input(dy, saved)
        self.backward_weight(rest)
        return dx

    @abstractmethod
    def activation_bytes(self, shape: Shape, width: int) -> Activations:
        """Return what the layer keeps for an input of this `shape`, in elements of `width` bytes.

        An array that a previous layer saved and this one passes through is not counted again.
        """

    def traffic(self, shape: Shape, width: int) -> LayerTraffic:
        """Return what the layer sends for an input of this `shape`, in elements of `width` bytes.

        Calls have no phase and no groups: each group along their axis makes them.
        """
        return LayerTraffic()

    def input_bytes(self, shape: Shape, width: int) -> int:
        """Return the bytes of floating-point numbers of an input; `shape`, `width`: as above."""
        return width * math.prod(shape)

    def saves_input(self) -> bool:
        """Return whether `saved` contains the input itself."""
        return True

    def config(self) -> list[Any]:
        """Return what must be equal on all ranks and is not visible in the parameters' shapes.

        The result consists of lists, strings and numbers; ranks compare its digest.
        """
        return [type(self).__name__]


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
        values_of, gradients_of = by_layer(values), by_layer(gradients)
        for name, layer in self.layers.items():
            layer.bind(values_of.get(name, {}), gradients_of.get(name, {}))

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        saved_by_layer = []
        for layer in self.layers.values():
            x, saved = layer.forward(x, step)
            saved_by_layer.append(saved)
        return x, saved_by_layer

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        rests = []
        for layer, of_layer in zip(reversed(self.layers.values()), reversed(saved), strict=True):
            dy, rest = layer.backward_input(dy, of_layer)
            rests.append(rest)
        return dy, rests

    def backward_weight(self, rest: Any) -> None:
        for layer, of_layer in zip(reversed(self.layers.values()), rest, strict=True):
            layer.backward_weight(of_layer)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves layer by layer, so that no `rest` is kept."""
        for layer, of_layer in zip(reversed(self.layers.values()), reversed(saved), strict=True):
            dy = layer.backward(dy, of_layer)
        return dy

    def activation_bytes(self, shape: Shape, width: int) -> Activations:
        each = [layer.activation_bytes(at, width) for layer, at in self.with_shapes(shape, width)]
        saved, rest = sum(x.saved for x in each), sum(x.rest for x in each)
        return Activations(saved, each[-1].shape, rest, max(x.extra for x in each))

    def traffic(self, shape: Shape, width: int) -> LayerTraffic:
        each = [layer.traffic(at, width) for layer, at in self.with_shapes(shape, width)]
        forward = [call for layer in each for call in layer.forward]
        backward = [call for layer in reversed(each) for call in layer.backward]
        return LayerTraffic(tuple(forward), tuple(backward))

    def with_shapes(self, shape: Shape, width: int) -> Iterator[tuple[Layer, Shape]]:
        """Yield the layers and the shapes of their inputs."""
        for layer in self.layers.values():
            yield layer, shape
            shape = layer.activation_bytes(shape, width).shape

    def input_bytes(self, shape: Shape, width: int) -> int:
        return self._first().input_bytes(shape, width)

    def saves_input(self) -> bool:
        return self._first().saves_input()

    def _first(self) -> Layer:
        return next(iter(self.layers.values()))


class Residual(Sequential):
    """Layers one after the other, whose result is added to their input.  He et al. 2016."""

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        y, saved = super().forward(x, step)
        return x + y, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, rest = super().backward_input(dy, saved)
        return dy + dx, rest

    def backward(self, dy: Array, saved: Any) -> Array:
        return dy + super().backward(dy, saved)


class Recompute(Layer):
    """A layer that keeps only its input, and runs forward again during backward.

    Chen et al. 2016.  Of attention alone: Korthikanti et al. 2022, selective recomputation.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def specs(self) -> dict[str, ParameterSpec]:
        return self.layer.specs()

    def config(self) -> list[Any]:
        return self.layer.config()  # the numbers are the same: ranks may differ in it

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        self.layer.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return self.layer.forward(x, step)[0], (x, step)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.layer.backward_input(dy, self._again(*saved))

    def backward_weight(self, rest: Any) -> None:
        self.layer.backward_weight(rest)

    def backward(self, dy: Array, saved: Any) -> Array:
        return self.layer.backward(dy, self._again(*saved))

    def _again(self, x: Array, step: Step) -> Any:
        saved = self.layer.forward(x, step)[1]
        step.num_recomputed += 1
        step.track(saved)
        return saved

    def activation_bytes(self, shape: Shape, width: int) -> Activations:
        inner, entering = self.layer.activation_bytes(shape, width), self.input_bytes(shape, width)
        extra = inner.saved + inner.extra - entering * self.layer.saves_input()
        return Activations(entering, inner.shape, inner.rest, extra)

    def traffic(self, shape: Shape, width: int) -> LayerTraffic:
        forward, backward = self.layer.traffic(shape, width)
        return LayerTraffic(forward, forward + backward)

    def input_bytes(self, shape: Shape, width: int) -> int:
        return self.layer.input_bytes(shape, width)


def by_layer(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return arrays named ``layer.name`` as a dictionary for each layer."""
    found: dict[str, dict[str, Array]] = {}
    for key, x in arrays.items():
        layer, _, name = key.partition(".")
        found.setdefault(layer, {})[name] = x
    return found


def recomputed(layers: Mapping[str, Layer], patterns: Sequence[str]) -> dict[str, Layer]:
    """Return `layers`, in which those whose names match a pattern keep only their input.

    Raises ValueError if a pattern matches no layer.
    """
    if not patterns:
        return dict(layers)
    found: set[str] = set()
    made = {name: _recomputed(layer, name, patterns, found) for name, layer in layers.items()}
    if unknown := [pattern for pattern in patterns if pattern not in found]:
        raise ValueError(f"there is no layer {unknown[0]!r} to recompute")
    return made


def _recomputed(layer: Layer, name: str, patterns: Sequence[str], found: set[str]) -> Layer:
    parts = name.count(".")
    matching = [p for p in patterns if p.count(".") == parts and fnmatchcase(name, p)]
    if matching:
        found.update(matching)
        return Recompute(layer)
    if isinstance(layer, Sequential):
        inner = {
            key: _recomputed(each, f"{name}.{key}", patterns, found)
            for key, each in layer.layers.items()
        }
        layer = copy(layer)
        layer.layers = inner
    return layer
