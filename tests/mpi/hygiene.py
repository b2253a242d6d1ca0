"""After every test under MPI nothing is left: no request, message, tag or communicator.

The library's communicators are replaced by ones that note the requests made on them.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

import collectives
from collectives.engines.compiled import CompiledExecution
from collectives.engines.mpi import MpiTransport
from collectives.runtime.session import Session
from tests.hygiene import afterwards, calls_of, is_broken, numbers, out_of_step, unfinished

_requests: list[tuple[MPI.Request, str]] = []


class Watched(MPI.Intracomm):
    """A communicator that notes its requests."""

    def Irecv(self, buf: Any, source: int, tag: int) -> MPI.Request:  # noqa: N802
        return noted(super().Irecv(buf, source, tag), f"a receive from rank {source}")

    def Isend(self, buf: Any, dest: int, tag: int) -> MPI.Request:  # noqa: N802
        return noted(super().Isend(buf, dest, tag), f"a send to rank {dest}")


def noted(request: Any, what: str) -> Any:
    _requests.append((request, what))
    return request


def forget_completed() -> None:
    """Forget the requests that are complete, and with them their buffers."""
    _requests[:] = [(request, what) for request, what in _requests if request]


class MadeOverMpi:
    """What this rank has made of MPI's since the last `begin`, and the worlds, which stay."""

    def __init__(self, agreement: MPI.Intracomm) -> None:
        self.agreement = agreement
        self.transports: list[MpiTransport] = []
        self.sessions: list[tuple[tuple[int, ...], Session]] = []  # with their ranks of the world
        self.known: list[Any] = []  # unfinished when the test began
        self.executions: list[Any] = []
        afterwards(CompiledExecution, "__init__", lambda made, _: self._note_execution(made))
        afterwards(MpiTransport, "__init__", lambda transport, _: self._note_transport(transport))
        afterwards(Session, "__init__", lambda session, _: self._note_session(session))
        self.worlds = [
            collectives.world(progress=progress, check=check)
            for progress in (None, "thread")
            for check in (None, False, True, "finite")
        ]
        self.lasting = list(self.transports), list(self.sessions)

    def _note_execution(self, made: CompiledExecution) -> None:
        """Remember its requests, but not its arrays."""
        requests = made._requests
        if len(self.executions) > 1000:  # what is gone and has left nothing needs no memory
            self.executions = [
                (reference, now, before)
                for reference, now, before in self.executions
                if reference() is not None or (now != before).any()
            ]
        self.executions.append((weakref.ref(made), requests, requests.copy()))

    def _note_transport(self, transport: MpiTransport) -> None:
        transport.comm = Watched(transport.comm)
        self.transports.append(transport)

    def _note_session(self, session: Session) -> None:
        if isinstance(session.transport, MpiTransport):
            self.sessions.append((world_ranks(session.transport.comm), session))

    def begin(self) -> None:
        transports, sessions = self.lasting
        self.transports, self.sessions = list(transports), list(sessions)
        self.known = calls_of(transports)
        _requests.clear()
        self.executions.clear()

    def left(self) -> list[str]:
        for _, session in self.sessions:
            session.forget_calls()  # boundedly many calls are kept by intent; all can be freed
            session.messages.forget()
        forget_completed()
        return [
            *(unfinished(plan) for plan in calls_of(self.transports) if plan not in self.known),
            *(f"a request: {what}" for request, what in _requests),
            *self._compiled_requests(),
            *self._communicators(),
            *self._tags(),
            *self._messages(),
        ]

    def _compiled_requests(self) -> Iterator[str]:
        """Requests that compiled code posted, which are neither complete nor cancelled."""
        for reference, requests, cleared in self.executions:
            execution = reference()
            if execution is None and (requests != cleared).any():
                yield "a request that nobody holds"
            ends, posted = (
                ({}, []) if execution is None else (execution._ends(), execution._posted())
            )
            for peer, is_receive in (ends[slot] for slot, _ in posted):
                kind = f"a receive from rank {peer}" if is_receive else f"a send to rank {peer}"
                yield f"a request: {kind}"

    def _communicators(self) -> Iterator[str]:
        for transport in self.transports:
            if transport not in self.lasting[0] and transport.comm:
                yield f"a communicator of ranks {list(world_ranks(transport.comm))}"

    def _messages(self) -> Iterator[str]:
        """Every message that was sent has come, if it will: all ranks have ended the test.

        Each has heard of all others since, from `_tags`.
        """
        for transport in self.transports:
            if transport.comm:
                yield from map(received, messages(transport.comm))

    def _tags(self) -> Iterator[str]:
        """The ranks of a communicator, made as the same of theirs, have counted equally far."""
        counted: dict[tuple[Any, ...], dict[int, int | None]] = defaultdict(dict)
        for rank, mine in enumerate(self.agreement.allgather(list(self._counts()))):
            for key, number in mine:
                counted[key][rank] = number
        for key, number_of in counted.items():
            if self.agreement.rank in key[0] and None not in number_of.values():
                yield from out_of_step(number_of)

    def _counts(self) -> Iterator[tuple[tuple[Any, ...], int | None]]:
        """Each communicator of this rank with the calls it has counted; None if it is broken."""
        times: dict[tuple[int, ...], int] = defaultdict(int)
        for ranks, session in self.sessions:
            times[ranks] += 1
            yield (ranks, times[ranks]), None if is_broken(session) else numbers(session)


def world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The ranks of COMM_WORLD that a communicator is made of, in its order."""
    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = group.Translate_ranks(None, world)
    group.Free()
    world.Free()
    return tuple(ranks)


def messages(comm: MPI.Intracomm) -> Iterator[tuple[MPI.Message, MPI.Status]]:
    """The messages that nobody has received."""
    num_looks = 0
    while num_looks < 3:  # a look moves things along
        status = MPI.Status()
        message = comm.Improbe(status=status)
        num_looks = 0 if message else num_looks + 1
        if message:
            yield message, status


def received(match: tuple[MPI.Message, MPI.Status]) -> str:
    """Take a message out of the next test's way, and say what it was."""
    message, status = match
    size, source, tag = status.Get_count(MPI.BYTE), status.source, status.tag
    message.Recv([bytearray(size), MPI.BYTE])
    return f"a message of {size} bytes from rank {source} with tag {tag}"
