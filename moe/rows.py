"""The rows of tokens in a dispatch: collected to be sent, and added up when they are back.

All functions are written for any array namespace.  On the host a compiled loop adds up rows, if
there is one for their dtype: it reads each row once and writes each sum once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from moe import kernels
from moe.dispatch import Part, distinct_order, stable_order
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
    if weights is None and len(part.entry) == part.num_sent:  # each row is that of a token
        xp = namespace_of(x)
        return xp.take(x, xp.asarray(part.token), axis=0)
    return added_up(x, Sums.of(part.token, part.place, part.num_sent), weights, x.dtype)


def combined(parts: Sequence[Part], rows: Array, weights: Values | None, like: Array) -> Array:
    """Return the sum of the rows of each token, in the dtype to compute in, (tokens, dim).

    `rows` are the send buffers of the `parts`, one after the other, and `weights` factors of the
    entries of the routing, if any.  `like` has the shape and the dtype of the tokens.  The rows of
    a token are added in the order of its entries.
    """
    xp, num_tokens, of_all = namespace_of(like), like.shape[0], Entries.of(parts)
    order = distinct_order(of_all.entry)
    order = order[stable_order(of_all.token[order], num_tokens)]
    factors = None if weights is None else xp.asarray(weights[of_all.entry[order]])
    sums = Sums.of(of_all.place[order], of_all.token[order], num_tokens)
    return added_up(rows, sums, factors, upcast(like[:0]).dtype)


def slopes(parts: Sequence[Part], rows: Array, dy: Array, weights: Values) -> Values:
    """Return the derivatives by the `weights`: of each entry, its row times its token's `dy`.

    `rows` are what `combined` has added up, and `dy` (tokens, dim) the derivative by its result.
    """
    xp, found, of_all = namespace_of(dy), np.zeros_like(weights), Entries.of(parts)
    products = xp.empty(len(of_all.entry), dtype=upcast(dy[:0]).dtype)
    for block in blocks(len(of_all.entry), dy):
        mine = upcast(xp.take(rows, xp.asarray(of_all.place[block]), axis=0))
        other = upcast(xp.take(dy, xp.asarray(of_all.token[block]), axis=0))
        products[block] = xp.sum(mine * other, axis=-1)
    found[of_all.entry] = on_host(products)
    return found


class Entries(NamedTuple):
    """The entries of all parts: the attributes of `Part`, with send buffers that are joined."""

    entry: Integers
    token: Integers
    place: Integers

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Entries:
        """Return those of these parts."""
        starts = accumulate((part.num_sent for part in parts), initial=0)
        places = [part.place + start for part, start in zip(parts, starts, strict=False)]
        return cls(
            np.concatenate([part.entry for part in parts]),
            np.concatenate([part.token for part in parts]),
            np.concatenate(places),
        )


# Sums of rows


class Sums(NamedTuple):
    """Which rows are added up: to sum i, the rows ``row[starts[i] : starts[i + 1]]``, in order."""

    row: Integers
    starts: Integers

    @classmethod
    def of(cls, row: Integers, number: Integers, num_sums: int) -> Sums:
        """Return those of rows that are added to the sums of these ascending `number`s."""
        ends = np.cumsum(np.bincount(number, minlength=num_sums))
        return cls(row, np.concatenate([[0], ends]))


def added_up(rows: Array, sums: Sums, factors: Array | None, dtype: Any) -> Array:
    """Return the `sums` of `rows` (n, dim), each times its factor, (sums, dim) of this `dtype`.

    Their `factors` are in the order of ``sums.row``; None: 1.
    """
    xp, shape = namespace_of(rows), (len(sums.starts) - 1, rows.shape[1])
    add = kernel_of(rows, factors, dtype)
    if add is None:
        return added_in_turns(rows, sums, factors, xp.zeros(shape, dtype=dtype))
    out = xp.empty(shape, dtype=dtype)
    add(rows, *sums, np.ones(len(sums.row), dtype) if factors is None else factors, out)
    return out


def kernel_of(rows: Array, factors: Array | None, dtype: Any) -> kernels.Adding | None:
    """Return the compiled loop for these arrays, if they are in host memory and there is one."""
    is_fit = rows.dtype == dtype and (factors is None or factors.dtype == dtype)
    if not is_fit or type(rows) is not np.ndarray or not rows.flags.c_contiguous:
        return None
    return kernels.adding(rows.dtype)


def added_in_turns(rows: Array, sums: Sums, factors: Array | None, out: Array) -> Array:
    """Add the first rows of all sums to `out`, then the second ones, and so on; return it.

    In blocks that fit into a cache.
    """
    xp, counts = namespace_of(out), np.diff(sums.starts)
    for block in blocks(len(counts), out):
        for turn in range(int(counts[block].max(initial=0))):
            number = block.start + np.flatnonzero(counts[block] > turn)
            e = sums.starts[number] + turn
            added = xp.take(rows, xp.asarray(sums.row[e]), axis=0)
            if factors is not None:
                added = upcast(added) * factors[xp.asarray(e)][:, None]
            out[where(number, xp)] += cast(added, out.dtype)
    return out


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
