"""What attention to divided rows sends and keeps is what its formulas say, on every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from parallel import MemoryTracker, Mesh
from parallel.nn import (
    Activations,
    ArraySpec,
    LayerTraffic,
    Linear,
    Recompute,
    RingAttention,
    Sequential,
    Step,
)
from parallel.optim import dtype_of
from tests.parallel.nn.bound_models import alone
from tests.parallel.nn.context.divided_rows import (
    DTYPES,
    KINDS,
    ROWS,
    WIDTH,
    Case,
    Make,
    by_width,
    each_kind,
    each_size,
    flat,
    on_ranks,
    predicted,
    recorded,
    with_tensor,
)

# Messages


def check_traffic(case: Case, make: Make) -> None:
    """Messages and bytes between each two ranks, by phase, as every rank predicts them."""
    ranks = on_ranks(case, make)
    assert ranks[0].ledger is not None
    sent = recorded(ranks[0].ledger)
    for rank in (ranks[0], ranks[-1]):
        for name, matrices in predicted(rank.layer, case, rank.mesh).items():
            np.testing.assert_array_equal(matrices, sent[name], name)


@each_kind
@each_size
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_is_sent_is_predicted(kind: str, size: tuple[int, int, int], dtype: str) -> None:
    check_traffic(Case(*size, dtype), KINDS[kind])


@each_kind
@with_tensor
def test_what_is_sent_beside_a_tensor_axis_is_predicted(kind: str, case: Case) -> None:
    check_traffic(case, by_width(kind))


def test_a_rank_without_heads_sends_nothing() -> None:
    for kind in KINDS.values():
        ranks = on_ranks(Case(3, 7, 1, tensor=2), kind)
        assert ranks[0].ledger is not None
        senders = {row.src for row in ranks[0].ledger.rows()}
        assert senders == {rank.mesh.rank for rank in ranks if rank.y.size}


class OneMore:
    """Says that each call sends one element more than it does."""

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        forward, (*others, last) = super().traffic(x)  # type: ignore[misc]
        return LayerTraffic(forward, (*others, replace(last, counts=one_more(last.counts))))


def one_more(counts: Any) -> Any:
    """One element more, from the first rank to the last if it is a table."""
    if isinstance(counts, int):
        return counts + 1
    first, *others = counts
    return ((*first[:-1], first[-1] + 1), *others)


@each_kind
def test_one_element_more_would_be_noticed(kind: str) -> None:
    made = type("Boasts", (OneMore, KINDS[kind]), {})
    with pytest.raises(AssertionError, match="backward"):
        check_traffic(Case(3, 12, 3), made)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_even_rows_send_what_the_table_says(ranks: int, dtype: str) -> None:
    """The table in the documentation of `parallel.nn.context`: b, s, h, C; w and w' bytes."""
    case = Case(ranks, 8 * ranks, 4, dtype)
    b, s, h, c = ROWS, case.context, 4 * WIDTH, ranks
    w = dtype_of(dtype).itemsize
    wide = max(w, 4)
    block = 2 * b * (s // c) * h
    wanted = {
        "ring": {
            "forward": (c - 1, (c - 1) * block * w),
            "backward": (2 * (c - 1), (c - 1) * block * (w + wide)),
        },
        "ulysses": dict.fromkeys(
            ("forward", "backward"), (2 * (c - 1), (c - 1) * 4 * b * (s // c) * h // c * w)
        ),
    }
    for kind, make in KINDS.items():
        ledger = on_ranks(case, make)[0].ledger
        assert ledger is not None
        for name, matrices in recorded(ledger).items():
            per_rank = {tuple(sums) for sums in matrices.sum(axis=2).T.tolist()}
            assert per_rank == {wanted[kind][name]}, kind


# Memory


def check_kept(case: Case, make: Make) -> None:
    """By formula, and counted from the arrays that are alive, on all ranks."""
    for rank in on_ranks(case, make):
        memory = MemoryTracker()
        memory.track("saved", rank.saved)
        formula = rank.layer.activation_bytes(case.spec(rank.mesh, rank.mesh.rank))
        counted = Activations(
            memory.now["saved"],
            formula.out,
            is_out_saved=any(each is rank.y for each in rank.saved),
        )
        assert formula == counted
        assert formula.out.shape == rank.y.shape and rank.y.dtype == dtype_of(case.dtype)


@each_kind
@each_size
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_is_predicted(kind: str, size: tuple[int, int, int], dtype: str) -> None:
    check_kept(Case(*size, dtype), KINDS[kind])


@each_kind
@with_tensor
def test_what_is_kept_beside_a_tensor_axis_is_predicted(kind: str, case: Case) -> None:
    check_kept(case, KINDS[kind])
    check_kept(case, by_width(kind))


@each_kind
def test_one_kept_element_more_would_be_noticed(kind: str) -> None:
    class Boasts(KINDS[kind]):  # type: ignore[misc]
        def activation_bytes(self, x: ArraySpec) -> Activations:
            found = super().activation_bytes(x)
            return found._replace(saved=found.saved + x.width)

    with pytest.raises(AssertionError):
        check_kept(Case(2, 9, 3), Boasts)


def test_the_ring_keeps_no_probabilities() -> None:
    """What it keeps grows with the positions; what the exchange keeps, with their square."""
    kept = {
        kind: [
            make(2, Mesh(None)).activation_bytes(ArraySpec((1, n, 24), 4, context=n)).saved
            for n in (100, 200)
        ]
        for kind, make in KINDS.items()
    }
    assert kept["ring"][1] == 2 * kept["ring"][0]
    assert kept["ulysses"][1] > 3 * kept["ulysses"][0]


def test_an_output_that_two_layers_keep_counts_once() -> None:
    """The ring keeps its output, which is the input that the next layer keeps."""
    x = flat(Case(1, 6, 2).arrays()[0])
    spec = ArraySpec(x.shape, 8, context=6)
    heads, out = RingAttention(2, Mesh(None)), Linear(2 * WIDTH, 4)
    both = Sequential({"heads": heads, "out": out})
    alone(both)
    memory = MemoryTracker()
    saved = both.forward(x, Step())[1]
    memory.track("saved", saved)
    made = heads.activation_bytes(spec)
    each = made.saved + out.activation_bytes(made.out).saved
    assert both.activation_bytes(spec).saved == memory.now["saved"] == each - made.out.nbytes


def test_a_ring_that_runs_again_keeps_its_input_only() -> None:
    x = flat(Case(1, 6, 2).arrays()[0])
    spec, inner = ArraySpec(x.shape, 8, context=6), RingAttention(2, Mesh(None))
    layer, memory = Recompute(inner), MemoryTracker()
    formula = layer.activation_bytes(spec)
    step = Step(track=partial(memory.track, "saved"))
    y, saved = layer.forward(x, step)
    memory.track("saved", saved)
    assert memory.now["saved"] == formula.saved == x.nbytes
    layer.backward(np.ones_like(y), saved)
    assert memory.peak["saved"] == formula.saved + formula.extra
    assert formula.saved + formula.extra == inner.activation_bytes(spec).saved
