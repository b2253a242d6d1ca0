"""What ranks have around matrices that they divide, and what they send at the borders.

Shoeybi et al. 2019 (Megatron-LM).  One matrix is divided by columns, and the next by rows.  Then
every rank has whole columns of the array between the two matrices, and computes GELU or heads of
attention without other ranks; only the last product is a sum over ranks.  (If the first matrix were
divided by rows, GELU would need a sum too.)  Two functions surround such a region: `f` before it
and `g` behind it.  Either is the derivative of the other.

|           | `f` forward | `f` backward   | `g` forward    | `g` backward |
|-----------|-------------|----------------|----------------|--------------|
| `Whole`   |             | all-reduce     | all-reduce     |              |
| `Divided` | all-gather  | reduce-scatter | reduce-scatter | all-gather   |

Outside of the regions all ranks have the same activations (`Whole`), or every rank has a part of
the tokens of every row (`Divided`: sequence parallelism, Korthikanti et al. 2022).  An all-reduce
of n elements sends as much as a reduce-scatter and an all-gather of n elements together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from collectives import Communicator, even_counts
from parallel.accounts import PredictedCall
from parallel.mesh import Mesh, length, span
from parallel.nn.functional import Array, namespace_of
from parallel.nn.layer import ArraySpec, LayerTraffic

Finish: TypeAlias = Callable[[], Array]  # waits for a call, and returns its result


@dataclass(frozen=True)
class Whole:
    """The ranks along an axis of a mesh, which all have whole activations outside of regions.

    Attributes
    ----------
    mesh : Mesh
        The mesh of all ranks.
    axis : str
        The axis along which ranks divide parameters.
    algorithm : str
        The algorithm of all collectives.
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
        """The axes along which gradients of parameters outside of regions are partial sums."""
        return ()

    def counts(self, total: int) -> tuple[int, ...]:
        """Return how many of `total` elements every rank has."""
        return tuple(even_counts(total, self.mesh.size_of(self.axis)))

    def part(self, total: int, rank: int | None = None) -> slice:
        """Return which of `total` elements a `rank` has, by default this rank."""
        return span(total, self.mesh.size_of(self.axis), self.mesh.index(self.axis, rank))

    @property
    def keeps_input(self) -> bool:
        """Whether the input of `f` is kept for backward, and not the output."""
        return True

    @property
    def gathers(self) -> bool:
        """Whether `f` and `g_backward` make new arrays of the parts of all ranks."""
        return False

    def config(self) -> list[Any]:
        """Return what the calls of the ranks depend on."""
        return [type(self).__name__, self.axis, self.algorithm]

    # The two functions

    def f(self, x: Array, positions: int) -> Array:
        """Return `x` (batch, tokens, dim) with the tokens of all ranks, `positions` in a row."""
        return x

    def start_f_backward(self, dx: Array) -> Finish:
        """Start to sum `dx` over ranks; return a function that waits for the sum."""
        work = self.comm.all_reduce(dx, out=dx, algorithm=self.algorithm, async_op=True)
        finish: Finish = work.wait
        return finish

    def g(self, y: Array) -> Array:
        """Return the sum of `y` (batch, tokens, dim) over ranks."""
        return self.comm.all_reduce(y, out=y, algorithm=self.algorithm)

    def g_backward(self, dy: Array, positions: int) -> Array:
        """Return `dy` with the tokens of all ranks, `positions` in a row."""
        return self.f(dy, positions)

    def kept(self, x: Array, entered: Array) -> Array:
        """Return the input or the output of `f`, whichever is kept for backward."""
        return x if self.keeps_input else entered

    def kept_again(self, kept: Array, positions: int) -> Array:
        """Return the output of `f` in backward, from the array that was kept."""
        return self.f(kept, positions) if self.keeps_input else kept

    # What they send and make

    def entered(self, x: ArraySpec) -> ArraySpec:
        """Return the output of `f` for the input `x`."""
        return x

    def kept_bytes(self, x: ArraySpec) -> int:
        """Return the bytes that are kept for the input `x` of `f`."""
        return (x if self.keeps_input else self.entered(x)).nbytes

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
        """Return a call of the ranks that sends `counts` of numbers of the width of `x`."""
        return PredictedCall(
            "",
            collective,
            self.algorithm,
            counts,
            x.width,
            axis=self.axis,
            in_place=collective == "all_reduce",
        )


@dataclass(frozen=True)
class Divided(Whole):
    """The ranks along an axis, which have parts of the tokens of every row outside of regions.

    Attributes
    ----------
    gathers_again : bool
        Whether only the part is kept for backward, which then gathers the parts again, as
        Megatron-LM does: less memory for one more all-gather.  (The gathered array is a temporary
        array of backward, as derivatives are, and does not count as kept.)  This form has the
        paper's activation memory, (s b h / t)(34 + 5 a s / h) bytes a layer; the other form has the
        paper's four all-gathers and four reduce-scatters a layer.
    """

    gathers_again: bool = False

    @property
    def partial(self) -> tuple[str, ...]:
        return (self.axis,)

    @property
    def keeps_input(self) -> bool:
        return self.gathers_again

    @property
    def gathers(self) -> bool:
        return True

    def config(self) -> list[Any]:
        return [*super().config(), self.gathers_again]

    def f(self, x: Array, positions: int) -> Array:
        return gathered(self.comm, x, 1, self.counts(positions), self.algorithm)

    def start_f_backward(self, dx: Array) -> Finish:
        return start_scattered(self.comm, dx, 1, self.counts(dx.shape[1]), self.algorithm)

    def g(self, y: Array) -> Array:
        return start_scattered(self.comm, y, 1, self.counts(y.shape[1]), self.algorithm)()

    def entered(self, x: ArraySpec) -> ArraySpec:
        return x.of_shape(x.shape[0], x.length, *x.shape[2:])

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
    """Return the arrays `x` of all ranks, joined along a `dim` in which they have `counts`."""
    xp = namespace_of(x)
    rows = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    whole = comm.all_gather(rows, counts=counts, algorithm=algorithm)
    return xp.ascontiguousarray(xp.moveaxis(whole, 0, dim))


def start_scattered(
    comm: Communicator, x: Array, dim: int, counts: tuple[int, ...], algorithm: str
) -> Finish:
    """Start to sum `x` over ranks; return a function that waits for this rank's part of the sum.

    The parts have sizes `counts` along a `dim`.
    """
    xp = namespace_of(x)
    rows = xp.ascontiguousarray(xp.moveaxis(x, dim, 0))
    work = comm.reduce_scatter(rows, counts=counts, algorithm=algorithm, async_op=True)
    return lambda: xp.ascontiguousarray(xp.moveaxis(work.wait(), 0, dim))
