"""Prepares an all-to-all: which counts a rank knows, and how it learns those that it needs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays import Array, Arrays, Backend, validation
from collectives.communicator.arguments import in_elements
from collectives.communicator.calls import Calls, Exchange, SentReceived
from collectives.errors import CollectiveMismatch
from collectives.programs import Counts, OwnCounts
from collectives.runtime import (
    Arguments,
    Checker,
    Prepared,
    Session,
    Work,
    gather_table,
    send_counts_ahead,
)
from collectives.schedule import even_counts
from collectives.selection import sends_counts_ahead

CountTable = tuple[tuple[int, ...], ...]  # rows from every rank to every rank


def all_to_all(
    calls: Calls, x: object, out: Array | None, counts: object, algorithm: str | None
) -> Arguments | Exchange:
    """Return the arguments of any rank of an all-to-all.

    If ranks pass only the counts of what they send, they exchange them first.
    """
    backend, source = calls._readable(x)
    if out is not None:  # the number of rows may not be known yet
        num_rows = validation.rows(validation.writable(out, "out")[1], "all_to_all")
        validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
    ahead = algorithm if algorithm and sends_counts_ahead("all_to_all", algorithm) else None
    if isinstance(counts, SentReceived):
        return _with_own_counts(calls, backend, source, out, counts, ahead)
    table = _count_table(calls, source, counts)
    if table is not None:
        return _exchanged(calls, backend, source, out, table)
    own = validation.total_counts(counts, calls.size, validation.rows(source, "all_to_all"))
    if ahead is not None:
        return partial(_after_counts_ahead, calls, backend, source, out, own, ahead)
    return partial(_after_counts, calls, backend, source, out, own)


def _count_table(calls: Calls, x: Array, counts: object) -> CountTable | None:
    """Return the rows from every rank to every rank; None if only this rank's counts are given."""
    num_rows = validation.rows(x, "all_to_all")
    if counts is None:
        return (even_counts(num_rows, calls.size),) * calls.size
    if not validation.is_table(counts):
        return None
    table = validation.count_table(counts, calls.size)
    validation.total_counts(table[calls.rank], calls.size, num_rows)
    return table


def _exchanged(
    calls: Calls, backend: Backend, source: Array, out: Array | None, table: CountTable
) -> Arguments:
    """Return the arguments of an all-to-all with a full table of counts."""
    num_rows = sum(row[calls.rank] for row in table)
    elements = tuple(in_elements(row, source) for row in table)
    return _of_rows(backend, source, out, num_rows, elements)


def _of_rows(
    backend: Backend, source: Array, out: Array | None, num_rows: int, counts: Counts
) -> Arguments:
    """Return the arguments of an all-to-all by which this rank gets `num_rows`."""
    target = validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
    return Arguments(Arrays(backend, source, target), counts, target, out is not None)


def _after_counts(
    calls: Calls,
    backend: Backend,
    source: Array,
    out: Array | None,
    own: Sequence[int],
    work: Work[Any],
) -> Generator[Prepared, None, Arguments]:
    """Exchange the counts, then prepare the all-to-all."""
    fields = {"collective": "all_to_all"}
    exchanged = yield from gather_table(calls._session, own, "counts", work, fields=fields)
    table = tuple(tuple(row) for row in exchanged.tolist())
    return _exchanged(calls, backend, source, out, table)


def _after_counts_ahead(
    calls: Calls,
    backend: Backend,
    source: Array,
    out: Array | None,
    own: Sequence[int],
    algorithm: str,
    work: Work[Any],
    expected: Sequence[int] | None = None,
) -> Generator[Prepared, None, Arguments]:
    """Send the counts the way of their blocks, then prepare the all-to-all.

    `expected` are the rows that this rank expects from each rank, if it knows them.
    """
    fields = {"collective": "all_to_all"}
    received, passing = yield from send_counts_ahead(calls._session, own, algorithm, work, fields)
    if expected is not None:
        _compare(calls.rank, received, expected)
    through = tuple(zip(passing, in_elements([*passing.values()], source), strict=True))
    sent_and_received = in_elements(own, source), in_elements(received, source)
    counts = OwnCounts(calls.rank, *sent_and_received, through)
    return _of_rows(backend, source, out, sum(received), counts)


def _compare(rank: int, received: Sequence[int], expected: Sequence[int]) -> None:
    """Raise CollectiveMismatch if other rows than expected will come to `rank`."""
    for sender, (sent, wanted) in enumerate(zip(received, expected, strict=True)):
        if sent != wanted:
            raise CollectiveMismatch(_difference(sender, sent, rank, wanted))


def _difference(sender: int, sent: int, receiver: int, expected: int) -> str:
    """Return the sentence about counts that differ."""
    rows = f"rank {sender} sends {sent} rows to rank {receiver}"
    return f"all_to_all: {rows}, which expects {expected}"


def _with_own_counts(
    calls: Calls,
    backend: Backend,
    source: Array,
    out: Array | None,
    counts: SentReceived,
    ahead: str | None,
) -> Arguments | Exchange:
    """Return the arguments of an all-to-all of which this rank knows its own counts.

    They are its row and its column of the table of counts.  `ahead` is the algorithm, if the counts
    of blocks that pass through ranks must be sent ahead.
    """
    size, rank, num_rows = calls.size, calls.rank, validation.rows(source, "all_to_all")
    sent = validation.total_counts(counts.sent, size, num_rows, "counts.sent")
    received = validation.row_counts(counts.received, size, "counts.received")
    if sent[rank] != received[rank]:
        raise ValueError(
            f"rank {rank} sends itself {sent[rank]} rows by counts.sent, "
            f"and {received[rank]} by counts.received"
        )
    elements = OwnCounts(rank, in_elements(sent, source), in_elements(received, source))
    ready = _of_rows(backend, source, out, sum(received), elements)
    checker = calls._session.checker
    if checker is not None:
        both = (*sent, *received)
        return partial(_after_comparison, calls._session, checker, source, ready, both)
    if ahead is None:
        return ready
    arrays = backend, source, out
    return partial(_after_counts_ahead, calls, *arrays, sent, ahead, expected=received)


def _after_comparison(
    session: Session,
    checker: Checker,
    source: Array,
    ready: Arguments,
    own: Sequence[int],
    work: Work[Any],
) -> Generator[Prepared, None, Arguments]:
    """Exchange the counts in checked mode, and refuse the call on all ranks if they differ."""
    fields = {"collective": "all_to_all", "counts": "sent and received"}
    exchanged = yield from gather_table(session, own, "counts", work, fields=fields)
    sent, received = np.hsplit(exchanged, 2)
    for sender, receiver in np.argwhere(sent != received.T).tolist():
        differing = sent[sender, receiver], receiver, received[receiver, sender]
        checker.stop(_difference(sender, *differing))
    return ready._replace(counts=tuple(in_elements(row, source) for row in sent.tolist()))
