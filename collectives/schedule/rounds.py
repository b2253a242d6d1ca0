"""The vocabulary of every algorithm: five operations, and rounds of them.

A rank sends blocks.  Blocks come to it from a peer or from itself, and replace or are combined with
what it holds:

                      replaces     is combined
    from a peer       Recv         RecvReduce
    from this rank    Copy         CopyReduce

An algorithm is a generator of rounds.  It names ranks and blocks, never bytes, buffers or MPI.
A block is any hashable name; both ends of a message must name the same blocks in the same order.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Block = Hashable
Kind = Literal["send", "recv", "recv_reduce", "copy", "copy_reduce"]
Side = Literal["left", "right"]


class Operation(NamedTuple):
    """One operation of one rank.  `Send`, `Recv`, `RecvReduce`, `Copy` and `CopyReduce` make them.

    Attributes
    ----------
    kind : str
        Which of the five it is: "send", "recv", "recv_reduce", "copy" or "copy_reduce".
    peer : int or None
        The rank at the other end; None for a copy.
    blocks : tuple
        The names of the blocks, in order.
    side : str or None
        Where the incoming operand of a reduction stands; "left" means incoming (+) own.
    into : tuple
        The names that the blocks get here, one for each; () if they keep theirs.
    """

    kind: Kind
    peer: int | None
    blocks: tuple[Block, ...]
    side: Side | None = None
    into: tuple[Block, ...] = ()

    @property
    def targets(self) -> tuple[Block, ...]:
        """The names under which the blocks that come are held."""
        return self.into or self.blocks


Round = tuple[Operation, ...]
Schedule = list[Round]


def Send(peer: int, blocks: Iterable[Block]) -> Operation:  # noqa: N802 - reads as the verb it is
    """Return the operation that sends `blocks` to `peer` in one message.

    Their values are those at the beginning of the round.  Messages of a round to the same peer are
    received in the order of their sends.
    """
    return Operation("send", peer, tuple(blocks))


def Recv(peer: int, blocks: Iterable[Block], into: Iterable[Block] = ()) -> Operation:  # noqa: N802
    """Return the operation that receives `blocks` from `peer` and replaces what was held.

    With `into` they are held under those names instead of the sender's.
    """
    return Operation("recv", peer, tuple(blocks), None, tuple(into))


def RecvReduce(  # noqa: N802
    peer: int, blocks: Iterable[Block], side: Side = "left", into: Iterable[Block] = ()
) -> Operation:
    """Return the operation that receives `blocks` from `peer` and combines them with those held.

    The incoming operand stands on `side`.  With `into` they are combined with the blocks of those
    names instead of the sender's.
    """
    return Operation("recv_reduce", peer, tuple(blocks), side, tuple(into))


def Copy(src: Iterable[Block], dst: Iterable[Block]) -> Operation:  # noqa: N802
    """Return the operation that copies the blocks `src` to the names `dst`, after the messages.

    A name that the collective does not know is a pair (label, block), for a value with the size of
    that block.  So every rank knows the length of a message from its names.
    """
    return Operation("copy", None, tuple(src), None, tuple(dst))


def CopyReduce(src: Iterable[Block], dst: Iterable[Block], side: Side = "left") -> Operation:  # noqa: N802
    """Return the operation that combines each block of `src` into that of `dst`.

    It follows the messages of the round.  The operand from `src` stands on `side`.  No block may be
    on both sides, or twice in `dst`.
    """
    return Operation("copy_reduce", None, tuple(src), side, tuple(dst))


class ScheduleError(Exception):
    """A schedule that does not do what its collective promises.  The message ends with the grid."""


def original(block: Block, known: Container[Block]) -> Block:
    """Return the block of the collective whose value a name may stand for.

    Labels are taken off.  Raises KeyError for a name that leads to no known block.
    """
    while block not in known:
        if not isinstance(block, tuple) or len(block) != 2:
            raise KeyError(block)
        block = block[1]
    return block


def outgoing(operations: Round) -> list[Operation]:
    """Return the operations of a round that send a message."""
    return [op for op in operations if op.kind == "send"]


def incoming(operations: Round) -> list[Operation]:
    """Return the operations of a round that receive a message."""
    return [op for op in operations if op.kind in ("recv", "recv_reduce")]


def local(operations: Round) -> list[Operation]:
    """Return the operations of a round that follow its messages, in their order."""
    return [op for op in operations if op.peer is None]


_SYMBOL = {"send": ">", "recv": "<", "recv_reduce": "+", "copy": "=", "copy_reduce": "+="}


def _name(block: Block) -> str:
    """Return a block in a cell: names made of names are joined by dots."""
    return ".".join(map(_name, block)) if isinstance(block, tuple) else str(block)


def _word(op: Operation) -> str:
    """Return one operation: `>3:0,1` sends blocks 0 and 1 to rank 3, `=0:x.0` copies 0 to x.0."""
    names = [",".join(map(_name, blocks)) for blocks in (op.blocks, op.into) if blocks]
    peer = [] if op.peer is None else [str(op.peer)]
    return _SYMBOL.get(op.kind, f"{op.kind}?") + ":".join(peer + names)


def _cell(operations: Round) -> str:
    """Return the text of one cell: the operations of one rank in one round."""
    return " ".join(map(_word, operations)) or "."


def grid(
    schedules: Sequence[Schedule] | Mapping[int, Schedule],
    mark: tuple[int, int] | None = None,
    rounds: range | None = None,
) -> str:
    """Return the schedules of all ranks, or of some, as a table.

    The table has a row for each rank, and a column for each round.

    Parameters
    ----------
    schedules : sequence or mapping of int to Schedule
        By rank.
    mark : tuple of int, optional
        The (rank, round) of a cell to point out; it is written between ``[`` and ``]``.
    rounds : range, optional
        Show only these rounds.

    Examples
    --------
    >>> from collectives.schedule import Recv, Send, grid
    >>> print(grid([[(Send(1, [0]),)], [(Recv(0, [0]),)]], mark=(1, 0)))
    rank  round 0
    0     >1:0
    1     [<0:0]
    """
    if not isinstance(schedules, Mapping):
        schedules = dict(enumerate(schedules))
    num_rounds = max(map(len, schedules.values()), default=0)
    rounds = range(num_rounds)[slice(rounds.start, rounds.stop) if rounds else slice(None)]
    rows = [["rank", *(f"round {k}" for k in rounds)]]
    for rank, schedule in schedules.items():
        cells = [_cell(operations) for operations in schedule]
        cells += ["(none)"] * (num_rounds - len(cells))
        if mark is not None and mark[0] == rank and mark[1] < len(cells):
            cells[mark[1]] = f"[{cells[mark[1]]}]"
        rows.append([str(rank), *(cells[k] for k in rounds)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
