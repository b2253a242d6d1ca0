"""The collectives and the point-to-point calls, as a user makes them.

Arrays split and concatenate along axis 0; "rows" are the entries along it.  Every collective takes

- `out`: the array for the result (it may be the input: in place).  Without it the result is a new
  array of the input's kind.  The input is never modified unless it is `out`.
- `algorithm`: a name from `collectives.algorithms.names(...)`, or None for a choice by size.  The
  options that `collectives.algorithms.info(...).options` lists are set like a call's arguments:
  "bruck(radix=4)".
- `async_op=True`: return a `Work` at once, to `wait()` for.
- `timeout`: seconds, after which CollectiveTimeout says who is waited for; None takes the
  communicator's.

Reductions take `op`: sum, prod, min, max, avg, and, or, xor, or a `collectives.Operator` of your
own, which on all ranks must be the same.  float16 and bfloat16 are combined two at a time: each
combination is computed in float32 and rounded once to the array's dtype, so what is sent and kept
has two bytes; an average is divided in float32 and rounded once.

An argument that cannot work raises TypeError or ValueError before any message is sent.  A blocking
call that fails half-way, because an operator raises or the ranks' calls do not match, is the last
of its communicator: every later one raises CollectiveError, which says so.  CuPy arrays are sent
through page-locked host memory and combined on the GPU.

Calls that come again are quick, because their plans are kept (`remembered.py`): those of a few KiB
always, larger ones if `out` is given and the arrays lie where they lay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np
from numpy import ndarray

from collectives import arguments, checked, select
from collectives.arrays import HOST, Array, Backend, backend_of_kind, num_elements
from collectives.header import Header
from collectives.layout import even
from collectives.plan import Plan
from collectives.program import Counts
from collectives.reduction import Operator, operator
from collectives.remembered import (
    COPIED_BYTES,
    COPIED_RESULT_BYTES,
    GuardedCall,
    KeptCall,
    borrowed,
    places,
)
from collectives.select import preferences, preferred
from collectives.session import Arrays, Session
from collectives.work import Work

# Without `out=` a header goes ahead of these.
_ANNOUNCED = ("broadcast", "scatter")
_GIVEN = {True: {"out": "given"}, False: {"out": "not given"}}


class Options(NamedTuple):
    """What every collective takes, checked."""

    collective: str
    algorithm: str | None
    async_op: bool
    timeout: float | None


Parameters = ParamSpec("Parameters")


def _remembering(method: Callable[Parameters, Any]) -> Callable[Parameters, Any]:
    """A collective whose calls, when they come again, go straight to their plans."""
    name = method.__name__

    @wraps(method)
    def call(
        self: Calls, x: Any = None, *args: Any, out: Any = None, timeout: Any = None, **named: Any
    ) -> Any:
        look = None if self._is_kept else _look(x, out)
        if look is not None:
            look = name, look, preferences(), *map(_told, args)
            if named:
                look += *named, *map(_told, named.values())
            try:
                known = self._session.remembered.calls.get(look)
            except TypeError:  # something unhashable among the arguments
                known = look = None
            if known is not None and timeout is None:
                return self._session.again(known, x, out, None)
        self._session.make_way(arguments.seconds(timeout))
        self._look, self._has_out = look, out is not None
        try:
            return method(self, x, *args, out=out, timeout=timeout, **named)  # type: ignore[arg-type]
        except BaseException as error:
            kept = self._is_kept  # and a plan takes no limit when it is made
            again = partial(call, self, x, *args, out=out, **named)
            self._session.broke_off(error, lambda limit: again(timeout=None if kept else limit))
            raise

    return call  # type: ignore[return-value]


def _told(argument: Any) -> tuple[Any, ...]:
    """An argument with its type, for 1.0 and True equal 1 and are refused as a root; a list, such
    as that of counts, by its entries."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_told, argument))
    return type(argument), argument


def _look(x: Any, out: Any) -> tuple[Any, ...] | None:
    """What the arrays of calls have in common that can share a plan; None if they can share none.

    The first of it is None if the plan can copy from and to the arrays wherever they lie, and else
    tells where they do.
    """
    num_bytes, limit = 0, COPIED_RESULT_BYTES
    form = likeness = None
    if x is not None:
        if type(x) is not ndarray:
            return None
        form, num_bytes = (x.shape, x.dtype), x.nbytes
    if out is not None:
        if type(out) is not ndarray or not out.flags.carray:
            return None
        likeness, num_bytes, limit = (out.shape, out.dtype), num_bytes + out.nbytes, COPIED_BYTES
    if num_bytes <= limit:
        return None, form, likeness
    if x is not None and not (x.flags.c_contiguous and x.flags.aligned):
        return None
    return places(x, out), form, likeness


