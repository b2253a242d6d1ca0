"""The MPI engine: point-to-point messages of mpi4py, and nothing else of it."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import Bytes
from collectives.diagnostics import Counters, FlightRecorder, Waiting
from collectives.engines import compiled
from collectives.engines.compiled import CompiledExecution, Port
from collectives.engines.interpreter import Interpreted
from collectives.engines.mpi_errors import FAILURES, Failed, called_off, explained
from collectives.engines.progress import under_way
from collectives.engines.staging import Staged
from collectives.engines.transport import (
    CallUnderWay,
    Execution,
    Operands,
    back_off,
    deadline_in,
    until,
    wrong_length,
)
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerFailed
from collectives.programs import Program

# One list for the process: a call of one communicator may hold up the call of another.
_in_flight: list[CallUnderWay] = []
_failed: list[Any] = []
_flight = FlightRecorder(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
_num_alike: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks

_PATIENCE = 1e-3  # seconds that the compiled loop waits before Python looks at signals
_NEWS = 1.0  # seconds that it may take to learn which ranks have failed

# A matter of how Open MPI was started.
_is_fault_tolerant = (
    os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 - as above
)


@atexit.register
def _keep_for_ever() -> None:
    """Let the memory of calls that are under way outlive the interpreter.

    MPI_Finalize, which comes after that has taken everything down, still moves their messages.
    """
    for call in (*_in_flight, *_failed, *under_way()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))


class MpiTransport:
    """One rank's end of an MPI communicator that belongs to the library alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises them; the caller's comm may abort
        self.rank, self.size = comm.rank, comm.size
        largest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # MPI keeps it there alone
        assert isinstance(largest_tag, int)
        self.num_tags = largest_tag + 1
        self.in_flight, self.failed, self.flight = _in_flight, _failed, _flight
        members = _ranks_in(MPI.COMM_WORLD, comm)
        _num_alike[members] += 1
        self.identity = members, _num_alike[members]
        self.log = _flight.log(*self.identity)

    @cached_property
    def port(self) -> Port:
        """What the compiled loop needs of this communicator."""
        return Port(self.comm)

    @property
    def why_interpreted(self) -> str | None:
        """Why programs are not run by the compiled loop; None if they are."""
        return compiled.why_not()

    def execution(self, program: Program, operands: Operands, tag: int) -> Execution:
        if not operands.backend.is_host:
            return Staged(program, operands, self.messages(tag))
        if self.why_interpreted is not None:
            return Interpreted(program, operands, self.messages(tag))
        return CompiledExecution(self.port, program, operands, tag)

    def messages(self, tag: int) -> MpiMessages:
        return MpiMessages(self.comm, tag)

    def subgroup(self, ranks: Sequence[int], deadline: float | None) -> MpiTransport:
        everyone = self.comm.Get_group()
        group = everyone.Incl(list(ranks))
        comm = _limited("subgroup", partial(self.comm.Create_group, group), deadline)
        group.Free()
        everyone.Free()
        return MpiTransport(comm)

    def split(self, ranks: Sequence[int] | None, deadline: float | None) -> MpiTransport | None:
        # Unlike Create_group, Split keeps its own messages out of Open MPI's count of the user's.
        color, key = (MPI.UNDEFINED, 0) if ranks is None else (min(ranks), ranks.index(self.rank))
        comm = _limited("split", partial(self.comm.Split, color, key), deadline)
        return None if ranks is None else MpiTransport(comm)

    @cached_property
    def patience(self) -> float:
        return 0.0 if self.why_interpreted else _PATIENCE

    def pause(self, deadline: float | None, num_tries: int) -> None:
        back_off(num_tries)

    def translate_error(self, error: BaseException) -> BaseException:
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in FAILURES:
            return error
        self.comm.Revoke()  # or those who wait for us, who gave up, would never know
        ranks = self._failed_ranks()
        names = ", ".join(map(str, ranks)) or "of another communicator"
        return PeerFailed(
            f"rank {names} has failed; shrink() makes a communicator of the others", ranks
        )

    def _failed_ranks(self) -> tuple[int, ...]:
        """Who has failed, in our numbering.  It may take a moment to be known on every rank."""
        deadline = time.monotonic() + _NEWS
        while (failed := self.comm.Get_failed()).size == 0 and time.monotonic() < deadline:
            failed.Free()
            MPI.COMM_SELF.Iprobe()  # news come in when MPI is called
            time.sleep(1e-3)
        mine = self.comm.Get_group()
        ranks = MPI.Group.Translate_ranks(failed, range(failed.size), mine)
        failed.Free()
        mine.Free()
        return tuple(sorted(ranks))

    can_shrink = _is_fault_tolerant

    def shrink(self, deadline: float | None) -> tuple[MpiTransport, list[int]]:
        if not self.can_shrink:
            raise CollectiveError(
                "shrink() needs an Open MPI that was started with fault tolerance: "
                "python -m collectives.launch --fault-tolerant, or mpirun --with-ft ulfm"
            )
        self.comm.Revoke()
        self._meet(deadline)
        comm: MPI.Intracomm = _limited("shrink", self.comm.Shrink, deadline)
        return MpiTransport(comm), list(_ranks_in(self.comm, comm))

    def _meet(self, deadline: float | None) -> None:
        """Wait until all ranks that are alive are here, on a communicator that is revoked."""
        flag = np.ones(1, np.intc)
        try:
            is_met = until(self.comm.Iagree(flag).Test, deadline)
        except MPI.Exception as error:  # that ranks have failed is known: all others are here
            is_met = error.Get_error_class() in FAILURES
        if not is_met:
            raise CollectiveTimeout("shrink: not all ranks that are alive have called it in time")

    def free(self) -> None:
        self.comm.Free()

    def counters(self) -> Counters:
        """MPI's own message counters of this process, by destination in COMM_WORLD."""
        return Counters(MPI._handleof(MPI.COMM_WORLD), MPI.COMM_WORLD.size)


