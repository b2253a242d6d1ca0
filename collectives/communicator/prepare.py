"""Checks the arguments of a call, and prepares its arrays and counts, for each collective.

An invalid argument raises TypeError or ValueError here, before any message is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from collectives.arrays import (
    HOST,
    Array,
    Arrays,
    Backend,
    Operator,
    backend_of_kind,
    num_elements,
    operator,
    validation,
)
from collectives.errors import CollectiveMismatch
from collectives.programs import Counts, OwnCounts
from collectives.runtime import (
    CallId,
    Checker,
    Header,
    Run,
    Session,
    Steps,
    broadcast_header,
    fields_with_header,
    gather_table,
    send_counts_ahead,
)
from collectives.schedule import even_counts
from collectives.selection import sends_counts_ahead

CountTable = tuple[tuple[int, ...], ...]  # rows from every rank to every rank


class SentReceived(NamedTuple):
    """The counts of one rank in an all-to-all, with which ranks exchange no counts.

        counts = collectives.SentReceived(sent=[2, 0, 5], received=[2, 1, 1])    # on rank 0 of 3

    `sent`: the rows from here to each rank.  `received`: the rows from each rank to here.
    """

    sent: Sequence[int]
    received: Sequence[int]


class Ready(NamedTuple):
    """A call whose arguments are checked and whose arrays are known.

    `counts`: see `compile_lane`.  `result`: the return value.  `has_out`: whether the caller passed
    `out`.  `unwritten_out`: the caller's `out` if it is checked but not written on this rank.
    """

    arrays: Arrays
    counts: Counts
    result: Array | None
    has_out: bool
    root: int = 0
    op: Operator | None = None
    unwritten_out: Array | None = None


Deferred = Callable[[CallId], Generator[Run, None, Ready]]
"""A call that must first receive a header or counts; they are exchanged when it is called."""


class Caller(NamedTuple):
    """The rank that makes a call.  `may_copy`: whether `x` may be copied to be contiguous."""

    session: Session
    may_copy: bool

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.transport.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.session.transport.size

    def readable(self, x: object) -> tuple[Backend, Array]:
        """An array to read from, C-contiguous: itself or a copy."""
        backend, array = validation.readable(x)
        if array is not x and not self.may_copy:
            raise ValueError(
                "x must be C-contiguous, because every run of a plan reads it in place"
            )
        return backend, array


# Broadcast


def broadcast(caller: Caller, x: object, root: object, out: Array | None) -> Ready | Deferred:
    """Any rank of a broadcast."""
    root = validation.rank(root, caller.size, "root")
    prepare = _broadcast_root if caller.rank == root else _broadcast_other
    return prepare(caller, x, out, root)


def _broadcast_root(caller: Caller, x: object, out: Array | None, root: int) -> Ready | Deferred:
    """The root, which first sends a header unless all ranks pass `out`."""
    backend, source = caller.readable(x)
    if out is not None:
        target = validation.result(out, backend, tuple(source.shape), source.dtype)
        return Ready(Arrays(backend, source, target), int(source.size), out, True, root)
    head = Header(backend.kind, source.dtype, tuple(source.shape))

    def after_header(call_id: CallId) -> Generator[Run, None, Ready]:
        yield from _header(caller, "broadcast", head, root, 0, call_id, source)
        return Ready(Arrays(backend, source, source), int(source.size), x, False, root)

    return after_header


def _broadcast_other(caller: Caller, x: object, out: Array | None, root: int) -> Ready | Deferred:
    """Another rank, which fills `out`, or `x` if it fits the header, or a new array."""
    if out is not None:
        backend, target = validation.writable(out, "out")
        return Ready(Arrays(backend, None, target), int(target.size), target, True, root)
    given = None if x is None else validation.writable(x, "x")
    like = None if given is None else given[1]

    def after_header(call_id: CallId) -> Generator[Run, None, Ready]:
        head = yield from _header(caller, "broadcast", None, root, 0, call_id, like)
        arrays = _new(head, head.shape) if given is None else Arrays(given[0], None, given[1])
        target: Array = arrays.target
        if target.dtype != head.dtype or tuple(target.shape) != head.shape:
            raise ValueError(
                f"x is {target.dtype} of shape {tuple(target.shape)}, "
                f"the root sends {head.dtype} of shape {head.shape}"
            )
        return Ready(arrays, int(target.size), target, False, root)

    return after_header


# Scatter


def scatter(
    caller: Caller, x: object, root: object, out: Array | None, counts: object
) -> Ready | Deferred:
    """Any rank of a scatter."""
    root = validation.rank(root, caller.size, "root")
    given = None if counts is None else validation.row_counts(counts, caller.size)
    if caller.rank == root:
        return _scatter_root(caller, x, out, given, root)
    return _scatter_other(caller, out, given, root)


def _scatter_root(
    caller: Caller, x: object, out: Array | None, counts: tuple[int, ...] | None, root: int
) -> Ready | Deferred:
    """The root, which first sends a header unless all ranks pass `out`."""
    backend, source = caller.readable(x)
    numbers = _divided_rows(caller, source, counts, "scatter")
    if out is not None and counts is None and len(set(numbers)) > 1:
        raise ValueError(
            f"{sum(numbers)} rows cannot be divided equally among {caller.size} ranks; "
            "with out= pass counts= on every rank, or omit out= on every rank"
        )
    shape = (numbers[caller.rank], *source.shape[1:])
    target = validation.result(out, backend, shape, source.dtype)
    arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
    ready = Ready(arrays, elements, target, out is not None, root)
    if out is not None:
        return ready
    head = Header(backend.kind, source.dtype, tuple(source.shape), numbers)

    def after_header(call_id: CallId) -> Generator[Run, None, Ready]:
        yield from _header(caller, "scatter", head, root, caller.size, call_id, source, numbers)
        return ready

    return after_header


def _scatter_other(
    caller: Caller, out: Array | None, counts: tuple[int, ...] | None, root: int
) -> Ready | Deferred:
    """Another rank, which gets the number of rows from the header unless it passes `out`."""
    if out is not None:
        backend, target = validation.writable(out, "out")
        own = validation.rows(target, "scatter")
        numbers = (own,) * caller.size if counts is None else counts
        if numbers[caller.rank] != own:
            raise ValueError(f"out has {own} rows, counts gives {numbers[caller.rank]}")
        elements = _elements(numbers, target)
        return Ready(Arrays(backend, None, target), elements, target, True, root)

    def after_header(call_id: CallId) -> Generator[Run, None, Ready]:
        head = yield from _header(caller, "scatter", None, root, caller.size, call_id, None, counts)
        if counts is not None and counts != head.counts:
            raise ValueError(f"counts is {counts} here and {head.counts} at the root")
        arrays = _new(head, (head.counts[caller.rank], *head.shape[1:]))
        elements = _elements(head.counts, arrays.target)
        return Ready(arrays, elements, arrays.target, False, root)

    return after_header


# Gather and all-gather


def gather(caller: Caller, x: object, root: object, out: Array | None, counts: object) -> Ready:
    """Any rank of a gather."""
    root = validation.rank(root, caller.size, "root")
    return _gathered(caller, x, out, counts, root, has_result=caller.rank == root)


def all_gather(caller: Caller, x: object, out: Array | None, counts: object) -> Ready:
    """Any rank of an all-gather."""
    return _gathered(caller, x, out, counts, 0, has_result=True)


def _gathered(
    caller: Caller, x: object, out: Array | None, counts: object, root: int, *, has_result: bool
) -> Ready:
    """Gather every rank's rows on the ranks that get the result."""
    backend, source = caller.readable(x)
    numbers, shape = _joined_rows(caller, source, counts)
    target = validation.result(out, backend, shape, source.dtype) if has_result else None
    arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
    return Ready(arrays, elements, target, out is not None, root)


