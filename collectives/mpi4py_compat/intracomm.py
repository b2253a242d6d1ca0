"""The drop-in for mpi4py: its communicators, with the collectives done by this library.

comm = collectives.Intracomm(MPI.COMM_WORLD)     # the one line that an existing script changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from mpi4py import MPI

from collectives.communicator import Communicator, adopt, mode_of
from collectives.diagnostics import Ledger
from collectives.mpi4py_compat.objects import ObjectCalls
from collectives.mpi4py_compat.requests import (
    THREAD_DELAY,
    Operation,
    progress_thread,
    when_all_done,
)


def _kept(method: Callable[..., Any]) -> Any:
    """A method that makes a communicator, which becomes one of ours."""

    @wraps(method)
    def keeping(self: Any, *args: Any, **named: Any) -> Any:
        return drop_in(method(self, *args, **named))

    return keeping


class Collectives(ObjectCalls):
    """The collectives of this library, under mpi4py's names, for an MPI intracommunicator."""

    _communicator: Communicator | None = None
    _duplicate: tuple[MPI.Intracomm, MPI.Request] | None = None  # to be the library's, if begun
    _is_freed = False

    @property
    def communicator(self) -> Communicator:
        """The library's communicator of the same ranks, with its own messages.

        All that it can do, such as `explain` and `load_decisions`, holds for the calls made here.
        """
        made = self._communicator
        return self._make() if made is None else made

    def _make(self) -> Communicator:
        assert isinstance(self, MPI.Intracomm)
        if not self or self._is_freed:
            raise MPI.Exception(MPI.ERR_COMM)
        duplicate = self._duplicate or MPI.Intracomm(self).Idup()
        made = adopt(duplicate, thread=progress_thread(), mode=mode_of(None))
        self._communicator, self.pending_operations = made, set[Operation]()
        session = made._session
        session.thread_delay = THREAD_DELAY
        if session.checker is not None:
            session.checker.compares_place = False
        return made

    @contextmanager
    def record(self) -> Iterator[Ledger]:
        """Record what the collectives of this communicator send inside the block."""
        with self.communicator.record() as ledger:
            yield ledger


class Intracomm(Collectives, MPI.Intracomm):
    """An mpi4py intracommunicator whose collectives are this library's.

    It is `comm` under another type: same handle, same point-to-point calls.  Making one is a
    collective call, for it duplicates `comm` for the library's own messages; `Free` gives back
    both, or, of COMM_WORLD and COMM_SELF, the duplicate alone.

    All collectives of mpi4py are there, with its buffer specifications, operations and errors:
    those that block, those that do not (`Iallreduce`), those that persist (`Allreduce_init`), and
    the lower-case ones, which pickle.  Never unpickle what ranks send that you do not trust.  Those
    with buffers never unpickle anything.

    - `algorithm="ring"`, a keyword of every call with buffers, names an algorithm.
    - What is not complete on return is a request of MPI, which stands in the lists of
      `MPI.Request.Waitall`, `Waitany`, `Testall` and the rest beside MPI's own.  It needs
      MPI_THREAD_MULTIPLE.  A persistent one is started by its `Start`, or by the `Startall` of its
      class; `MPI.Prequest.Startall` cannot start it, and a copy of its handle knows the run under
      way only.
    - A communicator made from it is of this type too, and one with a topology of `Cartcomm`,
      `Graphcomm` or `Distgraphcomm` here.
    - Intercommunicators, and the neighbourhood collectives of topologies, are MPI's own, untouched.
    - `record()` records what is sent; `communicator` is the library's communicator beneath.

    Arrays on a GPU are refused: `collectives.wrap(comm)` serves those.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        if self:
            _ = self.communicator

    # The communicators made from it

    Dup = _kept(MPI.Intracomm.Dup)
    Dup_with_info = _kept(MPI.Intracomm.Dup_with_info)
    Clone = _kept(MPI.Intracomm.Clone)
    Create = _kept(MPI.Intracomm.Create)
    Create_group = _kept(MPI.Intracomm.Create_group)
    Split = _kept(MPI.Intracomm.Split)
    Split_type = _kept(MPI.Intracomm.Split_type)
    Shrink = _kept(MPI.Intracomm.Shrink)
    Create_cart = _kept(MPI.Intracomm.Create_cart)
    Create_graph = _kept(MPI.Intracomm.Create_graph)
    Create_dist_graph = _kept(MPI.Intracomm.Create_dist_graph)
    Create_dist_graph_adjacent = _kept(MPI.Intracomm.Create_dist_graph_adjacent)

    def Idup(self, info: MPI.Info | None = None) -> tuple[Intracomm, MPI.Request]:
        """A duplicate that can be used when the request is complete."""
        made, request = super().Idup(info)
        made._duplicate = MPI.Intracomm(self).Idup()
        return made, request

    def Idup_with_info(self, info: MPI.Info) -> tuple[Intracomm, MPI.Request]:
        """The same, with hints."""
        return self.Idup(info)

    @classmethod
    def Create_from_group(cls, *args: Any, **named: Any) -> Any:
        """A communicator of a group, as `MPI.Intracomm.Create_from_group` makes it."""
        return drop_in(MPI.Intracomm.Create_from_group(*args, **named))

    def Free(self) -> None:
        """Give the communicator back to MPI.  All its ranks call this."""
        self._free_duplicate()
        if self.handle not in (MPI.COMM_WORLD.handle, MPI.COMM_SELF.handle):
            super().Free()

    def free(self) -> None:
        """Call `Free` if not null."""
        if self and not self._is_freed:
            self.Free()

    def Disconnect(self) -> None:
        """Give the communicator back when all its messages are through.  All its ranks call it."""
        self._free_duplicate()
        super().Disconnect()

    def _free_duplicate(self) -> None:
        if not self or self._is_freed:
            raise MPI.Exception(MPI.ERR_COMM)
        if self._duplicate is not None:
            _ = self.communicator  # which must be there to be given back
        if self._communicator is not None:  # MPI, too, carries what is under way to its end
            when_all_done(list(self.pending_operations), self._communicator.free)
        self._communicator, self._is_freed = None, True


class Cartcomm(Intracomm, MPI.Cartcomm):
    """A communicator with a Cartesian topology, whose neighbourhood collectives are MPI's own."""

    Sub = _kept(MPI.Cartcomm.Sub)


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


def drop_in(comm: MPI.Comm) -> Any:
    """The same communicator with our collectives; COMM_NULL and what is no intracommunicator as is.

    A collective call.
    """
    if isinstance(comm, Collectives) and comm:
        _ = comm.communicator
    if not comm or isinstance(comm, Collectives):
        return comm
    for theirs, ours in _TYPES:
        if isinstance(comm, theirs):
            return ours(comm)
    return comm
