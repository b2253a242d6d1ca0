"""Tensor parallelism: ranks divide the matrices of a layer, and what they send each other.

Shoeybi et al. 2019 (Megatron-LM).  A matrix is divided by columns, and the next by rows: then each
rank has whole columns of what is between them, GELU or heads of attention are its own, and only the
last product is a sum over ranks.  (Divided by rows first, GELU would need that sum.)  Two functions
surround such a region, and each is the other's derivative: `f` before it and `g` behind it.

|           | `f` forward | `f` backward   | `g` forward    | `g` backward |
|-----------|-------------|----------------|----------------|--------------|
| `Whole`   |             | all-reduce     | all-reduce     |              |
| `Divided` | all-gather  | reduce-scatter | reduce-scatter | all-gather   |

Outside of the regions all ranks have the same activations (`Whole`), or each has a part of the
tokens of every row (`Divided`: sequence parallelism, Korthikanti et al. 2022).
An all-reduce of n elements sends what a reduce-scatter and an all-gather of n elements do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from collectives import Communicator, even_counts
from parallel.accounts.calls import PredictedCall
from parallel.mesh import Mesh
from parallel.nn.functional import (
    Array,
    cast,
    flatten_rows,
    namespace_of,
    one_hot,
    upcast,
)
from parallel.nn.layer import Activations, ArraySpec, Layer, LayerTraffic, ParameterSpec, Step
from parallel.nn.layers import CrossEntropy, Embedding, Linear, check_classes, positions_of
from parallel.placement import Split, length, span

Splits: TypeAlias = Mapping[str, tuple[Split, ...]]
Finish: TypeAlias = Callable[[], Array]  # waits for a call and returns its result


@dataclass(frozen=True)
class Whole:
    """The ranks along an axis of a mesh, outside of whose regions all have whole activations.

    Attributes
    ----------
    mesh : Mesh
    axis : str
        The axis along which ranks divide parameters.
    algorithm : str
        Of all collectives.
    """

    mesh: Mesh
    axis: str = "tensor"
    algorithm: str = "ring"

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks."""
        comm = self.mesh[self.axis]
        assert comm is not None, "one rank alone sends nothing"
        return comm

    @property
    def partial(self) -> tuple[str, ...]:
        """The axes along which gradients of parameters outside of the regions are partial sums."""
        return ()

    def counts(self, total: int) -> tuple[int, ...]:
        """Return how many of `total` elements each rank has."""
        return tuple(even_counts(total, self.mesh.size_of(self.axis)))

    def part(self, total: int, rank: int | None = None) -> slice:
        """Return which of `total` elements a `rank` has, by default this rank."""
        return span(total, self.mesh.size_of(self.axis), self.mesh.index(self.axis, rank))

    # The two functions

    def f(self, x: Array, positions: int) -> Array:
        """Return `x` (batch, tokens, dim) with the tokens of all ranks, `positions` in a row."""
        return x

    def start_f_backward(self, dx: Array) -> Finish:
        """Start to sum `dx` over ranks; return what waits for it."""
        work = self.comm.all_reduce(dx, out=dx, algorithm=self.algorithm, async_op=True)
        return lambda: work.wait()

    def g(self, y: Array) -> Array:
        """Return the sum of `y` (batch, tokens, dim) over ranks."""
        return self.comm.all_reduce(y, out=y, algorithm=self.algorithm)

    def g_backward(self, dy: Array, positions: int) -> Array:
        """Return `dy` with the tokens of all ranks."""
        return dy

    def kept(self, x: Array, entered: Array) -> Array:
        """Return which of the input and the output of `f` is kept for backward."""
        return x

    def kept_again(self, kept: Array, positions: int) -> Array:
        """Return the output of `f` in backward."""
        return kept

    # What they send and make

    def entered(self, x: ArraySpec) -> ArraySpec:
        """Return the output of `f` for the input `x`."""
        return x

    def kept_bytes(self, x: ArraySpec) -> int:
        """Return the bytes of what is kept of the input `x` of `f`."""
        return x.nbytes

    def left(self, y: ArraySpec) -> ArraySpec:
        """Return the output of `g` for the input `y`."""
        return y

    def f_traffic(self, x: ArraySpec) -> LayerTraffic:
        """Return what `f` sends for the input `x`."""
        return LayerTraffic((), (self.call("all_reduce", x.size, x),))

    def g_traffic(self, y: ArraySpec) -> LayerTraffic:
        """Return what `g` sends for the input `y`."""
        return LayerTraffic((self.call("all_reduce", y.size, y),), ())

    def call(self, collective: str, counts: Any, x: ArraySpec) -> PredictedCall:
        """Return a call of the ranks, of numbers like those of `x`."""
        return PredictedCall(
            "", collective, self.algorithm, counts, x.width, axis=self.axis,
            in_place=collective == "all_reduce",
        )  # fmt: skip


