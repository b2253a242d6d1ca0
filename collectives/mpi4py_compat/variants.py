"""The blocking, the non-blocking and the persistent method of each collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Protocol

from mpi4py import MPI
from numpy import ndarray

from collectives.communicator import Communicator
from collectives.engines import call_all
from collectives.mpi4py_compat.ops import PLAIN_OPERATORS
from collectives.mpi4py_compat.prepared import Prepared
from collectives.mpi4py_compat.requests import Operation, PersistentRequest, Request, require_thread


class Caller(Protocol):
    """An MPI communicator with the library's collectives.

    Attributes
    ----------
    pending_operations : set of Operation
        The operations that were started here and are not complete.
    """

    pending_operations: set[Operation]

    @property
    def communicator(self) -> Communicator:
        """The library's communicator of the same ranks."""


def call_variants(name: str, prepare: Callable[..., Prepared]) -> tuple[Any, Any, Any]:
    """Return the blocking, the non-blocking and the persistent method for one preparation."""
    own = _DIRECT_CALLS.get(name, "")

    @wraps(prepare)
    def blocking(self: Caller, *args: Any, **named: Any) -> None:
        if own and (plain := _direct_arguments(*args, **named)):
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
    def nonblocking(self: Caller, *args: Any, **named: Any) -> Request:
        require_thread()
        if own and (plain := _direct_arguments(*args, **named)):
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
        self: Caller, *args: Any, info: MPI.Info | None = None, **named: Any
    ) -> PersistentRequest:
        require_thread()
        if args and isinstance(args[-1], MPI.Info):  # hints are ignored
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


def _request(caller: Caller, work: Any, call: Prepared | None = None) -> Request:
    """Return the request of a call in progress."""
    store, release = ((), ()) if call is None else (call.store, call.release)
    return Request.of(Operation(work, store, release, caller.pending_operations))


# Reductions whose usual arguments can be passed to the library's own call.
_DIRECT_CALLS = {"Allreduce": "all_reduce", "Scan": "scan"}


def _direct_arguments(
    sendbuf: Any = None, recvbuf: Any = None, op: Any = MPI.SUM, *others: Any, **more: Any
) -> dict[str, Any]:
    """Return the arguments of the library's own call if both buffers are plain arrays, else {}.

    Plain arrays need not be read as buffers, which takes longer than a small call.
    """
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
    if not sendbuf.ndim == recvbuf.ndim == 1:  # MPI has no shapes, but checked mode compares them
        sendbuf, recvbuf = sendbuf.reshape(-1), recvbuf.reshape(-1)
    return {"x": sendbuf, "out": recvbuf, **operator}


def _with_info(theirs: Signature) -> Signature:
    """Return the signature of a persistent call, which also accepts hints."""
    info = Parameter("info", Parameter.KEYWORD_ONLY, default=None, annotation=MPI.Info | None)
    return theirs.replace(parameters=[*theirs.parameters.values(), info])