# Reductions


def reduce(caller: Caller, x: object, op: str | Operator, root: object, out: Array | None) -> Ready:
    """Any rank of a reduce.  Only the root's `out` is used."""
    root = validation.rank(root, caller.size, "root")
    has_result = caller.rank == root
    out = out if has_result else None
    return reduction(caller, "reduce", x, op, out, root=root, has_result=has_result)


def exscan(caller: Caller, x: object, op: str | Operator, out: Array | None) -> Ready:
    """Any rank of an exscan; rank 0 gets no result."""
    return reduction(caller, "exscan", x, op, out, has_result=caller.rank > 0)


def reduction(
    caller: Caller,
    collective: str,
    x: object,
    op: str | Operator,
    out: Array | None,
    *,
    root: int = 0,
    has_result: bool = True,
    shards: int | None = None,
) -> Ready:
    """A reduction of whole vectors.  `has_result`: whether this rank gets the result."""
    backend, source = caller.readable(x)
    one = _one_shard(caller, source, shards)
    target = unwritten_out = None
    if has_result or out is not None:
        target = validation.result(out, backend, tuple(one.shape), source.dtype)
    if not has_result:
        target, unwritten_out = None, target
    combine = _checked_operator(collective, op, backend, source)
    arrays = Arrays(backend, source, target)
    return Ready(arrays, int(one.size), target, out is not None, root, combine, unwritten_out)


