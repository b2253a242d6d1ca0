"""The MPI engine: it uses only mpi4py's point-to-point messages."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays import Backend, Bytes, jit
from collectives.diagnostics import Counters, FlightRecorder, Waiting
from collectives.engines import compiled
from collectives.engines.board import Board
from collectives.engines.compiled import CompiledExecution, Port
from collectives.engines.host_memory import FOLDER, HostMemory, make_file, map_file
from collectives.engines.interpreter import Interpreted
from collectives.engines.mpi_errors import (
    FAILURES,
    Failed,
    cancel_all,
    is_complete,
    translate_message_error,
)
from collectives.engines.progress import calls_in_progress
from collectives.engines.staging import PageLockedMemory, Staged
from collectives.engines.transport import (
    Execution,
    MessageMemory,
    Operands,
    PendingCall,
    Transport,
    Waiter,
    back_off,
    deadline_in,
    poll_until,
    wrong_length,
)
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerFailed
from collectives.programs import Program

# The process has one list, because a call of one communicator may block a call of another.
_in_flight: list[PendingCall] = []
_failed: list[Any] = []
_flight = FlightRecorder(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
_num_alike: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks

_MAX_WAIT = 1e-3  # seconds that the compiled loop waits before Python checks for signals
_FAILURE_POLL = 0.1  # seconds between two looks for ranks that have failed
_FAILURE_NEWS = 1.0  # seconds within which every rank learns which ranks have failed

# Set when Open MPI is started with fault tolerance.
_is_fault_tolerant = (
    os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 - as above
)


@atexit.register
def _keep_memory_past_finalize() -> None:
    """Keep the memory of unfinished calls until the process ends.

    MPI_Finalize runs after the interpreter has freed its objects, and still transfers messages.
    """
    for call in (*_in_flight, *_failed, *calls_in_progress()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(call))


class MpiTransport:
    """One rank's end of an MPI communicator that only this library uses."""

    def __init__(self, comm: MPI.Intracomm, host: Host | None = None) -> None:
        """Use a communicator, and the memory of its host where it is known."""
        self.comm = comm
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # so that mpi4py raises them
        self.rank, self.size = comm.rank, comm.size
        largest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # only COMM_WORLD has this attribute
        assert isinstance(largest_tag, int)
        self.num_tags = largest_tag + 1
        self.in_flight, self.failed, self.flight = _in_flight, _failed, _flight
        members = _ranks_in(MPI.COMM_WORLD, comm)
        _num_alike[members] += 1
        self.identity = members, _num_alike[members]
        self.log = _flight.log(*self.identity)
        self.message_memory: Callable[[Backend], MessageMemory] = PageLockedMemory
        self.use_host(host or Host(None, {}, "the memory of the host is not shared"))

    def use_host(self, host: Host) -> None:
        """Show the other ranks of the host what this rank does in memory that they share."""
        self.host, (members, _) = host, self.identity
        parts = [host.parts.get(rank) for rank in members]
        self.board = Board(host.memory, parts, self.rank, self.identity, host.why_none)

    @cached_property
    def port(self) -> Port:
        """The data of this communicator that the compiled loop needs."""
        return Port(self.comm)

    @property
    def can_use_threads(self) -> bool:
        """Whether MPI was started for calls of several threads at the same time."""
        return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)

    @property
    def why_interpreted(self) -> str | None:
        """Why Python runs the programs instead of the compiled loop; None if the loop does."""
        return compiled.why_unavailable()

    def execution(
        self,
        program: Program,
        operands: Operands,
        tag: int,
        host_calls: NDArray[np.int64] | None = None,
    ) -> Execution:
        if not operands.backend.is_host:
            return Staged(program, operands, self, tag, host_calls)
        if self.why_interpreted is not None:
            return Interpreted(program, operands, self.messages(tag), host_calls)
        return CompiledExecution(self.port, program, operands, tag, host_calls)

    def messages(self, tag: int) -> MpiMessages:
        return MpiMessages(self.comm, tag)

    def probe(self, tag: int) -> int | None:
        status = MPI.Status()
        return status.source if self.comm.Iprobe(MPI.ANY_SOURCE, tag, status) else None

    def subgroup(self, ranks: Sequence[int], deadline: float | None) -> MpiTransport:
        everyone = self.comm.Get_group()
        group = everyone.Incl(list(ranks))
        make = partial(self.comm.Create_group, group)
        comm = _call_by_deadline("subgroup", make, deadline, partial(self.have_failed, ranks))
        group.Free()
        everyone.Free()
        return MpiTransport(comm, self.host)

    def split(self, ranks: Sequence[int] | None, deadline: float | None) -> MpiTransport | None:
        # Open MPI counts the messages of Create_group as the user's, but not the messages of Split.
        color, key = (MPI.UNDEFINED, 0) if ranks is None else (min(ranks), ranks.index(self.rank))
        make = partial(self.comm.Split, color, key)
        everyone = range(self.size)
        comm = _call_by_deadline("split", make, deadline, partial(self.have_failed, everyone))
        return None if ranks is None else MpiTransport(comm, self.host)

    @property
    def max_wait(self) -> float:
        return 0.0 if self.why_interpreted else _MAX_WAIT

    def watch(self, waiter: Waiter) -> None:
        """Do nothing: `pause` is short."""

    def unwatch(self, waiter: Waiter) -> None:
        """Do nothing."""

    def pause(self, deadline: float | None, num_tries: int) -> None:
        back_off(num_tries)

    def translate_error(self, error: BaseException) -> BaseException:
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in FAILURES:
            return error
        self.comm.Revoke()  # ranks that wait for this one would otherwise wait for ever
        ranks = _news_of_failed(self.comm)
        return PeerFailed(f"{_named(ranks)}; shrink() makes a communicator of the others", ranks)

    def have_failed(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks is known to have failed."""
        return not _failed_ranks(self.comm).isdisjoint(ranks)

    can_shrink = _is_fault_tolerant

    def shrink(self, deadline: float | None, interrupt: bool) -> tuple[MpiTransport, list[int]]:
        if not self.can_shrink:
            raise CollectiveError(
                "shrink() needs an Open MPI that was started with fault tolerance: "
                "ring launch --fault-tolerant, or mpirun --with-ft ulfm"
            )
        if interrupt:
            self.comm.Revoke()
        self._wait_for_survivors(deadline)
        comm: MPI.Intracomm = _call_by_deadline("shrink", self.comm.Shrink, deadline)
        return MpiTransport(comm, self.host), list(_ranks_in(self.comm, comm))

    def _wait_for_survivors(self, deadline: float | None) -> None:
        """Wait until all ranks that are alive call this, even if the communicator is revoked."""
        flag = np.ones(1, np.intc)
        try:
            have_all_called = poll_until(self.comm.Iagree(flag).Test, deadline)
        except MPI.Exception as error:  # MPI reports the failed ranks when all others are here
            have_all_called = error.Get_error_class() in FAILURES
        if not have_all_called:
            raise CollectiveTimeout("shrink: not all ranks that are alive have called it in time")

    def free(self) -> None:
        self.comm.Free()

    def counters(self) -> Counters:
        """Return MPI's own message counters of this process, by destination in COMM_WORLD."""
        return Counters(MPI._handleof(MPI.COMM_WORLD), MPI.COMM_WORLD.size)


def _failed_ranks(comm: MPI.Intracomm) -> set[int]:
    """Return the ranks of a communicator that are known to have failed."""
    if not _is_fault_tolerant:
        return set()
    failed, group = comm.Get_failed(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(failed, range(failed.size), group)
    failed.Free()
    group.Free()
    return set(ranks)


def _news_of_failed(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks that have failed, after MPI has reported a failure.

    The news of which ranks have failed may take a moment.
    """
    deadline = time.monotonic() + _FAILURE_NEWS
    while not (ranks := _failed_ranks(comm)) and time.monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # MPI receives the news only while it is called
        time.sleep(1e-3)
    return tuple(sorted(ranks))


def _named(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks)) or "of another communicator"
    return f"rank {names} has failed"


def duplicated(
    comm: MPI.Intracomm,
    duplicate: MPI.Intracomm,
    request: MPI.Request,
    timeout: float | None,
    parent: Transport | None = None,
) -> MpiTransport:
    """Return the transport of a duplicate that `comm.Idup` makes, when all ranks have called it.

    The `parent` is the transport of a communicator that has all ranks of `comm`.
    """
    is_made = partial(poll_until, request.Test)
    deadline = deadline_in(timeout)
    try:
        have_all_called = _is_done_by(deadline, is_made, lambda: bool(_failed_ranks(comm)))
    except MPI.Exception as error:  # Open MPI also reports a dead rank as an internal error
        ranks = _news_of_failed(comm) if _is_fault_tolerant else ()
        if not ranks and error.Get_error_class() not in FAILURES:
            raise
        message = f"{_named(ranks)} before this communicator was made"
        raise PeerFailed(message, ranks) from error
    if not have_all_called:
        raise CollectiveTimeout(f"not all ranks have made this communicator within {timeout} s")
    return MpiTransport(duplicate, parent.host if isinstance(parent, MpiTransport) else None)


_hosts_of_world: list[int] = []  # for each rank of COMM_WORLD, once they have been found together


class Host(NamedTuple):
    """The memory of a host, and the part of each of its ranks of COMM_WORLD; or why there is none.

    It is made once for all communicators, if the first one has all ranks of the job.
    """

    memory: HostMemory | None
    parts: Mapping[int, int]
    why_none: str = ""


_host_of_world: list[Host] = []


def hosts_of(transport: MpiTransport, timeout: float | None) -> list[int]:
    """Return for each rank a number that is equal for ranks that can share memory.

    All ranks call this.  MPI is asked once if the first communicator has all ranks of the job; it
    sends messages of its own.
    """
    members, _ = transport.identity
    if transport.size == 1:
        return [0]
    if _hosts_of_world and MPI.UNDEFINED not in members:
        transport.use_host(_host_of_world[0])
        return [_hosts_of_world[rank] for rank in members]
    ask = partial(_lowest_ranks, transport.comm)
    has_failed = partial(transport.have_failed, range(transport.size))
    try:
        hosts, host = _call_by_deadline("topology", ask, deadline_in(timeout), has_failed)
    except MPI.Exception as error:
        failure = transport.translate_error(error)
        if failure is error:
            raise
        raise failure from error
    transport.use_host(host)
    if sorted(members) == list(range(MPI.COMM_WORLD.size)):
        _host_of_world[:] = [host]
        _hosts_of_world[:] = [hosts[members.index(rank)] for rank in range(transport.size)]
    return list(hosts)


def _lowest_ranks(comm: MPI.Intracomm) -> tuple[list[int], Host]:
    """Return for each rank the lowest rank that shares memory with it, and this rank's memory."""
    host: Any = comm.Split_type(MPI.COMM_TYPE_SHARED)
    lowest = np.array(_ranks_in(comm, host)[:1], np.intc)
    shared = _shared_by(host)
    host.Free()
    lowest_ranks = np.empty(comm.size, np.intc)
    comm.Allgather(lowest, lowest_ranks)
    return list(map(int, lowest_ranks)), shared


def _shared_by(host: MPI.Intracomm) -> Host:
    """Return memory that the ranks of a host share: a file that has no name once all opened it."""
    members = _ranks_in(MPI.COMM_WORLD, host)
    if MPI.UNDEFINED in members:
        return Host(None, {}, "the ranks belong to several jobs")
    path, why = "", ""
    try:
        path = make_file(host.size) if host.rank == 0 else ""
    except OSError as error:
        why = f"{FOLDER} has no room for what ranks share: {error}"
    path, why = host.bcast((path, why))
    memory = None
    try:
        memory = map_file(path, host.size) if path else None
    except (OSError, ValueError) as error:
        why = f"what ranks share cannot be mapped: {error}"
    whys = host.allgather(why)
    if path and host.rank == 0:
        os.unlink(path)
    if memory is None or any(whys):
        return Host(None, {}, next(filter(None, whys), ""))
    parts = {rank: part for part, rank in enumerate(members)}
    shared = HostMemory(memory, host.size, host.rank)
    atexit.register(shared.end_process)
    return Host(shared, parts)


def _call_by_deadline(
    what: str,
    call: Callable[[], Any],
    deadline: float | None,
    has_failed: Callable[[], bool] | None = None,
) -> Any:
    """Make a blocking call of MPI, which has no time limit and blocks signals.

    If MPI supports threads, another thread makes the call, and is left behind after `deadline`, or
    when `has_failed()`.
    """
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE or jit.is_at_exit():
        return call()
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            answer.set_exception(error)

    threading.Thread(target=make, name=f"collectives {what}", daemon=True).start()

    def is_answered(until: float) -> bool:
        return answer in wait([answer], until - time.monotonic()).done

    if not _is_done_by(deadline, is_answered, has_failed):
        raise CollectiveTimeout(f"{what}: not all ranks have called it in time")
    return answer.result()


def _is_done_by(
    deadline: float | None, is_done: Callable[[float], bool], has_failed: Callable[[], bool] | None
) -> bool:
    """Wait until `is_done(until)`, which itself waits until then; return False at the deadline.

    Raises MPI's error when `has_failed()`: Open MPI can wait for a dead rank for ever when it makes
    a communicator.
    """
    end = math.inf if deadline is None else deadline
    while not is_done(min(end, time.monotonic() + _FAILURE_POLL)):
        if time.monotonic() >= end:
            return False
        if has_failed is not None and has_failed():
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
    return True


class MpiMessages:
    """The messages of an interpreted execution, by mpi4py's own calls."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self._comm, self.tag = comm, tag
        self.lengths: dict[int, int] = {}
        self._requests: dict[int, MPI.Request] = {}
        self._ends: dict[int, tuple[int, bool, Bytes]] = {}  # peer, whether it is received, data
        self._may_be_shorter = set[int]()
        self._statuses: list[MPI.Status] = []  # MPI adds as many as it needs
        self._completed = frozenset[int]()  # slots of messages that are known to be complete

    def receive(self, slot: int, peer: int, data: Bytes, *, may_be_shorter: bool = False) -> None:
        self._ends[slot] = peer, True, data
        (self._may_be_shorter.add if may_be_shorter else self._may_be_shorter.discard)(slot)
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
            raise translate_message_error(
                error, self._comm.rank, self._failed(slots)
            ) from error.__cause__
        for number, slot in enumerate(slots[:num_receives]):  # MPI checks only for longer ones
            peer, _, data = self._ends[slot]
            got = self._statuses[number].Get_count(MPI.BYTE)
            if slot in self._may_be_shorter:
                self.lengths[slot] = got
            elif got != data.size:
                raise CollectiveMismatch(wrong_length(self._comm.rank, peer, got, data.size))
        for slot in slots:
            del self._requests[slot], self._ends[slot]
        self._completed = frozenset()
        return True

    def _failed(self, slots: range) -> list[Failed]:
        ends = [self._ends[slot] for slot in slots]
        return [
            Failed(peer, is_receive, status.Get_error())
            for (peer, is_receive, _), status in zip(ends, self._statuses, strict=False)
        ]

    def note_completed(self) -> None:
        requests = self._requests.items()
        self._completed = frozenset(slot for slot, request in requests if is_complete(request))

    def waiting_for(self) -> list[Waiting]:
        completed = self._completed
        ends = self._ends.copy()  # in one step, for another thread may change it
        return [
            Waiting(peer, is_receive)
            for slot, (peer, is_receive, _) in ends.items()
            if slot not in completed
        ]

    def abandon(self) -> bool:
        requests = list(self._requests.values())
        receives = [self._requests[slot] for slot in self._requests if self._ends[slot][1]]
        return cancel_all(requests, receives)


def _ranks_in(whole: MPI.Intracomm, comm: MPI.Intracomm) -> tuple[int, ...]:
    """Return the ranks in `whole` of the ranks of `comm`."""
    theirs, group = whole.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), theirs)
    theirs.Free()
    group.Free()
    return tuple(ranks)
