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

A call that looks like one that was made before goes straight to its execution (`call_cache.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, ParamSpec

from numpy import ndarray

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
from collectives.runtime import MISFIT, Header, Plans, Run, Session, Steps, Turn, checked, ends_of
from collectives.schedule import even
from collectives.selection import preferences, preferred, select

# Without `out=` a header goes ahead of these.
_ANNOUNCED = ("broadcast", "scatter")


class Ready(NamedTuple):
    """A call whose arguments are checked and whose arrays are known.

    `counts`: see `compile_lane`.  `answer`: what the call returns.  `has_out`: whether the caller
    gave an array for the result.  `left`: such an array, which is checked and left as it is.
    """

    arrays: Arrays
    counts: Counts
    answer: Array | None
    has_out: bool
    root: int = 0
    op: Operator | None = None
    left: Array | None = None


Announced = Callable[[Turn], Generator[Run, None, Ready]]
"""A call of which ranks learn more than they know: what goes ahead of it, and then what it is."""


class Options(NamedTuple):
    """What every call takes, checked."""

    collective: str
    algorithm: str | None
    async_op: bool
    timeout: float | None


Parameters = ParamSpec("Parameters")


def _collective(method: Callable[Parameters, Any]) -> Callable[Parameters, Any]:
    """A collective, from the method that checks what is particular to it.

    A call that looks like one that was made before goes straight to its execution.
    """
    name = method.__name__.removeprefix("_")

    @wraps(method)
    def call(
        self: Calls,
        x: Any = None,
        *args: Any,
        out: Any = None,
        algorithm: Any = None,
        async_op: Any = False,
        timeout: Any = None,
        **named: Any,
    ) -> Any:
        if timeout is not None:
            timeout = validation.seconds(timeout)
        look: Any = name, async_op, out is None, algorithm, preferences()
        if args or named:
            look += *map(_told, args), *named, *map(_told, named.values())
        quick = self._quick.quick_calls
        try:
            cached = quick.latest.get(look)
        except TypeError:  # something unhashable among the arguments
            cached = look = None
        if cached is not None:
            answer = cached(x, out, timeout)
            if answer is not MISFIT:
                return answer
        look = None if look is None else _with_form(look, x, out)
        if look is not None and (other := quick.find(look)) is not None and other is not cached:
            answer = other(x, out, timeout)
            if answer is not MISFIT:
                return answer
        options = self._options(name, algorithm, async_op, timeout)
        found = method(self, x, *args, out=out, **named)  # type: ignore[arg-type]
        return self._perform(options, found, look)

    return call  # type: ignore[return-value]


def _told(argument: Any) -> tuple[Any, ...]:
    """An argument with its type, for 1.0 and True equal 1 and are refused as a root; a list, such
    as that of counts, by its entries."""
    if isinstance(argument, (list, tuple)):
        return tuple(map(_told, argument))
    return type(argument), argument


def _with_form(look: tuple[Any, ...], x: Any, out: Any) -> tuple[Any, ...] | None:
    """How a call looks, with the form of its arrays; None where calls on such are not cached."""
    like = out if x is None else x
    if type(like) is ndarray:
        return look, like.shape, like.dtype
    return (look,) if like is None else None


class Calls:
    """The calls of a communicator.  What becomes of each is `_perform`'s."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._quick: Session | Plans = session
        self.rank, self.size = session.transport.rank, session.transport.size

    # Collectives

    @_collective
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
        root = validation.rank(root, self.size, "root")
        prepare = self._to_broadcast if self.rank == root else self._to_be_broadcast
        return prepare(x, out, root)

    @_collective
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
        root = validation.rank(root, self.size, "root")
        given = None if counts is None else validation.row_counts(counts, self.size)
        prepare = self._to_scatter if self.rank == root else self._to_be_scattered
        return prepare(x, out, given, root)

    @_collective
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
        root = validation.rank(root, self.size, "root")
        backend, source = self._readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = None
        if self.rank == root:
            target = validation.result(out, backend, shape, source.dtype)
        arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
        return Ready(arrays, elements, target, out is not None, root)

    @_collective
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
        root = validation.rank(root, self.size, "root")
        has_result = self.rank == root
        out = out if has_result else None
        return self._reduced("reduce", x, op, out, root=root, has_result=has_result)

    @_collective
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
        backend, source = self._readable(x)
        numbers = self._divided_rows(source, counts, "reduce_scatter")
        shape = (numbers[self.rank], *source.shape[1:])
        target = validation.result(out, backend, shape, source.dtype)
        arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
        combine = _checked("reduce_scatter", op, backend, source)
        return Ready(arrays, elements, target, out is not None, op=combine)

    @_collective
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
        backend, source = self._readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = validation.result(out, backend, shape, source.dtype)
        arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
        return Ready(arrays, elements, target, out is not None)

    @_collective
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
        return self._reduced("all_reduce", x, op, out)

    @_collective
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
        return self._reduced("scan", x, op, out)

    @_collective
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
        return self._reduced("exscan", x, op, out, has_result=self.rank > 0)

    @_collective
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
        backend, source = self._readable(x)
        if out is not None:  # how many rows will come is not always known yet
            num_rows = validation.rows(validation.writable(out, "out")[1], "all_to_all")
            validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
        table = self._count_table(source, counts)
        if table is not None:
            return self._exchanged(backend, source, out, table)
        own = validation.total_counts(counts, self.size, validation.rows(source, "all_to_all"))
        return partial(self._after_counts, backend, source, out, own)

    def barrier(
        self,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return when every rank has called it."""
        return self._barrier(algorithm=algorithm, async_op=async_op, timeout=timeout)

    @_collective
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
        return Ready(Arrays(HOST, None, None), (0,) * self.size, None, False)

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
        backend, target = validation.writable(x, "x")
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
        target = validation.result(out, backend, tuple(array.shape), array.dtype)
        if out is not None and validation.aliasing(backend, array, target) != "none":
            raise ValueError("out shares memory with x, which is sent while out is filled")
        ends = {
            "dest": validation.rank(dest, self.size, "dest"),
            "source": validation.rank(source, self.size, "source"),
        }
        return self._run_point_to_point(options, Arrays(backend, array, target), tag, **ends)

    # From checked arguments to runs

    def _options(
        self, collective: str, algorithm: str | None, async_op: bool, timeout: float | None
    ) -> Options:
        """What every call takes, checked before anything is sent."""
        if algorithm is None:
            algorithm = preferred(collective)
        if algorithm is not None:
            select.check(collective, algorithm, self.size)
        return Options(collective, algorithm, bool(async_op), validation.seconds(timeout))

    def _readable(self, x: object) -> tuple[Backend, Array]:
        """An array to read from, C-contiguous: itself or a copy."""
        return validation.readable(x)

    def _perform(
        self, options: Options, found: Ready | Announced, look: tuple[Any, ...] | None
    ) -> Any:
        """Make the call, or only begin it if it is asynchronous.

        `look`: how it looks, if one like it can go straight to its execution next time.
        """
        steps = partial(self._steps, options, found, look)
        if options.async_op:
            return self._session.started(steps, options.timeout)
        return self._session.call(steps, options.timeout)

    def _steps(self, options: Options, found: Ready | Announced, look: Any, turn: Turn) -> Steps:
        """All the runs of a call."""
        ready = found if isinstance(found, Ready) else (yield from found(turn))
        session, spec = self._session, self._spec(options, ready, turn.is_blocking)
        is_plain = look is not None and isinstance(found, Ready)
        if is_plain and session.can_cache(look, spec, ready.arrays):
            yield from session.cached(look, spec, ready.arrays, turn, ready.left)
        else:
            yield from session.perform(spec, ready.arrays, turn)
        return ready.answer

    def _spec(self, options: Options, ready: Ready, is_blocking: bool | None) -> Any:
        """The call in the form in which it is compiled, kept and compared."""
        has_out = {True: "given", False: "not given"}[ready.has_out]
        return self._session.spec(
            options.collective,
            ready.arrays,
            ready.counts,
            root=ready.root,
            op=ready.op,
            algorithm=options.algorithm,
            is_blocking=is_blocking,
            out=has_out if options.collective in _ANNOUNCED else "",
        )

    def _run_point_to_point(
        self,
        options: Options,
        arrays: Arrays,
        tag: int,
        *,
        dest: int | None = None,
        source: int | None = None,
    ) -> Any:
        """Send and receive."""
        tag, name = self._session.users_tag(tag), options.collective

        def steps() -> Steps:
            yield self._session.runs.message(ends_of(name, arrays, dest, source), arrays, tag)
            return arrays.target

        return self._session.message(steps(), options.timeout, options.async_op)

    # What single collectives need

    def _reduced(
        self,
        collective: str,
        x: object,
        op: str | Operator,
        out: Array | None,
        *,
        root: int = 0,
        has_result: bool = True,
    ) -> Ready:
        """A reduction of whole vectors.  `has_result`: whether this rank gets the result."""
        backend, source = self._readable(x)
        target = left = None
        if has_result or out is not None:
            target = validation.result(out, backend, tuple(source.shape), source.dtype)
        if not has_result:
            target, left = None, target
        combine = _checked(collective, op, backend, source)
        arrays = Arrays(backend, source, target)
        return Ready(arrays, int(source.size), target, out is not None, root, combine, left)

    def _peer(self, peer: object) -> int:
        number = validation.rank(peer, self.size, "peer")
        if number == self.rank:
            raise ValueError(f"rank {number} would wait for itself; send_recv can serve that")
        return number

    def _to_broadcast(self, x: object, out: Array | None, root: int) -> Ready | Announced:
        """A broadcast's root, which announces what comes unless all have `out`."""
        backend, source = self._readable(x)
        if out is not None:
            target = validation.result(out, backend, tuple(source.shape), source.dtype)
            return Ready(Arrays(backend, source, target), int(source.size), out, True, root)
        head = Header(backend.kind, source.dtype, tuple(source.shape))

        def announced(turn: Turn) -> Generator[Run, None, Ready]:
            yield from self._announce("broadcast", head, root, 0, turn, source)
            return Ready(Arrays(backend, source, source), int(source.size), x, False, root)

        return announced

    def _to_be_broadcast(self, x: object, out: Array | None, root: int) -> Ready | Announced:
        """Another rank: `out`, `x` if it is what the header says, or a new array is filled."""
        if out is not None:
            backend, target = validation.writable(out, "out")
            return Ready(Arrays(backend, None, target), int(target.size), target, True, root)
        given = None if x is None else validation.writable(x, "x")
        like = None if given is None else given[1]

        def announced(turn: Turn) -> Generator[Run, None, Ready]:
            head = yield from self._announce("broadcast", None, root, 0, turn, like)
            arrays = _new(head, head.shape) if given is None else Arrays(given[0], None, given[1])
            target: Array = arrays.target
            if target.dtype != head.dtype or tuple(target.shape) != head.shape:
                raise ValueError(
                    f"x is {target.dtype} of shape {tuple(target.shape)}, "
                    f"the root sends {head.dtype} of shape {head.shape}"
                )
            return Ready(arrays, int(target.size), target, False, root)

        return announced

    def _to_scatter(
        self, x: object, out: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Ready | Announced:
        """A scatter's root."""
        backend, source = self._readable(x)
        numbers = self._divided_rows(source, counts, "scatter")
        if out is not None and counts is None and len(set(numbers)) > 1:
            raise ValueError(
                f"{sum(numbers)} rows are not equal parts for {self.size} ranks; "
                "with out= pass counts= on every rank, or leave out= away on every rank"
            )
        shape = (numbers[self.rank], *source.shape[1:])
        target = validation.result(out, backend, shape, source.dtype)
        arrays, elements = Arrays(backend, source, target), _elements(numbers, source)
        ready = Ready(arrays, elements, target, out is not None, root)
        if out is not None:
            return ready
        head = Header(backend.kind, source.dtype, tuple(source.shape), numbers)

        def announced(turn: Turn) -> Generator[Run, None, Ready]:
            yield from self._announce("scatter", head, root, self.size, turn, source, numbers)
            return ready

        return announced

    def _to_be_scattered(
        self, x: object, out: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Ready | Announced:
        """Another rank, which learns the rows from the root unless it has `out`."""
        if out is not None:
            backend, target = validation.writable(out, "out")
            own = validation.rows(target, "scatter")
            numbers = (own,) * self.size if counts is None else counts
            if numbers[self.rank] != own:
                raise ValueError(f"out has {own} rows, counts gives {numbers[self.rank]}")
            elements = _elements(numbers, target)
            return Ready(Arrays(backend, None, target), elements, target, True, root)

        def announced(turn: Turn) -> Generator[Run, None, Ready]:
            head = yield from self._announce("scatter", None, root, self.size, turn, None, counts)
            if counts is not None and counts != head.counts:
                raise ValueError(f"counts is {counts} here and {head.counts} at the root")
            arrays = _new(head, (head.counts[self.rank], *head.shape[1:]))
            elements = _elements(head.counts, arrays.target)
            return Ready(arrays, elements, arrays.target, False, root)

        return announced

    def _announce(
        self,
        collective: str,
        head: Header | None,
        root: int,
        num_counts: int,
        turn: Turn,
        like: Array | None = None,
        counts: Sequence[int] | None = None,
    ) -> Steps:
        """The root's header.  `like` and `counts`: what this rank expects."""
        says = checked.announced(collective, like, counts)
        return self._session.announce(head, root, num_counts, turn, says)

    def _divided_rows(
        self, x: Array, counts: Sequence[int] | None, collective: str
    ) -> tuple[int, ...]:
        """The rows of `x` that each rank gets."""
        num_rows = validation.rows(x, collective)
        if counts is None:
            return even(num_rows, self.size)
        return validation.total_counts(counts, self.size, num_rows)

    def _joined_rows(
        self, x: Array, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows that each rank brings, and the shape of all together."""
        own = int(x.shape[0]) if x.ndim else 1
        numbers = (own,) * self.size
        if counts is not None:
            numbers = validation.row_counts(counts, self.size)
        if numbers[self.rank] != own:
            raise ValueError(
                f"counts gives rank {self.rank} {numbers[self.rank]} rows, x has {own}"
            )
        return numbers, (sum(numbers), *x.shape[1:])

    def _count_table(self, x: Array, counts: object) -> tuple[tuple[int, ...], ...] | None:
        """The rows from every rank to every rank; None if only this rank's are given."""
        num_rows = validation.rows(x, "all_to_all")
        if counts is None:
            return (even(num_rows, self.size),) * self.size
        if not validation.is_table(counts):
            return None
        table = validation.count_table(counts, self.size)
        validation.total_counts(table[self.rank], self.size, num_rows)
        return table

    def _exchanged(
        self,
        backend: Backend,
        source: Array,
        out: Array | None,
        table: tuple[tuple[int, ...], ...],
    ) -> Ready:
        """An all-to-all of which all counts are known."""
        num_rows = sum(row[self.rank] for row in table)
        target = validation.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
        elements = tuple(_elements(row, source) for row in table)
        return Ready(Arrays(backend, source, target), elements, target, out is not None)

    def _after_counts(
        self, backend: Backend, source: Array, out: Array | None, own: Sequence[int], turn: Turn
    ) -> Generator[Run, None, Ready]:
        """An all-to-all of which the ranks exchange their counts first."""
        says = {"collective": "all_to_all"}
        exchanged = yield from self._session.table(own, "counts", turn, says=says)
        table = tuple(tuple(row) for row in exchanged.tolist())
        return self._exchanged(backend, source, out, table)


def _new(head: Header, shape: tuple[int, ...]) -> Arrays:
    """A new array to receive what the header announces."""
    backend = backend_of_kind(head.kind)
    return Arrays(backend, None, backend.empty(shape, head.dtype))


def _elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
    """Numbers of elements from numbers of rows of arrays like `x`."""
    per_row = num_elements(x.shape[1:])
    return tuple(count * per_row for count in counts)


def _checked(collective: str, op: str | Operator, backend: Backend, x: Array) -> Operator:
    """The operator, which must suit the collective and the array."""
    chosen = operator(op, collective)
    chosen.check(x.dtype)
    chosen.rehearse(backend, x)
    return chosen
