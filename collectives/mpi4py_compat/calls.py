"""The collectives with mpi4py's arguments: each is read once and can then be done in three ways.

What MPI lets a rank know is enough.  In the v-variants with a root, a rank that is not the root
knows its own count alone, and in an all-to-all its own row and column: their algorithms are those
in which a rank needs no more, unless the caller names another.  The ranks then exchange their
counts first, which the ledger shows under "counts", and for which a call that does not block waits
as well; so they do in checked mode, which compares them, and for a reduce-scatter without counts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from collectives.communicator import Communicator
from collectives.engines import Action, call_all
from collectives.mpi4py_compat.buffers import (
    Message,
    a_block_each,
    a_type_each,
    is_in_place,
    one_block,
)
from collectives.mpi4py_compat.memory import Side, side, sizes
from collectives.mpi4py_compat.ops import PLAIN_OPERATORS, Combining, combining
from collectives.mpi4py_compat.requests import Operation, PersistentRequest, Request, require_thread
from collectives.runtime import all_gather_integers
from collectives.selection import parse_label

# Those in which a rank needs to know only what it sends and receives itself, the usual one first.
_LOCAL = {
    "gather": ("linear_bounded", "linear"),
    "scatter": ("linear_bounded", "linear"),
    "all_to_all": ("linear", "linear_sync", "pairwise", "one_factor"),
}


class Prepared(NamedTuple):
    """A call of the library's that does what was asked for.

    `load` and `store` bring data to where the call reads it, and from where it leaves it; `release`
    gives back what they needed.
    """

    collective: str
    arguments: dict[str, Any]
    load: tuple[Action, ...] = ()
    store: tuple[Action, ...] = ()
    release: tuple[Action, ...] = ()


def three_ways(name: str, prepare: Callable[..., Prepared]) -> tuple[Any, Any, Any]:
    """The blocking, the non-blocking and the persistent method that one preparation serves."""
    own = _OWN_CALLS.get(name, "")

    @wraps(prepare)
    def blocking(self: Calls, *args: Any, **named: Any) -> None:
        if own and (plain := _plain(*args, **named)):
            getattr(self.communicator, own)(**plain)
            return
        call = prepare(self, *args, **named)
        try:
            call_all(call.load)
            getattr(self.communicator, call.collective)(**call.arguments)
            call_all(call.store)
        finally:
            call_all(call.release)

    @wraps(prepare)
    def nonblocking(self: Calls, *args: Any, **named: Any) -> Request:
        require_thread()
        if own and (plain := _plain(*args, **named)):
            return _request(self, getattr(self.communicator, own)(**plain, async_op=True))
        call = prepare(self, *args, **named)
        try:
            call_all(call.load)
            work = getattr(self.communicator, call.collective)(**call.arguments, async_op=True)
        except BaseException:
            call_all(call.release)
            raise
        return _request(self, work, call)

    @wraps(prepare)
    def persistent(
        self: Calls, *args: Any, info: MPI.Info | None = None, **named: Any
    ) -> PersistentRequest:
        require_thread()
        if args and isinstance(args[-1], MPI.Info):  # hints, of which there are none to take
            args = args[:-1]
        call = prepare(self, *args, **named)
        try:
            plan = getattr(self.communicator.plan, call.collective)(**call.arguments)
        except BaseException:
            call_all(call.release)
            raise
        return PersistentRequest(plan, call.load, call.store, call.release, self.pending_operations)

    methods: tuple[Any, Any, Any] = blocking, nonblocking, persistent
    names = name, f"I{name.lower()}", f"{name}_init"
    answers = None, Request, PersistentRequest
    for method, its_name, answer in zip(methods, names, answers, strict=True):
        method.__name__ = its_name
        method.__qualname__ = f"Calls.{its_name}"
        its_signature = signature(prepare).replace(return_annotation=answer)
        if method is persistent:
            its_signature = _with_info(its_signature)
        method.__signature__ = its_signature
    return methods


def _request(calls: Calls, work: Any, call: Prepared | None = None) -> Request:
    """The request of a call under way."""
    store, release = ((), ()) if call is None else (call.store, call.release)
    return Request.of(Operation(work, store, release, calls.pending_operations))


# Reductions whose arguments, in their usual form, are those of the library's own call.
_OWN_CALLS = {"Allreduce": "all_reduce", "Scan": "scan"}


def _plain(
    sendbuf: Any = None, recvbuf: Any = None, op: Any = MPI.SUM, *others: Any, **more: Any
) -> dict[str, Any]:
    """The arguments of the library's own call, for a reduction from one array to another of the
    same kind, which need not be read as buffers; none for all else."""
    if sendbuf is MPI.IN_PLACE:
        sendbuf = recvbuf
    if type(sendbuf) is not ndarray or type(recvbuf) is not ndarray or others or more:
        return {}
    dtype = recvbuf.dtype
    operator = PLAIN_OPERATORS.get((dtype, id(op)))
    if operator is None or sendbuf.dtype != dtype or sendbuf.size != recvbuf.size:
        return {}
    if not (sendbuf.flags.c_contiguous and recvbuf.flags.carray):
        return {}
    if not sendbuf.ndim == recvbuf.ndim == 1:  # MPI knows no shapes, which checked mode compares
        sendbuf, recvbuf = sendbuf.reshape(-1), recvbuf.reshape(-1)
    return {"x": sendbuf, "out": recvbuf, **operator}


def _with_info(theirs: Signature) -> Signature:
    """The signature of a persistent call, which takes hints as well."""
    info = Parameter("info", Parameter.KEYWORD_ONLY, default=None, annotation=MPI.Info | None)
    return theirs.replace(parameters=[*theirs.parameters.values(), info])


class Calls:
    """The collectives with buffers, as methods of an MPI communicator.

    `pending_operations`: the operations that were started here and are not over.
    """

    pending_operations: set[Operation]

    @property
    def communicator(self) -> Communicator:
        """The library's own communicator of the same ranks."""
        raise NotImplementedError

    # Preparations.  As in mpi4py the receiving side is read first, and its complaint comes first.

    def _barrier(self, *, algorithm: str | None = None) -> Prepared:
        """Complete when every rank has called it."""
        return Prepared("barrier", {"algorithm": algorithm})

    def _bcast(self, buf: Any, root: int = 0, *, algorithm: str | None = None) -> Prepared:
        """The root's message, to all ranks."""
        root, is_root = self._root(root)
        data = side(one_block(buf, is_sent=is_root))
        sent, received = (data, _place_for(data)) if is_root else (None, data)
        return _call("broadcast", sent, received, root=root, algorithm=algorithm)

    def _gather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """A block of every rank, one behind the other, to the root."""
        root, is_root = self._root(root)
        received = None
        if is_root:
            size = self.communicator.size
            received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = self._own_part(sendbuf, received)
        return _call("gather", sent, _side(received), root=root, algorithm=algorithm)

    def _gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """A block of every rank, each of its own length, to the root."""
        root, is_root = self._root(root)
        received = None
        if is_root:
            received = a_block_each(recvbuf, self.communicator.size, is_sent=False)
        sent, target = self._own_part(sendbuf, received), _side(received)
        counts, algorithm = self._rooted("gather", sent, target, algorithm)
        return _call("gather", sent, target, root=root, counts=counts, algorithm=algorithm)

    def _scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """A block of the root's to every rank."""
        root, is_root = self._root(root)
        sent = None
        if is_root:
            size = self.communicator.size
            sent = one_block(sendbuf, is_sent=True, num_blocks=size).repeated(size)
        received = self._own_result(sent, recvbuf)
        return _call("scatter", _side(sent), received, root=root, algorithm=algorithm)

    def _scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, algorithm: str | None = None
    ) -> Prepared:
        """A block of the root's, each of its own length, to every rank."""
        root, is_root = self._root(root)
        sent = None
        if is_root:
            sent = a_block_each(sendbuf, self.communicator.size, is_sent=True)
        received, source = self._own_result(sent, recvbuf), _side(sent)
        counts, algorithm = self._rooted("scatter", received, source, algorithm)
        return _call("scatter", source, received, root=root, counts=counts, algorithm=algorithm)

    def _allgather(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """A block of every rank, one behind the other, to all."""
        size = self.communicator.size
        received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = self._own_part(sendbuf, received)
        return _call("all_gather", sent, side(received), algorithm=algorithm)

    def _allgatherv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """A block of every rank, each of its own length, to all."""
        received = a_block_each(recvbuf, self.communicator.size, is_sent=False)
        sent, target = self._own_part(sendbuf, received), side(received)
        return _call("all_gather", sent, target, counts=target.sizes, algorithm=algorithm)

    def _alltoall(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """A block of every rank to every rank."""
        size = self.communicator.size
        received = one_block(recvbuf, is_sent=False, num_blocks=size).repeated(size)
        sent = received
        if not is_in_place(sendbuf):
            sent = one_block(sendbuf, is_sent=True, num_blocks=size).repeated(size)
        source, target = side(sent), side(received)
        _check_sizes(source.array.size, target.array.size)
        return _call("all_to_all", source, target, algorithm=algorithm)

    def _alltoallv(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """A block of every rank to every rank, each of its own length."""
        return self._exchanged(a_block_each, sendbuf, recvbuf, algorithm)

    def _alltoallw(self, sendbuf: Any, recvbuf: Any, *, algorithm: str | None = None) -> Prepared:
        """A block of every rank to every rank, each of its own length and datatype."""
        return self._exchanged(a_type_each, sendbuf, recvbuf, algorithm)

    def _reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        algorithm: str | None = None,
    ) -> Prepared:
        """The combination of every rank's elements, to the root."""
        root, is_root = self._root(root)
        if is_root:
            return _reduction("reduce", sendbuf, recvbuf, op, root=root, algorithm=algorithm)
        sent = one_block(sendbuf, is_sent=True)
        return _reduced(
            "reduce", combining(op, sent.datatype), sent, None, root=root, algorithm=algorithm
        )

    def _allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """The combination of every rank's elements, to all."""
        return _reduction("all_reduce", sendbuf, recvbuf, op, algorithm=algorithm)

    def _reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """The combination of every rank's elements, divided evenly among all."""
        size = self.communicator.size
        if is_in_place(sendbuf):
            received = one_block(recvbuf, is_sent=False, num_blocks=size)
            sent = received
        else:
            received = one_block(recvbuf, is_sent=False)
            sent = one_block(sendbuf, is_sent=True, num_blocks=size)
            _check_alike(sent, received)
        chosen = combining(op, sent.datatype)
        return _reduced(
            "reduce_scatter", chosen, sent.repeated(size), received, algorithm=algorithm
        )

    def _reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Any = None,
        op: MPI.Op = MPI.SUM,
        *,
        algorithm: str | None = None,
    ) -> Prepared:
        """The combination of every rank's elements, so many of them to each."""
        received = one_block(recvbuf, is_sent=False)
        in_place = is_in_place(sendbuf)
        sent = received if in_place else one_block(sendbuf, is_sent=True)
        counts = self._result_counts(received.num_elements, recvcounts, in_place)
        own = counts[self.communicator.rank]
        if in_place:
            _check_total(f"receive count {received.num_elements}", received.num_elements, counts)
            received = received.resized(own)
        else:
            _check_types(sent, received)
            _check_total(f"send count {sent.num_elements}", sent.num_elements, counts)
            if received.num_elements != own:
                raise ValueError(
                    f"mismatch in receive count {received.num_elements} "
                    f"and counts[{self.communicator.rank}] {own}"
                )
        chosen = combining(op, sent.datatype)
        return _reduced(
            "reduce_scatter", chosen, sent, received, counts=counts, algorithm=algorithm
        )

    def _scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """The combination of the elements of all ranks up to and including this one."""
        return _reduction("scan", sendbuf, recvbuf, op, algorithm=algorithm)

    def _exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, algorithm: str | None = None
    ) -> Prepared:
        """The combination of the elements of all ranks before this one; none for the first."""
        call = _reduction("exscan", sendbuf, recvbuf, op, algorithm=algorithm)
        return call if self.communicator.rank else call._replace(store=())

    Barrier, Ibarrier, Barrier_init = three_ways("Barrier", _barrier)
    Bcast, Ibcast, Bcast_init = three_ways("Bcast", _bcast)
    Gather, Igather, Gather_init = three_ways("Gather", _gather)
    Gatherv, Igatherv, Gatherv_init = three_ways("Gatherv", _gatherv)
    Scatter, Iscatter, Scatter_init = three_ways("Scatter", _scatter)
    Scatterv, Iscatterv, Scatterv_init = three_ways("Scatterv", _scatterv)
    Allgather, Iallgather, Allgather_init = three_ways("Allgather", _allgather)
    Allgatherv, Iallgatherv, Allgatherv_init = three_ways("Allgatherv", _allgatherv)
    Alltoall, Ialltoall, Alltoall_init = three_ways("Alltoall", _alltoall)
    Alltoallv, Ialltoallv, Alltoallv_init = three_ways("Alltoallv", _alltoallv)
    Alltoallw, Ialltoallw, Alltoallw_init = three_ways("Alltoallw", _alltoallw)
    Reduce, Ireduce, Reduce_init = three_ways("Reduce", _reduce)
    Allreduce, Iallreduce, Allreduce_init = three_ways("Allreduce", _allreduce)
    Reduce_scatter_block, Ireduce_scatter_block, Reduce_scatter_block_init = three_ways(
        "Reduce_scatter_block", _reduce_scatter_block
    )
    Reduce_scatter, Ireduce_scatter, Reduce_scatter_init = three_ways(
        "Reduce_scatter", _reduce_scatter
    )
    Scan, Iscan, Scan_init = three_ways("Scan", _scan)
    Exscan, Iexscan, Exscan_init = three_ways("Exscan", _exscan)

    # What they share

    def _root(self, root: Any) -> tuple[int, bool]:
        """The root, and whether this rank is it.  Raises MPI.Exception for one that is no rank."""
        communicator = self.communicator
        number = int(root) if isinstance(root, float) else operator.index(root)  # as mpi4py does
        if not 0 <= number < communicator.size:
            assert isinstance(self, MPI.Comm)
            self.Call_errhandler(MPI.ERR_ROOT)
            raise MPI.Exception(MPI.ERR_ROOT)
        return number, number == communicator.rank

    def _own_part(self, sendbuf: Any, received: Message | None) -> Side:
        """What this rank sends, which has the size of its part of what is `received` here."""
        if received is None:
            return side(one_block(sendbuf, is_sent=True))
        own = received.only(self.communicator.rank)
        if is_in_place(sendbuf):
            return side(own)
        sent = side(one_block(sendbuf, is_sent=True))
        _check_sizes(sent.array.size, sum(sizes(own)))
        return sent

    def _own_result(self, sent: Message | None, recvbuf: Any) -> Side:
        """Where this rank receives its part of what is `sent` here."""
        if sent is None:
            return side(one_block(recvbuf, is_sent=False))
        own = sent.only(self.communicator.rank)
        if is_in_place(recvbuf):
            place = side(own)
            return _place_for(place)._replace(release=place.release)
        received = side(one_block(recvbuf, is_sent=False))
        _check_sizes(sum(sizes(own)), received.array.size)
        return received

    def _rooted(
        self, collective: str, own: Side, whole: Side | None, algorithm: str | None
    ) -> tuple[list[int], str]:
        """Counts and algorithm of a v-variant.  `whole`: all ranks' parts, at the root."""
        size = self.communicator.size
        chosen = algorithm or _LOCAL[collective][0]
        if not self._knows_enough(collective, chosen):
            table = all_gather_integers(self.communicator._session, [own.array.size], "counts")
            return table[:, 0].tolist(), chosen
        counts = [0] * size
        counts[self.communicator.rank] = own.array.size
        return counts if whole is None else whole.sizes, chosen

    def _knows_enough(self, collective: str, algorithm: str) -> bool:
        """Whether a rank's own counts are enough: for the algorithm, and as nobody compares."""
        is_local = parse_label(collective, algorithm).algorithm.name in _LOCAL[collective]
        return is_local and not self.communicator.check

    def _exchanged(
        self,
        read: Callable[..., Message],
        sendbuf: Any,
        recvbuf: Any,
        algorithm: str | None,
    ) -> Prepared:
        """An all-to-all of unequal blocks."""
        size, rank = self.communicator.size, self.communicator.rank
        received = read(recvbuf, size, is_sent=False)
        in_place = is_in_place(sendbuf)
        sent = received if in_place else read(sendbuf, size, is_sent=True)
        source, target = side(sent), side(received)
        _check_sizes(source.sizes[rank], target.sizes[rank])
        chosen = algorithm or _LOCAL["all_to_all"][0]
        if not self._knows_enough("all_to_all", chosen):
            return _call("all_to_all", source, target, counts=source.sizes, algorithm=chosen)
        table = [[0] * size for _ in range(size)]
        for peer in range(size):
            table[peer][rank] = target.sizes[peer]
        table[rank] = source.sizes
        return _call("all_to_all", source, target, counts=table, algorithm=chosen)

    def _result_counts(self, own: int, counts: Any, in_place: bool) -> list[int]:
        """How many elements of a reduce-scatter each rank gets."""
        communicator = self.communicator
        if counts is None and not in_place:
            table = all_gather_integers(communicator._session, [own], "counts")
            return [int(number) for number in table[:, 0]]
        if len(counts) != communicator.size:
            raise ValueError(f"expecting {communicator.size} items, got {len(counts)}")
        return [operator.index(number) for number in counts]


