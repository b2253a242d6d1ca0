"""The MPI engine: point-to-point messages of mpi4py, and nothing else of it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.arrays import Bytes
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerFailed
from collectives.flight_recorder import FlightRecorder, Waiting
from collectives.monitor import Counters
from collectives.transport import (
    Action,
    Parcels,
    back_off,
    deadline_in,
    until,
    wrong_length,
)

if TYPE_CHECKING:
    from collectives.plan import Plan

# One list for the process: a plan of one communicator may hold up the plan of another.
_in_flight: list[Plan] = []
_failed: list[Plan] = []
_flight = FlightRecorder(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
_num_alike: Counter[tuple[int, ...]] = Counter()  # communicators of the same ranks

# Open MPI's monitoring does not see persistent requests: they are started below the layer that
# counts.  When somebody is counting, every message is posted afresh.
_is_monitored = (
    os.environ.get("OMPI_MCA_pml_monitoring_enable", "0") != "0"  # noqa: SIM112 - its own spelling
)


_MOST_BYTES, _MEBIBYTE = 2**31 - 1, 2**20

_FEW = 4  # up to so many requests are quicker started and waited for one by one
_PATIENCE = 0.1  # seconds that a message called off gets to be over
_NEWS = 1.0  # seconds that it may take to learn which ranks have failed

# Fault tolerance (ULFM) is a matter of how Open MPI was started; MPICH has none of it.
_FAILURES = {MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED} - {MPI.ERR_UNKNOWN}
_is_fault_tolerant = (
    os.environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")  # noqa: SIM112 - as above
)


# What mpi4py takes for a message.
_Words: TypeAlias = tuple[Bytes, MPI.Datatype] | tuple[Bytes, int, MPI.Datatype]


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

    def exchange(
        self, sends: Parcels, receives: Parcels, tag: int, is_kept: bool
    ) -> MpiExchange | PersistentExchange:
        kind = PersistentExchange if is_kept and not _is_monitored else MpiExchange
        return kind(self.comm, sends, receives, tag)

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

    def pause(self, deadline: float | None, num_tries: int) -> None:
        back_off(num_tries)

    def meaning(self, error: BaseException) -> BaseException:
        if not isinstance(error, MPI.Exception) or error.Get_error_class() not in _FAILURES:
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
            is_met = error.Get_error_class() in _FAILURES
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


class MpiExchange:
    """The messages of one round, posted afresh at every start.

    Receives come before sends in all lists.
    """

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        self._comm, self._tag, self._num_receives = comm, tag, len(receives)
        self._ends = [(peer, _message(data)) for peer, data in (*receives, *sends)]
        self._expected = [data.size for _, data in receives]
        self._requests: Sequence[MPI.Request] = ()
        self._statuses: list[MPI.Status] = []  # MPI adds as many as it needs
        self.starts: list[Action] = [self.start] if self._ends else []
        self.waits: list[Action] = [self.test] if self._ends else []

    def start(self) -> None:
        comm, tag, first_send = self._comm, self._tag, self._num_receives
        requests = [comm.Irecv(data, peer, tag) for peer, data in self._ends[:first_send]]
        requests += [comm.Isend(data, peer, tag) for peer, data in self._ends[first_send:]]
        self._requests = requests

    def test(self) -> bool:
        if not self._requests:
            return True
        try:
            is_complete = MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as error:
            self._explain(error)
            raise
        if is_complete:
            self._completed()
        return bool(is_complete)

    def wait(self, deadline: float | None) -> bool:
        return until(self.test, deadline)

    def _completed(self) -> None:
        """Check the lengths: MPI itself notices only messages that are too long."""
        for number in range(self._num_receives):
            self._check_length(number, self._statuses[number])

    def _check_length(self, number: int, status: MPI.Status) -> None:
        peer, message = self._ends[number]
        got, expected = status.Get_elements(message[-1]), self._expected[number]
        if got != expected:
            raise CollectiveMismatch(wrong_length(self._comm.rank, peer, got, expected))

    def _explain(self, error: MPI.Exception, number: int | None = None) -> None:
        """Raise ours for MPI's error about a message longer than its buffer.

        `number`: which message it is, if that is known.
        """
        if error.Get_error_class() == MPI.ERR_IN_STATUS:
            self._raise_failure()
        elif error.Get_error_class() != MPI.ERR_TRUNCATE:
            return
        raise CollectiveMismatch(
            f"{self._too_long(number)}: the ranks did not make the same call with the same sizes"
        ) from error

    def _raise_failure(self) -> None:
        """If one of several messages failed because a rank did, that is what went wrong."""
        for status in self._statuses[: len(self._ends)]:
            error = MPI.Exception(status.Get_error())
            if error.Get_error_class() in _FAILURES:
                raise error

    def _too_long(self, number: int | None) -> str:
        """Which message it was, as far as MPI says."""
        me = self._comm.rank
        if number is None:
            codes = [status.Get_error() for status in self._statuses[: len(self._ends)]]
            failed = [i for i, c in enumerate(codes) if c not in (MPI.SUCCESS, MPI.ERR_PENDING)]
            number = failed[0] if failed else None
        if number is None:
            return f"a message between rank {me} and another was longer than expected"
        peer = self._ends[number][0]
        sender, receiver = (peer, me) if number < self._num_receives else (me, peer)
        return f"rank {sender} sent rank {receiver} a longer message than it expected"

    def retag(self, tag: int) -> None:
        self._tag = tag

    def waiting_for(self) -> list[Waiting]:
        # Not Test: it would take the status of a complete request away from the wait to come.
        return [
            Waiting(peer, number < self._num_receives)
            for number, ((peer, _), request) in enumerate(self._posted())
            if not request.Get_status()
        ]

    def _posted(self) -> zip[tuple[tuple[int, _Words], MPI.Request]]:
        """The messages and their requests, if there are any yet."""
        return zip(self._ends, self._requests, strict=False)

    def abandon(self) -> bool:
        requests, self._requests = self._requests, ()
        return _called_off(requests, self._num_receives)

    def free(self) -> None:
        """Nothing is held between runs."""


class PersistentExchange(MpiExchange):
    """The messages of one round as persistent requests: made once, started many times."""

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        super().__init__(comm, sends, receives, tag)
        first_send = self._num_receives
        requests = [comm.Recv_init(data, peer, tag) for peer, data in self._ends[:first_send]]
        requests += [comm.Send_init(data, peer, tag) for peer, data in self._ends[first_send:]]
        self._requests = requests
        if len(requests) > _FEW:
            self.starts = [partial(MPI.Prequest.Startall, requests)]
        elif requests:
            self.starts = [request.Start for request in requests]
            self.waits = [self._arrival(number) for number in range(first_send)]
            self.waits += [request.Test for request in requests[first_send:]]

    def start(self) -> None:
        for start in self.starts:
            start()

    def _arrival(self, number: int) -> Action:
        """Whether one message is there; then its length is checked."""
        status = MPI.Status()
        test = partial(self._requests[number].Test, status)
        measure, datatype = status.Get_elements, self._ends[number][1][-1]
        expected = self._expected[number]

        def has_arrived() -> bool:
            try:
                if not test():
                    return False
            except MPI.Exception as error:
                self._explain(error, number)
                raise
            if measure(datatype) != expected:
                self._check_length(number, status)
            return True

        return has_arrived

    def free(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests = ()


def _ranks_in(whole: MPI.Intracomm, comm: MPI.Intracomm) -> tuple[int, ...]:
    """The ranks that a communicator's ranks have in another one."""
    theirs, group = whole.Get_group(), comm.Get_group()
    ranks = MPI.Group.Translate_ranks(group, range(group.size), theirs)
    theirs.Free()
    group.Free()
    return tuple(ranks)


