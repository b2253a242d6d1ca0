"""Makes prepared calls: a program, its execution, and what ledgers and reports show of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol
from weakref import ReferenceType, ref

from collectives.arrays import HOST, Arrays
from collectives.devices import DeviceCall, Devices, OnDevice
from collectives.diagnostics import Ancestry, CallLog, Recorder, Sent
from collectives.engines import Execution, Operands
from collectives.programs import CallSpec, Lane, Lanes, Program, Step, assembled
from collectives.runtime.prepared import Prepared, Shown, show_schedules
from collectives.runtime.work import Owner

Use = Literal["call", "ahead", "plan"]
"""What a prepared call is used for: calls, what is sent ahead of calls, or plans."""


class Origin(Owner, Protocol):
    """What prepares calls: a session, which also makes them.

    Attributes
    ----------
    name, axis : str
        The prefix of numbers of calls, and the name of the communicator, in ledgers.
    """

    devices: Devices
    ancestry: Ancestry
    name: str
    axis: str


def prepare_call(
    origin: Origin,
    spec: CallSpec,
    program: Program,
    use: Use,
    arrays: Arrays,
    tag: int,
    number: int,
) -> Prepared:
    """Prepare a call.

    Parameters
    ----------
    program : Program
        The program of `spec` on this rank, for calls that are not on devices.
    number : int
        The number of the call or plan.
    """
    execution = _execution(origin, spec, program, use, arrays, tag, number)
    numbered = _numbers(origin, use, number)
    shown, if_staged = _shown(origin, spec, program, numbered), None
    if isinstance(execution, OnDevice) and spec.direct is not None:
        program, if_staged = execution.program, shown
        shown = _shown(origin, spec.if_direct, program, numbered)
    divisor = spec.num_contributions(origin.transport.size)
    prepared = Prepared(origin.transport, program, execution, shown, op=spec.op, divisor=divisor)
    if isinstance(execution, OnDevice) and if_staged is not None:
        prepared.shown_if_staged = if_staged
        execution.when_staged = partial(_note_staged, ref(prepared))
    prepared.is_ahead = use == "ahead"
    if use != "plan":
        prepared.number = number
    elif isinstance(execution, OnDevice):
        prepared.when_released = partial(origin.devices.free_plan, number)
    else:
        prepared.number_plan = partial(_numbers, origin, use)
    return prepared


def _execution(
    origin: Origin,
    spec: CallSpec,
    program: Program,
    use: Use,
    arrays: Arrays,
    tag: int,
    number: int,
) -> Execution:
    """Make the execution, which the other ranks of the host see if it is in host memory."""
    transport, board = origin.transport, origin.transport.board
    divisor = spec.num_contributions(transport.size)
    if arrays.backend is not HOST and use != "ahead":
        operands = Operands.of(arrays, 0, spec.op, divisor)
        call = DeviceCall(spec, number if use == "plan" else 0)
        on_device = origin.devices.execution(operands, tag, call, number)
        if on_device is not None:
            return on_device
    if use == "plan":
        board.note_host_call(number)
    operands = Operands.of(arrays, program.num_scratch, spec.op, divisor)
    noted = board.host_calls if use == "call" else None
    return transport.execution(program, operands, tag, noted)


def _numbers(origin: Origin, use: Use, number: int) -> Callable[[int], str]:
    """Return what makes the numbers of runs as text.

    `number` is that of a plan.
    """
    if use == "plan":
        return partial(name_of_run, f"{origin.name}{number}")
    return partial(("{}{}a" if use == "ahead" else "{}{}").format, origin.name)


def _note_staged(reference: ReferenceType[Prepared]) -> None:
    """Let a prepared call show that it is staged, unless it was dropped."""
    if (prepared := reference()) is not None:
        prepared.note_staged()


def _shown(
    origin: Origin, spec: CallSpec, program: Program, numbered: Callable[[int], str]
) -> Shown:
    rank, size = origin.transport.rank, origin.transport.size
    names, axis = spec.names, origin.axis
    recorder = Recorder(names, numbered, program.sent, origin.ancestry, rank, axis)
    return Shown(recorder, str(program.num_rounds), partial(show_schedules, spec, rank, size))


def prepare_program(
    origin: Origin,
    names: tuple[str, str],
    program: Program,
    execution: Execution,
    numbered: Callable[[int], str],
    log: CallLog | None = None,
) -> Prepared:
    """Prepare a program of no algorithm, which ledgers show under `names`."""
    recorder = recorder_of(origin, names, numbered, program.sent)
    shown = Shown(recorder, str(program.num_rounds))
    return Prepared(origin.transport, program, execution, shown, log)


def prepare_steps(
    origin: Origin, names: tuple[str, str], steps: Sequence[Step], tag: int, number: str
) -> Prepared:
    """Prepare steps without data, which run once."""
    program, nothing = program_of(steps, 1), Operands.of(Arrays(HOST, None, None))
    execution = origin.transport.execution(program, nothing, tag)
    return prepare_program(origin, names, program, execution, lambda _: number)


def program_of(steps: Sequence[Step], itemsize: int) -> Program:
    """Return the program of some steps that belong to no algorithm."""
    return assembled(Lanes((Lane(tuple(steps)),)), itemsize)


def recorder_of(
    origin: Origin, names: tuple[str, str], numbered: Callable[[int], str], sent: Sent
) -> Recorder:
    """Return what records runs under the names of a collective and an algorithm."""
    return Recorder(names, numbered, sent, origin.ancestry, origin.transport.rank, origin.axis)


def name_of_run(name: str, run: int) -> str:
    """Return the number of a run of a plan: "7", "7.2", "7.3"."""
    return name if run == 1 else f"{name}.{run}"
