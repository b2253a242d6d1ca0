"""Attention with all-to-alls: all heads of some positions become all positions of some heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from collectives import even_counts
from parallel.accounts import PredictedCall
from parallel.mesh import Mesh, length, split
from parallel.nn.context.positions import ContextGroup
from parallel.nn.functional import Array, namespace_of
from parallel.nn.layer import Activations, ArraySpec, LayerTraffic, Step
from parallel.nn.plain import Attention, CausalAttention

Table: TypeAlias = tuple[tuple[int, ...], ...]  # elements from every rank to every rank


class UlyssesAttention(Attention):
    """Causal attention to rows whose positions are divided by ranks: Jacobs et al. 2023.

    It computes what `CausalAttention` computes on whole rows: from queries, keys and values side by
    side, (batch, length, 3 dim), at the positions `context_positions`, it makes (batch, length,
    dim) at these positions.  An all-to-all exchanges all heads of own positions for all positions
    of own heads, `CausalAttention` computes with these heads, and a second all-to-all exchanges the
    results back.  Ranks divide the heads as evenly as possible; if there are fewer heads than
    ranks, some ranks have none.

    A rank makes two all-to-alls forward and two backward, and sends (C-1)/C of the elements (b rows
    of s positions, vectors of h, C ranks): 3 b s h / C for queries, keys and values together or
    their derivatives, and b s h / C for outputs or their derivatives.  The queries, keys, values
    and probabilities of own heads, at all positions, are saved.

    Parameters
    ----------
    num_heads : int
        The number of heads before the exchange: with tensor parallelism not all, and perhaps none.
    mesh : Mesh
        The ranks.
    axis : str
        The axis of the mesh along which ranks divide rows.
    width : int, optional
        The number of elements of a head, as in `CausalAttention`.  If it is given, `num_heads` is
        not used, and predictions are right for ranks with other numbers of heads.
    algorithm : str
        The algorithm of the all-to-alls.

    Raises
    ------
    ValueError
        From `forward`, if the positions in the step are not those of `context_positions`.

    Examples
    --------
    >>> import collectives, numpy as np
    >>> from parallel import Mesh
    >>> from parallel.nn import Step, UlyssesAttention, context_positions
    >>> def attend(comm):
    ...     layer = UlyssesAttention(3, Mesh(comm, context=2))
    ...     mine = context_positions(10, 2, comm.rank)
    ...     x = np.ones((1, len(mine), 18))
    ...     y, (kept, _) = layer.forward(x, Step(positions=mine, context=10))
    ...     return y.shape, kept[0].shape
    >>> collectives.run(attend, size=2)
    [((1, 5, 6), (1, 10, 12)), ((1, 5, 6), (1, 10, 6))]
    """

    def __init__(
        self,
        num_heads: int,
        mesh: Mesh,
        axis: str = "context",
        *,
        width: int | None = None,
        algorithm: str = "pairwise",
    ) -> None:
        super().__init__(num_heads, width)
        self.group, self.algorithm = ContextGroup(mesh, axis), algorithm
        self.saves_input = self.group.size == 1

    def config(self) -> list[Any]:
        return [*super().config(), self.group.axis, self.algorithm]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        exchange = self._exchange(x.shape[2], self.group.context_of(x, step))
        whole = exchange.to_heads(x, 3)
        y, saved = exchange.attention().forward(whole, step)
        return exchange.to_positions(y, 1), (saved, exchange)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        inner, exchange = saved
        whole = exchange.to_heads(dy, 1)
        dx, _ = exchange.attention().backward_input(whole, inner)
        return exchange.to_positions(dx, 3), None

    def _exchange(self, size: int, context: int) -> Exchange:
        """Return the exchange of queries, keys and values of this `size`."""
        width = self._width(size)
        return Exchange(self.group, size // (3 * width), width, context, self.algorithm)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        exchange = self._exchange(x.shape[2], self.group.whole_row(x))
        num_heads = exchange.heads[self.group.index(x.rank)]
        whole = x.of_shape(x.shape[0], exchange.context, 3 * num_heads * exchange.width)
        inner = exchange.attention().activation_bytes(whole)
        return inner._replace(out=x.of_shape(*x.shape[:2], x.shape[2] // 3))

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        exchange = self._exchange(x.shape[2], self.group.whole_row(x))
        table = partial(exchange.table, x.shape[0])
        tables = (table(3), transposed(table(1))), (table(1), transposed(table(3)))
        return LayerTraffic(*(self._calls(both, x.width) for both in tables))

    def _calls(self, tables: tuple[Table, Table], itemsize: int) -> tuple[PredictedCall, ...]:
        return tuple(
            PredictedCall("", "all_to_all", self.algorithm, table, itemsize, axis=self.group.axis)
            for table in tables
            if self.group.size > 1 and any(map(any, table))
        )


@dataclass(frozen=True)
class Exchange:
    """How ranks exchange all heads of some positions for all positions of some heads.

    Arrays of own positions have the shape (batch, length, parts dim), and arrays of own heads the
    shape (batch, context, parts own dim).  Three parts are queries, keys and values.

    Attributes
    ----------
    group : ContextGroup
        The ranks.
    num_heads, width : int
        The number of heads that ranks divide, and the number of elements of a head.
    context : int
        The number of positions in a row.
    algorithm : str
        The algorithm of the all-to-alls.
    """

    group: ContextGroup
    num_heads: int
    width: int
    context: int
    algorithm: str

    @property
    def heads(self) -> tuple[int, ...]:
        """The number of heads of every rank."""
        return even_counts(self.num_heads, self.group.size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of every rank."""
        return tuple(self.group.num_positions(self.context, i) for i in range(self.group.size))

    def attention(self) -> CausalAttention:
        """Return the layer that computes with own heads."""
        return CausalAttention(self.num_heads, self.width)

    def table(self, batch: int, parts: int) -> Table:
        """Return the elements from every rank to every rank: own positions of the other's heads."""
        count = batch * parts * self.width  # for a head at a position
        return tuple(tuple(count * n * heads for heads in self.heads) for n in self.lengths)

    def to_heads(self, x: Array, parts: int) -> Array:
        """Return own heads of `parts` at all positions, from all heads at own positions, `x`."""
        if self.group.size == 1:
            return x
        batch, length, _ = x.shape
        heads = self.heads[self.group.index()]
        flat = heads_first(x.reshape(batch, length, parts, self.num_heads, self.width)).reshape(-1)
        received = self._sent(flat, self.table(batch, parts))
        sizes = [heads * batch * n * parts * self.width for n in self.lengths]
        pieces = [
            piece.reshape(heads, batch, n, parts, self.width)
            for piece, n in zip(split(received, sizes), self.lengths, strict=True)
        ]
        whole = heads_last(self.join_positions(pieces))
        return whole.reshape(batch, self.context, parts * heads * self.width)

    def to_positions(self, y: Array, parts: int) -> Array:
        """Return all heads of `parts` at own positions, from own heads at all positions, `y`."""
        if self.group.size == 1:
            return y
        batch, me, xp = y.shape[0], self.group.index(), namespace_of(y)
        y = heads_first(y.reshape(batch, self.context, parts, self.heads[me], self.width))
        flat = xp.concat([self.positions_of(y, i).reshape(-1) for i in range(self.group.size)])
        received = self._sent(flat, transposed(self.table(batch, parts)))
        mine = received.reshape(self.num_heads, batch, self.lengths[me], parts, self.width)
        return heads_last(mine).reshape(
            batch, self.lengths[me], parts * self.num_heads * self.width
        )

    def join_positions(self, pieces: list[Array]) -> Array:
        """Join the positions of all ranks, arrays (.., .., length, ..), in the order of the row.

        The early parts of the row are in the order of the ranks, the late parts in the reverse.
        """
        num_early = [length(self.group.parts(self.context, i)[0]) for i in range(self.group.size)]
        both = list(zip(pieces, num_early, strict=True))
        early = [piece[:, :, :n] for piece, n in both]
        late = [piece[:, :, n:] for piece, n in reversed(both)]
        return namespace_of(pieces[0]).concat([*early, *late], axis=2)

    def positions_of(self, y: Array, index: int) -> Array:
        """Return the positions of the rank `index`, from an array in the order of the row."""
        parts = self.group.parts(self.context, index)
        return namespace_of(y).concat([y[:, :, part] for part in parts], axis=2)

    def _sent(self, flat: Array, table: Table) -> Array:
        """Return what this rank receives if all ranks send the elements in `table`."""
        if not any(map(any, table)):
            return flat
        return self.group.comm.all_to_all(flat, counts=table, algorithm=self.algorithm)


def transposed(table: Table) -> Table:
    """Return the elements from every rank to every rank on the way back."""
    return tuple(zip(*table, strict=True))


def heads_first(x: Array) -> Array:
    """Return an array (batch, length, parts, heads, width) with the heads as first dimension."""
    return namespace_of(x).permute_dims(x, (3, 0, 1, 2, 4))


def heads_last(x: Array) -> Array:
    """Return an array with the heads as its first dimension as it was before `heads_first`."""
    return namespace_of(x).permute_dims(x, (1, 2, 3, 0, 4))
