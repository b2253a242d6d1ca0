"""What tests look at inside of the library, where no public way leads.

Only this file names the private attributes of the library's objects that these tests need.
"""

from __future__ import annotations

from typing import Any

import pytest

from collectives import Communicator
from collectives.arrays import jit
from collectives.devices import links
from collectives.devices.driver import Driver
from collectives.devices.streams import STREAMS
from collectives.devices.watch import Watch
from collectives.engines import Board, Transport
from collectives.engines.host_memory import NUM_SLOTS
from collectives.programs import program
from collectives.runtime import Plan
from collectives.runtime.session import Session
from collectives.selection import select


def session_of(comm: Communicator) -> Session:
    return comm._session


def transport_of(comm: Communicator) -> Transport:
    return session_of(comm).transport


def board_of(comm: Communicator) -> Board:
    """The memory that the ranks of a host share."""
    return transport_of(comm).board


def has_free_slots_only(board: Board) -> bool:
    """Whether no call or plan has a slot of the memory that ranks share."""
    return all(map(board._is_free, range(NUM_SLOTS)))


def links_of(comm: Communicator) -> Any:
    """What a rank knows of the memory of others; None before the first call on devices."""
    return session_of(comm).devices._links


def watch_of(comm: Communicator) -> Watch:
    """What watches the device of a communicator that has made calls on devices."""
    watch = session_of(comm).devices._watch
    assert watch is not None
    return watch


def execution_of(call: Any) -> Any:
    """The execution of a plan, or of a call under way."""
    prepared = call._prepared if isinstance(call, Plan) else call._run
    return prepared.execution


def waits_for_device(execution: Any) -> bool:
    """Whether an execution waits until a device has come to something."""
    return execution._wait is not None and execution._wait.is_at_work


def loop_of(execution: Any) -> Any:
    """The compiled loop that enqueues an execution on a device."""
    return execution._loop


def scratch_of(execution: Any) -> Any:
    """The scratch memory that an execution on a device uses, or keeps for its next run."""
    kept = execution._scratch
    return execution._operands.scratch if kept is None else kept


def kept_executions(comm: Communicator) -> list[Any]:
    """The executions of plans and of calls on devices that can run again."""
    kept = session_of(comm).devices._kept
    return [*kept._plans.values(), *kept._calls]


def forget_kept_calls(comm: Communicator) -> None:
    """Forget the calls on devices that can run again."""
    session_of(comm).devices._kept.forget_calls()


def forget_memory_of_driver(driver: Driver) -> Any:
    """Let this process make streams, and memory that others read, anew.

    Returns what must be kept as long as another process has it open.
    """
    probes = links._probes.copy()
    links._probes.clear()
    while links._page_locked:
        address, _ = links._page_locked.popitem()
        driver.call("cuMemHostUnregister", address)
    STREAMS._idle.clear()
    STREAMS._events.clear()
    return probes


def forget_runs(comm: Communicator) -> None:
    """Let the logs of a rank forget what no entry names, as they do now and then."""
    for log in transport_of(comm).flight.logs:
        log._forget()


def forget_choices() -> None:
    """Forget the algorithms that were chosen by the rules."""
    select._limits.cache_clear()
    select._default.cache_clear()


def forget_programs() -> None:
    """Forget the programs of this process, so that calls make them again."""
    program._compiled.cache_clear()


def forget_compiled(patch: pytest.MonkeyPatch) -> None:
    """Begin as a process that has compiled nothing, and has told nobody that it compiles."""
    patch.setattr(jit, "_compiled", {})
    patch.setattr(jit, "_warned", set())


def without_numba(patch: pytest.MonkeyPatch, why: str = "numba cannot be imported") -> None:
    """Let nothing be compiled any more, and say why."""
    patch.setattr(jit, "why_unavailable", lambda: why)
