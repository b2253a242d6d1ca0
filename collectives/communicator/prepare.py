"""Checks the arguments of a call, and prepares its arrays and counts, for each collective.

An invalid argument raises TypeError or ValueError here, before any message is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

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
from collectives.programs import Counts
from collectives.runtime import (
    CallId,
    Header,
    Run,
    Session,
    Steps,
    broadcast_header,
    fields_with_header,
)
from collectives.schedule import even_counts


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
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, source)
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
        elements = in_elements(numbers, target)
        return Ready(Arrays(backend, None, target), elements, target, True, root)

    def after_header(call_id: CallId) -> Generator[Run, None, Ready]:
        head = yield from _header(caller, "scatter", None, root, caller.size, call_id, None, counts)
        if counts is not None and counts != head.counts:
            raise ValueError(f"counts is {counts} here and {head.counts} at the root")
        arrays = _new(head, (head.counts[caller.rank], *head.shape[1:]))
        elements = in_elements(head.counts, arrays.target)
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
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, source)
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
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, one)
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


def in_elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
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
