"""Layers that run one after the other, and layers whose result is added to their input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any, Self

from parallel.nn.functional import Array
from parallel.nn.layer.layer import Layer
from parallel.nn.layer.specs import Activations, ArraySpec, LayerTraffic, ParameterSpec
from parallel.nn.layer.step import Step


class Sequential(Layer):
    """Named layers that run one after the other.

    Parameter ``weight`` of the layer ``up`` has the name ``up.weight`` here.

    Parameters
    ----------
    layers : mapping of str to Layer
        The layers in their order.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        super().__init__()
        self.contain(layers)

    def contain(self, layers: Mapping[str, Layer]) -> None:
        """Set the layers of which this layer consists, and what follows from them."""
        self.layers = dict(layers)
        first = next(iter(self.layers.values()), self)
        self.saves_input = first.saves_input
        self.needs_rows = any(layer.needs_rows for layer in self.layers.values())

    def with_layers(self, layers: Mapping[str, Layer]) -> Self:
        """Return a copy of this layer that consists of other `layers`."""
        made = copy(self)  # a subclass may be made of other arguments than its layers
        Layer.__init__(made)
        made.contain(layers)
        return made

    def specs(self) -> dict[str, ParameterSpec]:
        inner = ((name, layer.specs()) for name, layer in self.layers.items())
        return {f"{name}.{key}": spec for name, specs in inner for key, spec in specs.items()}

    def parts(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        yield name, self
        for key, layer in self.layers.items():
            yield from layer.parts(f"{name}.{key}" if name else key)

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
        for layer, its_saved in zip(self._reversed(), reversed(saved), strict=True):
            dy, rest = layer.backward_input(dy, its_saved)
            rests.append(rest)
        return dy, rests

    def backward_weight(self, rest: Any) -> None:
        for layer, its_rest in zip(self._reversed(), rest, strict=True):
            layer.backward_weight(its_rest)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves of backward layer by layer, so that nothing is kept between the halves."""
        for layer, its_saved in zip(self._reversed(), reversed(saved), strict=True):
            dy = layer.backward(dy, its_saved)
        return dy

    def _reversed(self) -> Iterator[Layer]:
        return reversed(self.layers.values())

    def activation_bytes(self, x: ArraySpec) -> Activations:
        kept = [layer.activation_bytes(entering) for _, layer, entering in self.inputs(x)]
        twice = sum(  # an output that is saved, and is saved as the input of the next layer too
            activations.out.nbytes
            for activations, following in zip(kept, [*self.layers.values()][1:], strict=False)
            if activations.is_out_saved and following.saves_input
        )
        return kept[-1]._replace(
            saved=sum(activations.saved for activations in kept) - twice,
            rest=sum(activations.rest for activations in kept),
            extra=max(activations.extra for activations in kept),
            is_input_in_rest=kept[0].is_input_in_rest,
        )

    def out(self, x: ArraySpec) -> ArraySpec:
        for layer in self.layers.values():
            x = layer.out(x)
        return x

    def check_input(self, x: ArraySpec) -> None:
        for _, layer, entering in self.inputs(x):
            layer.check_input(entering)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        traffic = [layer.traffic(entering) for _, layer, entering in self.inputs(x)]
        forward = [call for of_layer in traffic for call in of_layer.forward]
        backward = [call for of_layer in reversed(traffic) for call in of_layer.backward]
        return LayerTraffic(tuple(forward), tuple(backward))

    def inputs(self, x: ArraySpec) -> Iterator[tuple[str, Layer, ArraySpec]]:
        """Yield the name, the layer and its input for every layer; the first input is `x`."""
        for name, layer in self.layers.items():
            yield name, layer, x
            x = layer.out(x)


class Residual(Sequential):
    """Named layers that run one after the other, and whose result is added to their input.

    He et al. 2016.
    """

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        y, saved = super().forward(x, step)
        return x + y, saved

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, rest = super().backward_input(dy, saved)
        return dy + dx, rest

    def backward(self, dy: Array, saved: Any) -> Array:
        return dy + super().backward(dy, saved)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return super().activation_bytes(x)._replace(is_out_saved=False)  # the sum is not


def by_layer(arrays: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Return `arrays` named ``layer.name`` as a dictionary for every layer."""
    arrays_of: dict[str, dict[str, Array]] = {}
    for key, x in arrays.items():
        layer, _, name = key.partition(".")
        arrays_of.setdefault(layer, {})[name] = x
    return arrays_of
