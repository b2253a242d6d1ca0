"""A model: named layers, and the flat parameters that they work on.

All parameters of one named layer form one flat parameter, a 1-d array called a *unit* as in
PyTorch's FSDP, and so do their gradients: a unit is sent without packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallel.nn.functional import Array, Shape
from parallel.nn.layer import Activations, Layer, ParameterSpec, recomputed


class Model:
    """Named layers that run one after the other.

    The model allocates nothing: a training run allocates the flat parameter of each layer (its
    unit) and binds the layer to it.

    Parameters
    ----------
    layers : mapping of str to Layer
        In the order in which forward runs them.  Raises ValueError for a name with a dot.
    ties : mapping of str to str, optional
        Parameters that are those of another layer: ``{"head.out.table": "embedding.token"}``, or
        all parameters of a layer: ``{"block1": "block0"}``.  The layer on the left then uses the
        unit of the other, and the gradient of a unit is complete when backward has passed the first
        layer that uses it.  Raises ValueError for a parameter that does not exist, for two of
        different shapes, and for one that is tied itself.
    recompute : sequence of str
        Patterns of names of layers, or of parts of layers, that keep only their input and run
        forward again during backward: ``"block*"``, ``"block*.attention.heads"``.  Raises
        ValueError if one matches no layer.

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

    def __init__(
        self,
        layers: Mapping[str, Layer],
        ties: Mapping[str, str] | None = None,
        *,
        recompute: Sequence[str] = (),
    ) -> None:
        self.layers = recomputed(layers, recompute)
        if dotted := next((name for name in layers if "." in name), None):
            raise ValueError(f"a layer is named {dotted!r}: a name must not contain a dot")
        self.ties = {
            here: there for each in (ties or {}).items() for here, there in self._tie(*each)
        }
        self._check_ties()
        own = {
            name: {k: x for k, x in layer.specs().items() if f"{name}.{k}" not in self.ties}
            for name, layer in self.layers.items()
        }
        self.units = {name: specs for name, specs in own.items() if specs}
        self.unit_sizes = {unit: num_elements(specs) for unit, specs in self.units.items()}
        self._units_of = {name: self._find_units(name) for name in self.layers}
        self._bound: dict[str, tuple[object, object]] = {}  # the arrays of each layer, by identity

    def _tie(self, here: str, there: str) -> list[tuple[str, str]]:
        """Return the ties of all parameters, if both are names of layers."""
        if here not in self.layers or there not in self.layers:
            return [(here, there)]
        return [(f"{here}.{key}", f"{there}.{key}") for key in self.layers[here].specs()]

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

    def _find_units(self, layer: str) -> tuple[str, ...]:
        tied = [there for here, there in self.ties.items() if here.startswith(f"{layer}.")]
        units = [layer, *(there.partition(".")[0] for there in tied)]
        return tuple(dict.fromkeys(unit for unit in units if unit in self.units))

    @property
    def num_parameters(self) -> int:
        """The number of elements of all units."""
        return sum(self.unit_sizes.values())

    @property
    def layers_with_parameters(self) -> list[str]:
        """The names of the layers that use a unit."""
        return [name for name in self.layers if self.units_of(name)]

    def units_of(self, layer: str | None) -> tuple[str, ...]:
        """Return the units a layer computes with: its own and those it is tied to."""
        return () if layer is None else self._units_of[layer]

    def completed_units(self, layer: str) -> tuple[str, ...]:
        """Return the units whose gradients are complete once backward has passed `layer`."""
        previous = self.previous_layer(layer)
        earlier = self.units_until(previous) if previous else []
        return tuple(unit for unit in self.units_of(layer) if unit not in earlier)

    def units_until(self, layer: str) -> list[str]:
        """Return the units that `layer` and the layers before it use, each once."""
        names = list(self.layers)
        until = names[: names.index(layer) + 1]
        return list(dict.fromkeys(unit for name in until for unit in self.units_of(name)))

    def previous_layer(self, layer: str) -> str | None:
        """Return the layer that runs before `layer`; None for the first."""
        names = [None, *self.layers]
        return names[names.index(layer) - 1]

    def next_layer(self, layer: str) -> str | None:
        """Return the layer that runs after `layer`; None for the last."""
        names = [*self.layers, None]
        return names[names.index(layer) + 1]

    def active_layers(self) -> list[str]:
        """Return the layers that the next forward pass runs: all.

        A subclass may skip some; the last layer, the loss, always runs.
        """
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
        """Let a `layer` work on flat arrays: `values` and, unless forward only, `gradients`.

        They are mappings by unit; call `unbind` before one of them changes.
        """
        bound = self._bound.get(layer)
        if bound is None or bound[0] is not values or bound[1] is not gradients:
            self._bound[layer] = values, gradients
            views = self._views(layer, values), self._views(layer, gradients or {})
            self.layers[layer].bind(*views)

    def unbind(self, layer: str) -> None:
        """Remove a layer's arrays, so that it cannot use memory that has been freed."""
        self._bound.pop(layer, None)
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
        """Return views of the parameters in `flats`, by names such as ``block0.mlp.up.weight``."""
        return {
            f"{unit}.{key}": view
            for unit, specs in self.units.items()
            for key, view in split_flat(flats[unit], specs).items()
        }

    def activation_bytes(self, shape: Shape, width: int) -> dict[str, Activations]:
        """Return what each layer keeps.

        The input of the model is tokens of `shape` (batch, context); floating-point numbers have
        `width` bytes.  Integers are not counted.
        """
        found = {}
        for name, layer in self.layers.items():
            found[name] = layer.activation_bytes(shape, width)
            shape = found[name].shape
        return found


def num_elements(specs: Mapping[str, ParameterSpec]) -> int:
    """Return how many elements these parameters have together."""
    return sum(spec.size for spec in specs.values())


def split_flat(flat: Array, specs: Mapping[str, ParameterSpec]) -> dict[str, Array]:
    """Return consecutive views of a 1-d array, one for each parameter, in its shape."""
    views, start = {}, 0
    for name, spec in specs.items():
        stop = start + spec.size
        views[name] = flat[start:stop].reshape(spec.shape)
        start = stop
    return views
