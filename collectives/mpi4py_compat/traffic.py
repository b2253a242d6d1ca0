"""What a program sends by this library, by call site, printed when it ends."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from functools import cache

from mpi4py import MPI

from collectives.communicator import Communicator, follow
from collectives.diagnostics import Totals, unseen
from collectives.engines import deadline_in, poll_until
from collectives.mpi4py_compat.intracomm import Intracomm
from collectives.mpi4py_compat.traffic_table import Sums, traffic_table
from collectives.runtime import place_of_caller

_SECONDS = 30.0  # that rank 0, when it ends, waits for the others, and they for it
_SECONDS_AFTER_FAILURE = 1.0  # the same if the program fails: the others may never come
_NOTHING = [None, 0, MPI.BYTE]


class Traffic:
    """A record of what this library sends; rank 0 prints it at the end.

    It sees the calls of `comm` and of all communicators of this library that are made later, by
    `collectives.wrap` or as a process group of PyTorch as well.  The ledgers of the program do not
    change.
    """

    def __init__(self, comm: Intracomm) -> None:
        self._totals = Totals()
        self._comm = MPI.Intracomm(comm).Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._is_reported = False
        self._record(comm.communicator)
        follow(self._record)
        self._finalize = MPI.Finalize
        MPI.Finalize = self._report_and_finalize

    def _record(self, communicator: Communicator) -> None:
        """Record what a communicator, and those made from it, send."""
        session = communicator._session
        session.site_of_call = call_site
        session.add_ledger(self._totals)

    def _report_and_finalize(self) -> None:
        """Print the report and finalize MPI: `MPI.Finalize` of the program is this method."""
        self.report()
        self._finalize()

    def report(self, has_failed: bool = False) -> None:
        """Print the table of all ranks on rank 0, once, before MPI is finalized.

        All ranks call it when they end.  The table says which ranks did not within a time limit,
        which is short if the program `has_failed`.  Then the other ranks may be waiting for this
        one, and rank 0 among them: a rank that it does not answer prints its own table.
        """
        if self._is_reported or MPI.Is_finalized():
            return
        self._is_reported = True
        seconds = _SECONDS_AFTER_FAILURE if has_failed else _SECONDS
        sums = [[*kind, *sent] for kind, sent in self._totals.summary().items()]
        mine = json.dumps([sums, unseen()])
        if self._comm.rank == 0:
            self._print_all(mine.encode(), seconds)
        elif not self._is_delivered(mine.encode(), 2 * seconds) and has_failed:
            self._print({self._comm.rank: mine.encode()})

    def _print_all(self, mine: bytes, seconds: float) -> None:
        """Receive the numbers of the others, print the table, and let the others end."""
        parts = {0: mine}

        def have_all_come() -> bool:
            while self._comm.Iprobe(status=(status := MPI.Status())):
                data = bytearray(status.Get_count(MPI.BYTE))
                self._comm.Recv([data, MPI.BYTE], status.source)
                parts[status.source] = bytes(data)
            return len(parts) == self._comm.size

        with suppress(MPI.Exception):  # a rank has died
            poll_until(have_all_come, deadline_in(seconds))
        self._print(parts)
        with suppress(MPI.Exception):
            for rank in parts.keys() - {0}:
                self._comm.Isend(_NOTHING, rank)

    def _is_delivered(self, mine: bytes, seconds: float) -> bool:
        """Send the numbers to rank 0; return whether it has answered, after printing them."""
        data = MPI.Alloc_mem(len(mine))  # it outlives the interpreter, if rank 0 comes later
        data[:] = mine
        try:
            self._comm.Isend([data, MPI.BYTE], 0)
            answer = self._comm.Irecv(_NOTHING, 0)
            if poll_until(answer.Test, deadline_in(seconds)):
                return True
            answer.Cancel()
            answer.Wait()
        except MPI.Exception:  # rank 0 has died
            pass
        return False

    def _print(self, parts: dict[int, bytes]) -> None:
        sums, sentences = dict[int, Sums](), dict[str, None]()
        for rank in sorted(parts):  # so that the order does not depend on which rank ended first
            sums[rank], of_rank = json.loads(parts[rank])
            sentences.update(dict.fromkeys(of_rank))
        lines = traffic_table(sums, self._comm.size, sentences)
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()


def call_site() -> str:
    """Return the file and the line of the program that makes a call now."""
    path, line = place_of_caller()
    return f"{_shown(path)}:{line}"


@cache
def _shown(path: str) -> str:
    """Return the path of a file, relative to the folder of its import or the current folder."""
    path = os.path.abspath(path)
    folders = [os.path.abspath(folder) + os.sep for folder in (*sys.path, os.curdir)]
    return path[max((len(folder) for folder in folders if path.startswith(folder)), default=0) :]