# From messages to calls


def _call(collective: str, sent: Side | None, received: Side | None, **arguments: Any) -> Prepared:
    """A call that moves bytes."""
    load, store, release = _actions(sent, received)
    arrays = {
        "x": None if sent is None else sent.array,
        "out": None if received is None else received.array,
    }
    return Prepared(collective, {**arrays, **arguments}, load, store, release)


def _actions(sent: Side | None, received: Side | None) -> tuple[tuple[Action, ...], ...]:
    """What is done before, after, and when all is over."""
    load, first = (sent.load, sent.release) if sent else ((), ())
    store, second = (received.store, received.release) if received else ((), ())
    return load, store, first + second


def _reduction(
    collective: str, sendbuf: Any, recvbuf: Any, op: MPI.Op, **arguments: Any
) -> Prepared:
    """A reduction whose result is as long as what every rank brings."""
    received = one_block(recvbuf, is_sent=False)
    sent = received
    if not is_in_place(sendbuf):
        sent = one_block(sendbuf, is_sent=True)
        _check_alike(sent, received)
    return _reduced(collective, combining(op, received.datatype), sent, received, **arguments)


def _reduced(
    collective: str,
    chosen: Combining,
    sent: Message,
    received: Message | None,
    **arguments: Any,
) -> Prepared:
    """A call that combines elements."""
    source, target = side(sent), _side(received)
    load, store, release = _actions(source, target)
    arrays = {
        "x": source.array.view(chosen.dtype),
        "out": None if target is None else target.array.view(chosen.dtype),
        "op": chosen.operator,
    }
    release += chosen.release
    return Prepared(collective, {**arrays, **arguments}, load, store, release)


def _side(message: Message | None) -> Side | None:
    return None if message is None else side(message)


def _place_for(own: Side) -> Side:
    """Where to receive what is there already: there, or beside it if that is read-only."""
    array = own.array
    return Side(array if array.flags.writeable else np.empty_like(array), own.sizes)


# Refusals, in mpi4py's words where it has some


def _check_sizes(sent: int, received: int) -> None:
    if sent != received:
        raise ValueError(f"mismatch in what a rank sends itself, {sent} and {received} bytes")


def _check_types(sent: Message, received: Message) -> None:
    if sent.datatype != received.datatype:
        raise ValueError("mismatch in send and receive MPI datatypes")


def _check_alike(sent: Message, received: Message) -> None:
    _check_types(sent, received)
    if sent.num_elements != received.num_elements:
        raise ValueError(
            f"mismatch in send count {sent.num_elements} and receive count {received.num_elements}"
        )


def _check_total(what: str, number: int, counts: list[int]) -> None:
    if number != sum(counts):
        raise ValueError(f"mismatch in {what} and sum(counts) {sum(counts)}")
