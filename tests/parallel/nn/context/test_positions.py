"""Ranks divide the positions of a row so that causal attention is equally much work for all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from collectives import even_counts
from parallel.nn import context_positions
from parallel.nn.context import Tile, tiles
from tests.parallel.nn.bound_models import Values

SIZES = [(context, ranks) for ranks in range(1, 9) for context in range(ranks, 41)]


def all_positions(context: int, num_ranks: int) -> list[Values]:
    return [context_positions(context, num_ranks, i) for i in range(num_ranks)]


def num_pairs(positions: Values) -> int:
    """How many pairs of a query at these positions and a key that it sees there are."""
    return int((positions + 1).sum())


def spread(of_ranks: list[Values]) -> int:
    """The difference between the most and the fewest pairs of a rank."""
    pairs = [num_pairs(positions) for positions in of_ranks]
    return max(pairs) - min(pairs)


def contiguous(context: int, num_ranks: int) -> list[Values]:
    """The contrast: a rank's positions follow each other."""
    ends = np.cumsum(even_counts(context, num_ranks))
    return np.split(np.arange(context), ends[:-1])


@pytest.mark.parametrize(("context", "num_ranks"), SIZES)
def test_every_position_is_on_one_rank(context: int, num_ranks: int) -> None:
    found = all_positions(context, num_ranks)
    assert sorted(np.concatenate(found).tolist()) == list(range(context))
    for positions in found:
        assert positions.dtype == np.int64
        assert len(positions) > 0 and (np.diff(positions) > 0).all()


@pytest.mark.parametrize(("context", "num_ranks"), SIZES)
def test_ranks_have_equally_many_pairs(context: int, num_ranks: int) -> None:
    """Exactly, if the parts are even; else the difference is less than two queries can have."""
    most = 0 if context % (2 * num_ranks) == 0 else 2 * context - 1
    assert spread(all_positions(context, num_ranks)) <= most


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_contiguous_parts_would_not_be_balanced(num_ranks: int) -> None:
    """The contrast, and the negative control of the test above."""
    context = 16 * num_ranks
    pairs = [num_pairs(positions) for positions in contiguous(context, num_ranks)]
    assert max(pairs) > (1.8 * num_ranks - 1) * min(pairs)
    assert spread(contiguous(context, num_ranks)) > 2 * context
    assert spread(all_positions(context, num_ranks)) == 0


@pytest.mark.parametrize(
    ("context", "num_ranks", "index", "words"),
    [
        (3, 4, 0, "4 ranks cannot divide 3 positions"),
        (0, 1, 0, "1 ranks cannot divide 0"),
        (8, 4, 4, "no place 4 among 4"),
        (8, 4, -1, "no place -1"),
        (8, 0, 0, "no place 0 among 0"),
    ],
)
def test_a_rank_without_positions_is_refused(
    context: int, num_ranks: int, index: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        context_positions(context, num_ranks, index)


# Tiles


def times_computed(context: int, num_ranks: int, *, seen_only: bool) -> Values:
    """How often the score of each query (row) and key (column) of a whole row is computed."""
    found = np.zeros((context, context), int)
    places = all_positions(context, num_ranks)
    for mine, owner in itertools.product(range(num_ranks), repeat=2):
        for tile in tiles(context, num_ranks, mine, owner):
            queries, keys = places[mine][tile.queries], places[owner][tile.keys]
            shape = len(queries), len(keys)
            is_needed = np.tri(*shape) if tile.is_diagonal and seen_only else np.ones(shape)
            found[np.ix_(queries, keys)] += is_needed.astype(int)
    return found


@pytest.mark.parametrize(("context", "num_ranks"), SIZES[::3])
def test_a_query_sees_each_key_before_it_once(context: int, num_ranks: int) -> None:
    seen = times_computed(context, num_ranks, seen_only=True)
    np.testing.assert_array_equal(seen, np.tri(context))


def test_a_mask_that_is_forgotten_is_noticed() -> None:
    """The negative control: all scores of diagonal tiles are more than causality allows."""
    assert (times_computed(8, 2, seen_only=False) != np.tri(8)).any()


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_all_ranks_compute_equally_much_in_each_step(num_ranks: int) -> None:
    """With parts of n positions: 3 n n scores at home, then 2 n n; the whole square has 4 n n."""
    n = 3
    for mine, step in itertools.product(range(num_ranks), repeat=2):
        found = tiles(2 * n * num_ranks, num_ranks, mine, (mine - step) % num_ranks)
        assert sum(map(num_scores, found)) == (2 if step else 3) * n * n


def num_scores(tile: Tile) -> int:
    return len(range(tile.queries.stop)[tile.queries]) * len(range(tile.keys.stop)[tile.keys])
