"""Divide a model by placements of its parameters alone: what ranks send follows from these.

Lepikhin et al. 2021 (GShard), Xu et al. 2021 (GSPMD): the user says which dimension of a parameter
ranks divide, and a compiler derives the communication.  Here a walk through the layers does.  It
knows what ranks have of the array between two layers, all of it or a part of the features, what
each layer needs, and what it gives:

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

A layer that needs the whole after one with a divided output makes that gather its output, and so
does the end of the model.  The result consists of the layers of `parallel.nn.tensor`, as if placed
by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias, TypeVar

from parallel.mesh import Mesh
from parallel.nn.context import RingAttention, UlyssesAttention
from parallel.nn.layer import Layer, Recompute, Residual, Sequential
from parallel.nn.layers import CausalAttention, CrossEntropy, Embedding, Gelu, Linear, Unembedding
from parallel.nn.model import Model
from parallel.nn.tensor import (
    Columns,
    Rows,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    Whole,
)
from parallel.placement import Shape

L = TypeVar("L", bound=Layer)
Splits: TypeAlias = Mapping[str, tuple[int, str]]  # a dimension and an axis, by parameter


def annotate(model: Model, placements: Splits, mesh: Mesh) -> Model:
    """Return a `model` whose parameters ranks divide as `placements` say.

    Parameters
    ----------
    model : Model
        Of layers of one rank.  It is not changed.
    placements : mapping of str to (int, str)
        Patterns of names of parameters, and the dimension that the ranks along an axis of the mesh
        divide: ``{"*.up.weight": (1, "tensor"), "*.down.weight": (0, "tensor")}``.  The bias of a
        linear layer follows its weight, and a tied parameter the one that it is tied to.  An axis
        of one rank divides nothing.
    mesh : Mesh
        The ranks.

    Raises
    ------
    ValueError
        If a pattern matches no parameter, two patterns place one differently, or the mesh lacks an
        axis; and, with the name of the layer, if it cannot compute with its parameters so divided.

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
    made.recompute = model.recompute  # the layers are wrapped already
    return made


def splits_of(model: Model, placements: Splits, mesh: Mesh) -> dict[str, tuple[int, str]]:
    """Return the divided parameters of a `model` by name; raise ValueError as `annotate` does."""
    for pattern, (_, axis) in placements.items():
        if axis not in mesh.axes:
            raise ValueError(f"{pattern!r} is placed along {axis!r}, which the mesh lacks")
    names = list(Sequential(model.layers).specs())
    found, unused = {}, set(placements)
    for name in names:
        both = {name, model.ties.get(name, name)}
        matching = [p for p in placements if any(fnmatchcase(each, p) for each in both)]
        unused.difference_update(matching)
        if len({placements[pattern] for pattern in matching}) > 1:
            raise ValueError(f"{name} is placed differently by {' and '.join(matching)}")
        if matching and mesh.axes[placements[matching[0]][1]] > 1:
            found[name] = placements[matching[0]]
    if unused:
        raise ValueError(f"there is no parameter {min(unused)!r} to be placed")
    return found


class Features(NamedTuple):
    """Ranks have parts of the last dimension of an array."""

    region: Whole
    shape: Shape  # of the features
    dim: int  # of that shape, which ranks divide
    source: Columns  # the layer that made them

    def gather(self) -> None:
        """Let the layer that made them give all ranks the whole array."""
        self.source.is_gathered = True


Flow: TypeAlias = Features | None  # what ranks have of an array; None: all have the whole
Given: TypeAlias = tuple[Layer, Flow]  # a layer that ranks divide, and what it gives


@dataclass(frozen=True)
class Walk:
    """Takes an array through layers, with the parameters that ranks divide by name."""

    mesh: Mesh
    splits: Splits

    def through(self, layer: Layer, name: str, flow: Flow) -> Given:
        """Return what becomes of a `layer` and of the array after it, `flow` being before it."""
        rules: dict[type[Layer], Callable[[Layer, str, Flow], Given]] = {
            Residual: self._residual, Sequential: self._sequential, Recompute: self._recompute,
            Linear: self._linear, Unembedding: self._linear, Embedding: self._embedding,
            Gelu: self._elementwise, CausalAttention: self._attention,
            RingAttention: self._attention, UlyssesAttention: self._attention,
            CrossEntropy: self._cross_entropy,
        }  # fmt: skip
        return rules.get(type(layer), self._other)(layer, name, flow)

    def _sequential(self, layer: Layer, name: str, flow: Flow) -> Given:
        assert isinstance(layer, Sequential)
        inner = {}
        for key, each in layer.layers.items():
            inner[key], flow = self.through(each, f"{name}.{key}" if name else key, flow)
        made = copy(layer)  # a subclass may be made of other arguments than its layers
        Sequential.__init__(made, inner)
        return made, flow

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
        key = next(iter(layer.first_out_dims))  # of the matrix
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
        assert isinstance(layer, CausalAttention)
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
        """Return a layer if its parameters are divided as they are placed."""
        wanted = self._of(layer, name)
        for key, spec in layer.specs().items():
            if key in wanted and [split[:2] for split in spec.splits] != [wanted[key]]:
                raise ValueError(f"{name} cannot compute with {key} divided as {wanted[key]}")
        return layer

    def _of(self, layer: Layer, name: str) -> dict[str, tuple[int, str]]:
        """Return the placements of a layer's parameters."""
        names = {key: f"{name}.{key}" for key in layer.specs()}
        return {key: self.splits[long] for key, long in names.items() if long in self.splits}


def whole(flow: Flow) -> Flow:
    """Return what all ranks have if a layer needs the whole array: it is gathered if divided."""
    if flow is not None:
        flow.gather()
    return None


def has_heads(flow: Features, layer: CausalAttention) -> bool:
    """Return whether ranks have queries, keys and values of whole heads of a `layer`."""
    if len(flow.shape) != 3 or flow.shape[0] != 3 or flow.dim != 1:
        return False
    _, num_heads, width = flow.shape
    return width == layer.width if layer.width else num_heads == layer.num_heads


def fresh(layer: L) -> L:
    """Return a copy of a layer, and of the layers in it, that is bound to no arrays."""
    made = copy(layer)
    if isinstance(made, Sequential):
        made.layers = {name: fresh(each) for name, each in made.layers.items()}
    made.bind({}, {})
    return made