def reduce_scatter(
    caller: Caller,
    x: object,
    op: str | Operator,
    out: Array | None,
    counts: object,
    shards: int | None,
) -> Ready:
    """Any rank of a reduce-scatter."""
    backend, source = caller.readable(x)
    one = _one_shard(caller, source, shards)
    numbers = _divided_rows(caller, one, counts, "reduce_scatter")
    shape = (numbers[caller.rank], *one.shape[1:])
    target = validation.result(out, backend, shape, source.dtype)
    arrays, elements = Arrays(backend, source, target), _elements(numbers, one)
    combine = _checked_operator("reduce_scatter", op, backend, source)
    return Ready(arrays, elements, target, out is not None, op=combine)


def _one_shard(caller: Caller, x: Array, shards: int | None) -> Array:
    """The first of this rank's logical shards; all of `x` if there are none."""
    if shards is None:
        return x
    own = even_counts(shards, caller.size)[caller.rank]
    if x.ndim == 0 or x.shape[0] != own:
        found = "is 0-d" if x.ndim == 0 else f"has {x.shape[0]}"
        raise ValueError(f"rank {caller.rank} has {own} of {shards} shards, x {found}")
    return x[0]


def _checked_operator(collective: str, op: str | Operator, backend: Backend, x: Array) -> Operator:
    """The operator.  Raises an error if it does not fit the collective or the array."""
    chosen = operator(op, collective)
    chosen.check(x.dtype)
    chosen.rehearse(backend, x)
    return chosen


# All-to-all


def all_to_all(
    caller: Caller, x: object, out: Array | None, counts: object, algorithm: str | None
) -> Ready | Deferred:
    """Any rank of an all-to-all; with only the counts of what it sends, ranks exchange them."""
    backend, source = caller.readable(x)
    if out is not None:  # the number of rows may not be known yet
        num_rows = validation.rows(validation.writable(out, "out")[1], "all_to_all")
        validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
    ahead = algorithm if algorithm and sends_counts_ahead("all_to_all", algorithm) else None
    if isinstance(counts, SentReceived):
        return _with_own_counts(caller, backend, source, out, counts, ahead)
    table = _count_table(caller, source, counts)
    if table is not None:
        return _exchanged(caller, backend, source, out, table)
    own = validation.total_counts(counts, caller.size, validation.rows(source, "all_to_all"))
    if ahead is not None:
        return partial(_after_counts_ahead, caller, backend, source, out, own, ahead)
    return partial(_after_counts, caller, backend, source, out, own)


def _count_table(caller: Caller, x: Array, counts: object) -> CountTable | None:
    """The rows from every rank to every rank; None if only this rank's counts are given."""
    num_rows = validation.rows(x, "all_to_all")
    if counts is None:
        return (even_counts(num_rows, caller.size),) * caller.size
    if not validation.is_table(counts):
        return None
    table = validation.count_table(counts, caller.size)
    validation.total_counts(table[caller.rank], caller.size, num_rows)
    return table


def _exchanged(
    caller: Caller, backend: Backend, source: Array, out: Array | None, table: CountTable
) -> Ready:
    """An all-to-all with a full table of counts."""
    num_rows = sum(row[caller.rank] for row in table)
    elements = tuple(_elements(row, source) for row in table)
    return _of_rows(backend, source, out, num_rows, elements)


def _of_rows(
    backend: Backend, source: Array, out: Array | None, num_rows: int, counts: Counts
) -> Ready:
    """An all-to-all by which this rank gets `num_rows`."""
    target = validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
    return Ready(Arrays(backend, source, target), counts, target, out is not None)


def _after_counts(
    caller: Caller,
    backend: Backend,
    source: Array,
    out: Array | None,
    own: Sequence[int],
    call_id: CallId,
) -> Generator[Run, None, Ready]:
    """Exchange the counts, then prepare the all-to-all."""
    fields = {"collective": "all_to_all"}
    exchanged = yield from gather_table(caller.session, own, "counts", call_id, fields=fields)
    table = tuple(tuple(row) for row in exchanged.tolist())
    return _exchanged(caller, backend, source, out, table)


