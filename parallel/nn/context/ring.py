"""Ring attention: keys and values travel around the ranks, queries stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from parallel.accounts import PredictedCall
from parallel.mesh import Mesh
from parallel.nn.context.positions import ContextGroup, tiles
from parallel.nn.context.softmax import Derivatives, OnlineSoftmax
from parallel.nn.functional import Array, cast, namespace_of
from parallel.nn.layer import Activations, ArraySpec, LayerTraffic, Step
from parallel.nn.plain import Attention

BLOCK, GRADIENT = 0, 1  # the tags of messages


class RingAttention(Attention):
    """Causal attention to rows whose positions are divided by ranks: the ring of Liu et al. 2023.

    It computes what `CausalAttention` computes on whole rows: from queries, keys and values side by
    side, (batch, length, 3 dim), at the positions `context_positions`, it makes (batch, length,
    dim) at these positions.  Queries stay.  Blocks of keys and values travel: in every one of C - 1
    steps a rank sends the block that it has to the next rank, receives another block from the
    previous rank, and meanwhile computes with the block that it has.  If causality excludes a
    score, it is computed only between positions of one rank, and every rank computes equally many
    scores in a step (Brandon et al. 2023, Striped Attention, with the positions of Llama Team
    2024).  In backward the blocks travel again.  The gradient of a block, in at least float32,
    follows its block and ends on the block's owner.

    A rank sends C - 1 blocks forward, and C - 1 blocks and C - 1 gradients backward; a block of L
    positions has 2 b L h elements (b rows, vectors of h).  The input, the output, and the
    log-sum-exp of every query and head, in at least float32, are saved.  During forward a rank has
    two blocks, and during backward also two gradients of blocks.

    Parameters
    ----------
    num_heads : int
        The number of heads of this rank: with tensor parallelism not all, and perhaps none.
    mesh : Mesh
        The ranks.
    axis : str
        The axis of the mesh along which ranks divide rows.
    width : int, optional
        The number of elements of a head, as in `CausalAttention`.  If it is given, `num_heads` is
        not used, and predictions are right for ranks with other numbers of heads.

    Raises
    ------
    ValueError
        From `forward`, if the positions in the step are not those of `context_positions`.

    Examples
    --------
    >>> import collectives, numpy as np
    >>> from parallel import Mesh
    >>> from parallel.nn import RingAttention, Step, context_positions
    >>> def attend(comm):
    ...     layer = RingAttention(2, Mesh(comm, context=2))
    ...     mine = context_positions(10, 2, comm.rank)
    ...     x = np.ones((1, len(mine), 12))
    ...     return layer.forward(x, Step(positions=mine, context=10))[0].shape
    >>> collectives.run(attend, size=2)
    [(1, 5, 4), (1, 5, 4)]
    """

    def __init__(
        self, num_heads: int, mesh: Mesh, axis: str = "context", *, width: int | None = None
    ) -> None:
        super().__init__(num_heads, width)
        self.group = ContextGroup(mesh, axis)

    def config(self) -> list[Any]:
        return [*super().config(), self.group.axis]

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        context = self.group.context_of(x, step)
        q, k, v = self._split(x)
        softmax = OnlineSoftmax(q)
        for owner, block in blocks(self.group, namespace_of(x).stack([k, v]), context):
            for tile in tiles(context, self.group.size, self.group.index(), owner):
                softmax.add(block, tile)
        y, log_sum = softmax.result()
        y = cast(self._join(y), x.dtype)
        return y, (x, y, log_sum, context)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        x, y, log_sum, context = saved
        (q, k, v), xp = self._split(x), namespace_of(x)
        parts = Derivatives.of(q, heads_of(y, q), log_sum, heads_of(dy, q))
        dk, dv = self._ring_backward(parts, xp.stack([k, v]), context)
        joined = [cast(self._join(part), x.dtype) for part in (parts.dq, dk, dv)]
        return xp.concat(joined, axis=-1), None

    def _ring_backward(self, parts: Derivatives, mine: Array, context: int) -> Array:
        """Return the derivative by this rank's block, to which all ranks add, and complete dq."""
        group, me, finish = self.group, self.group.index(), None
        for owner, block in blocks(group, mine, context):
            gradient = parts.of_block(block, tiles(context, group.size, me, owner))
            if owner == me:
                total = gradient  # the owner adds its own part last, which saves one message
                continue
            if finish is not None:
                gradient += finish()
            following = (owner - 1) % group.size
            finish = start_shift(group, gradient, group.num_positions(context, following), GRADIENT)
        return total if finish is None else total + finish()

    def activation_bytes(self, x: ArraySpec) -> Activations:
        batch, length, size = x.shape
        out = x.of_shape(batch, length, size // 3)
        num_sums = batch * length * (size // (3 * self._width(size)))
        saved = x.nbytes + out.nbytes + max(x.width, 4) * num_sums
        return Activations(saved, out, is_out_saved=True)

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        size, me = self.group.size, self.group.index(x.rank)
        sent = partial(self._message, x)
        moved = [sent((me - step) % size, x.width) for step in range(size - 1)]
        gradients = [sent((me - step) % size, max(x.width, 4)) for step in range(1, size)]
        forward = tuple(call for call in moved if call.counts)
        return LayerTraffic(forward, (*forward, *(call for call in gradients if call.counts)))

    def _message(self, x: ArraySpec, owner: int, itemsize: int) -> PredictedCall:
        """Return the message with the block of the rank `owner`, or with the block's gradient."""
        group, me = self.group.ranks(x.rank), self.group.index(x.rank)
        ends = (x.rank, group[(me + 1) % len(group)])
        num_positions = self.group.num_positions(self.group.whole_row(x), owner)
        count = 2 * x.shape[0] * num_positions * (x.shape[2] // 3)
        return PredictedCall(
            "", "send", "point_to_point", count, itemsize, groups=(ends,), axis=self.group.axis
        )


def heads_of(y: Array, q: Array) -> Array:
    """Return `y` (batch, length, dim) by heads, like the queries `q`."""
    batch, heads, length, width = q.shape
    return namespace_of(y).permute_dims(y.reshape(batch, length, heads, width), (0, 2, 1, 3))


def blocks(group: ContextGroup, block: Array, context: int) -> Iterator[tuple[int, Array]]:
    """Yield the blocks of all ranks with the indices of their owners, beginning with this rank's.

    `block` is the block of this rank, (2, batch, heads, length, width).  While the caller works
    with a block, it is sent on, and the next block arrives.
    """
    me, size = group.index(), group.size
    for step in range(size - 1):
        owner, following = (me - step) % size, (me - step - 1) % size
        finish = start_shift(group, block, group.num_positions(context, following), BLOCK)
        yield owner, block
        block = finish()
    yield (me + 1) % size, block


def start_shift(
    group: ContextGroup, block: Array, num_positions: int, tag: int
) -> Callable[[], Array]:
    """Start to send a block to the next rank; return a function that waits for another block.

    The other block is from the previous rank and has `num_positions` positions.  Messages without
    elements are not sent.
    """
    shape = (*block.shape[:3], num_positions, block.shape[4])
    arriving = namespace_of(block).empty(shape, dtype=block.dtype)
    if not block.size:
        return lambda: arriving
    me, comm = group.index(), group.comm
    received = comm.recv(arriving, (me - 1) % group.size, tag, async_op=True)
    sent = comm.send(block, (me + 1) % group.size, tag, async_op=True)

    def finish() -> Array:
        sent.wait()
        return received.wait()

    return finish
