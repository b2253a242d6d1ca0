"""The MPI engine: point-to-point messages of mpi4py, and nothing else of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.errors import CollectiveMismatch
from collectives.monitor import Counters
from collectives.transport import Parcels, back_off, wrong_length

if TYPE_CHECKING:
    from collectives.plan import Plan

# One list for the process: a plan of one communicator may hold up the plan of another.
_in_flight: list[Plan] = []

# Open MPI's monitoring does not see persistent requests: they are started below the layer that
# counts.  When somebody is counting, every message is posted afresh.
_is_monitored = (
    os.environ.get("OMPI_MCA_pml_monitoring_enable", "0") != "0"  # noqa: SIM112 - its own spelling
)


# Looked up once: these are the calls that every round of every plan makes.
_start_all, _wait_all, _BYTE = MPI.Prequest.Startall, MPI.Request.Waitall, MPI.BYTE


class MpiTransport:
    """One rank's end of an MPI communicator that belongs to the library alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        largest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # MPI keeps it there alone
        assert isinstance(largest_tag, int)
        self.num_tags = largest_tag + 1
        self.in_flight = _in_flight

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

    def free(self) -> None:
        self.comm.Free()

    def counters(self) -> Counters:
        """MPI's own message counters of this process, by destination in COMM_WORLD."""
        return Counters(MPI._handleof(MPI.COMM_WORLD), MPI.COMM_WORLD.size)


class MpiExchange:
    """The messages of one round, posted afresh at every start."""

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        self._comm, self._tag = comm, tag
        self._sends = [([data, MPI.BYTE], peer) for peer, data in sends]
        self._receives = [([buffer, MPI.BYTE], peer) for peer, buffer in receives]
        self._expected = [(peer, buffer.size) for peer, buffer in receives]
        self._statuses = [MPI.Status() for _ in range(len(sends) + len(receives))]
        self._requests: list[MPI.Request] = []

    def start(self) -> None:
        comm, tag = self._comm, self._tag
        self._requests = [comm.Irecv(buffer, peer, tag) for buffer, peer in self._receives]
        self._requests += [comm.Isend(data, peer, tag) for data, peer in self._sends]

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
        # Receives come first in the lists.  MPI itself notices only messages that are too long.
        self._requests = []
        for (peer, expected), status in zip(self._expected, self._statuses, strict=False):
            if (got := status.Get_count(_BYTE)) != expected:
                raise CollectiveMismatch(wrong_length(self._comm.rank, peer, got, expected))

    def _explain(self, error: MPI.Exception) -> None:
        """Raise ours for MPI's error about a message longer than its buffer."""
        if error.Get_error_class() in (MPI.ERR_TRUNCATE, MPI.ERR_IN_STATUS):
            raise CollectiveMismatch(
                f"rank {self._comm.rank} got a longer message than it expected: "
                "the ranks did not make the same call with the same sizes"
            ) from error

    def waiting_for(self) -> list[str]:
        ends = [f"a message from rank {peer}" for _, peer in self._receives]
        ends += [f"rank {peer} to receive" for _, peer in self._sends]
        # Not Test: it would take the status of a complete request away from the wait to come.
        pairs = zip(ends, self._requests, strict=False)
        return [end for end, request in pairs if not request.Get_status()]

    def free(self) -> None:
        """Nothing is held between runs."""


class PersistentExchange(MpiExchange):
    """The messages of one round as persistent requests: made once, started many times."""

    def __init__(self, comm: MPI.Intracomm, sends: Parcels, receives: Parcels, tag: int) -> None:
        super().__init__(comm, sends, receives, tag)
        self._kept = [comm.Recv_init(buffer, peer, tag) for buffer, peer in self._receives]
        self._kept += [comm.Send_init(data, peer, tag) for data, peer in self._sends]

    def start(self) -> None:
        self._requests = [*self._kept]
        if self._kept:
            _start_all(self._kept)

    def free(self) -> None:
        for request in self._kept:
            request.Free()
        self._kept = []
