"""The messages that the library sends for itself, each under its own label in the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import algorithms
from collectives.arrays import HOST, Arrays, Bytes
from collectives.programs import CountOfEachBlock, Message, Step, passing_blocks
from collectives.runtime import header
from collectives.runtime.header import Header
from collectives.runtime.performing import perform
from collectives.runtime.preparing import prepare_steps
from collectives.runtime.session import Session
from collectives.runtime.work import Steps, Work
from collectives.schedule import Piece, Region, Round, incoming, outgoing
from collectives.selection import select

_NOTHING = Region("input", 0, 0)


# Before a call


def broadcast_header(
    session: Session,
    head: Header | None,
    root: int,
    num_counts: int,
    work: Work[Any],
    fields: Mapping[str, str],
) -> Steps:
    """Send the root's header to every rank, before the call itself.

    `fields` are the fields of that call that checked mode compares.
    """
    message: Bytes = np.empty(header.num_bytes(num_counts), np.uint8)
    if head is not None:
        message = header.encode(head)
    arrays = Arrays(HOST, None if head is None else message, message)
    named: dict[str, Any] = {"root": root, "algorithm": "binomial", "label": "header"}
    spec = session.spec("broadcast", arrays, message.size, **named, is_blocking=work.is_blocking)
    yield from perform(session, work, spec, arrays, is_ahead=True, fields=fields)
    return header.decode(message)


def gather_table(
    session: Session,
    numbers: Sequence[int],
    label: str,
    work: Work[Any],
    *,
    is_ahead: bool = True,
    fields: Mapping[str, str] | None = None,
) -> Steps:
    """Gather a few integers of every rank on every rank, one row for each, before a call."""
    mine, size = np.array(numbers, np.int64), session.transport.size
    table = np.empty((size, mine.size), np.int64)
    arrays = Arrays(HOST, mine, table)
    spec = session.spec("all_gather", arrays, (mine.size,) * size, label=label)
    yield from perform(session, work, spec, arrays, is_ahead=is_ahead, fields=fields)
    return table


def send_counts_ahead(
    session: Session,
    counts: Sequence[int],
    algorithm: str,
    work: Work[Any],
    fields: Mapping[str, str],
) -> Steps:
    """Send the count of every block the way that an all-to-all by `algorithm` sends the block.

    If the algorithm cuts blocks, each piece has the count of its block.

    Parameters
    ----------
    counts : sequence of int
        The counts of this rank's blocks, for each rank.

    Returns
    -------
    list of int, dict
        The counts of the blocks from each rank; and of the blocks that pass through this rank.
    """
    rank, size = session.transport.rank, session.transport.size
    choice = select.choose("all_to_all", algorithm, size, 0, topology=session.topology)
    num_pieces = choice.algorithm.case(size, None, **choice.options).num_pieces
    passing = passing_blocks(choice.algorithm, rank, size, tuple(choice.options.items()))
    known = np.empty(size * num_pieces + len(passing), np.int64)
    arrays = Arrays(HOST, np.repeat(np.array(counts, np.int64), num_pieces), known)
    named: dict[str, Any] = {"algorithm": algorithm, "label": "counts"}
    spec = session.spec("all_to_all", arrays, CountOfEachBlock(), **named)
    yield from perform(session, work, spec, arrays, is_ahead=True, fields=fields)
    received, others = np.split(known, [size * num_pieces])
    blocks = [part.block if isinstance(part, Piece) else part for part in passing]
    return received[::num_pieces].tolist(), dict(zip(blocks, others.tolist(), strict=True))


# Complete calls


def all_gather_integers(
    session: Session, numbers: Sequence[int], label: str, timeout: float | None = None
) -> NDArray[np.int64]:
    """Gather a few integers of every rank on every rank, one row for each."""

    def steps(work: Work[Any]) -> Steps:
        return gather_table(session, numbers, label, work, is_ahead=False)

    table: NDArray[np.int64] = session.call_part(steps, timeout)
    return table


def broadcast_integers(
    session: Session, numbers: Sequence[int] | None, length: int, root: int, label: str
) -> list[int]:
    """Send a few integers of the root to every rank.

    `numbers` is None on the other ranks.
    """
    shared = np.empty(length, np.int64)
    if numbers is not None:
        shared[:] = numbers
    arrays = Arrays(HOST, None if numbers is None else shared, shared)
    spec = session.spec("broadcast", arrays, length, root=root, label=label)
    session.call_part(lambda work: perform(session, work, spec, arrays))
    return [int(number) for number in shared]


def broadcast_bytes(session: Session, data: bytes, label: str) -> bytes:
    """Send rank 0's bytes to every rank."""
    is_root = session.transport.rank == 0
    lengths = all_gather_integers(session, [len(data)], label)
    shared = np.empty(int(lengths[0, 0]), np.uint8)
    if is_root:
        shared[:] = np.frombuffer(data, np.uint8)
    arrays = Arrays(HOST, shared if is_root else None, shared)
    spec = session.spec("broadcast", arrays, shared.size, label=label)
    session.call_part(lambda work: perform(session, work, spec, arrays))
    return shared.tobytes()


def gather_bytes(session: Session, data: bytes, label: str) -> list[bytes] | None:
    """Gather every rank's bytes on rank 0; return None on the others."""
    lengths = all_gather_integers(session, [len(data)], label)[:, 0]
    is_root = session.transport.rank == 0
    whole = np.empty(int(lengths.sum()), np.uint8) if is_root else None
    arrays = Arrays(HOST, np.frombuffer(data, np.uint8), whole)
    spec = session.spec("gather", arrays, tuple(lengths.tolist()), label=label)
    session.call_part(lambda work: perform(session, work, spec, arrays))
    if whole is None:
        return None
    return [part.tobytes() for part in np.split(whole, np.cumsum(lengths)[:-1])]


def subgroup_barrier(session: Session, members: Sequence[int], timeout: float | None) -> None:
    """Wait until all members of a new communicator call this.

    MPI's own call that makes a communicator has no time limit.
    """
    index, size = list(members).index(session.transport.rank), len(members)
    rounds = algorithms.schedule("barrier", "dissemination", rank=index, size=size)
    steps = [_step(operations, members) for operations in rounds]
    number = f"{session.name}s{session.num_children[tuple(members)] + 1}"

    def steps_of(work: Work[Any]) -> Steps:
        names = "subgroup", "dissemination"
        yield prepare_steps(session, names, steps, session.numbering.subgroup_tag, number)

    session.call_part(steps_of, timeout)


def _step(operations: Round, members: Sequence[int]) -> Step:
    """Return a round of empty messages among the members."""
    ends = [
        tuple(Message(members[op.peer], _NOTHING) for op in half(operations) if op.peer is not None)
        for half in (outgoing, incoming)
    ]
    return Step(sends=ends[0], receives=ends[1])
