"""Checks the arguments of a call, and prepares its arrays and counts, for each collective.

An invalid argument raises TypeError or ValueError here, before any message is sent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

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
from collectives.communicator.calls import Calls, Exchange
from collectives.runtime import (
    Arguments,
    Header,
    Prepared,
    Steps,
    Work,
    broadcast_header,
    fields_with_header,
)
from collectives.schedule import even_counts


def broadcast(calls: Calls, x: object, root: object, out: Array | None) -> Arguments | Exchange:
    """Return the arguments of any rank of a broadcast."""
    root = validation.rank(root, calls.size, "root")
    prepare = _broadcast_root if calls.rank == root else _broadcast_other
    return prepare(calls, x, out, root)


def _broadcast_root(calls: Calls, x: object, out: Array | None, root: int) -> Arguments | Exchange:
    """Return the root's arguments.  It first sends a header unless all ranks pass `out`."""
    backend, source = calls._readable(x)
    if out is not None:
        target = validation.result(out, backend, tuple(source.shape), source.dtype)
        return Arguments(Arrays(backend, source, target), int(source.size), out, True, root)
    head = Header(backend.kind, source.dtype, tuple(source.shape))

    def after_header(work: Work[Any]) -> Generator[Prepared, None, Arguments]:
        yield from _header(calls, "broadcast", head, root, 0, work, source)
        return Arguments(Arrays(backend, source, source), int(source.size), x, False, root)

    return after_header


def _broadcast_other(calls: Calls, x: object, out: Array | None, root: int) -> Arguments | Exchange:
    """Return the arguments of another rank.

    It fills `out`, or `x` if `x` fits the header, or a new array.
    """
    if out is not None:
        backend, target = validation.writable(out, "out")
        return Arguments(Arrays(backend, None, target), int(target.size), target, True, root)
    given = None if x is None else validation.writable(x, "x")
    like = None if given is None else given[1]

    def after_header(work: Work[Any]) -> Generator[Prepared, None, Arguments]:
        head = yield from _header(calls, "broadcast", None, root, 0, work, like)
        arrays = _new(head, head.shape) if given is None else Arrays(given[0], None, given[1])
        target: Array = arrays.target
        if target.dtype != head.dtype or tuple(target.shape) != head.shape:
            raise ValueError(
                f"x is {target.dtype} of shape {tuple(target.shape)}, "
                f"the root sends {head.dtype} of shape {head.shape}"
            )
        return Arguments(arrays, int(target.size), target, False, root)

    return after_header


def scatter(
    calls: Calls, x: object, root: object, out: Array | None, counts: object
) -> Arguments | Exchange:
    """Return the arguments of any rank of a scatter."""
    root = validation.rank(root, calls.size, "root")
    given = None if counts is None else validation.row_counts(counts, calls.size)
    if calls.rank == root:
        return _scatter_root(calls, x, out, given, root)
    return _scatter_other(calls, out, given, root)


def _scatter_root(
    calls: Calls, x: object, out: Array | None, counts: tuple[int, ...] | None, root: int
) -> Arguments | Exchange:
    """Return the root's arguments.  It first sends a header unless all ranks pass `out`."""
    backend, source = calls._readable(x)
    numbers = _divided_rows(calls, source, counts, "scatter")
    if out is not None and counts is None and len(set(numbers)) > 1:
        raise ValueError(
            f"{sum(numbers)} rows cannot be divided equally among {calls.size} ranks; "
            "with out= pass counts= on every rank, or omit out= on every rank"
        )
    shape = (numbers[calls.rank], *source.shape[1:])
    target = validation.result(out, backend, shape, source.dtype)
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, source)
    ready = Arguments(arrays, elements, target, out is not None, root)
    if out is not None:
        return ready
    head = Header(backend.kind, source.dtype, tuple(source.shape), numbers)

    def after_header(work: Work[Any]) -> Generator[Prepared, None, Arguments]:
        yield from _header(calls, "scatter", head, root, calls.size, work, source, numbers)
        return ready

    return after_header


def _scatter_other(
    calls: Calls, out: Array | None, counts: tuple[int, ...] | None, root: int
) -> Arguments | Exchange:
    """Return the arguments of another rank.

    It gets the number of rows from the header unless it passes `out`.
    """
    if out is not None:
        backend, target = validation.writable(out, "out")
        own = validation.rows(target, "scatter")
        numbers = (own,) * calls.size if counts is None else counts
        if numbers[calls.rank] != own:
            raise ValueError(f"out has {own} rows, counts gives {numbers[calls.rank]}")
        elements = in_elements(numbers, target)
        return Arguments(Arrays(backend, None, target), elements, target, True, root)

    def after_header(work: Work[Any]) -> Generator[Prepared, None, Arguments]:
        head = yield from _header(calls, "scatter", None, root, calls.size, work, None, counts)
        if counts is not None and counts != head.counts:
            raise ValueError(f"counts is {counts} here and {head.counts} at the root")
        arrays = _new(head, (head.counts[calls.rank], *head.shape[1:]))
        elements = in_elements(head.counts, arrays.target)
        return Arguments(arrays, elements, arrays.target, False, root)

    return after_header


def gather(calls: Calls, x: object, root: object, out: Array | None, counts: object) -> Arguments:
    """Return the arguments of any rank of a gather."""
    root = validation.rank(root, calls.size, "root")
    return _gathered(calls, x, out, counts, root, has_result=calls.rank == root)


