"""Divide a model by placements of its parameters alone: what ranks send follows from them.

In GShard (Lepikhin et al. 2021) and GSPMD (Xu et al. 2021) the user says which dimension of a
parameter ranks divide, and a compiler derives the communication.  Here a walk through the layers
derives it.  The walk knows whether ranks have the whole array between two layers or parts of its
features, what every layer needs, and what it gives:

| layer                        | needs                | gives                                    |
|------------------------------|----------------------|------------------------------------------|
| linear                       | whole                | whole                                    |
| linear, output divided       | whole                | features, divided as the output is       |
| linear, input divided        | features, the same   | partial sums, added up to the whole      |
| embedding, tokens divided    | tokens               | partial sums, added up to the whole      |
| GELU, element by element     | anything             | the same                                 |
| attention                    | whole, or by heads   | whole, or by heads                       |
| cross-entropy                | whole, or by classes | the loss                                 |
| residual, norm, other layers | whole                | whole                                    |

A layer with a divided output gathers it if the next layer needs the whole array, or if the model
ends.  The result consists of the layers of `parallel.nn.tensor`, as if they were placed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias, TypeVar

from parallel.mesh import Mesh, Shape
from parallel.nn.context import RingAttention, UlyssesAttention
from parallel.nn.layer import Layer, Recompute, Residual, Sequential
from parallel.nn.models.model import Model
from parallel.nn.plain import (
    Attention,
    CausalAttention,
    CrossEntropy,
    Embedding,
    Gelu,
    Linear,
    Unembedding,
)
from parallel.nn.tensor import Columns, Rows, VocabularyCrossEntropy, VocabularyEmbedding, Whole

L = TypeVar("L", bound=Layer)
Splits: TypeAlias = Mapping[str, tuple[int, str]]  # a dimension and an axis for parameters


def annotate(model: Model, placements: Splits, mesh: Mesh) -> Model:
    """Return a `model` whose parameters ranks divide as `placements` say.

    Parameters
    ----------
    model : Model
        A model of layers that one rank computes.  It is not changed.
    placements : mapping of str to (int, str)
        Patterns of names of parameters, and the dimension that the ranks along an axis of the mesh
        divide: ``{"*.up.weight": (1, "tensor"), "*.down.weight": (0, "tensor")}``.  The bias of a
        linear layer follows its weight, and a tied parameter follows the parameter that it is tied
        to.  An axis of one rank divides nothing.
    mesh : Mesh
        The ranks.

    Raises
    ------
    ValueError
        If a pattern matches no parameter, two patterns place a parameter differently, the mesh
        lacks an axis, or a layer, which is named, cannot compute with its parameters so divided.

    Examples
    --------
    >>> import collectives
    >>> from parallel import Mesh, gpt
    >>> from parallel.nn import ArraySpec, annotate
    >>> def calls(comm):
    ...     by_columns = {"*.up.weight": (1, "tensor")}
    ...     model = annotate(gpt(num_layers=1, hidden=8), by_columns, Mesh(comm, tensor=2))
    ...     forward, backward = model.traffic(ArraySpec.tokens(1, 4, 4))["block0"]
    ...     return [call.collective for call in forward + backward]
    >>> collectives.run(calls, size=2)[0]
    ['all_gather', 'all_reduce']
    """
    walk = Walk(mesh, splits_of(model, placements, mesh))
    layers, flow = walk.through(Sequential(model.layers), "", None)
    assert isinstance(layers, Sequential)
    whole(flow)
    made = Model(layers.layers, model.ties, mesh=mesh)
    made.recompute = model.recompute  # the layers are within `Recompute` already
    return made


def splits_of(model: Model, placements: Splits, mesh: Mesh) -> dict[str, tuple[int, str]]:
    """Return the divided parameters of a `model` by name; raise ValueError as `annotate` does."""
    for pattern, (_, axis) in placements.items():
        if axis not in mesh.axes:
            raise ValueError(f"{pattern!r} is placed along {axis!r}, which the mesh lacks")
    splits, unused = {}, set(placements)
    for name in Sequential(model.layers).specs():
        there = model.ties.get(name, name)
        matching = [p for p in placements if fnmatchcase(name, p) or fnmatchcase(there, p)]
        unused.difference_update(matching)
        if len({placements[pattern] for pattern in matching}) > 1:
            raise ValueError(f"{name} is placed differently by {' and '.join(matching)}")
        if matching and mesh.axes[placements[matching[0]][1]] > 1:
            splits[name] = placements[matching[0]]
    if unused:
        raise ValueError(f"there is no parameter {min(unused)!r} to be placed")
    return splits


class Features(NamedTuple):
    """The features of an array, of which ranks have parts.

    Attributes
    ----------
    region : Whole
        The ranks.
    shape : tuple of int
        The shape of the features.
    dim : int
        The dimension of this shape that ranks divide.
    source : Columns
        The layer whose output the array is.
    """

    region: Whole
    shape: Shape
    dim: int
    source: Columns


Flow: TypeAlias = Features | None  # what ranks have of an array; None: all have the whole array
Given: TypeAlias = tuple[Layer, Flow]  # a layer that ranks divide, and what it gives


@dataclass(frozen=True)
class Walk:
    """A walk through layers, which divides their parameters.

    Attributes
    ----------
    mesh : Mesh
        The ranks.
    splits : mapping of str to (int, str)
        The parameters that ranks divide, by name.
    """

    mesh: Mesh
    splits: Splits

    def through(self, layer: Layer, name: str, flow: Flow) -> Given:
        """Return the divided form of a `layer`, and what ranks have of its output.

        `flow` is what ranks have of its input.
        """
        rules: dict[type[Layer], Callable[[Layer, str, Flow], Given]] = {
            Residual: self._residual,
            Sequential: self._sequential,
            Recompute: self._recompute,
            Linear: self._linear,
            Unembedding: self._linear,
            Embedding: self._embedding,
            Gelu: self._elementwise,
            Attention: self._attention,
            CausalAttention: self._attention,
            RingAttention: self._attention,
            UlyssesAttention: self._attention,
            CrossEntropy: self._cross_entropy,
        }
        return rules.get(type(layer), self._other)(layer, name, flow)

    def _sequential(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Sequential)
        inner = {}
        for key, part in layer.layers.items():
            inner[key], flow = self.through(part, f"{name}.{key}" if name else key, flow)
        return layer.with_layers(inner), flow

    def _residual(self, layer: Layer, name: str, flow: Flow) -> Given:
        made, added = self._sequential(layer, name, whole(flow))
        return made, whole(added)

    def _recompute(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Recompute)
        inner, flow = self.through(layer.layer, name, flow)
        return Recompute(inner), flow

    def _elementwise(self, layer: Layer, name: str, flow: Flow) -> Given:
        return self._plain(layer, name), flow

    def _other(self, layer: Layer, name: str, flow: Flow) -> Given:
        return self._plain(layer, name), whole(flow)

    def _linear(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Linear)
        key = next(iter(layer.first_out_dims))  # the name of the matrix
        splits = self._of(layer, name)
        if key not in splits:
            return self._plain(layer, name), whole(flow)
        dim, axis = splits[key]
        region, out_dim = Whole(self.mesh, axis), dim - layer.first_out_dims[key]
        if 0 <= out_dim < len(layer.out_shape):
            whole(flow)
            columns = Columns(fresh(layer), region, out_dim)
            return self._checked(columns, name), Features(region, layer.out_shape, out_dim, columns)
        return self._rows(layer, name, flow, region, dim), None

    def _rows(self, layer: Linear, name: str, flow: Flow, region: Whole, dim: int) -> Layer:
        if dim != 0 or "weight" not in layer.first_out_dims:
            raise ValueError(f"{name} cannot be divided by dimension {dim} of its matrix")
        if flow is None or flow.region != region or flow.dim != 0:
            raise ValueError(
                f"{name} is divided by its input along {region.axis!r}, but what enters it is not"
            )
        return self._checked(Rows(fresh(layer), region, math.prod(flow.shape[1:])), name)

    def _embedding(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Embedding)
        splits = self._of(layer, name)
        if "token" not in splits:
            return self._plain(layer, name), None
        region = Whole(self.mesh, splits["token"][1])
        made = VocabularyEmbedding(layer.vocab_size, layer.context, layer.dim, region)
        return self._checked(made, name), None

    def _attention(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Attention)
        if flow is None or not has_heads(flow, layer):
            return self._plain(layer, name), whole(flow)
        made = fresh(layer)
        made.width = flow.shape[2]  # this rank's number of heads is another
        return made, flow._replace(shape=flow.shape[1:], dim=0)

    def _cross_entropy(self, layer: Layer, name: str, flow: Flow) -> Given:
        if flow is None or len(flow.shape) != 1:
            return self._plain(layer, name), whole(flow)
        return VocabularyCrossEntropy(flow.shape[0], flow.region), None

    def _plain(self, layer: Layer, name: str) -> Layer:
        """Return a layer that all ranks compute alike, if they divide none of its parameters."""
        if any(spec.splits for spec in layer.specs().values()):
            raise ValueError(f"{name} is divided already")
        return self._checked(fresh(layer), name)

    def _checked(self, layer: Layer, name: str) -> Layer:
        """Return a `layer`; raise ValueError unless its parameters are divided as placed."""
        wanted = self._of(layer, name)
        for key, spec in layer.specs().items():
            if key in wanted and [split[:2] for split in spec.splits] != [wanted[key]]:
                raise ValueError(f"{name} cannot compute with {key} divided as {wanted[key]}")
        return layer

    def _of(self, layer: Layer, name: str) -> dict[str, tuple[int, str]]:
        """Return the placements of the parameters of a `layer`."""
        names = {key: f"{name}.{key}" for key in layer.specs()}
        return {key: self.splits[long] for key, long in names.items() if long in self.splits}


def whole(flow: Flow) -> Flow:
    """Return what ranks have for a layer that needs the whole array.

    The layer whose output the array is gathers the output if it is divided.
    """
    if flow is not None:
        flow.source.is_gathered = True
    return None


def has_heads(flow: Features, layer: Attention) -> bool:
    """Return whether ranks have queries, keys and values of whole heads of a `layer`."""
    if len(flow.shape) != 3 or flow.shape[0] != 3 or flow.dim != 1:
        return False
    _, num_heads, width = flow.shape
    return width == layer.width if layer.width else num_heads == layer.num_heads


def fresh(layer: L) -> L:
    """Return a copy of a `layer`, and of the layers in it, that is bound to no arrays."""
    made = copy(layer)
    if isinstance(made, Sequential):
        made.layers = {name: fresh(part) for name, part in made.layers.items()}
    made.bind({}, {})
    return made
