"""The drop-in for mpi4py: its communicators, with the collectives of this library.

comm = collectives.Intracomm(MPI.COMM_WORLD)     # the one line that an existing script changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from mpi4py import MPI

from collectives.communicator import Communicator, adopt, adopt_child, mode_of
from collectives.diagnostics import Ledger
from collectives.mpi4py_compat.objects import ObjectCalls
from collectives.mpi4py_compat.requests import (
    THREAD_DELAY,
    Operation,
    progress_thread,
    when_all_done,
)


def _converting(method: Callable[..., Any]) -> Any:
    """Return a method that makes a communicator as `method` does, as a drop-in."""

    @wraps(method)
    def converting(self: Any, *args: Any, **named: Any) -> Any:
        return converted(method(self, *args, **named), parent=self)

    return converting


def _constant(method: Callable[..., MPI.Comm]) -> Any:
    """Return a class method that returns COMM_WORLD itself, replaced or not, for its handle."""

    @wraps(method)
    def of_handle(_: type, handle: int) -> MPI.Comm:
        comm = method(handle)
        return MPI.COMM_WORLD if comm == MPI.COMM_WORLD else comm

    return classmethod(of_handle)


class DropInCollectives(ObjectCalls):
    """The collectives of this library, under mpi4py's names, for an intracommunicator of MPI."""

    _communicator: Communicator | None = None  # None also after `Revoke`
    _made: Communicator | None = None  # the same, until it is freed
    _parent: Communicator | None = None  # of the communicator from which this one was made
    _duplicate: tuple[MPI.Intracomm, MPI.Request] | None = None  # for the library
    _is_freed = False

    @property
    def communicator(self) -> Communicator:
        """The library's communicator of the same ranks, with its own messages.

        Its methods, such as `explain` and `load_decisions`, also apply to the calls made here.
        """
        made = self._communicator
        return self._make() if made is None else made

    def _make(self) -> Communicator:
        assert isinstance(self, MPI.Intracomm)
        if not self or self._is_freed:
            raise MPI.Exception(MPI.ERR_COMM)
        if self._made is not None:
            raise MPI.Exception(MPI.ERR_REVOKED)
        self._duplicate = self._duplicate or MPI.Intracomm(self).Idup()
        if self._parent is None:
            made = adopt(self, self._duplicate, thread=progress_thread(), mode=mode_of(None))
        else:
            made = adopt_child(self, self._duplicate, self._parent)
        self._communicator = self._made = made
        self.pending_operations = set[Operation]()
        session = made._session
        session.thread_delay = THREAD_DELAY
        if session.checker is not None:
            session.checker.compares_place = False
        return made

    @contextmanager
    def record(self) -> Iterator[Ledger]:
        """Record what this communicator's collectives send inside the block.

        It also records what the communicators made from this one send.
        """
        with self.communicator.record() as ledger:
            yield ledger