def duplicated(
    duplicate: MPI.Intracomm, request: MPI.Request, timeout: float | None
) -> MpiTransport:
    """The transport of what `Idup` makes, as soon as all ranks have called that."""
    if not until(request.Test, deadline_in(timeout)):
        raise CollectiveTimeout(f"not all ranks have made this communicator within {timeout} s")
    return MpiTransport(duplicate)


def _limited(what: str, call: Callable[[], Any], deadline: float | None) -> Any:
    """Make a call of MPI's that knows no time limit and lets no signal in.

    Where MPI allows it another thread does, and it stays behind if we cannot wait any longer.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return call()
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            answer.set_exception(error)

    threading.Thread(target=make, name=f"collectives {what}", daemon=True).start()
    try:
        return answer.result(None if deadline is None else deadline - time.monotonic())
    except TimeoutError:
        raise CollectiveTimeout(f"{what}: not all ranks have called it in time") from None


class MpiMessages:
    """The messages of an execution that is interpreted, by mpi4py's own calls."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self._comm, self.tag = comm, tag
        self._requests: dict[int, MPI.Request] = {}
        self._ends: dict[int, tuple[int, bool, Bytes]] = {}  # peer, whether it is received, data
        self._statuses: list[MPI.Status] = []  # MPI adds as many as it needs

    def receive(self, slot: int, peer: int, data: Bytes) -> None:
        self._ends[slot] = peer, True, data
        self._requests[slot] = self._comm.Irecv([data, MPI.BYTE], peer, self.tag)

    def send(self, slot: int, peer: int, data: Bytes) -> None:
        self._ends[slot] = peer, False, data
        self._requests[slot] = self._comm.Isend([data, MPI.BYTE], peer, self.tag)

    def test(self, slots: range, num_receives: int) -> bool:
        requests = [self._requests[slot] for slot in slots]
        try:
            if not MPI.Request.Testall(requests, self._statuses):
                return False
        except MPI.Exception as error:
            raise explained(error, self._comm.rank, self._failed(slots)) from error.__cause__
        for number, slot in enumerate(slots[:num_receives]):  # MPI notices only what is too long
            peer, _, data = self._ends[slot]
            got = self._statuses[number].Get_count(MPI.BYTE)
            if got != data.size:
                raise CollectiveMismatch(wrong_length(self._comm.rank, peer, got, data.size))
        for slot in slots:
            del self._requests[slot], self._ends[slot]
        return True

    def _failed(self, slots: range) -> list[Failed]:
        ends = [self._ends[slot] for slot in slots]
        return [
            Failed(peer, is_receive, status.Get_error())
            for (peer, is_receive, _), status in zip(ends, self._statuses, strict=False)
        ]

    def waiting_for(self) -> list[Waiting]:
        # Not Test: it would take the status of a complete request away from the wait to come.
        return [
            Waiting(*self._ends[slot][:2])
            for slot, request in list(self._requests.items())
            if request and not request.Get_status()
        ]

    def abandon(self) -> bool:
        requests = list(self._requests.values())
        receives = [self._requests[slot] for slot in self._requests if self._ends[slot][1]]
        return called_off(requests, receives)


def _ranks_in(whole: MPI.Intracomm, comm: MPI.Intracomm) -> tuple[int, ...]:
    """The ranks that a communicator's ranks have in another one."""
    theirs, group = whole.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), theirs)
    theirs.Free()
    group.Free()
    return tuple(ranks)
