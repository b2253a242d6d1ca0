"""A model: named layers, and the flat parameters that they work on.

The parameters of one named layer form one flat parameter, a 1-d array called a *unit* as in
PyTorch's FSDP; so do their gradients.  A unit is sent without packing.  Parameters are in separate
units if ranks divide them, or sum their gradients, along different axes of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from parallel.mesh import Box, Mesh, Shape, split
from parallel.nn.functional import Array
from parallel.nn.layer import (
    Activations,
    ArraySpec,
    Layer,
    LayerTraffic,
    ParameterSpec,
    Sequential,
    recomputed,
)


class Model:
    """Named layers that run one after the other, on units that a training run allocates.

    Parameters
    ----------
    layers : mapping of str to Layer
        The layers in the order in which forward runs them.
    ties : mapping of str to str, optional
        Parameters that are the parameters of another layer, such as ``{"head.out.table":
        "embedding.token"}``, or layers that have all parameters of another layer, such as
        ``{"block1": "block0"}``.  The layer on the left uses the unit of the other layer.
    recompute : sequence of str
        Patterns of names of layers, or of their parts, that keep only their input and run forward
        again during backward: ``"block*"``, ``"block*.attention.heads"``.
    mesh : Mesh, optional
        The ranks that divide parameters (`ParameterSpec.splits`), if layers divide any.

    Raises
    ------
    ValueError
        If the name of a layer has a dot, or a pattern matches no layer.  Also unless two tied
        parameters exist, have the same shape and are divided alike, and the second is not tied.

    Attributes
    ----------
    layers : dict of str to Layer
        The layers, some within `Recompute`.
    ties : dict of str to str
        Pairs of tied parameters, also for tied layers.
    recompute : tuple of str
        The patterns, as given.
    specs : dict of str to ParameterSpec
        The parameters that are not tied, by names such as ``block0.mlp.up.weight``.
    units : dict of str to (dict of str to ParameterSpec)
        The parameters of every unit, in their order in the unit.
    unit_sizes, shapes : dict
        The number of elements of every unit, and the shapes of its parameters, on this rank.
    split_axes : tuple of str
        The axes of the mesh along which ranks have different parts of the model.
    needs_rows : bool
        Whether a layer depends on which rows of the batch it computes (`Layer.needs_rows`).

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
        self._sequence = Sequential(recomputed(layers, recompute))
        self.layers, self.recompute = self._sequence.layers, tuple(recompute)
        if dotted := next((name for name in layers if "." in name), None):
            raise ValueError(f"a layer is named {dotted!r}: a name must not contain a dot")
        specs = self._sequence.specs()
        self.ties = self._ties_of_parameters(ties or {}, specs)
        self.units: dict[str, dict[str, ParameterSpec]] = {}
        self.mesh = mesh or Mesh(None)
        self.needs_rows = self._sequence.needs_rows
        self.specs = {name: spec for name, spec in specs.items() if name not in self.ties}
        for name, spec in self.specs.items():
            self.units.setdefault(self._unit_name(name, spec), {})[name] = spec
        self._units_of = self._find_units()
        self._bound: dict[str, tuple[object, object]] = {}  # the mappings that layers work on
        splits = (axis for spec in specs.values() for axis in spec.split_axes)
        self.split_axes = self._with_ranks(dict.fromkeys(splits))
        self.unit_sizes = self.unit_sizes_of(self.mesh.rank)
        self.shapes = {
            unit: {key: box.shape for key, box in self.boxes(unit).items()} for unit in self.units
        }

    def _ties_of_parameters(
        self, ties: Mapping[str, str], specs: Mapping[str, ParameterSpec]
    ) -> dict[str, str]:
        """Return `ties` with ties of all parameters in place of ties of layers."""
        tied: dict[str, str] = {}
        for here, there in ties.items():
            are_layers = here in self.layers and there in self.layers
            ends = [f".{key}" for key in self.layers[here].specs()] if are_layers else [""]
            tied |= {here + end: there + end for end in ends}
        for here, there in tied.items():
            both = [(s.shape, s.splits) for s in (specs.get(here), specs.get(there)) if s]
            if there in tied or len(both) < 2 or both[0] != both[1]:
                raise ValueError(
                    f"{here!r} cannot be tied to {there!r}: both must exist, have the same shape"
                    " and be divided alike, and the second must not be tied itself"
                )
        return tied

    def _with_ranks(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the `axes` along which the mesh has several ranks."""
        return tuple(axis for axis in axes if self.mesh.axes.get(axis, 1) > 1)

    def _unit_name(self, name: str, spec: ParameterSpec) -> str:
        """Return the unit of a parameter: its layer, and what is special about it on this mesh.

        ``block0@tensor`` is divided along that axis, the gradients of ``block0+tensor`` are summed
        along the axis, and ``embedding~`` is used by layers that may be in different stages.
        """
        divided = [f"@{axis}" for axis in self._with_ranks(spec.split_axes)]
        summed = [f"+{axis}" for axis in self._with_ranks(spec.partial)]
        is_shared = bool(self._with_ranks(["pipe"])) and name in self.ties.values()
        return "".join([name.partition(".")[0], "~" * is_shared, *divided, *summed])

    def _find_units(self) -> dict[str, tuple[str, ...]]:
        """Return the units of every layer: its own units, and the units that it is tied to."""
        unit_of = {name: unit for unit, specs in self.units.items() for name in specs}
        used: dict[str, dict[str, None]] = {layer: {} for layer in self.layers}
        for name, there in [*((name, name) for name in unit_of), *self.ties.items()]:
            used[name.partition(".")[0]][unit_of[there]] = None
        return {layer: tuple(units) for layer, units in used.items()}

    # Which elements

    @property
    def num_parameters(self) -> int:
        """The number of elements of all whole parameters."""
        return sum(spec.size for spec in self.specs.values())

    def boxes(self, unit: str, rank: int | None = None) -> dict[str, Box]:
        """Return the boxes of a unit's parameters that a `rank` has, by default this rank."""
        return {name: spec.box(self.mesh, rank) for name, spec in self.units[unit].items()}

    def partial_axes(self, unit: str) -> tuple[str, ...]:
        """Return the axes of the mesh along which the gradients of a unit are partial sums."""
        return self._with_ranks(self._first_of(unit).partial)

    def split_axes_of(self, unit: str) -> tuple[str, ...]:
        """Return the axes of the mesh along which ranks have different parts of a unit."""
        return self._with_ranks(self._first_of(unit).split_axes)

    def _first_of(self, unit: str) -> ParameterSpec:
        """Return a parameter of a unit; all have the same `split_axes` and `partial`."""
        return next(iter(self.units[unit].values()))

    def unit_sizes_of(self, rank: int) -> dict[str, int]:
        """Return `unit_sizes` of another `rank`."""
        return {
            unit: sum(math.prod(box.shape) for box in self.boxes(unit, rank).values())
            for unit in self.units
        }

    # What layers send and count

    @property
    def comm_axes(self) -> tuple[str, ...]:
        """The communicators that layers use, as axes of the mesh."""
        used = (axis for name in self.layers for axis in self.axes_of(name))
        return tuple(dict.fromkeys((*self.split_axes, *used)))

    def axes_of(self, layer: str) -> tuple[str, ...]:
        """Return the axes whose communicators a `layer` and its parts use (`Layer.comm_axes`)."""
        used = (axis for _, part in self.layers[layer].parts() for axis in part.comm_axes)
        return tuple(dict.fromkeys(used))

    @property
    def counting_layers(self) -> dict[str, Layer]:
        """The layers that count something in each step, by name (`Layer.step_counts`)."""
        parts = self._sequence.parts()
        return {name: layer for name, layer in parts if layer.step_counts is not None}

    @property
    def step_counts(self) -> dict[str, np.ndarray[Any, np.dtype[np.int64]]]:
        """What layers have counted in this step, by name."""
        parts = self._sequence.parts()
        return {name: layer.step_counts for name, layer in parts if layer.step_counts is not None}

    @property
    def num_counts(self) -> int:
        """The number of integers that layers count."""
        return sum(map(len, self.step_counts.values()))

    # Order

    @property
    def layers_with_parameters(self) -> list[str]:
        """The names of the layers that use a unit."""
        return [name for name in self.layers if self.units_of(name)]

    def units_of(self, layer: str) -> tuple[str, ...]:
        """Return the units that a `layer` uses: its own units, and the units that it is tied to."""
        return self._units_of[layer]

    def active_layers(self) -> list[str]:
        """Return the layers that the next forward pass runs, which are all layers.

        A subclass may skip some layers.  The last layer, the loss, always runs.
        """
        return list(self.layers)

    @property
    def context(self) -> int | None:
        """The most positions of a row of a batch; None if no layer limits them."""
        limits = (part.context for _, part in self._sequence.parts())
        return min((limit for limit in limits if limit is not None), default=None)

    # Arrays

    def draw(self, unit: str, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return this rank's initial values of a `unit`: 1-d float64 in host memory.

        A whole parameter is a function of `seed`, its name and its shape.
        """
        specs, boxes = self.units[unit], self.boxes(unit)
        drawn = {name: spec.draw(seed, name)[boxes[name].slices] for name, spec in specs.items()}
        return np.concatenate([x.ravel() for x in drawn.values()])

    def bind(
        self, layer: str, values: Mapping[str, Array], gradients: Mapping[str, Array] | None = None
    ) -> None:
        """Let a `layer` work on flat arrays: `values`, and `gradients` unless it runs forward only.

        Both are mappings by unit.  Call `unbind` before one of them changes.
        """
        bound = self._bound.get(layer)
        if bound is None or bound[0] is not values or bound[1] is not gradients:
            self._bound[layer] = values, gradients
            views = self._views(layer, values), self._views(layer, gradients or {})
            self.layers[layer].bind(*views)

    def unbind(self, layer: str) -> None:
        """Remove the arrays of a `layer`, so that it cannot use memory that has been freed."""
        self._bound.pop(layer, None)
        self.layers[layer].bind({}, {})

    def _views(self, layer: str, flats: Mapping[str, Array]) -> dict[str, Array]:
        units = [unit for unit in self.units_of(layer) if unit in flats]
        views = {name: x for unit in units for name, x in self.split(unit, flats[unit]).items()}
        views |= {here: views[there] for here, there in self.ties.items() if there in views}
        start = f"{layer}."
        return {name.removeprefix(start): x for name, x in views.items() if name.startswith(start)}

    def split(self, unit: str, flat: Array) -> dict[str, Array]:
        """Return views of the parameters in the flat array of a unit."""
        return split_flat(flat, self.shapes[unit])

    def named(self, flats: Mapping[str, Array]) -> dict[str, Array]:
        """Return views of the parameters in `flats`, by their names in the model."""
        views = [self.split(unit, flats[unit]) for unit in self.units]
        return {name: x for of_unit in views for name, x in of_unit.items()}

    # What it costs

    def inputs(self, x: ArraySpec) -> dict[str, ArraySpec]:
        """Return what enters every layer for the input `x` of the model."""
        return {name: entering for name, _, entering in self._sequence.inputs(x)}

    def check_input(self, x: ArraySpec) -> None:
        """Raise ValueError if a layer cannot compute what enters it for the input `x`."""
        self._sequence.check_input(x)

    def activation_bytes(self, x: ArraySpec) -> dict[str, Activations]:
        """Return what every layer keeps for the input `x` of the model (`ArraySpec.tokens`)."""
        inputs = self._sequence.inputs(x)
        return {name: layer.activation_bytes(entering) for name, layer, entering in inputs}

    def traffic(self, x: ArraySpec) -> dict[str, LayerTraffic]:
        """Return what every layer sends for the input `x` of the model."""
        inputs = self._sequence.inputs(x)
        return {name: layer.traffic(entering) for name, layer, entering in inputs}


def split_flat(flat: Array, shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """Return consecutive views of the 1-d array `flat`, one of every shape, by name."""
    parts = split(flat, map(math.prod, shapes.values()))
    return {name: x.reshape(shapes[name]) for name, x in zip(shapes, parts, strict=True)}
