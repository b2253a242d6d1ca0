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
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from parallel.accounts.calls import PredictedCall
from parallel.nn.cache import KeyValues
from parallel.nn.functional import Array, on_host
from parallel.placement import Placement, Shape


@dataclass(frozen=True)
class ParameterSpec(Placement):
    """A parameter before it is allocated: its placement, and the distribution of its values."""

    std: float = 0.0
    mean: float = 0.0

    def draw(self, seed: int, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return initial values, float64 of `shape`: a function of `seed` and `name` alone."""
        rng = np.random.default_rng([seed, *name.encode()])
        return self.mean + self.std * rng.standard_normal(self.shape)


@dataclass(frozen=True)
class BatchRows:
    """Which rows of which batch the ranks compute in a micro-batch.

    Attributes
    ----------
    step : int
        The number of the training step, from 0 on.
    of_rank : tuple of range
        The rows of the whole batch that each rank of the mesh computes, or computes a part of.
    seed : int, optional
        Of the training run; None: this is no training, and layers draw nothing.
    """

    step: int
    of_rank: tuple[range, ...]
    seed: int | None = 0

    def random(self, rank: int, name: str) -> list[np.random.Generator] | None:
        """Return a source of random numbers for each row of a `rank`, in the layer `name`.

        What it gives depends on the seed, the step, the row and the name, and not on the ranks.
        None without a seed.
        """
        if self.seed is None:
            return None
        words = name.encode()
        return [
            np.random.default_rng([self.seed, self.step, row, *words]) for row in self.of_rank[rank]
        ]


@dataclass(frozen=True)
class ArraySpec:
    """What is known of an array between two layers before it exists.

    Attributes
    ----------
    shape : tuple of int
        Of this rank's array.
    width : int
        The bytes of a number of the model.
    are_tokens : bool
        Whether these are integers, which do not count as memory.
    context : int
        The number of positions in a whole row, which ranks may divide.
    length : int
        How many of them this rank and the ranks with which it divides parameters have together.
    rank : int
        The rank of the mesh whose array it is.
    batch : BatchRows, optional
        Which rows of the batch it is of; known if a layer needs them (`Layer.needs_rows`).
    """

    shape: Shape
    width: int
    are_tokens: bool = field(default=False, kw_only=True)
    context: int = field(default=0, kw_only=True)
    length: int = field(default=0, kw_only=True)
    rank: int = field(default=0, kw_only=True)
    batch: BatchRows | None = field(default=None, kw_only=True)

    @classmethod
    def tokens(
        cls, rows: int, length: int, width: int, *, context: int | None = None, **where: Any
    ) -> ArraySpec:
        """Return the spec of tokens (`rows`, `length`), the input of a model.

        `where` are the attributes ``rank`` and ``batch``.
        """
        context = length if context is None else context
        return cls((rows, length), width, are_tokens=True, context=context, length=length, **where)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes that count as memory: none of tokens."""
        return 0 if self.are_tokens else self.width * self.size

    def of_shape(self, *shape: int) -> ArraySpec:
        """Return the spec of an array of numbers of another `shape`, on the same rank."""
        return ArraySpec(  # predictions make many; `replace` takes five times as long
            shape, self.width, context=self.context, length=self.length, rank=self.rank,
            batch=self.batch,
        )  # fmt: skip


class Activations(NamedTuple):
    """The bytes of floating-point numbers that a layer keeps, and its output."""

    saved: int  # from forward to backward
    out: ArraySpec
    rest: int = 0  # from `backward_input` to `backward_weight`, if these do not follow each other
    extra: int = 0  # the most during backward in addition to `saved`: what is computed again
    is_out_saved: bool = False  # whether the output itself is a part of `saved`
    is_input_in_rest: bool = False  # whether the input itself is a part of `rest`
    is_dy_in_rest: bool = False  # whether the derivative by the output itself is a part of `rest`

    def changes(self, kind: str) -> tuple[int, ...]:
        """Return how the bytes that are kept change, one after the other, in an F, B, I or W."""
        backward = (self.extra, -self.extra - self.saved)
        return {
            "F": (self.saved,), "B": backward, "I": (*backward, self.rest), "W": (-self.rest,),
        }[kind]  # fmt: skip


class LayerTraffic(NamedTuple):
    """The calls that a layer makes for a micro-batch, in each group along their axes."""

    forward: tuple[PredictedCall, ...] = ()
    backward: tuple[PredictedCall, ...] = ()


@dataclass
class Step:
    """What layers may know of the training step that they are a part of."""

    targets: Array = None  # the right classes of this micro-batch, int64 (rows, context)
    total: int = 1  # how many targets the batch of all ranks has
    micro_batch: int = 0
    # Of this rank's tokens in a row, int64 (context,), in host memory; None: from 0 on.
    positions: np.ndarray[Any, np.dtype[np.int64]] | None = None
    context: int = 0  # the number of tokens in a whole row, which ranks may divide
    loss_scale: float = 1.0  # the factor of the loss
    track: Callable[[Any], object] = id  # called with arrays that backward computes again
    num_recomputed: int = 0  # how many forward passes of layers have run again
    is_again: bool = False  # whether this is such a pass, which adds no losses and counts nothing
    losses: list[float] = field(default_factory=list)  # of layers, to be added to the loss
    is_reference: bool = False  # whether layers complete each call where they start it
    add_wait: Callable[[float], object] = id  # called with the seconds that a layer waited for one
    tokens: Array = None  # the input of the model, int64 (rows, ...)
    batch: BatchRows | None = None  # which rows of which batch these are
    numbers: Array = None  # of the tokens in the batch, int64, in an expert that gets some of them
    pass_turn: Callable[[], object] = dict  # lets another micro-batch compute until it waits itself
    cache: KeyValues | None = None  # of attention, if these tokens follow others of the same rows
    copied: Mapping[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # see `on_host`

    @property
    def length(self) -> int:
        """The number of tokens of each row of this micro-batch, those of other ranks included."""
        return int((self.tokens if self.targets is None else self.targets).shape[-1])

    def on_host(self, x: Array) -> np.ndarray[Any, Any]:
        """Return `x`, the tokens or targets, in host memory, without waiting for a device.

        `copied` has the arrays from which they were copied, by their ``id``; another array on a
        device is waited for.
        """
        found = self.copied.get(id(x))
        return on_host(x) if found is None else found

    @contextmanager
    def numbered(self, numbers: Array) -> Iterator[None]:
        """Let layers in this context compute tokens with these `numbers`."""
        before, self.numbers = self.numbers, numbers
        try:
            yield
        finally:
            self.numbers = before

    def wait(self, finish: Callable[[], Array]) -> Array:
        """Return what `finish` does, which waits for a call of this layer that sends only once.

        Meanwhile this rank may compute another micro-batch.  So all ranks that have a communicator
        in common must call this equally often.
        """
        self.pass_turn()
        return self._wait(finish)

    def _wait(self, finish: Callable[[], Array]) -> Array:
        began = time.perf_counter()
        result = finish()
        self.add_wait(time.perf_counter() - began)
        return result

    def overlap(self, finish: Callable[[], Array], compute: Callable[[], object]) -> Array:
        """Call `compute` before `finish`, which waits for a call; after it in a reference step."""
        if self.is_reference:
            result = self._wait(finish)
            compute()
            return result
        compute()
        return self._wait(finish)


class Layer(ABC):
    """One differentiable function with parameters; the base class of all layers.

    A subclass defines `forward`, `backward_input` and `activation_bytes`; `specs` and
    `backward_weight` if it has parameters; and `traffic` if it communicates.  Arrays have any dtype
    of `parallel.optim.precision.DTYPES`.

    Attributes
    ----------
    value : dict of str to array
        This rank's boxes of the parameters, as long as the layer is bound.
    gradient : dict of str to array
        The gradients, of the same shapes; empty if the layer is bound for forward only.
    saves_input : bool
        Whether what `forward` saves contains the input itself.
    needs_rows : bool
        Whether the layer depends on which rows of the batch it computes: what it sends, what it
        keeps, or which random numbers it draws.
    context : int, optional
        The most positions of a row of the batch, if the layer limits them.
    comm_axes : tuple of str
        The communicators that the layer uses, as axes of the mesh, without those along which its
        parameters are divided.  Ranks make them together: outside a trainer, get ``mesh[axis]`` for
        each on all ranks, before the first forward.
    step_counts : array, optional
        What the layer has counted in this step, int64 (n,), if it counts anything.  After the
        update ranks add up what they have counted, and `end_step` gets the sum.
    """

    saves_input = True
    needs_rows = False
    context: int | None = None
    comm_axes: tuple[str, ...] = ()
    step_counts: np.ndarray[Any, np.dtype[np.int64]] | None = None

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

        `dy` is the derivative by the output; `saved` is what `forward` returned.
        """

    def backward_weight(self, rest: Any) -> None:
        """Add the derivatives by the parameters to `gradient`; `rest` is from `backward_input`."""
        assert rest is None, f"{type(self).__name__} does not define backward_weight"

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves of backward (see `backward_input` for `dy` and `saved`); return dx."""
        dx, rest = self.backward_input(dy, saved)
        self.backward_weight(rest)
        return dx

    @abstractmethod
    def activation_bytes(self, x: ArraySpec) -> Activations:
        """Return what the layer keeps for an input `x`, on the rank of which that is.

        An array that a previous layer saved and this one passes through is not counted again.
        """

    def out(self, x: ArraySpec) -> ArraySpec:
        """Return the output for an input `x`, on the rank of which that is."""
        return self.activation_bytes(x).out

    def check_input(self, x: ArraySpec) -> None:
        """Raise ValueError if `forward` would refuse an input `x`, on the rank of which that is.

        This is asked before anything is sent, of the inputs of all ranks: whatever `forward` checks
        and is known without the data is checked here, so that no rank fails alone in a step.
        """
        return

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        """Return the calls that the layer makes for an input `x`, on the rank of which that is.

        Calls have no phase and no groups: the group of that rank along their axis makes them.
        """
        return LayerTraffic()

    def end_step(self, counts: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Use the sum of the `step_counts` of all ranks, `counts`."""
        raise NotImplementedError(f"{type(self).__name__} counts nothing")

    def state(self) -> list[float]:
        """Return what changes from step to step and is no parameter; checkpoints contain it."""
        return []

    def load_state(self, state: Sequence[float]) -> None:
        """Set what `state` returned."""
        assert not state, f"{type(self).__name__} has no state"

    def parts(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        """Yield this layer and all layers in it, with their names; its own is `name`."""
        yield name, self

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
        first = next(iter(self.layers.values()), self)
        self.saves_input = first.saves_input
        self.needs_rows = any(layer.needs_rows for layer in self.layers.values())

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

    def activation_bytes(self, x: ArraySpec) -> Activations:
        layers = list(self.layers.values())
        each = [layer.activation_bytes(entering) for _, layer, entering in self.inputs(x)]
        twice = sum(  # an output that is saved, and is saved as the input of the next layer too
            made.out.nbytes
            for made, following in zip(each, layers[1:], strict=False)
            if made.is_out_saved and following.saves_input
        )
        first, last = each[0], each[-1]
        return last._replace(
            saved=sum(made.saved for made in each) - twice,
            rest=sum(made.rest for made in each),
            extra=max(made.extra for made in each),
            is_input_in_rest=first.is_input_in_rest,
        )

    def out(self, x: ArraySpec) -> ArraySpec:
        for layer in self.layers.values():
            x = layer.out(x)
        return x

    def check_input(self, x: ArraySpec) -> None:
        for _, layer, entering in self.inputs(x):
            layer.check_input(entering)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        each = [layer.traffic(entering) for _, layer, entering in self.inputs(x)]
        forward = [call for layer in each for call in layer.forward]
        backward = [call for layer in reversed(each) for call in layer.backward]
        return LayerTraffic(tuple(forward), tuple(backward))

    def inputs(self, x: ArraySpec) -> Iterator[tuple[str, Layer, ArraySpec]]:
        """Yield the layers with their names and inputs, the first of which is `x`."""
        for name, layer in self.layers.items():
            yield name, layer, x
            x = layer.out(x)


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

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return super().activation_bytes(x)._replace(is_out_saved=False)  # the sum is not


class Recompute(Layer):
    """A layer that keeps only its input, and runs forward again during backward.

    Chen et al. 2016.  Of attention alone: Korthikanti et al. 2022, selective recomputation.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self.needs_rows = layer, layer.needs_rows

    def specs(self) -> dict[str, ParameterSpec]:
        return self.layer.specs()

    def parts(self, name: str = "") -> Iterator[tuple[str, Layer]]:
        yield name, self
        yield from self.layer.parts(name)

    def config(self) -> list[Any]:
        return self.layer.config()  # the numbers are the same: ranks that send nothing may differ

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
        losses, step.losses, step.is_again = step.losses, [], True
        saved = self.layer.forward(x, step)[1]
        step.losses, step.is_again = losses, False
        step.num_recomputed += 1
        step.track(saved)
        return saved

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = self.layer.activation_bytes(x)
        extra = inner.saved + inner.extra - x.nbytes * self.layer.saves_input
        return inner._replace(saved=x.nbytes, extra=extra, is_out_saved=False)

    def out(self, x: ArraySpec) -> ArraySpec:
        return self.layer.out(x)

    def check_input(self, x: ArraySpec) -> None:
        self.layer.check_input(x)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, backward = self.layer.traffic(x)
        return LayerTraffic(forward, forward + backward)


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
    found: set[str] = set()

    def changed(name: str, layer: Layer) -> Layer:
        parts = name.count(".")
        matching = {p for p in patterns if p.count(".") == parts and fnmatchcase(name, p)}
        if matching:
            found.update(matching)
            return Recompute(layer)
        if patterns and isinstance(layer, Sequential):
            inner = {key: changed(f"{name}.{key}", each) for key, each in layer.layers.items()}
            layer = copy(layer)  # a subclass may be made of other arguments than its layers
            Sequential.__init__(layer, inner)
        return layer

    made = {name: changed(name, layer) for name, layer in layers.items()}
    if unknown := [pattern for pattern in patterns if pattern not in found]:
        raise ValueError(f"there is no layer {unknown[0]!r} to recompute")
    return made