class Intracomm(DropInCollectives, MPI.Intracomm):
    """An mpi4py intracommunicator whose collectives are this library's.

    It is `comm` with another type: it has the same handle and the same point-to-point calls.
    Making one is a collective call, because `comm` is duplicated for the library's own messages.
    `Free` frees both; of COMM_WORLD and COMM_SELF it frees only the duplicate.  Where
    `ring launch --drop-in` has replaced `MPI.COMM_WORLD`, `MPI.COMM_WORLD` is a constant: it cannot
    be freed, and it pickles.

    It has all collectives of mpi4py, with mpi4py's buffer specifications, operations and errors:
    blocking, non-blocking (`Iallreduce`) and persistent ones (`Allreduce_init`), and the lower-case
    ones, which pickle.  Use these only among ranks that you trust, because unpickling can run code.
    The collectives with buffers never unpickle anything.

    - `algorithm="ring"`, a keyword of every call with buffers, names an algorithm.
    - Non-blocking and persistent calls return a request of MPI, which can be in the lists of
      `MPI.Request.Waitall`, `Waitany`, `Testall` and the like together with MPI's own.  They need
      MPI_THREAD_MULTIPLE.  A persistent request is started by its `Start`, or by the `Startall` of
      its class; `MPI.Prequest.Startall` cannot start it, and a copy of its handle stands only for
      the current run.
    - A communicator made from it has this type too; one with a topology is a `Cartcomm`,
      `Graphcomm` or `Distgraphcomm` of this module.
    - Intercommunicators, and the neighbourhood collectives of topologies, remain MPI's own.
    - `record()` records what is sent; `communicator` is the library's own communicator.

    Arrays on a GPU are refused; use `collectives.wrap(comm)` for these.

    Parameters
    ----------
    comm : MPI.Intracomm, optional
        The communicator whose collectives are replaced.  The default is `MPI.COMM_NULL`, for which
        nothing is duplicated.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        if self:
            _ = self.communicator

    Dup = _converting(MPI.Intracomm.Dup)
    Dup_with_info = _converting(MPI.Intracomm.Dup_with_info)
    Clone = _converting(MPI.Intracomm.Clone)
    Create = _converting(MPI.Intracomm.Create)
    Create_group = _converting(MPI.Intracomm.Create_group)
    Split = _converting(MPI.Intracomm.Split)
    Split_type = _converting(MPI.Intracomm.Split_type)
    Shrink = _converting(MPI.Intracomm.Shrink)
    Create_cart = _converting(MPI.Intracomm.Create_cart)
    Create_graph = _converting(MPI.Intracomm.Create_graph)
    Create_dist_graph = _converting(MPI.Intracomm.Create_dist_graph)
    Create_dist_graph_adjacent = _converting(MPI.Intracomm.Create_dist_graph_adjacent)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Intracomm, MPI.Request]:
        """Return a duplicate, and the request after whose completion it can be used."""
        made, request = super().Idup(info)
        made._parent, made._duplicate = self._made, MPI.Intracomm(self).Idup()
        return made, request

    def Idup_with_info(self, info: MPI.Info) -> tuple[Intracomm, MPI.Request]:
        """Return a duplicate as `Idup` does, with hints."""
        return self.Idup(info)

    @classmethod
    def Create_from_group(cls, *args: Any, **named: Any) -> Any:
        """Return a communicator of a group, as `MPI.Intracomm.Create_from_group` makes it."""
        return converted(MPI.Intracomm.Create_from_group(*args, **named))

    # The constant, if it was replaced: see `replace_world`

    def __reduce__(self) -> Any:
        return "COMM_WORLD" if self is MPI.COMM_WORLD else super().__reduce__()

    fromhandle = _constant(MPI.Comm.fromhandle)
    fromint = _constant(MPI.Comm.fromint)
    f2py = _constant(MPI.Comm.f2py)

    def Revoke(self) -> None:
        """Let all calls on this communicator fail, on all its ranks."""
        super().Revoke()
        if self._duplicate is not None:
            self._duplicate[0].Revoke()
        self._communicator = None

    def Free(self) -> None:
        """Free the communicator.  All its ranks call this."""
        self._free_duplicate()
        if self.handle not in (MPI.COMM_WORLD.handle, MPI.COMM_SELF.handle):
            super().Free()

    def free(self) -> None:
        """Call `Free` unless the communicator is null, freed or a constant."""
        if self is not MPI.COMM_WORLD:
            if self and not self._is_freed:
                self.Free()
            super().free()  # the handles of COMM_WORLD and COMM_SELF become null

    def Disconnect(self) -> None:
        """Free the communicator when its messages are complete.  All its ranks call this."""
        self._free_duplicate()
        super().Disconnect()

    def _free_duplicate(self) -> None:
        if not self or self._is_freed or self is MPI.COMM_WORLD:
            raise MPI.Exception(MPI.ERR_COMM)
        if self._duplicate is not None and self._made is None:
            _ = self.communicator  # made, so that it can be freed
        if self._made is not None:  # as in MPI, pending operations are completed first
            when_all_done(list(self.pending_operations), self._made.free)
        self._communicator, self._made, self._is_freed = None, None, True


class Cartcomm(Intracomm, MPI.Cartcomm):
    """A communicator with a Cartesian topology, whose neighbourhood collectives are MPI's own."""

    Sub = _converting(MPI.Cartcomm.Sub)


class Graphcomm(Intracomm, MPI.Graphcomm):
    """A communicator with a graph topology, whose neighbourhood collectives are MPI's own."""


class Distgraphcomm(Intracomm, MPI.Distgraphcomm):
    """A communicator with a distributed graph, whose neighbourhood collectives are MPI's own."""


_TYPES: tuple[tuple[type[MPI.Comm], Any], ...] = (
    (MPI.Cartcomm, Cartcomm),
    (MPI.Graphcomm, Graphcomm),
    (MPI.Distgraphcomm, Distgraphcomm),
    (MPI.Intracomm, Intracomm),
)


def converted(comm: MPI.Comm, parent: DropInCollectives | None = None) -> Any:
    """Return the communicator as a drop-in; return COMM_NULL and intercommunicators unchanged.

    All ranks of `comm` call this.

    Parameters
    ----------
    comm : MPI.Comm
        Any communicator.
    parent : DropInCollectives, optional
        The communicator from which `comm` was made, if `comm` has the same ranks or fewer.
    """
    if comm and not isinstance(comm, DropInCollectives):
        kind = next((ours for theirs, ours in _TYPES if isinstance(comm, theirs)), None)
        if kind is None:
            return comm
        comm = MPI.Intracomm.__new__(kind, comm)  # `__init__` does not know the parent
    if comm and isinstance(comm, DropInCollectives):
        comm._parent = None if parent is None else parent._made
        _ = comm.communicator
    return comm