def all_gather(calls: Calls, x: object, out: Array | None, counts: object) -> Arguments:
    """Return the arguments of any rank of an all-gather."""
    return _gathered(calls, x, out, counts, 0, has_result=True)


def _gathered(
    calls: Calls, x: object, out: Array | None, counts: object, root: int, *, has_result: bool
) -> Arguments:
    """Return the arguments of a call that joins the rows of all ranks."""
    backend, source = calls._readable(x)
    numbers, shape = _joined_rows(calls, source, counts)
    target = validation.result(out, backend, shape, source.dtype) if has_result else None
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, source)
    return Arguments(arrays, elements, target, out is not None, root)


def reduce(
    calls: Calls, x: object, op: str | Operator, root: object, out: Array | None
) -> Arguments:
    """Return the arguments of any rank of a reduce.  Only the root's `out` is used."""
    root = validation.rank(root, calls.size, "root")
    has_result = calls.rank == root
    out = out if has_result else None
    return reduction(calls, "reduce", x, op, out, root=root, has_result=has_result)


def exscan(calls: Calls, x: object, op: str | Operator, out: Array | None) -> Arguments:
    """Return the arguments of any rank of an exscan.  Rank 0 gets no result."""
    return reduction(calls, "exscan", x, op, out, has_result=calls.rank > 0)


def reduction(
    calls: Calls,
    collective: str,
    x: object,
    op: str | Operator,
    out: Array | None,
    *,
    root: int = 0,
    has_result: bool = True,
    shards: int | None = None,
) -> Arguments:
    """Return the arguments of a reduction of whole vectors.

    `has_result` says whether this rank gets the result.
    """
    backend, source = calls._readable(x)
    one = _one_shard(calls, source, shards)
    target = unwritten_out = None
    if has_result or out is not None:
        target = validation.result(out, backend, tuple(one.shape), source.dtype)
    if not has_result:
        target, unwritten_out = None, target
    combine = _checked_operator(collective, op, backend, source)
    arrays = Arrays(backend, source, target)
    return Arguments(arrays, int(one.size), target, out is not None, root, combine, unwritten_out)


def reduce_scatter(
    calls: Calls,
    x: object,
    op: str | Operator,
    out: Array | None,
    counts: object,
    shards: int | None,
) -> Arguments:
    """Return the arguments of any rank of a reduce-scatter."""
    backend, source = calls._readable(x)
    one = _one_shard(calls, source, shards)
    numbers = _divided_rows(calls, one, counts, "reduce_scatter")
    shape = (numbers[calls.rank], *one.shape[1:])
    target = validation.result(out, backend, shape, source.dtype)
    arrays, elements = Arrays(backend, source, target), in_elements(numbers, one)
    combine = _checked_operator("reduce_scatter", op, backend, source)
    return Arguments(arrays, elements, target, out is not None, op=combine)


def _one_shard(calls: Calls, x: Array, shards: int | None) -> Array:
    """Return the first of this rank's logical shards; all of `x` if there are none."""
    if shards is None:
        return x
    own = even_counts(shards, calls.size)[calls.rank]
    if x.ndim == 0 or x.shape[0] != own:
        actual = "is 0-d" if x.ndim == 0 else f"has {x.shape[0]}"
        raise ValueError(f"rank {calls.rank} has {own} of {shards} shards, x {actual}")
    return x[0]


def _checked_operator(collective: str, op: str | Operator, backend: Backend, x: Array) -> Operator:
    """Return the operator.  Raise an error if it does not fit the collective or the array."""
    chosen = operator(op, collective)
    chosen.check(x.dtype)
    chosen.rehearse(backend, x)
    return chosen


def barrier(calls: Calls) -> Arguments:
    """Return the arguments of any rank of a barrier."""
    return Arguments(Arrays(HOST, None, None), (0,) * calls.size, None, False)


def _divided_rows(calls: Calls, x: Array, counts: object, collective: str) -> tuple[int, ...]:
    """Return the numbers of rows of `x` that the ranks get."""
    num_rows = validation.rows(x, collective)
    if counts is None:
        return even_counts(num_rows, calls.size)
    return validation.total_counts(counts, calls.size, num_rows)


def _joined_rows(calls: Calls, x: Array, counts: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of rows of each rank, and the shape of the joined array."""
    own = int(x.shape[0]) if x.ndim else 1
    numbers = (own,) * calls.size
    if counts is not None:
        numbers = validation.row_counts(counts, calls.size)
    if numbers[calls.rank] != own:
        raise ValueError(f"counts gives rank {calls.rank} {numbers[calls.rank]} rows, x has {own}")
    return numbers, (sum(numbers), *x.shape[1:])


def in_elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
    """Return counts of elements from counts of rows of arrays like `x`."""
    per_row = num_elements(x.shape[1:])
    return tuple(count * per_row for count in counts)


def _header(
    calls: Calls,
    collective: str,
    head: Header | None,
    root: int,
    num_counts: int,
    work: Work[Any],
    like: Array | None = None,
    counts: Sequence[int] | None = None,
) -> Steps:
    """Send the root's header to every rank.  This rank expects `like` and `counts`."""
    fields = fields_with_header(collective, like, counts)
    return broadcast_header(calls._session, head, root, num_counts, work, fields)


def _new(head: Header, shape: tuple[int, ...]) -> Arrays:
    """Return a new array for the data that the header describes."""
    backend = backend_of_kind(head.kind)
    return Arrays(backend, None, backend.empty(shape, head.dtype))