def _after_counts_ahead(
    caller: Caller,
    backend: Backend,
    source: Array,
    out: Array | None,
    own: Sequence[int],
    algorithm: str,
    call_id: CallId,
    expected: Sequence[int] | None = None,
) -> Generator[Run, None, Ready]:
    """Send the counts the way of their blocks, then prepare the all-to-all.

    `expected`: the rows that this rank expects from each rank, if it knows them.
    """
    fields = {"collective": "all_to_all"}
    received, passing = yield from send_counts_ahead(
        caller.session, own, algorithm, call_id, fields
    )
    for sender, (sent, wanted) in enumerate(zip(received, expected or received, strict=True)):
        if sent != wanted:
            raise CollectiveMismatch(
                f"all_to_all: rank {sender} sends {sent} rows to rank {caller.rank}, "
                f"which expects {wanted}"
            )
    through = tuple(zip(passing, _elements([*passing.values()], source), strict=True))
    sent_and_received = _elements(own, source), _elements(received, source)
    counts = OwnCounts(caller.rank, *sent_and_received, through)
    return _of_rows(backend, source, out, sum(received), counts)


def _with_own_counts(
    caller: Caller,
    backend: Backend,
    source: Array,
    out: Array | None,
    counts: SentReceived,
    ahead: str | None,
) -> Ready | Deferred:
    """An all-to-all of which this rank knows its own row and column of the table of counts.

    `ahead`: the algorithm, if the counts of blocks that pass through ranks must be sent ahead.
    """
    size, rank, num_rows = caller.size, caller.rank, validation.rows(source, "all_to_all")
    sent = validation.total_counts(counts.sent, size, num_rows, "counts.sent")
    received = validation.row_counts(counts.received, size, "counts.received")
    if sent[rank] != received[rank]:
        raise ValueError(
            f"rank {rank} sends itself {sent[rank]} rows by counts.sent, "
            f"and {received[rank]} by counts.received"
        )
    elements = OwnCounts(rank, _elements(sent, source), _elements(received, source))
    ready = _of_rows(backend, source, out, sum(received), elements)
    checker = caller.session.checker
    if checker is None and ahead is not None:
        return partial(
            _after_counts_ahead, caller, backend, source, out, sent, ahead, expected=received
        )
    if checker is None:
        return ready
    return partial(_after_comparison, caller.session, checker, source, ready, (*sent, *received))


def _after_comparison(
    session: Session,
    checker: Checker,
    source: Array,
    ready: Ready,
    own: Sequence[int],
    call_id: CallId,
) -> Generator[Run, None, Ready]:
    """In checked mode: exchange the counts, and refuse the call on all ranks if they differ."""
    fields = {"collective": "all_to_all", "counts": "sent and received"}
    exchanged = yield from gather_table(session, own, "counts", call_id, fields=fields)
    sent, received = np.hsplit(exchanged, 2)
    for sender, receiver in np.argwhere(sent != received.T).tolist():
        checker.stop(
            f"all_to_all: rank {sender} sends {sent[sender, receiver]} rows to rank {receiver}, "
            f"which expects {received[receiver, sender]}"
        )
    return ready._replace(counts=tuple(_elements(row, source) for row in sent.tolist()))


# Barrier


def barrier(caller: Caller) -> Ready:
    """Any rank of a barrier."""
    return Ready(Arrays(HOST, None, None), (0,) * caller.size, None, False)


# Rows and headers


def _divided_rows(caller: Caller, x: Array, counts: object, collective: str) -> tuple[int, ...]:
    """The rows of `x` that each rank gets."""
    num_rows = validation.rows(x, collective)
    if counts is None:
        return even_counts(num_rows, caller.size)
    return validation.total_counts(counts, caller.size, num_rows)


def _joined_rows(
    caller: Caller, x: Array, counts: object
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of each rank, and the shape of the joined array."""
    own = int(x.shape[0]) if x.ndim else 1
    numbers = (own,) * caller.size
    if counts is not None:
        numbers = validation.row_counts(counts, caller.size)
    if numbers[caller.rank] != own:
        raise ValueError(
            f"counts gives rank {caller.rank} {numbers[caller.rank]} rows, x has {own}"
        )
    return numbers, (sum(numbers), *x.shape[1:])


def _elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
    """Counts of elements from counts of rows of arrays like `x`."""
    per_row = num_elements(x.shape[1:])
    return tuple(count * per_row for count in counts)


def _header(
    caller: Caller,
    collective: str,
    head: Header | None,
    root: int,
    num_counts: int,
    call_id: CallId,
    like: Array | None = None,
    counts: Sequence[int] | None = None,
) -> Steps:
    """Send the root's header to every rank.  `like` and `counts`: what this rank expects."""
    fields = fields_with_header(collective, like, counts)
    return broadcast_header(caller.session, head, root, num_counts, call_id, fields)


def _new(head: Header, shape: tuple[int, ...]) -> Arrays:
    """A new array for the data that the header describes."""
    backend = backend_of_kind(head.kind)
    return Arrays(backend, None, backend.empty(shape, head.dtype))