class Calls:
    """The calls of a communicator.  What becomes of the plan that each makes is `_finish`'s."""

    _is_kept = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self.rank, self.size = session.transport.rank, session.transport.size
        # Of the call being made: what it looks like, if it can be remembered, and whether it has
        # an array for its result.
        self._look: tuple[Any, ...] | None = None
        self._has_out = False

    # Collectives

    @_remembering
    def broadcast(
        self,
        x: Array | None = None,
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The root's `x` on every rank.  In place: `x` is filled on the others, and returned.

        Another rank may pass None and gets a new array.  A header of 256 bytes goes first; it tells
        the others the shape and dtype, and is checked against the `x` they passed.  With `out=` on
        every rank no header is sent.
        """
        options = self._options("broadcast", algorithm, async_op, timeout)
        root = arguments.rank(root, self.size, "root")
        prepare = self._to_broadcast if self.rank == root else self._to_be_broadcast
        arrays = prepare(x, out, root, options)
        assert arrays.target is not None
        given = x if out is None else out
        answer = arrays.target if given is None else given
        return self._run(options, arrays, int(arrays.target.size), root=root, answer=answer)

    @_remembering
    def scatter(
        self,
        x: Array | None = None,
        root: int = 0,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rows of the root's `x`, divided among the ranks: `counts[r]` of them to rank r.

        Without `counts` the rows are divided as evenly as possible, larger parts first.  A header
        tells the other ranks shape, dtype and counts.  With `out=` on every rank no header is sent;
        then the parts must be equal, or every rank must pass `counts`.
        """
        options = self._options("scatter", algorithm, async_op, timeout)
        root = arguments.rank(root, self.size, "root")
        given = None if counts is None else arguments.row_counts(counts, self.size)
        prepare = self._to_scatter if self.rank == root else self._to_be_scattered
        arrays, numbers = prepare(x, out, given, root, options)
        return self._run(options, arrays, _elements(numbers, arrays.target), root=root)

    @_remembering
    def gather(
        self,
        x: Array,
        root: int = 0,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's rows, in rank order, on the root; None on the others.

        Rank r brings `counts[r]` rows; without `counts` all bring equally many.  0-d arrays become
        the entries of a vector.  `out` matters on the root only.
        """
        options = self._options("gather", algorithm, async_op, timeout)
        root = arguments.rank(root, self.size, "root")
        backend, source = self._readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = None
        if self.rank == root:
            target = arguments.result(out, backend, shape, source.dtype)
        arrays = Arrays(backend, source, target)
        return self._run(options, arrays, _elements(numbers, source), root=root)

    @_remembering
    def reduce(
        self,
        x: Array,
        op: str | Operator = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of every rank's `x` on the root; None on the others.

        `out` matters on the root only.
        """
        options = self._options("reduce", algorithm, async_op, timeout)
        root = arguments.rank(root, self.size, "root")
        has_result = self.rank == root
        out = out if has_result else None
        return self._reduced(options, x, op, out, root=root, has_result=has_result)

    @_remembering
    def reduce_scatter(
        self,
        x: Array,
        op: str | Operator = "sum",
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The combination of every rank's `x`, its rows divided: `counts[r]` of them to rank r.

        Without `counts` the rows are divided as evenly as possible, larger parts first.
        """
        options = self._options("reduce_scatter", algorithm, async_op, timeout)
        backend, source = self._readable(x)
        numbers = self._divided_rows(source, counts, "reduce_scatter")
        shape = (numbers[self.rank], *source.shape[1:])
        target = arguments.result(out, backend, shape, source.dtype)
        arrays = Arrays(backend, source, target)
        combine = _checked(options, op, backend, source)
        return self._run(options, arrays, _elements(numbers, source), op=combine)

    @_remembering
    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Every rank's rows, in rank order, on every rank.

        Rank r brings `counts[r]` rows; without `counts` all bring equally many.  0-d arrays become
        the entries of a vector.
        """
        options = self._options("all_gather", algorithm, async_op, timeout)
        backend, source = self._readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = arguments.result(out, backend, shape, source.dtype)
        return self._run(options, Arrays(backend, source, target), _elements(numbers, source))

    @_remembering
    def all_reduce(
        self,
        x: Array,
        op: str | Operator = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of every rank's `x`, on every rank."""
        options = self._options("all_reduce", algorithm, async_op, timeout)
        return self._reduced(options, x, op, out)

    @_remembering
    def scan(
        self,
        x: Array,
        op: str | Operator = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of the `x` of all ranks up to and including this one.

        `op` may not be avg.
        """
        options = self._options("scan", algorithm, async_op, timeout)
        return self._reduced(options, x, op, out)

    @_remembering
    def exscan(
        self,
        x: Array,
        op: str | Operator = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of the `x` of all ranks before this one; None on rank 0.

        `op` may not be avg.  `out` is checked on rank 0 too, and left as it is.
        """
        options = self._options("exscan", algorithm, async_op, timeout)
        return self._reduced(options, x, op, out, has_result=self.rank > 0)

    @_remembering
    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        counts: Any = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Rows from every rank to every rank, in the order of the ranks they come from.

        `counts`: None, all ranks divide equally many rows as evenly as possible; p integers, the
        rows from here to each rank (the ranks then exchange their counts first, and only after that
        can an `out` of too few or too many rows be refused); or a p x p table,
        the same on every rank, of rows from source to destination (nothing is exchanged).
        """
        options = self._options("all_to_all", algorithm, async_op, timeout)
        backend, source = self._readable(x)
        if out is not None:  # how many rows will come is not always known yet
            num_rows = arguments.rows(arguments.writable(out, "out")[1], "all_to_all")
            arguments.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
        table = self._count_table(source, counts, options)
        num_rows = sum(row[self.rank] for row in table)
        target = arguments.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
        elements = tuple(_elements(row, source) for row in table)
        return self._run(options, Arrays(backend, source, target), elements)

    def barrier(
        self,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return when every rank has called it."""
        return self._barrier(algorithm=algorithm, async_op=async_op, timeout=timeout)

    @_remembering
    def _barrier(
        self,
        x: None = None,
        *,
        out: None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """A barrier, which is remembered as well."""
        options = self._options("barrier", algorithm, async_op, timeout)
        return self._run(options, Arrays(HOST, None, None), (0,) * self.size)

    # Point to point

    def send(
        self,
        x: Array,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send an array to rank `peer`, which must receive it with the same `tag`."""
        options = self._options("send", None, async_op, timeout)
        arrays = Arrays(*self._readable(x), None)
        return self._run_point_to_point(options, arrays, tag, dest=self._peer(peer))

    def recv(
        self,
        x: Array,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Fill `x` with what rank `peer` sends with the same `tag`, and return it."""
        options = self._options("recv", None, async_op, timeout)
        backend, target = arguments.writable(x, "x")
        arrays = Arrays(backend, None, target)
        return self._run_point_to_point(options, arrays, tag, source=self._peer(peer))

    def send_recv(
        self,
        x: Array,
        dest: int,
        source: int,
        tag: int = 0,
        *,
        out: Array | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send `x` to rank `dest` while receiving from rank `source`; returns what came.

        Both at once, so a ring of these cannot block.  `out`: where to receive; without it a new
        array like `x`.  It may not share memory with `x`.  A rank may name itself.
        """
        options = self._options("send_recv", None, async_op, timeout)
        backend, array = self._readable(x)
        target = arguments.result(out, backend, tuple(array.shape), array.dtype)
        if out is not None and arguments.aliasing(backend, array, target) != "none":
            raise ValueError("out shares memory with x, which is sent while out is filled")
        ends = {
            "dest": arguments.rank(dest, self.size, "dest"),
            "source": arguments.rank(source, self.size, "source"),
        }
        return self._run_point_to_point(options, Arrays(backend, array, target), tag, **ends)

    # From checked arguments to a plan

    def _options(
        self, collective: str, algorithm: str | None, async_op: bool, timeout: float | None
    ) -> Options:
        """What every call takes, checked before anything is sent."""
        if algorithm is None:
            algorithm = preferred(collective)
        if algorithm is not None:
            select.check(collective, algorithm, self.size)
        return Options(collective, algorithm, bool(async_op), arguments.seconds(timeout))

    def _readable(self, x: object) -> tuple[Backend, Array]:
        """An array to read from, C-contiguous: itself or a copy."""
        return arguments.readable(x)

    def _run(
        self,
        options: Options,
        arrays: Arrays,
        counts: Counts,
        *,
        root: int = 0,
        op: Operator | None = None,
        answer: Array | None = None,
    ) -> Any:
        """Make the plan and finish.  `answer`: what it returns if that is not the target."""
        session, answer = self._session, arrays.target if answer is None else answer
        make = partial(
            session.collective,
            options.collective,
            counts=counts,
            root=root,
            op=op,
            algorithm=options.algorithm,
            says=_GIVEN[self._has_out] if options.collective in _ANNOUNCED else None,
        )
        if not self._is_kept and not options.async_op:
            make = partial(make, is_blocking=True)
            return self._run_blocking(make, arrays, answer, op, options.timeout)
        plan = make(arrays, is_kept=self._is_kept)
        plan.result = answer
        return self._finish(plan, options)

    def _run_blocking(
        self,
        make: Callable[..., Plan],
        arrays: Arrays,
        answer: Array | None,
        op: Operator | None,
        timeout: float | None,
    ) -> Any:
        """Run a blocking call, and remember it if it may come again in the same form."""
        remembered, (look, self._look) = self._session.remembered, (self._look, None)
        call = None if look is None else remembered.calls.get(look)
        if call is None and look is not None and self._is_memorable(look, arrays, op):
            if look[1][0] is None:
                x, y = (None if array is None else np.empty_like(array) for array in arrays[1:])
                plan = make(Arrays(HOST, x, y), is_kept=True)
            else:
                x = y = None
                plan = make(Arrays(HOST, *map(borrowed, arrays[1:])), is_kept=True)
            kind = KeptCall if self._session.checker is None else GuardedCall
            call = kind(plan, x, y, has_result=arrays.target is not None)
            remembered.add(look, call)
        if call is not None:
            return self._session.again(call, arrays.source, answer, timeout)
        plan = make(arrays)
        plan.result = answer
        return self._session.once(plan, timeout)

    def _is_memorable(self, look: tuple[Any, ...], arrays: Arrays, op: Operator | None) -> bool:
        """Whether a call can be remembered, now that its arguments are known to be good."""
        if arrays.backend is not HOST or not (op is None or isinstance(op.function, str)):
            return False
        if look[1][0] is not None and not (self._has_out or arrays.target is None):
            return False  # a result that is new every time lies elsewhere every time
        return self._session.remembered.wants(look)

    def _run_point_to_point(
        self,
        options: Options,
        arrays: Arrays,
        tag: int,
        *,
        dest: int | None = None,
        source: int | None = None,
    ) -> Any:
        tag, name = self._session.users_tag(tag), options.collective
        plan = self._session.point_to_point(name, arrays, tag, dest, source, self._is_kept)
        return self._finish(plan, options)

    def _finish(self, plan: Plan, options: Options) -> Any:
        """Run the plan: to its end, or, if asynchronous, only its start."""
        if options.timeout is not None:
            plan.timeout = options.timeout
        if not options.async_op:
            return plan.run()
        plan.start()
        return Work(plan)

    # What single collectives need

    def _reduced(
        self,
        options: Options,
        x: object,
        op: str | Operator,
        out: Array | None,
        *,
        root: int = 0,
        has_result: bool = True,
    ) -> Any:
        """A reduction of whole vectors.  `has_result`: whether this rank gets the result."""
        backend, source = self._readable(x)
        target = None
        if has_result or out is not None:
            target = arguments.result(out, backend, tuple(source.shape), source.dtype)
        arrays = Arrays(backend, source, target if has_result else None)
        combine = _checked(options, op, backend, source)
        return self._run(options, arrays, int(source.size), root=root, op=combine)

    def _peer(self, peer: object) -> int:
        number = arguments.rank(peer, self.size, "peer")
        if number == self.rank:
            raise ValueError(f"rank {number} would wait for itself; send_recv can serve that")
        return number

    def _to_broadcast(self, x: object, out: Array | None, root: int, options: Options) -> Arrays:
        """The arrays of a broadcast's root, which announces what comes unless all have `out`."""
        backend, source = self._readable(x)
        if out is not None:
            target = arguments.result(out, backend, tuple(source.shape), source.dtype)
            return Arrays(backend, source, target)
        head = Header(backend.kind, source.dtype, tuple(source.shape))
        self._announce(head, root, 0, options, source)
        return Arrays(backend, source, source)

    def _to_be_broadcast(self, x: object, out: Array | None, root: int, options: Options) -> Arrays:
        """The arrays of another rank: `out`, `x` if it is what the header says, or a new one."""
        if out is not None:
            backend, target = arguments.writable(out, "out")
            return Arrays(backend, None, target)
        given = None if x is None else arguments.writable(x, "x")
        head = self._announce(None, root, 0, options, None if given is None else given[1])
        if given is None:
            return _new(head, head.shape)
        backend, target = given
        if target.dtype != head.dtype or tuple(target.shape) != head.shape:
            raise ValueError(
                f"x is {target.dtype} of shape {tuple(target.shape)}, "
                f"the root sends {head.dtype} of shape {head.shape}"
            )
        return Arrays(backend, None, target)

    def _to_scatter(
        self,
        x: object,
        out: Array | None,
        counts: tuple[int, ...] | None,
        root: int,
        options: Options,
    ) -> tuple[Arrays, tuple[int, ...]]:
        """The arrays of a scatter's root, and the rows of every rank."""
        backend, source = self._readable(x)
        numbers = self._divided_rows(source, counts, "scatter")
        if out is not None and counts is None and len(set(numbers)) > 1:
            raise ValueError(
                f"{sum(numbers)} rows are not equal parts for {self.size} ranks; "
                "with out= pass counts= on every rank, or leave out= away on every rank"
            )
        shape = (numbers[self.rank], *source.shape[1:])
        target = arguments.result(out, backend, shape, source.dtype)
        if out is None:
            head = Header(backend.kind, source.dtype, tuple(source.shape), numbers)
            self._announce(head, root, self.size, options, source, numbers)
        return Arrays(backend, source, target), numbers

    def _to_be_scattered(
        self,
        x: object,
        out: Array | None,
        counts: tuple[int, ...] | None,
        root: int,
        options: Options,
    ) -> tuple[Arrays, tuple[int, ...]]:
        """The arrays of another rank, which learns the rows from the root unless it has `out`."""
        if out is not None:
            backend, target = arguments.writable(out, "out")
            own = arguments.rows(target, "scatter")
            numbers = (own,) * self.size if counts is None else counts
            if numbers[self.rank] != own:
                raise ValueError(f"out has {own} rows, counts gives {numbers[self.rank]}")
            return Arrays(backend, None, target), numbers
        head = self._announce(None, root, self.size, options, counts=counts)
        if counts is not None and counts != head.counts:
            raise ValueError(f"counts is {counts} here and {head.counts} at the root")
        return _new(head, (head.counts[self.rank], *head.shape[1:])), head.counts

    def _announce(
        self,
        head: Header | None,
        root: int,
        num_counts: int,
        options: Options,
        like: Array | None = None,
        counts: Sequence[int] | None = None,
    ) -> Header:
        """The root's header; a call that needs one is not remembered.

        `like` and `counts`: what this rank expects.
        """
        self._look = None
        says = None
        if self._session.checker is not None:
            says = checked.announced(options.collective, like, counts)
        return self._session.announce(head, root, num_counts, options.timeout, says)

    def _divided_rows(
        self, x: Array, counts: Sequence[int] | None, collective: str
    ) -> tuple[int, ...]:
        """The rows of `x` that each rank gets."""
        num_rows = arguments.rows(x, collective)
        if counts is None:
            return even(num_rows, self.size)
        return arguments.total_counts(counts, self.size, num_rows)

    def _joined_rows(
        self, x: Array, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows that each rank brings, and the shape of all together."""
        own = int(x.shape[0]) if x.ndim else 1
        numbers = (own,) * self.size
        if counts is not None:
            numbers = arguments.row_counts(counts, self.size)
        if numbers[self.rank] != own:
            raise ValueError(
                f"counts gives rank {self.rank} {numbers[self.rank]} rows, x has {own}"
            )
        return numbers, (sum(numbers), *x.shape[1:])

    def _count_table(
        self, x: Array, counts: object, options: Options
    ) -> tuple[tuple[int, ...], ...]:
        """The rows from every rank to every rank, exchanged if only this rank's are given."""
        num_rows = arguments.rows(x, "all_to_all")
        if counts is None:
            return (even(num_rows, self.size),) * self.size
        if arguments.is_table(counts):
            table = arguments.count_table(counts, self.size)
            arguments.total_counts(table[self.rank], self.size, num_rows)
            return table
        numbers = arguments.total_counts(counts, self.size, num_rows)
        self._look = None
        says = {"collective": options.collective}
        exchanged = self._session.announce_counts(numbers, options.timeout, says)
        return tuple(tuple(row) for row in exchanged.tolist())


def _new(head: Header, shape: tuple[int, ...]) -> Arrays:
    """A new array to receive what the header announces."""
    backend = backend_of_kind(head.kind)
    return Arrays(backend, None, backend.empty(shape, head.dtype))


def _elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
    """Numbers of elements from numbers of rows of arrays like `x`."""
    per_row = num_elements(x.shape[1:])
    return tuple(count * per_row for count in counts)


def _checked(options: Options, op: str | Operator, backend: Backend, x: Array) -> Operator:
    """The operator, which must suit the collective and the array."""
    chosen = operator(op, options.collective)
    chosen.check(x.dtype)
    chosen.rehearse(backend, x)
    return chosen
