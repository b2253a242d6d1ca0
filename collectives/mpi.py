"""The MPI engine: point-to-point messages of mpi4py, and nothing else of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.arrays import Bytes
from collectives.errors import CollectiveMismatch
from collectives.monitor import Counters
from collectives.transport import Parcels, back_off, wrong_length

if TYPE_CHECKING:
    from collectives.plan import Plan

# One list for the process: a plan of one communicator may hold up the plan of another.
_in_flight: list[Plan] = []
_failed: list[Plan] = []

# Open MPI's monitoring does not see persistent requests: they are started below the layer that
# counts.  When somebody is counting, every message is posted afresh.
_is_monitored = (
    os.environ.get("OMPI_MCA_pml_monitoring_enable", "0") != "0"  # noqa: SIM112 - its own spelling
)


_MOST_BYTES, _MEBIBYTE = 2**31 - 1, 2**20

# Looked up once: these are the calls that every round of every plan makes.
_start_all, _wait_all = MPI.Prequest.Startall, MPI.Request.Waitall


class MpiTransport:
    """One rank's end of an MPI communicator that belongs to the library alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        largest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # MPI keeps it there alone
        assert isinstance(largest_tag, int)
        self.num_tags = largest_tag + 1
        self.in_flight, self.failed = _in_flight, _failed

    def exchange(
        self, sends: Parcels, receives: Parcels, tag: int, is_kept: bool
    ) -> MpiExchange | PersistentExchange:
        kind = PersistentExchange if is_kept and not _is_monitored else MpiExchange
        return kind(self.comm, sends, receives, tag)

    def subgroup(self, ranks: Sequence[int]) -> MpiTransport:
        group = self.comm.group.Incl(list(ranks))
        comm = self.comm.Create_group(group)
        group.Free()
        return MpiTransport(comm)

    def split(self, ranks: Sequence[int] | None) -> MpiTransport | None:
        # Unlike Create_group, Split keeps its own messages out of Open MPI's count of the user's.
        if ranks is None:
            self.comm.Split(MPI.UNDEFINED)
            return None
        comm = self.comm.Split(min(ranks), list(ranks).index(self.rank))
        assert isinstance(comm, MPI.Intracomm)
        return MpiTransport(comm)

    def pause(self, deadline: float | None, num_tries: int) -> None:
        back_off(num_tries)

    def free(self) -> None:
        self.comm.Free()

    def counters(self) -> Counters:
        """MPI's own message counters of this process, by destination in COMM_WORLD."""
        return Counters(MPI._handleof(MPI.COMM_WORLD), MPI.COMM_WORLD.size)


class MpiExchange:
    """The messages of one round, posted afresh at every start.

    Receives come before sends in all lists.
    """

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        self._comm, self._tag, self._num_receives = comm, tag, len(receives)
        self._ends = [(peer, _message(data)) for peer, data in (*receives, *sends)]
        self._expected = [data.size for _, data in receives]
        self._statuses = [MPI.Status() for _ in self._ends]
        self._requests: Sequence[MPI.Request] = ()

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
        if deadline is not None:
            return self._wait_until(deadline)
        if self._requests:
            try:
                _wait_all(self._requests, self._statuses)
            except MPI.Exception as error:
                self._explain(error)
                raise
            self._completed()
        return True

    def _wait_until(self, deadline: float) -> bool:
        num_tries = 0
        while not self.test():
            if time.monotonic() > deadline:
                return False
            back_off(num_tries)
            num_tries += 1
        return True

    def _completed(self) -> None:
        """Check the lengths: MPI itself notices only messages that are too long."""
        self._requests = ()
        for number, expected in enumerate(self._expected):
            peer, message = self._ends[number]
            got = self._statuses[number].Get_elements(message[-1])
            if got != expected:
                raise CollectiveMismatch(wrong_length(self._comm.rank, peer, got, expected))

    def _explain(self, error: MPI.Exception) -> None:
        """Raise ours for MPI's error about a message longer than its buffer."""
        if error.Get_error_class() not in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            return
        raise CollectiveMismatch(
            f"{self._too_long()}: the ranks did not make the same call with the same sizes"
        ) from error

    def _too_long(self) -> str:
        """Which message it was, as far as MPI says."""
        me = self._comm.rank
        for number, status in enumerate(self._statuses):
            if status.Get_error() not in (MPI.SUCCESS, MPI.ERR_PENDING):
                peer = self._ends[number][0]
                sender, receiver = (peer, me) if number < self._num_receives else (me, peer)
                return f"rank {sender} sent rank {receiver} a longer message than it expected"
        return f"a message between rank {me} and another was longer than expected"

    def waiting_for(self) -> list[str]:
        # Not Test: it would take the status of a complete request away from the wait to come.
        is_open = [not request.Get_status() for request in self._requests]
        return [
            f"a message from rank {peer}"
            if number < self._num_receives
            else f"rank {peer} to receive"
            for number, (peer, _) in enumerate(self._ends)
            if is_open[number]
        ]

    def free(self) -> None:
        """Nothing is held between runs."""


class PersistentExchange(MpiExchange):
    """The messages of one round as persistent requests: made once, started many times."""

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        super().__init__(comm, sends, receives, tag)
        first_send = self._num_receives
        self._kept = [comm.Recv_init(data, peer, tag) for peer, data in self._ends[:first_send]]
        self._kept += [comm.Send_init(data, peer, tag) for peer, data in self._ends[first_send:]]

    def start(self) -> None:
        self._requests = self._kept
        if self._kept:
            _start_all(self._kept)

    def free(self) -> None:
        for request in self._kept:
            request.Free()
        self._kept = []


def _message(data: Bytes) -> tuple[Bytes, MPI.Datatype] | tuple[Bytes, int, MPI.Datatype]:
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
