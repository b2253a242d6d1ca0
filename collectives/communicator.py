"""What the user holds: a communicator and its collectives.

Arrays split and concatenate along axis 0; "rows" are the entries along it.  Every collective takes

- `out`: the array for the result (it may be the input: in place).  Without it the result is a new
  array of the input's kind.  The input is never modified unless it is `out`.
- `algorithm`: a name from `collectives.algorithms.names(...)`, or None for a choice by size.
- `async_op=True`: return a `Work` at once, to `wait()` for.
- `timeout`: seconds, after which CollectiveTimeout says who is waited for; None takes the
  communicator's.

An argument that cannot work raises TypeError or ValueError before any message is sent.  CuPy
arrays are sent through page-locked host memory and combined on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import arguments, header, select
from collectives.arrays import HOST, Array, Backend, backend_named, num_elements
from collectives.header import Header
from collectives.layout import even
from collectives.ledger import Call, Entry, Ledger
from collectives.monitor import Counters, MonitorUnavailable
from collectives.plan import Buffers, Plan, Work
from collectives.program import Counts, Message, Program, Region, Step, compile_program
from collectives.reduction import Operator, operator
from collectives.transport import Transport

Ancestry = list[tuple[list[Ledger], Sequence[int] | None]]


class Communicator:
    """A group of ranks that communicate.

    All ranks call the same collectives in the same order.  `timeout`: the default of every call,
    in seconds; None waits for ever.
    """

    _is_kept = False

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float | None = None,
        name: str = "",
        ancestry: Ancestry | None = None,
    ) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.timeout = timeout
        self._name = name
        self._num_calls = 0
        self._ledgers: list[Ledger] = []
        # Who records our messages, and our ranks in the recorder's numbering (None: the same).
        self._ancestry: Ancestry = [(self._ledgers, None), *(ancestry or [])]

    def __repr__(self) -> str:
        return f"<Communicator{self._name}: rank {self.rank} of {self.size}>"

    @property
    def plan(self) -> Planner:
        """The same methods, but each returns a `Plan`, to run many times.

        A plan keeps its arrays and its requests; every run reads the input afresh.  Making one is
        itself a collective call: all ranks make the same plans in the same order.
        """
        return Planner(self)

    # Collectives

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
        root, tag = arguments.rank(root, self.size, "root"), self._next_tag()
        source, head = None, None
        if self.rank == root:
            backend, source = arguments.readable(x)
            target = source
            if out is not None:
                target = arguments.result(out, backend, tuple(source.shape), source.dtype)
            head = Header(backend.name, source.dtype, tuple(source.shape))
        if out is None:
            head = self._announce(head, root, tag, num_counts=0, timeout=timeout)
        if self.rank != root:
            shape = head.shape if head else None
            backend, target = self._receiver(x if out is None else out, head, shape)
        plan = self._bind("broadcast", backend, source, target, int(target.size), tag=tag,
                          root=root, algorithm=algorithm)
        if self.rank == root:
            plan.result = x if out is None else out
        return self._finish(plan, async_op, timeout)

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
        root, tag = arguments.rank(root, self.size, "root"), self._next_tag()
        source, head = None, None
        if counts is not None:
            counts = arguments.row_counts(counts, self.size)
        if self.rank == root:
            backend, source = arguments.readable(x)
            counts = self._scatter_counts(source, counts, needs_equal=out is not None)
            head = Header(backend.name, source.dtype, tuple(source.shape), tuple(counts))
        if out is None:
            head = self._announce(head, root, tag, num_counts=self.size, timeout=timeout)
            if counts is not None and tuple(counts) != head.counts:
                raise ValueError(f"counts is {tuple(counts)} here and {head.counts} at the root")
            counts = head.counts
        elif counts is None:
            counts = (arguments.rows(arguments.writable(out, "out")[1], "scatter"),) * self.size
        shape = (counts[self.rank], *head.shape[1:]) if head else None
        backend, target = self._receiver(out, head, shape)
        if target.shape[0] != counts[self.rank]:
            raise ValueError(f"out has {target.shape[0]} rows, counts gives {counts[self.rank]}")
        plan = self._bind("scatter", backend, source, target, _elements(counts, target), tag=tag,
                          root=root, algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

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
        root, tag = arguments.rank(root, self.size, "root"), self._next_tag()
        backend, source = arguments.readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = None
        if self.rank == root:
            target = arguments.result(out, backend, shape, source.dtype)
        plan = self._bind("gather", backend, source, target, _elements(numbers, source), tag=tag,
                          root=root, algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

    def reduce(
        self,
        x: Array,
        op: str = "sum",
        root: int = 0,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of every rank's `x` on the root; None on the others.

        `op`: sum, prod, min, max, avg, and, or, xor.  `out` matters on the root only.
        """
        root, tag = arguments.rank(root, self.size, "root"), self._next_tag()
        backend, source = arguments.readable(x)
        target = None
        if self.rank == root:
            target = arguments.result(out, backend, tuple(source.shape), source.dtype)
        plan = self._bind("reduce", backend, source, target, int(source.size), tag=tag,
                          root=root, op=_checked(op, source), algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

    def reduce_scatter(
        self,
        x: Array,
        op: str = "sum",
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
        tag = self._next_tag()
        backend, source = arguments.readable(x)
        num_rows = arguments.rows(source, "reduce_scatter")
        numbers = even(num_rows, self.size)
        if counts is not None:
            numbers = arguments.total_counts(counts, self.size, num_rows)
        shape = (numbers[self.rank], *source.shape[1:])
        target = arguments.result(out, backend, shape, source.dtype)
        plan = self._bind("reduce_scatter", backend, source, target, _elements(numbers, source),
                          tag=tag, op=_checked(op, source), algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

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
        tag = self._next_tag()
        backend, source = arguments.readable(x)
        numbers, shape = self._joined_rows(source, counts)
        target = arguments.result(out, backend, shape, source.dtype)
        plan = self._bind("all_gather", backend, source, target, _elements(numbers, source),
                          tag=tag, algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

    def all_reduce(
        self,
        x: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """The element-wise combination of every rank's `x`, on every rank.

        `op`: sum, prod, min, max, avg, and, or, xor.
        """
        tag = self._next_tag()
        backend, source = arguments.readable(x)
        target = arguments.result(out, backend, tuple(source.shape), source.dtype)
        plan = self._bind("all_reduce", backend, source, target, int(source.size), tag=tag,
                          op=_checked(op, source), algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

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
        rows from here to each rank (the ranks then exchange their counts first); or a p x p table,
        the same on every rank, of rows from source to destination (nothing is exchanged).
        """
        tag = self._next_tag()
        backend, source = arguments.readable(x)
        table = self._count_table(source, counts, tag, timeout)
        num_rows = sum(row[self.rank] for row in table)
        target = arguments.result(out, backend, (num_rows, *source.shape[1:]), source.dtype)
        elements = tuple(_elements(row, source) for row in table)
        plan = self._bind("all_to_all", backend, source, target, elements, tag=tag,
                          algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

    def barrier(
        self,
        *,
        algorithm: str | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Return when every rank has called it."""
        plan = self._bind("barrier", HOST, None, None, (0,) * self.size, tag=self._next_tag(),
                          algorithm=algorithm)
        return self._finish(plan, async_op, timeout)

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
        backend, source = arguments.readable(x)
        plan = self._point_to_point("send", backend, tag, source, self._peer(peer), None, None)
        return self._finish(plan, async_op, timeout)

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
        backend, target = arguments.writable(x, "x")
        plan = self._point_to_point("recv", backend, tag, None, None, target, self._peer(peer))
        return self._finish(plan, async_op, timeout)

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
        backend, array = arguments.readable(x)
        target = arguments.result(out, backend, tuple(array.shape), array.dtype)
        if out is not None and arguments.aliasing(backend, array, target) != "none":
            raise ValueError("out shares memory with x, which is sent while out is filled")
        dest = arguments.rank(dest, self.size, "dest")
        source = arguments.rank(source, self.size, "source")
        plan = self._point_to_point("send_recv", backend, tag, array, dest, target, source)
        return self._finish(plan, async_op, timeout)

    # Groups

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """One communicator for each `color`, its ranks ordered by `key`, then by rank here.

        All ranks call it; `color=None` takes no part and gets None.
        """
        mine = [-1 if color is None else arguments.integer(color, "color"),
                arguments.integer(key, "key")]
        if color is not None and mine[0] < 0:
            raise ValueError(f"color must not be negative, got {color}")
        table = self._all_integers(mine, "split", self._next_tag(), None)
        members = [rank for rank in range(self.size) if table[rank, 0] == mine[0]]
        members.sort(key=lambda rank: (table[rank, 1], rank))
        transport = self._transport.split(None if color is None else members)
        return None if transport is None else self._child(transport, members)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of these ranks, in this order.  Exactly these ranks call it."""
        members = [arguments.rank(rank, self.size, "an entry of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            raise ValueError(f"ranks names a rank twice: {members}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} asks for a subgroup it is not in: {members}")
        return self._child(self._transport.subgroup(members), members)

    def _child(self, transport: Transport, members: Sequence[int]) -> Communicator:
        translated: Ancestry = [
            (ledgers, members if ranks is None else [ranks[member] for member in members])
            for ledgers, ranks in self._ancestry
        ]
        name = f"{self._name}[{','.join(map(str, members))}]"
        return Communicator(transport, timeout=self.timeout, name=name, ancestry=translated)

    def free(self) -> None:
        """Give the communicator back to MPI.  All its ranks call this; it is of no use after."""
        self._transport.free()

    # Traffic

    @contextmanager
    def record(self) -> Iterator[Ledger]:
        """Record what this communicator, and those made from it, send inside the block."""
        ledger = Ledger(self.rank, self.size, collect=self._collect)
        self._ledgers.append(ledger)
        try:
            yield ledger
        finally:
            self._ledgers.remove(ledger)

    def counters(self) -> Counters:
        """The MPI library's own count of this process's messages, by rank of COMM_WORLD.

        Raises MonitorUnavailable where there is none.
        """
        if not hasattr(self._transport, "counters"):
            raise MonitorUnavailable("threads of one process have no MPI to count their messages")
        counters: Counters = self._transport.counters()
        return counters

    def _collect(self, data: bytes) -> list[bytes] | None:
        """Every rank's bytes, on rank 0; None on the others."""
        counts = self._all_integers([len(data)], "ledger", self._next_tag(), None)[:, 0]
        whole = np.empty(int(counts.sum()) if self.rank == 0 else 0, np.uint8)
        self._bind("gather", HOST, np.frombuffer(data, np.uint8), whole,
                   tuple(counts.tolist()), tag=self._next_tag(), label="ledger").run(self.timeout)
        if self.rank != 0:
            return None
        return [part.tobytes() for part in np.split(whole, np.cumsum(counts)[:-1])]

    # What the methods above share

    def _next_tag(self) -> int:
        """A fresh tag from the upper half of the tags; the lower half is the user's."""
        self._num_calls += 1
        half = self._transport.num_tags // 2
        return half + self._num_calls % half

    def _peer(self, peer: object) -> int:
        number = arguments.rank(peer, self.size, "peer")
        if number == self.rank:
            raise ValueError(f"rank {number} would wait for itself; send_recv can serve that")
        return number

    def _bind(
        self,
        collective: str,
        backend: Backend,
        source: Array | None,
        target: Array | None,
        counts: Counts,
        *,
        tag: int,
        root: int = 0,
        op: Operator | None = None,
        algorithm: str | None = None,
        label: str | None = None,
    ) -> Plan:
        """The plan of a collective on checked arrays."""
        like = target if source is None else source
        dtype = np.dtype(np.uint8) if like is None else like.dtype
        num_bytes = _total(counts) * dtype.itemsize
        chosen = select.choose(collective, algorithm, self.size, num_bytes, op)
        options = tuple(select.options(chosen, num_bytes).items())
        buffers = self._buffers(backend, source, target, dtype)
        shared = arguments.aliasing(backend, buffers.input, buffers.output)
        program = compile_program(
            collective, chosen.name, self.rank, self.size, root, counts, options, shared
        )
        return self._plan(label or collective, chosen.name, program, buffers, tag, target, op)

    def _point_to_point(
        self,
        name: str,
        backend: Backend,
        tag: int,
        source: Array | None,
        dest: int | None,
        target: Array | None,
        origin: int | None,
    ) -> Plan:
        tag = arguments.integer(tag, "tag")
        largest = self._transport.num_tags // 2 - 1
        if not 0 <= tag <= largest:
            raise ValueError(f"tag must be from 0 to {largest}, got {tag}")
        step, like = Step(), source
        if source is not None and dest is not None:
            step = step._replace(sends=(Message(dest, Region("input", 0, int(source.size))),))
        if target is not None and origin is not None:
            whole = Region("output", 0, int(target.size))
            step, like = step._replace(receives=(Message(origin, whole),)), target
        assert like is not None
        buffers = self._buffers(backend, source, target, like.dtype)
        return self._plan(name, "point_to_point", Program((step,)), buffers, tag, target, None)

    def _buffers(
        self, backend: Backend, source: Array | None, target: Array | None, dtype: np.dtype[Any]
    ) -> Buffers:
        nothing = backend.empty((0,), dtype)
        source, target = (nothing if x is None else x.reshape(-1) for x in (source, target))
        return Buffers(backend, source, target, nothing)

    def _plan(
        self,
        collective: str,
        algorithm: str,
        program: Program,
        buffers: Buffers,
        tag: int,
        result: Array | None,
        op: Operator | None,
    ) -> Plan:
        dtype = buffers.input.dtype
        if program.num_scratch:
            scratch = buffers.backend.empty((program.num_scratch,), dtype)
            buffers = buffers._replace(scratch=scratch)
        number = f"{self._name}{self._num_calls}"
        return Plan(
            f"{collective} ({algorithm}), call {number}",
            program,
            buffers,
            self._transport,
            tag=tag,
            result=result,
            operator=op,
            is_kept=self._is_kept,
            on_start=self._recorder(collective, algorithm, number, program, dtype.itemsize),
        )

    def _recorder(
        self, collective: str, algorithm: str, number: str, program: Program, itemsize: int
    ) -> Callable[[], list[Entry]]:
        """What a plan does at every start: enter the call into all open ledgers."""
        num_runs, everybodys = 0, [ledgers for ledgers, _ in self._ancestry]

        def is_recorded() -> bool:
            for ledgers in everybodys:  # noqa: SIM110 - any() costs more than all the rest
                if ledgers:
                    return True
            return False

        def enter() -> list[Entry]:
            nonlocal num_runs
            num_runs += 1
            if not is_recorded():
                return []
            run = number if num_runs == 1 else f"{number}.{num_runs}"
            sent = tuple((k, peer, count * itemsize) for k, peer, count in program.sent())
            call = Call(collective, algorithm, run, sent)
            return [
                ledger.add(call, self.rank if ranks is None else ranks[self.rank], ranks)
                for ledgers, ranks in self._ancestry
                for ledger in ledgers
            ]

        return enter

    def _finish(self, plan: Plan, async_op: bool, timeout: float | None) -> Any:
        """Run the plan: to its end, or, if asynchronous, only its start."""
        if async_op:
            plan.start()
            return Work(plan)
        return plan.run(self.timeout if timeout is None else timeout)

    def _announce(
        self, head: Header | None, root: int, tag: int, num_counts: int, timeout: float | None
    ) -> Header:
        """The root's header, on every rank."""
        message: NDArray[np.uint8] = np.empty(header.num_bytes(num_counts), np.uint8)
        if head is not None:
            message = header.encode(head)
        plan = self._bind("broadcast", HOST, message if self.rank == root else None, message,
                          message.size, tag=tag, root=root, algorithm="binomial", label="header")
        plan.run(self.timeout if timeout is None else timeout)
        return header.decode(message)

    def _receiver(
        self, buffer: Array | None, head: Header | None, shape: tuple[int, ...] | None
    ) -> tuple[Backend, Array]:
        """The array to receive into: new from the header, or the caller's, checked against it."""
        if head is None:
            return arguments.writable(buffer, "out")
        if buffer is None:
            backend = backend_named(head.backend)
            return backend, backend.empty(shape or (), head.dtype)
        backend, array = arguments.writable(buffer, "x")
        if array.dtype != head.dtype or tuple(array.shape) != shape:
            raise ValueError(
                f"this array is {array.dtype} of shape {tuple(array.shape)}, "
                f"the root sends {head.dtype} of shape {shape}"
            )
        return backend, array

    def _scatter_counts(
        self, source: Array, counts: Sequence[int] | None, needs_equal: bool
    ) -> tuple[int, ...]:
        num_rows = arguments.rows(source, "scatter")
        if counts is not None:
            return arguments.total_counts(counts, self.size, num_rows)
        if needs_equal and num_rows % self.size:
            raise ValueError(
                f"{num_rows} rows are not equal parts for {self.size} ranks; "
                "with out= pass counts= on every rank, or leave out= away on every rank"
            )
        return even(num_rows, self.size)

    def _joined_rows(
        self, x: Array, counts: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rows of every rank, and the shape of all together."""
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
        self, x: Array, counts: Any, tag: int, timeout: float | None
    ) -> tuple[tuple[int, ...], ...]:
        num_rows = arguments.rows(x, "all_to_all")
        if counts is None:
            return (even(num_rows, self.size),) * self.size
        if np.ndim(counts) == 2:
            table = arguments.count_table(counts, self.size)
            arguments.total_counts(table[self.rank], self.size, num_rows)
            return table
        numbers = arguments.total_counts(counts, self.size, num_rows)
        exchanged = self._all_integers(numbers, "counts", tag, timeout)
        return tuple(tuple(row) for row in exchanged.tolist())

    def _all_integers(
        self, numbers: Sequence[int], label: str, tag: int, timeout: float | None
    ) -> NDArray[np.int64]:
        """A few integers of every rank on every rank, one row each."""
        mine = np.array(numbers, np.int64)
        table = np.empty((self.size, mine.size), np.int64)
        plan = self._bind("all_gather", HOST, mine, table, (mine.size,) * self.size, tag=tag,
                          label=label)
        plan.run(self.timeout if timeout is None else timeout)
        return table


class Planner(Communicator):
    """The methods of a communicator, which return a `Plan` instead of running it."""

    _is_kept = True

    def __init__(self, comm: Communicator) -> None:
        # The very same state, so that calls and plans are numbered and recorded together.
        self.__dict__ = comm.__dict__

    def _finish(self, plan: Plan, async_op: bool, timeout: float | None) -> Any:
        if async_op or timeout is not None:
            raise TypeError("a plan takes no async_op or timeout: start() it, or run(timeout)")
        return plan


def _elements(counts: Sequence[int], x: Array) -> tuple[int, ...]:
    """Numbers of elements from numbers of rows of arrays like `x`."""
    per_row = num_elements(x.shape[1:])
    return tuple(count * per_row for count in counts)


def _total(counts: Counts) -> int:
    """The elements of the vector, of all blocks together, or of an average rank's all-to-all."""
    if isinstance(counts, int):
        return counts
    numbers = [count if isinstance(count, int) else sum(count) for count in counts]
    return sum(numbers) // (1 if isinstance(counts[0], int) else len(counts))


def _checked(op: str, x: Array) -> Operator:
    """The operator of this name, which must suit the array's dtype."""
    chosen = operator(op)
    chosen.check(x.dtype)
    return chosen
