"""The rows of tokens in an exchange: collected to be sent, and added up when they are back.

All functions are written for any array namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moe.exchange.parts import Part
from moe.routing import Integers, Values
from moe.sums import Sums, add_up, blocks, distinct_order, scattered, stable_order
from parallel.mesh import length
from parallel.nn import Array, namespace_of, new_array, upcast


class Rows(NamedTuple):
    """Rows for other ranks, `away`, and rows of this rank itself, `own`, which are not sent."""

    away: Array
    own: Array

    def set(self, values: Array) -> None:
        """Copy `values` into the rows, first into the rows for others."""
        num_away = self.away.shape[0]
        self.away[...], self.own[...] = values[:num_away], values[num_away:]

    def set_of_expert(self, part: Part, expert: int, values: Array) -> None:
        """Copy `values` into the rows of an `expert` of this rank, source by source."""
        start = 0
        for source, segment in enumerate(part.segments[expert]):
            stop = start + length(segment)
            rows = self.own if source == part.rank else self.away
            rows[segment] = values[start:stop]
            start = stop


class SendBuffer(NamedTuple):
    """The rows that a part sends, (rows, dim): copies of the rows of `tokens`, in their order.

    They are collected from the tokens when and where they are needed.  `weights` (n,) are factors
    of the entries; None: 1.
    """

    tokens: Array
    part: Part
    weights: Array | None = None

    def away(self) -> Array:
        """Return the rows for other ranks."""
        out = new_array((self.part.num_away, self.tokens.shape[1]), self.tokens)
        self.write(0, out)
        return out

    def own(self, start: int, out: Array) -> None:
        """Copy the rows of this rank itself, from the one with number `start` on, to `out`."""
        self.write(self.part.num_away + start, out)

    def write(self, start: int, out: Array) -> None:
        """Copy as many rows as `out` has, from row `start` on, to `out`."""
        part, num_rows = self.part, out.shape[0]
        first, last = np.searchsorted(part.row, [start, start + num_rows])
        token = part.token[first:last]
        if self.weights is None and len(token) == num_rows:  # each row is a copy
            take(self.tokens, token, out)
            return
        weights = None if self.weights is None else self.weights[first:last]
        add_up(self.tokens, Sums.of(token, part.row[first:last] - start, num_rows), weights, out)


def take(x: Array, index: Integers, out: Array) -> None:
    """Copy the rows of `x` with these numbers, which are valid, to `out`."""
    if type(x) is np.ndarray:
        np.take(x, index, axis=0, out=out, mode="clip")  # other modes write to a copy first
    else:
        xp = namespace_of(x)
        out[...] = xp.take(x, xp.asarray(index), axis=0)


class Received(NamedTuple):
    """Rows that came from other ranks, `away`, and `num_own` rows of this rank itself.

    ``own(start, out)`` copies rows of this rank, from the one with number `start` on, to `out`.
    """

    away: Array
    num_own: int
    own: Callable[[int, Array], None]

    def joined(self) -> Array:
        """Return all rows, rows of others first; a view if this rank itself has none."""
        num_away = self.away.shape[0]
        if not self.num_own:
            return self.away
        out = new_array((num_away + self.num_own, self.away.shape[1]), self.away)
        out[:num_away] = self.away
        self.own(0, out[num_away:])
        return out

    def of_expert(self, part: Part, expert: int) -> Array:
        """Return the rows of an `expert` of this rank, source by source."""
        segments = part.segments[expert]
        out = new_array((sum(map(length, segments)), self.away.shape[1]), self.away)
        start = 0
        for source, segment in enumerate(segments):
            stop = start + length(segment)
            if source == part.rank:
                self.own(segment.start, out[start:stop])
            else:
                out[start:stop] = self.away[segment]
            start = stop
        return out


# Rows that are back


class Entries(NamedTuple):
    """The entries of all parts: the attributes of `Part`, with send buffers that are joined."""

    entry: Integers
    token: Integers
    row: Integers

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Entries:
        """Return the entries of these parts."""
        starts = accumulate((part.num_sent for part in parts), initial=0)
        rows = [part.row + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.entry for part in parts]),
            np.concatenate([part.token for part in parts]),
            np.concatenate(rows),
        )


def combined(parts: Sequence[Part], rows: Array, weights: Values | None, like: Array) -> Array:
    """Return the sum of the rows of each token, in the dtype to compute in, (tokens, dim).

    `rows` are the send buffers of the `parts`, one after the other, and `weights` factors of the
    entries of the routing, if any.  `like` has the shape and the dtype of the tokens.  The rows of
    a token are added in the order of its entries.
    """
    xp, num_tokens, entries = namespace_of(like), like.shape[0], Entries.of(parts)
    order = distinct_order(entries.entry)
    order = order[stable_order(entries.token[order], num_tokens)]
    factors = None if weights is None else xp.asarray(weights[entries.entry[order]])
    sums = Sums.of(entries.row[order], entries.token[order], num_tokens)
    out = new_array(like.shape, like, upcast(like[:0]).dtype)
    add_up(rows, sums, factors, out)
    return out


def slopes(parts: Sequence[Part], rows: Array, dy: Array, weights: Values) -> Array:
    """Return the derivatives by the `weights`: for each entry, its row times its token's `dy`.

    `rows` are what `combined` has added up, and `dy` (tokens, dim) is the derivative by its result.
    The derivatives are on the device of `dy`.
    """
    xp, entries = namespace_of(dy), Entries.of(parts)
    products = xp.empty(len(entries.entry), dtype=upcast(dy[:0]).dtype)
    for block in blocks(len(entries.entry), dy):
        mine = upcast(xp.take(rows, xp.asarray(entries.row[block]), axis=0))
        other = upcast(xp.take(dy, xp.asarray(entries.token[block]), axis=0))
        products[block] = xp.sum(mine * other, axis=-1)
    return scattered(products, entries.entry, weights.shape[0], weights.dtype)