@dataclass(frozen=True)
class Divided(Whole):
    """The same ranks, outside of whose regions each has a part of the tokens of every row.

    Attributes
    ----------
    gathers_again : bool
        Whether only the part is kept for backward, which then gathers it again: less memory for one
        more all-gather.  Megatron-LM does this; the paper keeps what is gathered.
    """

    gathers_again: bool = False

    @property
    def partial(self) -> tuple[str, ...]:
        return (self.axis,)

    def f(self, x: Array, positions: int) -> Array:
        return gathered(self.comm, x, 1, self.counts(positions), self.algorithm)

    def start_f_backward(self, dx: Array) -> Finish:
        return start_scattered(self.comm, dx, 1, self.counts(dx.shape[1]), self.algorithm)

    def g(self, y: Array) -> Array:
        return start_scattered(self.comm, y, 1, self.counts(y.shape[1]), self.algorithm)()

    def g_backward(self, dy: Array, positions: int) -> Array:
        return self.f(dy, positions)

    def kept(self, x: Array, entered: Array) -> Array:
        return x if self.gathers_again else entered

    def kept_again(self, kept: Array, positions: int) -> Array:
        return self.f(kept, positions) if self.gathers_again else kept

    def entered(self, x: ArraySpec) -> ArraySpec:
        return x.of_shape(x.shape[0], x.length, *x.shape[2:])

    def kept_bytes(self, x: ArraySpec) -> int:
        return x.nbytes if self.gathers_again else self.entered(x).nbytes

    def left(self, y: ArraySpec) -> ArraySpec:
        mine = length(self.part(y.length, y.rank))
        return y.of_shape(y.shape[0], mine, *y.shape[2:])

    def f_traffic(self, x: ArraySpec) -> LayerTraffic:
        gather, scatter = self._calls(self.entered(x))
        return LayerTraffic((gather,), (*[gather] * self.gathers_again, scatter))

    def g_traffic(self, y: ArraySpec) -> LayerTraffic:
        gather, scatter = self._calls(y)
        return LayerTraffic((scatter,), (gather,))

    def _calls(self, y: ArraySpec) -> tuple[PredictedCall, PredictedCall]:
        """Return the all-gather and the reduce-scatter of an array with all tokens."""
        counts = tuple(n * y.size // max(y.shape[1], 1) for n in self.counts(y.shape[1]))
        return self.call("all_gather", counts, y), self.call("reduce_scatter", counts, y)


def gathered(
    comm: Communicator, x: Array, dim: int, counts: tuple[int, ...], algorithm: str
) -> Array:
    """Return the arrays of all ranks one after the other along a `dim` of these sizes."""
    xp = namespace_of(x)
    rows = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    whole = comm.all_gather(rows, counts=counts, algorithm=algorithm)
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, dim))


def start_scattered(
    comm: Communicator, x: Array, dim: int, counts: tuple[int, ...], algorithm: str
) -> Finish:
    """Start to sum `x` over ranks; return what waits for this rank's part along a `dim`."""
    xp = namespace_of(x)
    rows = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    work = comm.reduce_scatter(rows, counts=counts, algorithm=algorithm, async_op=True)
    return lambda: xp.ascontiguousarray(xp.moveaxis(work.wait(), 0, dim))


