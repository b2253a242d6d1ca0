"""Sends and receives: their programs, and the order in which they take boxes on devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from collectives.arrays import Arrays
from collectives.devices import ENVELOPE, End, Tagged
from collectives.diagnostics import CallLog
from collectives.engines import Execution, Operands
from collectives.programs import Message, Program, Step
from collectives.runtime.compiled_support import can_start_compiled
from collectives.runtime.plan import Plan
from collectives.runtime.pool import Pool
from collectives.runtime.prepared import Prepared
from collectives.runtime.preparing import (
    Origin,
    name_of_run,
    prepare_program,
    program_of,
    recorder_of,
)
from collectives.runtime.repeat import one_run
from collectives.schedule import Region

_NO_ALGORITHM = "point_to_point"


class Ends(NamedTuple):
    """The peers and the numbers of elements of a send, a receive, or both."""

    name: str
    dest: int | None
    num_sent: int
    source: int | None
    num_received: int
    itemsize: int

    @classmethod
    def of(cls, name: str, arrays: Arrays, dest: int | None, source: int | None) -> Ends:
        """Return the ends of the messages that send and receive `arrays`."""
        sizes = [0 if x is None else int(x.size) for x in arrays[1:]]
        return cls(name, dest, sizes[0], source, sizes[1], arrays.dtype.itemsize)


class _Receive:
    """Stands for a receive that expects data only; see `Mail.expect_data_only`."""


class Messages:
    """The sends and receives of a communicator."""

    def __init__(self, origin: Origin) -> None:
        self._origin, self._pool = origin, Pool()
        self.num_messages = 0
        self._log: CallLog | None = None

    def take(self, ends: Ends, arrays: Arrays, tag: int) -> Prepared:
        """Return a prepared send, receive, or both, on these arrays."""
        number = self.num_messages = self.num_messages + 1  # other threads may send too
        receive = _Receive()
        is_tagged = self._is_tagged(ends, arrays, tag, receive)
        numbered = partial("{}p{}".format, self._origin.name)
        make = partial(self._make, ends, is_tagged, numbered)
        kind = self._pool.kind((ends, arrays.backend.name, is_tagged), make, _program(ends))
        prepared = kind.take(arrays, tag, number)
        prepared.when_released = partial(self._origin.devices.mail.has_received, receive)
        return prepared

    def plan(self, ends: Ends, arrays: Arrays, tag: int) -> Plan:
        """Make the plan of a send, a receive, or both."""
        number = self.num_messages = self.num_messages + 1
        receive = _Receive()
        is_tagged = self._is_tagged(ends, arrays, tag, receive)
        numbered = partial(name_of_run, f"{self._origin.name}p{number}")
        prepared = self._make(ends, is_tagged, numbered, arrays, tag, 1)
        prepared.when_released = partial(self._origin.devices.mail.has_received, receive)
        plan = Plan(self._origin, prepared, partial(one_run, prepared), arrays.target)
        if can_start_compiled(self._origin.transport, arrays) and not is_tagged:
            plan.let_code_start(arrays, tag)
            prepared.execution.detach()  # of the arrays, which the plan keeps
        return plan

    def forget(self) -> None:
        """Forget what is prepared and does not run."""
        self._pool.forget()

    def free(self) -> None:
        """Release what a communicator that is freed does not need."""
        self.forget()
        if self._log is not None:
            self._origin.transport.flight.close(self._log)

    def _is_tagged(self, ends: Ends, arrays: Arrays, tag: int, receive: object) -> bool:
        """Return whether a message may go by a box, or must wait for one that does.

        `receive` stands for its receive, if that expects data only.
        """
        devices = self._origin.devices
        if not arrays.backend.is_host:
            devices.connect(arrays.backend)
            return True
        if devices.mail.has_line(ends.dest, tag):
            return True
        return ends.source is not None and not devices.mail.expect_data_only(receive, ends.source)

    def _make(
        self,
        ends: Ends,
        is_tagged: bool,
        numbered: Callable[[int], str],
        arrays: Arrays,
        tag: int,
        number: int,
    ) -> Prepared:
        origin, log, program = self._origin, self._open_log(), _program(ends)
        names, operands = (ends.name, _NO_ALGORITHM), Operands.of(arrays)
        execution: Execution
        if is_tagged:
            both = _sending_end(ends), _receiving_end(ends)
            execution = Tagged(origin.transport, origin.devices.mail, *both, operands, tag)
        else:
            execution = origin.transport.execution(program, operands, tag)
        prepared = prepare_program(origin, names, program, execution, numbered, log)
        prepared.number = number
        if is_tagged and ends.dest is not None:
            sent = ((0, ends.dest, ENVELOPE.itemsize, 1),)
            names = "envelope", _NO_ALGORITHM
            prepared.envelope = recorder_of(origin, names, numbered, sent)
        return prepared

    def _open_log(self) -> CallLog:
        if self._log is None:
            transport = self._origin.transport
            self._log = transport.flight.log(*transport.identity)
            self._origin.devices.add_log(self._log)
        return self._log


@lru_cache(maxsize=256)
def _program(ends: Ends) -> Program:
    """Return the program of a send, a receive, or both."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    if ends.dest is not None:
        sends = (Message(ends.dest, Region("input", 0, ends.num_sent)),)
    if ends.source is not None:
        receives = (Message(ends.source, Region("output", 0, ends.num_received)),)
    return program_of([Step(sends=sends, receives=receives)], ends.itemsize)


def _sending_end(ends: Ends) -> End | None:
    """Return the send alone, if there is one."""
    if ends.dest is None:
        return None
    alone = ends._replace(source=None, num_received=0)
    return End(ends.dest, ends.num_sent * ends.itemsize, _program(alone))


def _receiving_end(ends: Ends) -> End | None:
    """Return the receive alone, if there is one."""
    if ends.source is None:
        return None
    alone = ends._replace(dest=None, num_sent=0)
    return End(ends.source, ends.num_received * ends.itemsize, _program(alone))
