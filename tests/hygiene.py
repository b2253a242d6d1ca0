"""After every test nothing is left: no call under way, no message, no tag, no page-locked memory.

A plugin of pytest, which `conftest.py` registers: a test that leaves something has an error of its
own name.  The library is watched from outside: what it makes is noted by wrapping its constructors
here, and nothing in it counts for a test.  `tests/mpi/hygiene.py` adds what only MPI has.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from collectives.engines.staging import MessageBuffers
from collectives.engines.threads import ThreadTransport, World
from collectives.engines.transport import Execution
from collectives.runtime.session import FREED, Session
from collectives.runtime.work import Work

# Seconds in which the thread that watches devices lets go of the communicator at which it looks.
PATIENCE = 5.0


class Source(Protocol):
    """Somebody who knows what a test may leave."""

    def begin(self) -> None:
        """A test begins: what was left by another is not its fault."""

    def left(self) -> Iterable[str]:
        """What is left, one line each.  Where ranks are processes, all of them call it."""


class Made:
    """What the library has made in this process since the last `begin`."""

    def __init__(self) -> None:
        self.worlds: list[World] = []
        self.transports: list[ThreadTransport] = []
        self.sessions: list[Session] = []
        self.buffers: list[weakref.ref[np.ndarray]] = []

    def install(self) -> None:
        """Note from now on what is made."""
        afterwards(World, "__init__", lambda world, _: self.worlds.append(world))
        afterwards(ThreadTransport, "__init__", lambda made, _: self.transports.append(made))
        afterwards(Session, "__init__", lambda session, _: self.sessions.append(session))
        afterwards(MessageBuffers, "buffer", lambda _, buffer: self._note(buffer))

    def _note(self, buffer: np.ndarray) -> None:
        """Remember the memory itself; what is handed out are views of it."""
        while isinstance(buffer.base, np.ndarray):
            buffer = buffer.base
        self.buffers.append(weakref.ref(buffer))

    def begin(self) -> None:
        for made in (self.worlds, self.transports, self.sessions, self.buffers):
            made.clear()

    def left(self) -> Iterator[str]:
        yield from self._calls()
        yield from self._messages()
        yield from self._tags()
        yield from self._memory()

    def _calls(self) -> Iterator[str]:
        over = [transport for transport in self.transports if transport.world.failure is None]
        yield from map(unfinished, calls_of(over))
        pending = {id(messages): messages for transport in over for messages in transport.pending}
        for messages in pending.values():
            yield f"a receive: {', '.join(map(str, messages.waiting_for()))}"

    def _messages(self) -> Iterator[str]:
        """A world that has failed, and a communicator that has, may end with messages in it."""
        broken = {
            session.transport.context
            for session in self.sessions
            if isinstance(session.transport, ThreadTransport) and is_broken(session)
        }
        for world in self.worlds:
            for (context, source, dest, tag), letters in sorted(world.mail.items(), key=str):
                if world.failure is None and context not in broken:
                    what = f"from rank {source} to rank {dest} with tag {tag}"
                    yield f"{len(letters)} message(s) {what}"

    def _tags(self) -> Iterator[str]:
        groups = defaultdict(list)
        for session in self.sessions:
            transport = session.transport
            if isinstance(transport, ThreadTransport) and transport.world.failure is None:
                groups[id(transport.world), transport.context].append(session)
        for sessions in groups.values():
            if not any(map(is_broken, sessions)):
                yield from out_of_step({s.transport.rank: numbers(s) for s in sessions})

    def _memory(self) -> Iterator[str]:
        deadline = time.monotonic() + PATIENCE
        while (num_bytes := self._num_bytes()) and time.monotonic() < deadline:
            gc.collect()  # the frames of an exception that a test has looked at
            time.sleep(0.01)
        if num_bytes:
            yield f"{num_bytes} bytes of page-locked memory"

    def _num_bytes(self) -> int:
        """The bytes of the page-locked memory that is not freed yet."""
        alive = {id(b): b.nbytes for b in (buffer() for buffer in self.buffers) if b is not None}
        return sum(alive.values())


def afterwards(cls: type, name: str, note: Callable[[Any, Any], object]) -> None:
    """Let `note(self, result)` follow every call of a method."""
    method = getattr(cls, name)

    def noted(self: Any, *args: Any, **named: Any) -> Any:
        result = method(self, *args, **named)
        note(self, result)
        return result

    setattr(cls, name, noted)


def calls_of(transports: Iterable[Any]) -> list[Work | Execution]:
    """The calls that are under way, and the executions that failed with messages on their way."""
    calls = [call for transport in transports for call in (*transport.in_flight, *transport.failed)]
    return list({id(call): call for call in calls}.values())


def unfinished(call: Work | Execution) -> str:
    if isinstance(call, Work):
        return f"a call under way: {call.title}"
    _, waiting = call.position()
    return f"a call failed half-way: {', '.join(map(str, waiting))}"


def is_broken(session: Session) -> bool:
    """Whether the communicator is unusable for another reason than by its `free`."""
    return session._broken_by is not None and str(session._broken_by) != FREED


def numbers(session: Session) -> int:
    """How many calls this rank has counted, from which tags come."""
    return session.numbering.num_calls


def out_of_step(counted: dict[int, int]) -> Iterator[str]:
    """Ranks of one communicator that would take different tags for their next call."""
    if len(set(counted.values())) > 1:
        in_order = dict(sorted(counted.items()))
        yield f"tags out of step: calls counted by each rank: {in_order}"


MADE = Made()
MADE.install()
SOURCES: list[Source] = [MADE]


def begin() -> None:
    for source in SOURCES:
        source.begin()


def left() -> list[str]:
    return [line for source in SOURCES for line in source.left()]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    begin()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        lines = left()
        if lines:
            pytest.fail("\n".join((f"{item.name} left", *lines)), pytrace=False)