class Columns(Layer):
    """A linear layer of which each rank computes some columns: `f`, then its part of the product.

    While `f` backward sums the derivative of the input over ranks, the product for the gradient of
    the weights is computed.

    Parameters
    ----------
    linear : Linear
        The whole layer; `Unembedding` is one.
    region : Whole
        The ranks, and what is outside.
    splits : mapping of str to splits
        How each parameter is divided (`Placement.splits`): only by dimensions of the output.
    is_gathered : bool
        Whether every rank gets all columns: the simplest model parallelism, with an all-gather of
        the outputs forward and an all-reduce of the derivatives of the inputs backward.
    """

    def __init__(
        self, linear: Linear, region: Whole, splits: Splits, *, is_gathered: bool = False
    ) -> None:
        super().__init__()
        self.linear, self.region, self.splits = linear, region, splits
        self.is_gathered = is_gathered
        self.saves_input = type(region) is Whole

    def specs(self) -> dict[str, ParameterSpec]:
        return with_splits(self.linear.specs(), self.splits)

    def config(self) -> list[Any]:
        return self.linear.config()

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        self.linear.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        positions = step.targets.shape[-1]
        entered = self.region.f(x, positions)
        y, _ = self.linear.forward(entered, step)
        if self.is_gathered:
            counts = self.counts()
            y = gathered(self.region.comm, y, y.ndim - 1, counts, self.region.algorithm)
        return y, (self.region.kept(x, entered), positions)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, rest = self._own_backward_input(dy, saved)
        return self.region.start_f_backward(dx)(), rest

    def backward(self, dy: Array, saved: Any) -> Array:
        """Sum the derivative of the input while the gradient of the weights is computed."""
        dx, rest = self._own_backward_input(dy, saved)
        finish = self.region.start_f_backward(dx)
        self.backward_weight(rest)
        return finish()

    def _own_backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        """Return this rank's part of the sum that is dx, and what `backward_weight` needs."""
        if self.is_gathered:
            ends = [sum(self.counts()[:i]) for i in range(len(self.counts()) + 1)]
            me = self.region.mesh.index(self.region.axis)
            dy = namespace_of(dy).ascontiguousarray(dy[..., ends[me] : ends[me + 1]])
        entered = self.region.kept_again(*saved)
        return self.linear.backward_input(dy, entered)

    def backward_weight(self, rest: Any) -> None:
        self.linear.backward_weight(rest)

    def counts(self) -> tuple[int, ...]:
        """Return the number of columns of each rank."""
        group = next(g for g in self.region.mesh.ranks(self.region.axis))
        return tuple(map(self._width, group))

    def _width(self, rank: int) -> int:
        """Return the number of columns of a rank."""
        spec = next(iter(self.specs().values()))
        shape = spec.box(self.region.mesh, rank).shape
        return math.prod(shape) // self.linear.in_features

    def activation_bytes(self, x: ArraySpec) -> Activations:
        entered = self.region.entered(x)
        mine = entered.of_shape(*entered.shape[:-1], self._width(x.rank))
        out = entered.of_shape(*entered.shape[:-1], sum(self.counts()))
        rest = entered.nbytes + mine.nbytes
        return Activations(self.region.kept_bytes(x), out if self.is_gathered else mine, rest)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, backward = self.region.f_traffic(x)
        if self.is_gathered:
            entered = self.region.entered(x)
            rows = math.prod(entered.shape[:-1])
            counts = tuple(rows * n for n in self.counts())
            forward = (*forward, self.region.call("all_gather", counts, entered))
        return LayerTraffic(forward, backward)


class Rows(Layer):
    """A linear layer of which each rank has some rows: its part of the product, then `g`.

    The input is divided as the rows are.  The bias is added once, to the sum.

    `linear`, `region` and `splits` are as in `Columns`: the weight is divided by its first
    dimension, and the bias not.
    """

    def __init__(self, linear: Linear, region: Whole, splits: Splits) -> None:
        super().__init__()
        self.linear, self.region, self.splits = linear, region, splits

    def specs(self) -> dict[str, ParameterSpec]:
        return with_splits(self.linear.specs(), self.splits)

    def config(self) -> list[Any]:
        return self.linear.config()

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        self.linear.bind(values, gradients)

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        product = self.region.g(self.linear.product(x))
        y = upcast(product) + upcast(self.value["bias"].reshape(-1))
        return cast(y, x.dtype), x

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.linear.backward_input(self.region.g_backward(dy, saved.shape[1]), saved)

    def backward_weight(self, rest: Any) -> None:
        self.linear.backward_weight(rest)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = self.linear.activation_bytes(x)
        return inner._replace(out=self.region.left(inner.out))

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        return self.region.g_traffic(self.linear.activation_bytes(x).out)


