"""The rows of tokens in a dispatch: collected to be sent, and added up when they are back.

All functions are written for any array namespace.  On the host they work through blocks that fit
into a cache, so that each row is read from memory once and written once; on a device, in one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moe.dispatch import Part
from moe.routing import Integers, Values
from parallel.nn import Array, cast, namespace_of, on_host
from parallel.nn.functional import upcast

CACHED = 2**18  # bytes of a block of rows


class Rows(NamedTuple):
    """Rows that came from other ranks, `away`, and those of this rank itself, `own`.

    Own rows are not sent, and not copied either.
    """

    away: Array
    own: Array

    @classmethod
    def of(cls, rows: Array, num_away: int) -> Rows:
        """Return the first rows as those of others."""
        return cls(rows[:num_away], rows[num_away:])

    @classmethod
    def empty_like(cls, rows: Rows) -> Rows:
        """Return new arrays of the same shapes."""
        return cls(*(namespace_of(each).empty_like(each) for each in rows))

    def joined(self) -> Array:
        """Return one array, the rows of others first; a view if one of them has no rows."""
        if not self.away.shape[0]:
            return self.own
        if not self.own.shape[0]:
            return self.away
        return namespace_of(self.own).concat([self.away, self.own], axis=0)

    def set(self, values: Array) -> None:
        """Copy what `joined` would return."""
        num_away = self.away.shape[0]
        self.away[...], self.own[...] = values[:num_away], values[num_away:]

    def pieces(self, part: Part, expert: int) -> list[Array]:
        """Return the rows of an `expert` of this rank, in views, from each source."""
        return [
            (self.own if source == part.rank else self.away)[segment]
            for source, segment in enumerate(part.segments[expert])
        ]


def gathered(pieces: Sequence[Array]) -> Array:
    """Return arrays one after the other; the array itself if there is one."""
    return pieces[0] if len(pieces) == 1 else namespace_of(pieces[0]).concat(pieces, axis=0)


def scatter(pieces: Sequence[Array], values: Array) -> None:
    """Copy `values` into arrays, one after the other."""
    start = 0
    for piece in pieces:
        stop = start + piece.shape[0]
        piece[...] = values[start:stop]
        start = stop


# Of tokens


def spread(x: Array, part: Part, weights: Array | None = None) -> Array:
    """Return the send buffer of a part, (rows, dim): the rows of `x` (tokens, dim) in their places.

    `weights` (n,), if given, are factors of the entries.
    """
    xp, num_used = namespace_of(x), len(part.entry)
    make = xp.empty if num_used == part.num_sent else xp.zeros  # if each row is used
    buffer = make((part.num_sent, x.shape[1]), dtype=x.dtype)
    for block in blocks(num_used, x):
        rows = xp.take(x, xp.asarray(part.token[block]), axis=0)
        if weights is not None:
            rows = cast(rows * weights[block, None], x.dtype)
        buffer[where(part.place[block], xp)] = rows
    return buffer


def combined(
    parts: Sequence[Part], rows: Sequence[Array], weights: Values | None, like: Array
) -> Array:
    """Return the sum of the rows of each token, in the dtype to compute in, (tokens, dim).

    `rows` are the send buffers of the `parts`, and `weights` factors of the entries of the routing,
    if any.  `like` has the shape and the dtype of the tokens.  The rows of a token are added in the
    order of the parts and of its entries.
    """
    xp = namespace_of(like)
    y = xp.zeros(like.shape, dtype=upcast(like[:0]).dtype)
    turns = [turns_of(part, like.shape[0]) for part in parts]
    for block in blocks(like.shape[0], y):
        for part, each, of_part in zip(parts, rows, turns, strict=True):
            for turn in of_part:
                entries = turn.of_tokens(block)
                added = cast(xp.take(each, xp.asarray(part.place[entries]), axis=0), y.dtype)
                if weights is not None:
                    added = added * xp.asarray(weights[part.entry[entries]])[:, None]
                tokens = where(part.token[entries], xp)
                y[tokens] += added
    return y


class Turn(NamedTuple):
    """Entries of a part, each of another token, in the order of their tokens."""

    entries: Integers
    tokens: Integers

    def of_tokens(self, block: slice) -> Integers:
        """Return the entries of a block of tokens."""
        first, last = np.searchsorted(self.tokens, (block.start, block.stop))
        return self.entries[first:last]


def turns_of(part: Part, num_tokens: int) -> list[Turn]:
    """Return the first entries of all tokens, then the second ones, and so on."""
    order = np.argsort(part.token, kind="stable")
    token = part.token[order]
    counts = np.bincount(token, minlength=num_tokens)
    turn = np.arange(len(token)) - np.repeat(np.cumsum(counts) - counts, counts)
    each = (np.flatnonzero(turn == i) for i in range(int(counts.max(initial=0))))
    return [Turn(order[at], token[at]) for at in each]


def slopes(parts: Sequence[Part], rows: Sequence[Array], dy: Array, weights: Values) -> Values:
    """Return the derivatives by the `weights`: of each entry, its row times its token's `dy`.

    `rows` are what `combined` has added up, and `dy` (tokens, dim) the derivative by its result.
    """
    xp, found = namespace_of(dy), np.zeros_like(weights)
    for part, each in zip(parts, rows, strict=True):
        products = xp.empty(len(part.entry), dtype=upcast(dy[:0]).dtype)
        for block in blocks(len(part.entry), dy):
            mine = upcast(xp.take(each, xp.asarray(part.place[block]), axis=0))
            other = upcast(xp.take(dy, xp.asarray(part.token[block]), axis=0))
            products[block] = xp.sum(mine * other, axis=-1)
        found[part.entry] = on_host(products)
    return found


def blocks(num_rows: int, like: Array) -> Iterator[slice]:
    """Yield blocks of rows of an array `like` this one: of `CACHED` bytes each on the host."""
    size = num_rows
    if isinstance(like, np.ndarray):
        size = max(1, CACHED // max(1, like.shape[1] * like.dtype.itemsize))
    for start in range(0, num_rows, max(1, size)):
        yield slice(start, min(start + size, num_rows))


def where(index: Integers, xp: Any) -> Any:
    """Return an ascending `index` as a slice, if it is one, which is faster."""
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return slice(int(index[0]), int(index[-1]) + 1)
    return xp.asarray(index)
