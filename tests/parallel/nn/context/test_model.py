"""A model whose rows are divided by hand has the loss and the gradients of one rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh
from parallel.nn import (
    CausalAttention,
    CrossEntropy,
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Residual,
    Step,
    Unembedding,
    context_positions,
)
from tests.parallel.nn.bound_models import Values, bound
from tests.parallel.nn.context.divided_rows import KINDS

VOCAB, CONTEXT, DIM, HEADS, ROWS = 7, 11, 8, 2, 3
rng = np.random.default_rng(5)
TOKENS, TARGETS = (rng.integers(0, VOCAB, (ROWS, CONTEXT)) for _ in range(2))


class Found(NamedTuple):
    """The loss, and the gradients by the parameters' names."""

    loss: float
    gradients: dict[str, Values]


def model(heads: Layer) -> Model:
    attention = {
        "norm": LayerNorm(DIM),
        "qkv": Linear(DIM, (3, HEADS, DIM // HEADS)),
        "heads": heads,
        "out": Linear(DIM, DIM),
    }
    return Model(
        {
            "embedding": Embedding(VOCAB, CONTEXT, DIM),
            "attention": Residual(attention),
            "out": Unembedding(DIM, VOCAB),
            "loss": CrossEntropy(),
        }
    )


def passes(heads: Layer, positions: Values | None) -> Found:
    """Forward and backward, on the tokens at some positions of all rows."""
    made = bound(model(heads))
    mine = slice(None) if positions is None else positions
    step = Step(TARGETS[:, mine], ROWS * CONTEXT, positions=positions, context=CONTEXT)
    x: Any = TOKENS[:, mine]
    kept = []
    for layer in made.model.layers.values():
        x, saved = layer.forward(x, step)
        kept.append((layer, saved))
    dy: Any = 1.0
    for layer, saved in reversed(kept):
        dy = layer.backward(dy, saved)
    return Found(x, made.named_gradients())


def on_ranks(make: Callable[[Mesh], Layer], num_ranks: int) -> Found:
    """The sums over ranks, which have equal parameters."""

    def run(comm: Communicator) -> Found:
        heads = make(Mesh(comm, context=num_ranks))
        return passes(heads, context_positions(CONTEXT, num_ranks, comm.rank))

    found: list[Found] = collectives.run(run, size=num_ranks, timeout=30)
    sums = {name: sum(each.gradients[name] for each in found) for name in found[0].gradients}
    return Found(sum(each.loss for each in found), sums)


def check(found: Found) -> None:
    alone = passes(CausalAttention(HEADS), None)
    assert found.loss == pytest.approx(alone.loss, rel=1e-12)
    for name, wanted in alone.gradients.items():
        assert np.abs(wanted).max() > 1e-4
        np.testing.assert_allclose(found.gradients[name], wanted, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_gradients_summed_over_ranks_are_those_of_one_rank(kind: str, num_ranks: int) -> None:
    check(on_ranks(partial(KINDS[kind], HEADS), num_ranks))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_attend_to_their_own_positions_only_are_noticed(num_ranks: int) -> None:
    """The negative control: each row falls into pieces that do not see each other."""
    with pytest.raises(AssertionError):
        check(on_ranks(lambda mesh: CausalAttention(HEADS), num_ranks))