def _called_off(requests: Sequence[MPI.Request], num_receives: int) -> bool:
    """Call off the receives among the requests and let all go; whether all were over by then.

    A receive whose message has begun to come, and a send, can only be waited for.
    """
    for request in requests[:num_receives]:
        if request and not request.Get_status():
            request.Cancel()
    deadline = time.monotonic() + _PATIENCE
    are_over = [until(partial(_is_over, request), deadline) for request in requests]
    for request in requests:
        if request:
            request.Free()
    return all(are_over)


def _is_over(request: MPI.Request) -> bool:
    """Whether the request is complete; one that MPI has ended with an error is over too."""
    return not request or bool(request.Get_status())


def _message(data: Bytes) -> _Words:
    """What mpi4py takes for these bytes, as one message however many they are."""
    if data.size <= _MOST_BYTES:
        return data, MPI.BYTE
    return data, 1, _whole(data.size)


@cache
def _whole(num_bytes: int) -> MPI.Datatype:
    """One element of so many bytes: not every MPI takes a count above 2**31 - 1."""
    num_full, rest = divmod(num_bytes, _MEBIBYTE)
    full = MPI.BYTE.Create_contiguous(_MEBIBYTE)
    whole = MPI.Datatype.Create_struct(
        [num_full, rest], [0, num_full * _MEBIBYTE], [full, MPI.BYTE]
    ).Commit()
    full.Free()
    return whole