class VocabularyEmbedding(Embedding):
    """An embedding of which each rank has the vectors of some tokens; `g` adds up all."""

    def __init__(self, vocab_size: int, context: int, dim: int, region: Whole) -> None:
        super().__init__(vocab_size, context, dim)
        self.region = region

    def specs(self) -> dict[str, ParameterSpec]:
        return with_splits(super().specs(), {"token": ((0, self.region.axis),)})

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.check(x)
        xp, table = namespace_of(x), self.value["token"]
        index, is_mine = self._local(x)
        if table.shape[0]:
            rows = xp.take(table, xp.reshape(index, (-1,)), axis=0)
            rows = cast(rows * xp.reshape(is_mine, (-1, 1)), table.dtype)
        else:
            rows = xp.zeros((x.size, self.dim), dtype=table.dtype)
        vectors = self.region.g(xp.reshape(rows, (*x.shape, self.dim)))
        positions = self.value["position"][positions_of(step, x.shape[1])]
        if vectors.shape[1] < x.shape[1]:
            positions = positions[self.region.part(x.shape[1])]
        return vectors + positions, (x, step.positions)

    def _local(self, x: Array) -> tuple[Array, Array]:
        """Return the tokens counted from this rank's first, 0 for others, and which it has."""
        part, xp = self.region.part(self.vocab_size), namespace_of(x)
        is_mine = (x >= part.start) & (x < part.stop)
        return xp.where(is_mine, x - part.start, xp.zeros_like(x)), is_mine

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        tokens, positions = saved
        return None, (tokens, positions, self.region.g_backward(dy, tokens.shape[1]))

    def _selected(self, tokens: Array, dtype: Any) -> Array:
        index, is_mine = self._local(tokens)
        flat, mine = index.reshape(-1), is_mine.reshape(-1, 1)
        return one_hot(flat, self.value["token"].shape[0], dtype) * cast(mine, dtype)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        inner = super().activation_bytes(x)
        return inner._replace(out=self.region.left(inner.out))

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        return self.region.g_traffic(super().activation_bytes(x).out)


class VocabularyCrossEntropy(CrossEntropy):
    """The loss of logits of which each rank has those of some classes; see `CrossEntropy`.

    For each target, ranks agree on the largest logit, and then add up two numbers in one call: the
    exponentials of the others, and the target's own logit.  Every rank has the whole loss.
    """

    def __init__(self, num_classes: int, region: Whole) -> None:
        super().__init__()
        self.num_classes, self.region = num_classes, region

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        xp, region = namespace_of(x), self.region
        flat, targets = upcast(flatten_rows(x)), xp.reshape(step.targets, (-1,))
        check_classes("target", targets, self.num_classes)
        options: dict[str, Any] = {"algorithm": region.algorithm}
        largest = xp.full((flat.shape[0], 1), -math.inf, dtype=flat.dtype)
        if flat.shape[1]:
            largest = xp.max(flat, axis=-1, keepdims=True)
        largest = region.comm.all_reduce(largest, "max", out=largest, **options)
        shifted = flat - largest
        powers = xp.exp(shifted)
        part = region.part(self.num_classes)
        truth = one_hot(targets - part.start, flat.shape[1], flat.dtype)
        each = xp.stack([xp.sum(powers, axis=-1), xp.sum(truth * shifted, axis=-1)])
        sums, own = region.comm.all_reduce(each, out=each, **options)
        loss = xp.sum(xp.log(sums) - own)
        dlogits = (powers / sums[:, None] - truth) * (step.loss_scale / step.total)
        return float(loss) / step.total, cast(dlogits, x.dtype).reshape(x.shape)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        wide, rows = replace(x, width=max(x.width, 4)), math.prod(x.shape[:-1])
        return LayerTraffic(tuple(self.region.call("all_reduce", n * rows, wide) for n in (1, 2)))


def with_splits(specs: Mapping[str, ParameterSpec], splits: Splits) -> dict[str, ParameterSpec]:
    """Return `specs` in which some parameters are divided."""
    return {name: replace(spec, splits=splits.get(name, ())) for name, spec in specs.items()}
