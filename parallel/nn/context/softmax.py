"""Attention to blocks of keys and values, one block after the other."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from parallel.nn.context.positions import Tile
from parallel.nn.functional import Array, causal, namespace_of, transpose, upcast


class OnlineSoftmax:
    """The attention of queries to the keys that came so far, in at least float32.

    The softmax is kept as a running maximum and a running sum (Milakov & Gimelshein 2018) with the
    weighted sum of values (Rabe & Staats 2021; Dao et al. 2022, FlashAttention).

    Parameters
    ----------
    q : array
        Queries (batch, heads, length, width).
    """

    def __init__(self, q: Array) -> None:
        self.q, xp = upcast(q), namespace_of(q)
        of_queries = (*q.shape[:-1], 1)
        self.highest = xp.full(of_queries, -math.inf, dtype=self.q.dtype)
        self.total = xp.zeros(of_queries, dtype=self.q.dtype)
        self.weighted = xp.zeros(q.shape, dtype=self.q.dtype)

    def add(self, block: Array, tile: Tile) -> None:
        """Let the queries of a `tile` attend to its keys.

        `block` has the keys and values of a rank, (2, batch, heads, length, width).  The first keys
        that are added for a query must include a key that the query sees.
        """
        xp, rows = namespace_of(block), (..., tile.queries, slice(None))
        scores = scores_of(self.q, block[0], tile)
        highest = xp.maximum(self.highest[rows], xp.max(scores, axis=-1, keepdims=True))
        powers = xp.exp(scores - highest)
        shrink = xp.exp(self.highest[rows] - highest)
        self.highest[rows] = highest
        self.total[rows] = self.total[rows] * shrink + xp.sum(powers, axis=-1, keepdims=True)
        values = upcast(block[1][..., tile.keys, :])
        self.weighted[rows] = self.weighted[rows] * shrink + powers @ values

    def result(self) -> tuple[Array, Array]:
        """Return the outputs (batch, heads, length, width), and the log-sum-exp of the scores."""
        return self.weighted / self.total, self.highest + namespace_of(self.q).log(self.total)


class Derivatives(NamedTuple):
    """What the derivatives of attention are computed from, arrays of at least float32.

    Attributes
    ----------
    q, dy : array
        The queries, and the derivative by their outputs, (batch, heads, length, width).
    log_sum : array
        The log-sum-exp of the scores, from `OnlineSoftmax.result`.
    along : array
        The products of the outputs with `dy`, with a last dimension of 1.
    dq : array
        The derivative by the queries, to which `of_block` adds.
    """

    q: Array
    dy: Array
    log_sum: Array
    along: Array
    dq: Array

    @classmethod
    def of(cls, q: Array, y: Array, log_sum: Array, dy: Array) -> Derivatives:
        """Return the derivatives before the first block.

        `y` and `log_sum` are the result of attention to the queries `q`, and `dy` is the derivative
        by `y`.
        """
        xp, q, dy = namespace_of(q), upcast(q), upcast(dy)
        along = xp.sum(dy * upcast(y), axis=-1, keepdims=True)
        return cls(q, dy, log_sum, along, xp.zeros(q.shape, dtype=q.dtype))

    def of_block(self, block: Array, tiles: list[Tile]) -> Array:
        """Return the derivative by a `block` of keys and values, which queries see in `tiles`."""
        gradient = namespace_of(block).zeros(block.shape, dtype=self.q.dtype)
        for tile in tiles:
            self._add(gradient, upcast(block), tile)
        return gradient

    def _add(self, gradient: Array, block: Array, tile: Tile) -> None:
        rows, keys = (..., tile.queries, slice(None)), (..., tile.keys, slice(None))
        scores = scores_of(self.q, block[0], tile)
        probabilities = namespace_of(scores).exp(scores - self.log_sum[rows])
        dscores = self.dy[rows] @ transpose(block[1][keys]) - self.along[rows]
        dscores *= probabilities * scale_of(self.q)
        self.dq[rows] += dscores @ block[0][keys]
        gradient[0][keys] += transpose(dscores) @ self.q[rows]
        gradient[1][keys] += transpose(probabilities) @ self.dy[rows]


def scores_of(q: Array, k: Array, tile: Tile) -> Array:
    """Return the scaled products of queries and keys of a `tile`.

    They are minus infinity where a query does not see a key.
    """
    keys = upcast(k[..., tile.keys, :])
    scores = q[..., tile.queries, :] @ transpose(keys) * scale_of(q)
    return causal(scores) if tile.is_diagonal else scores


def scale_of(q: Array) -> Any:
    """Return the factor of the scores of queries (..., width)."""
    return 1 / math.sqrt(q.shape[-1])
