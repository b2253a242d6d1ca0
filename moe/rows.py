"""The rows of tokens in a dispatch: collected to be sent, and added up when they are back.

All functions are written for any array namespace.  On the host a compiled loop adds up rows, if
there is one for their dtype: it reads each row once and writes each sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from moe import kernels
from moe.dispatch import Part, distinct_order, stable_order
from moe.routing import Integers, Values
from parallel.nn import Array, cast, namespace_of, new_array
from parallel.nn.functional import upcast
from parallel.placement import length

CACHED = 2**18  # bytes of a block of rows


class Rows(NamedTuple):
    """Rows for other ranks, `away`, and rows of this rank itself, `own`, which are not sent."""

    away: Array
    own: Array

    def set(self, values: Array) -> None:
        """Copy `values` into the rows, those for others first."""
        num_away = self.away.shape[0]
        self.away[...], self.own[...] = values[:num_away], values[num_away:]

    def pieces(self, part: Part, expert: int) -> list[Array]:
        """Return the rows of an `expert` of this rank, in views, for each source."""
        return [
            (self.own if source == part.rank else self.away)[segment]
            for source, segment in enumerate(part.segments[expert])
        ]


def scatter(pieces: Sequence[Array], values: Array) -> None:
    """Copy `values` into arrays, one after the other."""
    start = 0
    for piece in pieces:
        stop = start + piece.shape[0]
        piece[...] = values[start:stop]
        start = stop


# Of tokens


class SendBuffer(NamedTuple):
    """The rows that a part sends, (rows, dim): those of `tokens` in their places.

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
        """Copy as many rows as `out` has, from the one at place `start` on, to `out`."""
        part, num_rows = self.part, out.shape[0]
        first, last = np.searchsorted(part.place, [start, start + num_rows])
        token = part.token[first:last]
        if self.weights is None and len(token) == num_rows:  # each row is that of a token
            take(self.tokens, token, out)
            return
        weights = None if self.weights is None else self.weights[first:last]
        add_up(self.tokens, Sums.of(token, part.place[first:last] - start, num_rows), weights, out)


class Received(NamedTuple):
    """Rows that came from other ranks, `away`, and `num_own` rows of this rank itself.

    ``own(start, out)`` copies the latter, from the one with number `start` on, to `out`.
    """

    away: Array
    num_own: int
    own: Callable[[int, Array], None]

    def joined(self) -> Array:
        """Return all rows, those of others first; a view if this rank itself has none."""
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


def take(x: Array, index: Integers, out: Array) -> None:
    """Copy the rows of `x` with these numbers, which are valid, to `out`."""
    if type(x) is np.ndarray:
        np.take(x, index, axis=0, out=out, mode="clip")  # other modes write to a copy first
    else:
        xp = namespace_of(x)
        out[...] = xp.take(x, xp.asarray(index), axis=0)


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
    out = new_array(like.shape, like, upcast(like[:0]).dtype)
    add_up(rows, sums, factors, out)
    return out


def slopes(parts: Sequence[Part], rows: Array, dy: Array, weights: Values) -> Array:
    """Return the derivatives by the `weights`: of each entry, its row times its token's `dy`.

    `rows` are what `combined` has added up, and `dy` (tokens, dim) the derivative by its result, on
    whose device the derivatives are.
    """
    xp, of_all = namespace_of(dy), Entries.of(parts)
    products = xp.empty(len(of_all.entry), dtype=upcast(dy[:0]).dtype)
    for block in blocks(len(of_all.entry), dy):
        mine = upcast(xp.take(rows, xp.asarray(of_all.place[block]), axis=0))
        other = upcast(xp.take(dy, xp.asarray(of_all.token[block]), axis=0))
        products[block] = xp.sum(mine * other, axis=-1)
    return scattered(products, of_all.entry, weights.shape[0], weights.dtype)


def scattered(values: Array, index: Integers, size: int, dtype: Any) -> Array:
    """Return an array with `values` at these different places, and 0 elsewhere, on their device."""
    xp = namespace_of(values)
    found = xp.zeros(size, dtype=dtype)
    found[xp.asarray(index)] = values
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


def sums_of(values: Array, number: Integers, num_sums: int) -> Array:
    """Return the sums, in float64, of the values of each `number`, in their order."""
    order = stable_order(number, num_sums)
    out = new_array((num_sums, 1), values, np.float64)
    add_up(values.reshape(-1, 1), Sums.of(order, number[order], num_sums), None, out)
    return out.reshape(-1)


def add_up(rows: Array, sums: Sums, factors: Array | None, out: Array) -> None:
    """Set `out` (sums, dim) to the `sums` of `rows` (n, dim), each times its factor.

    The `factors` are in the order of ``sums.row``; None: 1.
    """
    add = kernel_of(rows, factors, out.dtype)
    if add is None:
        add_in_turns(rows, sums, factors, out)
        return
    add(rows, *sums, np.ones(len(sums.row), out.dtype) if factors is None else factors, out)


def kernel_of(rows: Array, factors: Array | None, dtype: Any) -> kernels.Adding | None:
    """Return the compiled loop for these arrays, if they are in host memory and there is one."""
    is_fit = rows.dtype == dtype and (factors is None or factors.dtype == dtype)
    if not is_fit or type(rows) is not np.ndarray or not rows.flags.c_contiguous:
        return None
    return kernels.adding(rows.dtype)


def add_in_turns(rows: Array, sums: Sums, factors: Array | None, out: Array) -> None:
    """Set `out` to the first rows of all sums, then add the second ones, and so on.

    In blocks that fit into a cache.
    """
    xp, counts = namespace_of(out), np.diff(sums.starts)
    out[...] = 0
    for block in blocks(len(counts), out):
        for turn in range(int(counts[block].max(initial=0))):
            number = block.start + np.flatnonzero(counts[block] > turn)
            e = sums.starts[number] + turn
            added = xp.take(rows, xp.asarray(sums.row[e]), axis=0)
            if factors is not None:
                added = upcast(added) * factors[xp.asarray(e)][:, None]
            out[where(number, xp)] += cast(added, out.dtype)


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
