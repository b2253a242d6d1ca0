"""Attention to rows that ranks divide finds what attention to whole rows does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh
from parallel.nn import (
    Array,
    ArraySpec,
    CausalAttention,
    LayerTraffic,
    RingAttention,
    Step,
    UlyssesAttention,
    context_positions,
)
from parallel.nn.context import Tile, ring, softmax, tiles, ulysses
from tests.fakes.arrays import FAKE, bare, crossed
from tests.parallel.nn.bound_models import Values
from tests.parallel.nn.context.divided_rows import (
    KINDS,
    WIDTH,
    Case,
    Found,
    Make,
    by_width,
    check_close,
    each_kind,
    each_size,
    flat,
    on_one_rank,
    on_ranks,
    whole_of,
    with_tensor,
)

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # the most that a number changes, relatively
EXACT = {"float64": 1e-12, "float32": 1e-5}


def check(case: Case, make: Make) -> None:
    """Forward and backward, all ranks together, are those of one rank."""
    found = whole_of(case, on_ranks(case, make))
    check_close(found, on_one_rank(case), EXACT[case.dtype])


# What it computes


@each_kind
@each_size
@pytest.mark.parametrize("dtype", EXACT)
def test_ranks_find_what_one_rank_does(kind: str, size: tuple[int, int, int], dtype: str) -> None:
    check(Case(*size, dtype), KINDS[kind])


@each_kind
@with_tensor
def test_ranks_that_divide_heads_divide_rows_too(kind: str, case: Case) -> None:
    check(case, KINDS[kind])


@each_kind
@with_tensor
def test_the_width_of_heads_may_be_given_instead_of_their_number(kind: str, case: Case) -> None:
    check(case, by_width(kind))


@each_kind
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("size", [(1, 6, 2), (3, 16, 2)], ids=str)
def test_two_bytes_are_rounded_once(kind: str, size: tuple[int, int, int], dtype: str) -> None:
    """By the ring; with all-to-alls the probabilities are rounded too, as on one rank."""
    case, eps = Case(*size, dtype), ROUNDING[dtype]
    found, exact = whole_of(case, on_ranks(case, KINDS[kind])), on_one_rank(case, exact=True)
    if kind == "ring":
        check_rounded(case, found)
    for a, b in zip(found, exact, strict=True):
        assert np.abs(a - b).max() <= 4 * eps * np.abs(b).max()


def check_rounded(case: Case, found: Found) -> None:
    """Each number is that of float32, rounded; in dx after the rounding of the output."""
    eps, exact = ROUNDING[case.dtype], on_one_rank(case, exact=True)
    for a, b, more in zip(found, exact, (0, slack(case, eps)), strict=True):
        assert (np.abs(a - b) <= eps * np.abs(b) + more + 1e-5).all(), "rounded more than once"


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_ring_that_computes_in_two_bytes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(softmax, "upcast", lambda x: x)
    case = Case(3, 16, 2, dtype)
    with pytest.raises(AssertionError, match="rounded more than once"):
        check_rounded(case, whole_of(case, on_ranks(case, RingAttention)))


def slack(case: Case, eps: float) -> Values:
    """How much dx may change because the output that backward reads is rounded."""
    x, dy = (z.astype(np.float64) for z in case.arrays())
    q, k, _ = np.moveaxis(x, (2, 3), (0, 2))  # (rows, heads, context, width)
    y = np.moveaxis(on_one_rank(case, exact=True).y, 2, 1)
    dy = np.moveaxis(dy, 2, 1)
    scores = np.where(np.tri(case.context), q @ k.mT / np.sqrt(WIDTH), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    along = eps * np.abs(dy * y).sum(-1, keepdims=True) * p / np.sqrt(WIDTH)
    each = along @ np.abs(k), along.mT @ np.abs(q), np.zeros_like(q)
    return np.moveaxis(np.stack(each), (0, 2), (2, 3))


@each_kind
def test_the_halves_of_backward_are_the_whole_to_the_bit(kind: str) -> None:
    class Halves(KINDS[kind]):  # type: ignore[misc]
        def backward(self, dy: Array, saved: Any) -> Array:
            dx, rest = self.backward_input(dy, saved)
            assert rest is None
            with collectives.phase("forbidden"):
                self.backward_weight(rest)
            return dx

    case = Case(3, 11, 4)
    halves, whole = on_ranks(case, Halves), on_ranks(case, KINDS[kind])
    for a, b in zip(halves, whole, strict=True):
        np.testing.assert_array_equal(a.dx, b.dx)
    assert halves[0].ledger is not None
    assert {row.phase for row in halves[0].ledger.rows()} == {"forward", "backward"}


@each_kind
def test_several_micro_batches_may_be_in_progress(kind: str) -> None:
    """Two forward passes, then both backward, the first one first; and nothing is overwritten."""
    case = Case(3, 11, 4)

    def attend(comm: Communicator) -> list[bool]:
        mesh = case.mesh(comm)
        layer, (positions, _) = KINDS[kind](case.heads, mesh), case.part(mesh, comm.rank)
        step = Step(positions=positions, context=case.context)
        batches = [[flat(z[:, positions]) for z in case.arrays(seed)] for seed in (0, 1)]
        kept = [(dy, *layer.forward(x, step)) for x, dy in batches]
        found = [(y, layer.backward(dy, saved)) for dy, y, saved in kept]
        one_by_one = []
        for x, dy in batches:
            y, saved = layer.forward(x, step)
            one_by_one.append((y, layer.backward(dy, saved)))
        pairs = zip(found, one_by_one, strict=True)
        return [np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True)]

    assert np.all(collectives.run(attend, size=case.ranks, timeout=30))


@each_kind
def test_arrays_of_a_device_stay_there(kind: str) -> None:
    case = Case(3, 11, 4)

    def attend(comm: Communicator) -> Counter[str]:
        mesh = case.mesh(comm)
        layer, (positions, _) = KINDS[kind](case.heads, mesh), case.part(mesh, comm.rank)
        x, dy = (FAKE.asarray(flat(z[:, positions])) for z in case.arrays())
        step = Step(positions=positions, context=case.context)
        crossed().clear()
        y, saved = layer.forward(x, step)
        dx, one = bare(layer.backward(dy, saved)), on_one_rank(case)
        np.testing.assert_allclose(bare(y), flat(one.y[:, positions]), rtol=0, atol=1e-12)
        np.testing.assert_allclose(dx, flat(one.dx[:, positions]), rtol=0, atol=1e-12)
        return Counter(crossed())

    assert collectives.run(attend, size=case.ranks, timeout=30) == [Counter()] * case.ranks


@each_kind
def test_a_mesh_without_the_axis_is_one_rank(kind: str) -> None:
    x, dy = Case(1, 6, 2).arrays()
    layer = KINDS[kind](2, Mesh(None))
    y, saved = layer.forward(flat(x), Step())
    found = Found(y.reshape(dy.shape), layer.backward(flat(dy), saved).reshape(x.shape))
    check_close(found, on_one_rank(Case(1, 6, 2)), 1e-12)
    assert layer.traffic(ArraySpec(flat(x).shape, 8, context=6)) == LayerTraffic()


@each_kind
def test_other_positions_are_refused(kind: str) -> None:
    """On every rank, before anything is sent."""

    def refused(comm: Communicator) -> list[Any]:
        layer, x = KINDS[kind](1, Mesh(comm, context=2)), np.ones((1, 4, 3))
        contiguous = np.arange(4 * comm.rank, 4 * comm.rank + 4)
        right = context_positions(8, 2, comm.rank)
        for step in (
            Step(positions=contiguous, context=8),
            Step(positions=right, context=9),
            Step(),
            Step(positions=right[:3], context=8),
        ):
            with comm.record() as ledger, pytest.raises(ValueError, match="tokens at positions"):
                layer.forward(x, step)
            assert ledger.rows() == []
        return list(layer.forward(x, Step(positions=right, context=8))[0].shape)

    assert collectives.run(refused, size=2, timeout=30) == [[1, 4, 1]] * 2


def test_layers_of_other_kinds_or_axes_are_told_apart() -> None:
    mesh = Mesh(None)
    layers = [
        CausalAttention(2),
        *(kind(2, mesh, axis) for kind in KINDS.values() for axis in ("context", "tensor")),
    ]
    layers += [RingAttention(3, mesh), UlyssesAttention(2, mesh, algorithm="bruck")]
    configs = [str(layer.config()) for layer in layers]
    assert len(set(configs)) == len(configs)


# Negative controls of these tests


def fails(case: Case, make: Make) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(case, make)


def test_a_ring_that_forgets_positions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It masks every block as its own."""

    def forgetful(context: int, size: int, mine: int, owner: int) -> list[Tile]:
        return tiles(context, size, mine, mine)

    monkeypatch.setattr(ring, "tiles", forgetful)
    fails(Case(2, 8, 2), RingAttention)


def test_an_exchange_that_forgets_positions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It masks as if the ranks had contiguous parts of the row."""

    def by_rank(exchange: Any, pieces: list[Array]) -> Array:
        return np.concatenate(pieces, axis=2)

    def of_rank(exchange: Any, y: Array, index: int) -> Array:
        start = sum(exchange.lengths[:index])
        return y[:, :, start : start + exchange.lengths[index]]

    monkeypatch.setattr(ulysses.Exchange, "join_positions", by_rank)
    monkeypatch.setattr(ulysses.Exchange, "positions_of", of_rank)
    fails(Case(2, 8, 2), UlyssesAttention)


class WrongOwner(RingAttention):
    """The gradient of a block ends on the rank after its owner."""

    def _ring_backward(self, *args: Any) -> Array:
        found, me = super()._ring_backward(*args), self.group.index()
        size = self.group.size
        return self.group.comm.send_recv(found, (me + 1) % size, (me - 1) % size)


def test_a_gradient_on_the_wrong_rank_is_noticed() -> None:
    fails(Case(3, 12, 2), WrongOwner)
