"""The runs of a communicator: made when first needed, and kept for later calls of the same kind.

A complete run is kept here without arrays.  When the same call is made again, the run gets new
arrays, tag and number.  The runs of plans and cached calls are not kept here: these own them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple
from weakref import ReferenceType, ref

from collectives.arrays import HOST, Array, Arrays, Backend, Operator
from collectives.devices import ENVELOPE, DeviceCall, Devices, End, OnDevice, Tagged
from collectives.diagnostics import Ancestry, CallLog, Recorder, Sent
from collectives.engines import Execution, Operands, Transport
from collectives.programs import (
    CallSpec,
    Lane,
    Lanes,
    Message,
    Program,
    Step,
    assembled,
    compile_call,
)
from collectives.runtime.run import Run
from collectives.runtime.shown import Shown, schedule_grid
from collectives.schedule import Region

_MAX_KINDS, _MAX_PER_KIND = 256, 8  # of idle runs
_NO_ALGORITHM = "point_to_point"


class Ends(NamedTuple):
    """The peers and the numbers of elements of a send, a receive, or both."""

    name: str
    dest: int | None
    num_sent: int
    source: int | None
    num_received: int
    itemsize: int


def ends_of(name: str, arrays: Arrays, dest: int | None, source: int | None) -> Ends:
    """The ends of the messages that send and receive `arrays`."""
    sizes = [0 if x is None else int(x.size) for x in arrays[1:]]
    return Ends(name, dest, sizes[0], source, sizes[1], arrays.dtype.itemsize)


class _Receive:
    """Stands for a receive that expects data only; see `Mail.expect_data_only`."""


class RunPool:
    """Makes the runs of a communicator, and keeps a bounded number of idle ones.

    `name`: the prefix of their numbers in the ledger.
    """

    def __init__(
        self, transport: Transport, devices: Devices, name: str, ancestry: Ancestry, axis: str = ""
    ) -> None:
        self._transport, self._ancestry, self._axis = transport, ancestry, axis
        self._devices = devices
        self._number = partial("{}{}".format, name)  # of calls in the ledger
        self._number_ahead = partial("{}{}a".format, name)
        self._number_message = partial("{}p{}".format, name)
        self._idle: dict[Hashable, list[Run]] = {}
        self.num_messages = 0
        self._message_log: CallLog | None = None

    def call(
        self, spec: CallSpec, arrays: Arrays, tag: int, number: int, *, is_ahead: bool = False
    ) -> Run:
        """The run of a call, or of the header or counts that are sent before it."""
        if not spec.is_recurring:
            return self.new_call(spec, arrays, tag, number)
        key = spec, arrays.backend.name, is_ahead
        run = self._reuse(key, arrays, tag, spec)
        if run is None:
            numbered = self._number_ahead if is_ahead else self._number
            run = self._of_call(spec, arrays, tag, numbered, number, is_ahead=is_ahead)
        return self._lend(run, key, number)

    def new_call(self, spec: CallSpec, arrays: Arrays, tag: int, number: int) -> Run:
        """The run of a call that is not kept here, but perhaps in the cache of calls."""
        run = self._of_call(spec, arrays, tag, self._number, number)
        run.number = number
        return run

    def plan(self, spec: CallSpec, arrays: Arrays, tag: int, number: int) -> Run:
        """The run of a plan."""
        numbered = partial(_of_runs, self._number(number))
        run = self._of_call(spec, arrays, tag, numbered, number, is_plan=True)
        run.when_detached = partial(self._devices.free_plan, number)
        return run

    def renumber_plan(self, run: Run, number: int) -> None:
        """Give the run of a freed plan, on host arrays, to another plan."""
        self._transport.board.note_host_call(number)
        run.renumber(partial(_of_runs, self._number(number)))

    def message(self, ends: Ends, arrays: Arrays, tag: int) -> Run:
        """The run of a send, a receive, or both."""
        number = self.num_messages = self.num_messages + 1  # other threads may send too
        receive = _Receive()
        is_tagged = self._is_tagged(ends, arrays, tag, receive)
        key = ends, arrays.backend.name, is_tagged
        run = self._reuse(key, arrays, tag)
        if run is None:
            run = self._of_message(ends, arrays, tag, self._number_message, is_tagged=is_tagged)
        run.number = number
        run.release = partial(self._take_back_message, key, receive)
        run.when_detached = partial(self._devices.mail.has_received, receive)
        return run

    def message_plan(self, ends: Ends, arrays: Arrays, tag: int) -> Run:
        """The run of the plan of a send, a receive, or both."""
        number = self.num_messages = self.num_messages + 1
        numbered = partial(_of_runs, self._number_message(number))
        receive = _Receive()
        is_tagged = self._is_tagged(ends, arrays, tag, receive)
        run = self._of_message(ends, arrays, tag, numbered, is_tagged=is_tagged)
        run.when_detached = partial(self._devices.mail.has_received, receive)
        return run

    def _is_tagged(self, ends: Ends, arrays: Arrays, tag: int, receive: object) -> bool:
        """Whether a message may go by a box, or must wait for one that does.

        `receive`: stands for its receive, if that expects data only.
        """
        mail = self._devices.mail
        if not arrays.backend.is_host:
            self._devices.connect(arrays.backend)
            return True
        if mail.has_line(ends.dest, tag):
            return True
        return ends.source is not None and not mail.expect_data_only(receive, ends.source)

    def subgroup_barrier(self, steps: Sequence[Step], tag: int, name: str) -> Run:
        """The run of a barrier among the members of a new subgroup."""
        names, operands = ("subgroup", "dissemination"), operands_of(Arrays(HOST, None, None))
        program = _program_of(steps, 1)
        execution = self._transport.execution(program, operands, tag)
        return self._run(names, program, execution, lambda _: name)

    def rename(self, axis: str) -> None:
        """Give new runs another name of the communicator."""
        self._axis = axis
        self.forget()

    def forget(self) -> None:
        """Forget the idle runs."""
        self._idle.clear()

    def free(self) -> None:
        """Release the runs and the log of a communicator that is freed."""
        self.forget()
        if self._message_log is not None:
            self._transport.flight.close(self._message_log)

    # Those that are kept

    def idle(self, spec: CallSpec, backend: Backend) -> list[Run]:
        """The idle runs of a call, of which the caller may take one and give it back."""
        return self._idle_of((spec, backend.name, False))

    def attach(self, run: Run, arrays: Arrays, tag: int, spec: CallSpec) -> None:
        """Give arrays to a run that is no longer idle, and let it come back when it is complete."""
        run.execution.attach(self._operands_of(run, arrays, spec), tag)
        run.release = partial(self._take_back, (spec, arrays.backend.name, False))

    def _reuse(
        self, key: Hashable, arrays: Arrays, tag: int, spec: CallSpec | None = None
    ) -> Run | None:
        """An idle run with new arrays, or None."""
        try:
            run = self._idle[key].pop()
        except LookupError:  # there is none, or another thread has taken the last one
            return None
        run.execution.attach(self._operands_of(run, arrays, spec), tag)
        return run

    def _lend(self, run: Run, key: Hashable, number: int) -> Run:
        """Number a run, and let it come back to the pool when it is complete."""
        run.number, run.release = number, partial(self._take_back, key)
        return run

    def _take_back(self, key: Hashable, run: Run) -> None:
        run.execution.detach()
        idle = self._idle_of(key)
        if len(idle) < _MAX_PER_KIND:
            idle.append(run)

    def _take_back_message(self, key: Hashable, receive: object, run: Run) -> None:
        self._devices.mail.has_received(receive)
        self._take_back(key, run)

    def _idle_of(self, key: Hashable) -> list[Run]:
        """The idle runs of a kind; of all kinds a bounded number is known."""
        if len(self._idle) >= _MAX_KINDS and key not in self._idle:
            self._idle.clear()
        return self._idle.setdefault(key, [])

    # New ones

    def _of_call(
        self,
        spec: CallSpec,
        arrays: Arrays,
        tag: int,
        numbered: Callable[[int], str],
        number: int,
        *,
        is_ahead: bool = False,
        is_plan: bool = False,
    ) -> Run:
        rank, size = self._transport.rank, self._transport.size
        program = compile_call(spec, rank, size)
        execution = (
            self._transport.execution(program, self._operands(arrays, program, spec), tag)
            if is_ahead
            else self._execution(program, arrays, tag, spec, number, is_plan=is_plan)
        )
        shown = self._shown(spec, program, numbered)
        if isinstance(execution, OnDevice) and spec.direct is not None:
            return self._of_direct(spec, execution, numbered, if_staged=shown)
        run = Run(self._transport, program, execution, shown)
        run.is_ahead = is_ahead
        return run

    def _of_direct(
        self, spec: CallSpec, on_device: OnDevice, numbered: Callable[[int], str], if_staged: Shown
    ) -> Run:
        """The run of a call that has another program if it is staged."""
        program = on_device.program
        shown = self._shown(spec.if_direct, program, numbered)
        run = Run(self._transport, program, on_device, shown)
        run.shown_if_staged = if_staged
        on_device.when_staged = partial(_note_staged, ref(run))
        return run

    def _shown(self, spec: CallSpec, program: Program, numbered: Callable[[int], str]) -> Shown:
        recorder = self._recorder(spec.names, numbered, program.sent)
        rank, size = self._transport.rank, self._transport.size
        return Shown(recorder, str(program.num_rounds), partial(schedule_grid, spec, rank, size))

    def _execution(
        self,
        program: Program,
        arrays: Arrays,
        tag: int,
        spec: CallSpec,
        number: int,
        *,
        is_plan: bool,
    ) -> Execution:
        """The execution of a call or a plan, which the others see if it is in host memory."""
        if arrays.backend is not HOST:
            call = DeviceCall(spec, number if is_plan else 0)
            operands = self._operands(arrays, None, spec)
            on_devices = self._devices.execution(operands, tag, call, number)
            if on_devices is not None:
                return on_devices
        board = self._transport.board
        if is_plan:
            board.note_host_call(number)
        noted = None if is_plan else board.host_calls
        operands = self._operands(arrays, program, spec)
        return self._transport.execution(program, operands, tag, noted)

    def _of_message(
        self,
        ends: Ends,
        arrays: Arrays,
        tag: int,
        numbered: Callable[[int], str],
        *,
        is_tagged: bool,
    ) -> Run:
        if self._message_log is None:
            self._message_log = self._transport.flight.log(*self._transport.identity)
            self._devices.add_log(self._message_log)
        names, program, operands = (ends.name, _NO_ALGORITHM), _message(ends), operands_of(arrays)
        if not is_tagged:
            execution = self._transport.execution(program, operands, tag)
            return self._run(names, program, execution, numbered, self._message_log)
        both = _sending_end(ends), _receiving_end(ends)
        tagged = Tagged(self._transport, self._devices.mail, *both, operands, tag)
        run = self._run(names, program, tagged, numbered, self._message_log)
        if ends.dest is not None:
            sent = ((0, ends.dest, ENVELOPE.itemsize, 1),)
            run.envelope = self._recorder(("envelope", _NO_ALGORITHM), numbered, sent)
        return run

    def _run(
        self,
        names: tuple[str, str],
        program: Program,
        execution: Execution,
        numbered: Callable[[int], str],
        log: CallLog | None = None,
    ) -> Run:
        recorder = self._recorder(names, numbered, program.sent)
        shown = Shown(recorder, str(program.num_rounds))
        return Run(self._transport, program, execution, shown, log)

    def _recorder(
        self, names: tuple[str, str], numbered: Callable[[int], str], sent: Sent
    ) -> Recorder:
        return Recorder(names, numbered, sent, self._ancestry, self._transport.rank, self._axis)

    def _operands_of(self, run: Run, arrays: Arrays, spec: CallSpec | None) -> Operands:
        """The operands of a run; an execution on devices makes its own scratch memory."""
        is_on_device = isinstance(run.execution, OnDevice)
        return self._operands(arrays, None if is_on_device else run.program, spec)

    def _operands(self, arrays: Arrays, program: Program | None, spec: CallSpec | None) -> Operands:
        """The operands of a program, with scratch memory.  `spec`: of a collective."""
        dtype, num_bytes = arrays.dtype, 0 if program is None else program.num_scratch
        scratch = None
        if num_bytes:
            scratch = arrays.backend.empty((num_bytes // dtype.itemsize,), dtype)
        if spec is None:
            return operands_of(arrays, scratch)
        divisor = spec.num_contributions(self._transport.size)
        return operands_of(arrays, scratch, spec.op, divisor)


def operands_of(
    arrays: Arrays, scratch: Array | None = None, op: Operator | None = None, divisor: int = 1
) -> Operands:
    """The flat arrays for a program; empty arrays for those that are None."""
    nothing = arrays.backend.empty((0,), arrays.dtype)
    source, target = (nothing if x is None else x.reshape(-1) for x in arrays[1:])
    scratch = nothing if scratch is None else scratch
    function = None if op is None else op.function
    return Operands(arrays.backend, source, target, scratch, function, divisor)


@lru_cache(maxsize=256)
def _message(ends: Ends) -> Program:
    """The program of a send, a receive, or both."""
    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    if ends.dest is not None:
        sends = (Message(ends.dest, Region("input", 0, ends.num_sent)),)
    if ends.source is not None:
        receives = (Message(ends.source, Region("output", 0, ends.num_received)),)
    return _program_of([Step(sends=sends, receives=receives)], ends.itemsize)


def _sending_end(ends: Ends) -> End | None:
    """The send alone, if there is one."""
    if ends.dest is None:
        return None
    alone = ends._replace(source=None, num_received=0)
    return End(ends.dest, ends.num_sent * ends.itemsize, _message(alone))


def _receiving_end(ends: Ends) -> End | None:
    """The receive alone, if there is one."""
    if ends.source is None:
        return None
    alone = ends._replace(dest=None, num_sent=0)
    return End(ends.source, ends.num_received * ends.itemsize, _message(alone))


def _program_of(steps: Sequence[Step], itemsize: int) -> Program:
    """The program of some steps that belong to no algorithm."""
    return assembled(Lanes((Lane(tuple(steps)),)), itemsize)


def _note_staged(reference: ReferenceType[Run]) -> None:
    """Let a run show that it is staged, unless it was dropped."""
    if (run := reference()) is not None:
        run.note_staged()


def _of_runs(name: str, run: int) -> str:
    """The numbers of the runs of one plan: "7", "7.2", "7.3"."""
    return name if run == 1 else f"{name}.{run}"
