"""Attention to whole rows on one rank, and to rows that ranks divide, on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator, Ledger, even_counts, phase
from parallel import Mesh, PredictedCall
from parallel.nn import (
    ArraySpec,
    CausalAttention,
    LayerTraffic,
    RingAttention,
    Step,
    UlyssesAttention,
    context_positions,
    upcast,
)
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import Values

ROWS, WIDTH = 2, 3
KINDS = {"ring": RingAttention, "ulysses": UlyssesAttention}

# Ranks, positions of a row, and heads: rows and heads that ranks divide evenly and unevenly, fewer
# heads than ranks, and ranks with one position.
SIZES = [(1, 5, 2), (2, 8, 2), (2, 9, 3), (3, 17, 1), (4, 4, 4), (4, 19, 6), (5, 7, 3), (8, 33, 9)]

Make = Callable[[int, Mesh], Any]


DTYPES = ["float64", "float32", "bfloat16", "float16"]


class Case(NamedTuple):
    """`heads` are of all ranks along the tensor axis, which is there if it has several ranks."""

    ranks: int
    context: int
    heads: int
    dtype: str = "float64"
    tensor: int = 1

    def mesh(self, comm: Communicator | None) -> Mesh:
        axes = {"context": self.ranks} | ({"tensor": self.tensor} if self.tensor > 1 else {})
        return Mesh(comm, **axes)

    def arrays(self, seed: int = 0) -> tuple[Values, Values]:
        """The input (rows, context, 3, heads, width), and the slope by the output."""
        rng, shape = np.random.default_rng(seed), (ROWS, self.context, 3, self.heads, WIDTH)
        x, dy = 2 * rng.standard_normal(shape), rng.standard_normal(shape[:2] + shape[3:])
        return x.astype(dtype_of(self.dtype)), dy.astype(dtype_of(self.dtype))

    def part(self, mesh: Mesh, rank: int) -> tuple[Values, slice]:
        """The positions and the heads of a rank."""
        positions = context_positions(self.context, self.ranks, mesh.index("context", rank))
        place = mesh.index("tensor", rank) if self.tensor > 1 else 0
        counts = even_counts(self.heads, self.tensor)
        return positions, slice(sum(counts[:place]), sum(counts[: place + 1]))

    def spec(self, mesh: Mesh, rank: int) -> ArraySpec:
        """The input of a rank."""
        positions, heads = self.part(mesh, rank)
        length, num_heads = len(positions), heads.stop - heads.start
        return ArraySpec(
            (ROWS, length, 3 * num_heads * WIDTH),
            dtype_of(self.dtype).itemsize,
            context=self.context,
            length=length,
            rank=rank,
        )


each_kind = pytest.mark.parametrize("kind", KINDS)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)
# Heads that the ranks along the tensor axis divide: the last of them may have none.
with_tensor = pytest.mark.parametrize(
    "case", [Case(2, 9, 5, tensor=2), Case(3, 7, 1, tensor=2), Case(2, 8, 2, tensor=3)], ids=str
)


def by_width(kind: str) -> Make:
    """Layers that take as many heads as come: predictions are right for all ranks."""
    return lambda heads, mesh: KINDS[kind](99, mesh, width=WIDTH)


class Found(NamedTuple):
    """Of the whole row, (rows, context, heads, width) and (rows, context, 3, heads, width)."""

    y: Values
    dx: Values


def on_one_rank(case: Case, *, exact: bool = False) -> Found:
    """What `CausalAttention` finds; if `exact`, without the rounding of two bytes."""
    x, dy = case.arrays()
    if exact:
        x, dy = upcast(x), upcast(dy)
    layer = CausalAttention(case.heads)
    y, saved = layer.forward(flat(x), Step())
    dx = layer.backward(flat(dy), saved)
    return Found(y.reshape(dy.shape), dx.reshape(x.shape))


class Rank(NamedTuple):
    """What one rank found, and of which part of the row; `ledger` is that of all ranks, on rank 0.

    `saved` is what it kept for backward.
    """

    y: Values
    dx: Values
    where: tuple[Any, Any]
    layer: Any
    saved: Any
    mesh: Mesh
    ledger: Ledger | None


def on_ranks(case: Case, make: Make) -> list[Rank]:
    """Attention on ranks as threads, with the layers that `make` makes of local heads."""

    def attend(comm: Communicator) -> Rank:
        mesh = case.mesh(comm)
        positions, heads = case.part(mesh, comm.rank)
        x, dy = (flat(z[:, positions][..., heads, :]) for z in case.arrays())
        layer = make(heads.stop - heads.start, mesh)
        with comm.record() as ledger:
            with phase("forward"):
                y, saved = layer.forward(x, Step(positions=positions, context=case.context))
            with phase("backward"):
                dx = layer.backward(dy, saved)
        whole = ledger.gather()
        return Rank(y, dx, (positions, heads), layer, saved, mesh, whole)

    found: list[Rank] = collectives.run(attend, size=case.ranks * case.tensor, timeout=30)
    return found


def whole_of(case: Case, ranks: Iterable[Rank]) -> Found:
    """The row that ranks divide, put together; every element must be of one rank."""
    x, dy = case.arrays()
    y, dx = np.full(dy.shape, np.nan), np.full(x.shape, np.nan)
    for rank in ranks:
        positions, heads = rank.where
        here = np.ix_(range(ROWS), positions, range(heads.start, heads.stop))
        assert np.isnan(y[here]).all()
        y[here] = rank.y.reshape(y[here].shape)
        here = np.ix_(range(ROWS), positions, range(3), range(heads.start, heads.stop))
        dx[here] = rank.dx.reshape(dx[here].shape)
    return Found(y, dx)


def flat(x: Values) -> Values:
    """With the dimensions after positions as one, in memory of its own."""
    return np.array(x, order="C").reshape(*x.shape[:2], math.prod(x.shape[2:]))


def check_close(found: Found, wanted: Found, tolerance: float) -> None:
    """Absolutely: the numbers are near 1."""
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b.astype(np.float64), rtol=0, atol=tolerance)


# Messages

Matrices = np.ndarray[Any, np.dtype[np.int64]]  # messages and bytes (2, ranks, ranks)


def predicted(layer: Any, case: Case, mesh: Mesh) -> dict[str, Matrices]:
    """What all ranks send by phase, as any one rank knows it."""
    found = {name: np.zeros((2, mesh.size, mesh.size), np.int64) for name in LayerTraffic._fields}
    for rank in range(mesh.size):
        traffic = layer.traffic(case.spec(mesh, rank))
        for name, calls in traffic._asdict().items():
            for call in calls:
                found[name] += of_rank(call, mesh, rank).matrices(mesh.size)
    return found


def of_rank(call: PredictedCall, mesh: Mesh, rank: int) -> PredictedCall:
    """A call with its group, unless another rank speaks for that."""
    if call.groups is not None:
        return call
    group = next(g for g in mesh.ranks(call.axis) if rank in g)
    return replace(call, groups=(group,), num_calls=call.num_calls * (rank == group[0]))


def recorded(ledger: Ledger) -> dict[str, Matrices]:
    """What all ranks sent by phase."""
    found = {
        name: np.zeros((2, ledger.size, ledger.size), np.int64) for name in LayerTraffic._fields
    }
    for row in ledger.rows():
        assert row.axis == "context"
        found[row.phase][:, row.src, row.dst] += row.segments, row.bytes
    return found
