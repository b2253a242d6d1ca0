"""A model: named layers, and the flat parameters that they work on.

All parameters of one named layer form one flat parameter, a 1-d array called a *unit* as in
PyTorch's FSDP, and so do their gradients: a unit is sent without packing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from parallel.mesh import Mesh
from parallel.nn.functional import Array
from parallel.nn.layer import (
    Activations,
    Layer,
    LayerTraffic,
    ParameterSpec,
    Sequential,
    recomputed,
)
from parallel.placement import Box, Shape


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
    mesh : Mesh, optional
        The ranks that divide parameters (`ParameterSpec.splits`), if layers divide any.

    Attributes
    ----------
    layers, ties : dict
        As given.
    units : dict of str to (dict of str to ParameterSpec)
        For each layer with parameters of its own: their specifications, in their order in the unit.
    unit_sizes, shapes : dict
        The number of elements of each unit, and the shapes of its parameters, that this rank has.
    split_axes : tuple of str
        The axes of the mesh along which ranks have different parts of the model.

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
        mesh: Mesh | None = None,
    ) -> None:
        self.layers = recomputed(layers, recompute)
        if dotted := next((name for name in layers if "." in name), None):
            raise ValueError(f"a layer is named {dotted!r}: a name must not contain a dot")
        self.ties = {
            here: there for each in (ties or {}).items() for here, there in self._tie(*each)
        }
        specs = Sequential(self.layers).specs()
        self._check_ties(specs)
        self.units: dict[str, dict[str, ParameterSpec]] = {}
        for name, spec in specs.items():
            if name not in self.ties:
                layer, _, key = name.partition(".")
                self.units.setdefault(layer, {})[key] = spec
        self._units_of = {name: self._find_units(name) for name in self.layers}
        self._bound: dict[str, tuple[object, object]] = {}  # the arrays of each layer, by identity
        self.mesh = mesh or Mesh(None)
        splits = (axis for spec in specs.values() for _, axis in spec.splits)
        self.split_axes = tuple(a for a in dict.fromkeys(splits) if a in self.mesh.axes)
        self.unit_sizes = self.unit_sizes_of(self.mesh.rank)
        self.shapes = {
            unit: {key: box.shape for key, box in self.boxes(unit).items()} for unit in self.units
        }

    def _tie(self, here: str, there: str) -> list[tuple[str, str]]:
        """Return the ties of all parameters, if both are names of layers."""
        if here not in self.layers or there not in self.layers:
            return [(here, there)]
        return [(f"{here}.{key}", f"{there}.{key}") for key in self.layers[here].specs()]

    def _check_ties(self, specs: Mapping[str, ParameterSpec]) -> None:
        for here, there in self.ties.items():
            both = {here, there} <= specs.keys()
            if there in self.ties or not both or specs[here].shape != specs[there].shape:
                raise ValueError(
                    f"{here!r} cannot be tied to {there!r}: both must exist, have the same shape,"
                    " and the second must not be tied itself"
                )

    def _find_units(self, layer: str) -> tuple[str, ...]:
        tied = [there for here, there in self.ties.items() if here.startswith(f"{layer}.")]
        units = [layer, *(there.partition(".")[0] for there in tied)]
        return tuple(dict.fromkeys(unit for unit in units if unit in self.units))

    # Which elements

    @property
    def num_parameters(self) -> int:
        """The number of elements of all whole units."""
        return sum(spec.size for specs in self.units.values() for spec in specs.values())

    def boxes(self, unit: str, rank: int | None = None) -> dict[str, Box]:
        """Return the boxes of a unit's parameters that a `rank` has, by default this rank."""
        return {key: spec.box(self.mesh, rank) for key, spec in self.units[unit].items()}

    def unit_sizes_of(self, rank: int) -> dict[str, int]:
        """Return the elements of each unit that a `rank` has; for this rank, see `unit_sizes`."""
        shapes = {
            unit: [box.shape for box in self.boxes(unit, rank).values()] for unit in self.units
        }
        return {unit: sum(map(math.prod, each)) for unit, each in shapes.items()}

    # Order

    @property
    def layers_with_parameters(self) -> list[str]:
        """The names of the layers that use a unit."""
        return [name for name in self.layers if self.units_of(name)]

    def units_of(self, layer: str | None) -> tuple[str, ...]:
        """Return the units a layer computes with: its own and those it is tied to."""
        return () if layer is None else self._units_of[layer]

    def completed_units(self, layer: str) -> tuple[str, ...]:
        """Return the units whose gradients are complete once backward has passed `layer`."""
        names = list(self.layers)
        earlier = {u for name in names[: names.index(layer)] for u in self.units_of(name)}
        return tuple(unit for unit in self.units_of(layer) if unit not in earlier)

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

    # Arrays

    def draw(self, unit: str, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return this rank's initial values of a unit: 1-d float64 in host memory.

        The whole parameter is a function of `seed` and of its name and shape.
        """
        specs, boxes = self.units[unit], self.boxes(unit)
        drawn = (spec.draw(seed, f"{unit}.{key}") for key, spec in specs.items())
        parts = [x[box.slices].ravel() for x, box in zip(drawn, boxes.values(), strict=True)]
        return np.concatenate(parts)

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
        views = self.split(layer, flats[layer]) if layer in flats and layer in self.units else {}
        for here, there in self.ties.items():
            unit, _, key = there.partition(".")
            if here.startswith(f"{layer}.") and unit in flats:
                views[here.removeprefix(f"{layer}.")] = self.split(unit, flats[unit])[key]
        return views

    def split(self, unit: str, flat: Array) -> dict[str, Array]:
        """Return views of the parameters in the flat array of a unit."""
        return split_flat(flat, self.shapes[unit])

    def named(self, flats: Mapping[str, Array]) -> dict[str, Array]:
        """Return views of the parameters in `flats`, by names such as ``block0.mlp.up.weight``."""
        views = {unit: self.split(unit, flats[unit]) for unit in self.units}
        return {f"{unit}.{key}": x for unit, each in views.items() for key, x in each.items()}

    # What it costs

    def activation_bytes(self, shape: Shape, width: int) -> dict[str, Activations]:
        """Return what each layer keeps.

        The input of the model is tokens of `shape` (batch, context); floating-point numbers have
        `width` bytes.  Integers are not counted.
        """
        shapes = Sequential(self.layers).with_shapes(shape, width)
        return {
            name: layer.activation_bytes(at, width)
            for name, (layer, at) in zip(self.layers, shapes, strict=True)
        }

    def traffic(self, shape: Shape, width: int) -> dict[str, LayerTraffic]:
        """Return what each layer sends; `shape` and `width` are those of `activation_bytes`."""
        shapes = Sequential(self.layers).with_shapes(shape, width)
        return {
            name: layer.traffic(at, width)
            for name, (layer, at) in zip(self.layers, shapes, strict=True)
        }


def split_flat(flat: Array, shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """Return consecutive views of a 1-d array, one for each name, in its shape."""
    views, start = {}, 0
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        views[name] = flat[start:stop].reshape(shape)
        start = stop
    return views
