"""Executions on host memory over MPI, which the compiled loop of `executor.py` runs.

This file fills the blocks of words on which the loop works, and translates its results into Python.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays import Array, jit, kernels
from collectives.diagnostics import COMPLETE, CallLog, Waiting
from collectives.engines.host_memory import NUM_HOST_CALLS
from collectives.engines.interpreter import Memory
from collectives.engines.mpi_errors import (
    Failed,
    cancel_all,
    is_complete,
    request_of,
    translate_message_error,
)
from collectives.engines.transport import Operands, wrong_length
from collectives.errors import CollectiveMismatch
from collectives.programs import Kind, Program

Words = NDArray[np.int64]
_pointer_at = ctypes.c_int64.from_address
_DATA_FIELD = 16  # of NumPy's array objects; `executor.DATA_FIELD`

_FUNCTIONS = ("MPI_Irecv", "MPI_Isend", "MPI_Testall", "MPI_Get_count")
# Polls before a waiting rank yields its processor; a poll of a network takes as long as a yield.
_SPINS, _SPINS_BETWEEN_HOSTS, _SPINS_WHERE_CROWDED = 2000, 20, 4
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")  # set by Open MPI and MPICH


# The run and row at which an execution has asked MPI, and the slots of complete messages.
_NOTHING_NOTED: tuple[tuple[int, int], frozenset[int]] = (-1, -1), frozenset()

_loader: threading.Thread | None = None  # that loads the compiled functions in the background


class Loop(NamedTuple):
    """The compiled functions; see `executor.py`."""

    advance: Callable[[int, int], int]
    run: Callable[[int, int, int, int], int]
    fits: Callable[[int, int, int], bool]

    @property
    def start(self) -> Callable[[int, int, int, int], int]:
        """The function `run`.

        On the host it makes no difference whether the caller goes on meanwhile.
        """
        return self.run


def why_unavailable() -> str | None:
    """Return why the compiled loop cannot run programs now, as text; None if it can."""
    if _loader is not None and _loader.is_alive():
        return "compiled code is being loaded"
    return _why_never_available()


def load_in_background() -> None:
    """Load the compiled loop in a thread.  Until that is done, Python runs the programs."""
    global _loader
    if _loader is None and not jit.is_at_exit():
        _loader = threading.Thread(target=_load, name="collectives loading")
        _loader.start()
        # In a child of this process that is forked meanwhile, the import would never end.
        os.register_at_fork(before=_loader.join)


def _load() -> None:
    """Load the loop and the most used kernel."""
    if _why_never_available() is None:
        loop()
        kernels.combine("add", np.dtype(np.float32))


@cache
def _why_never_available() -> str | None:
    """Return why the compiled loop can never run programs in this process; None if it can."""
    if (reason := jit.why_unavailable()) is not None:
        return reason
    try:
        _addresses()
    except (AttributeError, OSError) as error:
        return f"the addresses of this MPI's functions cannot be found: {error}"
    return None if _knows_arrays() else "this NumPy has another layout of array objects"


@cache
def loop() -> Loop:
    """Return the compiled functions, which are compiled or loaded at first use."""
    from collectives.engines import executor  # noqa: PLC0415 - it imports numba

    return Loop(
        jit.function(executor.advance.py_func, "int64(int64, int64)"),
        jit.function(executor.run.py_func, "int64(int64, int64, int64, int64)"),
        jit.function(executor.fits.py_func, "boolean(int64, int64, int64)"),
    )


@cache
def _addresses() -> list[int]:
    """Return the addresses of the functions that the loop calls.

    They are functions of this process's MPI and C libraries.
    """
    library = ctypes.CDLL(MPI.__file__)  # and the MPI library that it is linked to
    functions = [getattr(library, name) for name in _FUNCTIONS]
    c_library = ctypes.CDLL(None)
    functions += [c_library.clock_gettime, c_library.sched_yield]
    return [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]


def _knows_arrays() -> bool:
    """Return whether the fields of an array object are where the compiled code reads them."""
    from collectives.engines import executor  # noqa: PLC0415

    array = np.zeros((3, 5), np.float32)

    def word(field: int, kind: Any) -> int:
        return int(kind.from_address(id(array) + field).value)

    dimensions = (ctypes.c_int64 * 2).from_address(word(executor.DIMENSIONS_FIELD, ctypes.c_int64))
    flags = executor.CONTIGUOUS | executor.ALIGNED | executor.WRITEABLE
    return (
        word(executor.DATA_FIELD, ctypes.c_int64) == array.ctypes.data == address(array)
        and word(executor.NDIM_FIELD, ctypes.c_int32) == 2
        and tuple(dimensions) == array.shape
        and word(executor.DTYPE_FIELD, ctypes.c_int64) == id(array.dtype)
        and word(executor.FLAGS_FIELD, ctypes.c_int32) & flags == flags
    )


def _handle(handle: Any) -> int:
    """Return MPI's handle of a communicator or datatype: a pointer or an integer."""
    size = MPI._sizeof(type(handle))
    return int.from_bytes(ctypes.string_at(MPI._addressof(handle), size), "little", signed=size < 8)


def _num_spins() -> int:
    """Return how often a waiting rank polls before it yields.

    That is rarely if others need its processor.
    """
    sizes = [os.environ[name] for name in _LOCAL_SIZES if name in os.environ]
    num_ranks = int(sizes[0]) if sizes and sizes[0].isdecimal() else MPI.COMM_WORLD.size
    if num_ranks > len(os.sched_getaffinity(0)):
        return _SPINS_WHERE_CROWDED
    return _SPINS_BETWEEN_HOSTS if num_ranks < MPI.COMM_WORLD.size else _SPINS


class Port:
    """The data that all executions on one communicator share."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from collectives.engines import executor  # noqa: PLC0415

        self.comm, self.names, self.loop = comm, executor, loop()
        self.words = np.zeros(executor.NUM_PORT_WORDS, np.int64)
        self.words[: executor.YIELD + 1] = _addresses()
        self.words[executor.COMM], self.words[executor.BYTE] = _handle(comm), _handle(MPI.BYTE)
        self.words[executor.REQUEST_BYTES] = MPI._sizeof(MPI.Request)
        self.words[executor.STATUS_BYTES] = MPI._sizeof(MPI.Status)
        self.words[executor.SPINS] = _num_spins()
        null = ctypes.string_at(MPI._addressof(MPI.REQUEST_NULL), MPI._sizeof(MPI.Request))
        self.no_request = np.frombuffer(null, np.uint8)


class CompiledExecution:
    """An execution whose state is a block of words for the compiled loop."""

    enqueued, device_row, final_state = None, "", COMPLETE
    limit: float | None = None

    def leave_callers_stream(self) -> None:
        """Do nothing: it has no stream."""

    def __init__(
        self,
        port: Port,
        program: Program,
        operands: Operands,
        tag: int,
        host_calls: Words | None = None,
    ) -> None:
        """Prepare the state; `host_calls` is as in `Transport.execution`."""
        program.check_arrays(operands.input, operands.output, operands.scratch)
        self._port, self._names, self.program, self.loop = port, port.names, program, port.loop
        self._pending_answer: int | None = (
            None  # the answer of `loop.run` that Python has to handle
        )
        self._dtypes: list[np.dtype[Any] | None] = [None, None]  # of the arrays that are accepted
        self._operands: Operands | None = operands
        self._completed = _NOTHING_NOTED
        self._scratch: Array | None = None  # kept while compiled code may start a run
        # One block of memory: the words of the state, then those of each slot.
        num_words, num_slots = self._names.NUM_STATE_WORDS, max(program.num_slots, 1)
        expected, statuses = num_words, num_words + num_slots
        requests = statuses + num_slots * -(-MPI._sizeof(MPI.Status) // 8)
        memory = np.zeros(requests + num_slots, np.int64)
        self.state, self._expected = memory[:num_words], memory[expected:statuses]
        self.state_address = address(memory)
        self._statuses_at = self.state_address + 8 * statuses
        handles = memory[requests:].view(np.uint8)[: num_slots * port.no_request.size]
        self._requests = handles.reshape(num_slots, -1)
        self._requests[:] = port.no_request
        dtype = operands.output.dtype
        words = (  # in the order of their names in `executor.py`
            *(address(port.words), address(program.rows), len(program.rows), 0),
            *(
                self.state_address + 8 * requests,
                self._statuses_at,
                self.state_address + 8 * expected,
            ),
            *(tag, address(operands.input), address(operands.output), address(operands.scratch)),
            *(kernel_of(operands.function, dtype), kernels.divide(dtype) or 0),
            *(operands.divisor, program.itemsize),
        )
        self.state[: len(words)] = words
        self._host_calls = host_calls
        if host_calls is not None:
            self.state[self._names.HOST_CALLS] = address(host_calls)

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""
        if self._scratch is not None:
            operands = operands._replace(scratch=self._scratch)
        self.program.check_arrays(operands.input, operands.output, operands.scratch)
        names, self._operands = self._names, operands
        places = address(operands.input), address(operands.output), address(operands.scratch)
        self.state[names.TAG : names.SCRATCH_AT + 1] = tag, *places

    def detach(self) -> None:
        """Release the arrays; the next run has others."""
        self._operands = None

    # Runs on other arrays, which compiled code starts

    def make_reusable(
        self,
        log: CallLog,
        key: int,
        counter: Words,
        source: Array | None,
        target: Array | None,
        tags: range = range(0),
    ) -> None:
        """See `Reusable.make_reusable`."""
        assert self._operands is not None
        names, state, self._scratch = self._names, self.state, self._operands.scratch
        self._counter, self._log = counter, log.words
        words = key, address(log.words), address(counter), tags.start, len(tags)
        state[names.KEY : names.NUM_TAGS + 1] = words
        state[names.SHIFT] = _shift(source, target, names.APART)
        for which, (array, first) in enumerate(
            ((source, names.INPUT_FORM), (target, names.OUTPUT_FORM))
        ):
            if array is not None:
                self._dtypes[which] = array.dtype
                form = True, id(array.dtype), array.nbytes, array.ndim, *array.shape
                state[first : first + len(form)] = form

    def update_dtypes(self, source: Array | None, target: Array | None) -> bool:
        """See `Reusable.update_dtypes`."""
        has_changed, forms = False, (self._names.INPUT_FORM, self._names.OUTPUT_FORM)
        for which, array in enumerate((source, target)):
            if _is_equal_but_other(array, self._dtypes[which]):
                self._dtypes[which], has_changed = array.dtype, True  # type: ignore[union-attr]
                self.state[forms[which] + self._names.DTYPE] = id(self._dtypes[which])
        return has_changed

    @property
    def reads_input(self) -> bool:
        """Whether runs need an input."""
        return bool(self.state[self._names.INPUT_FORM])

    def make_reusable_like(self, other: CompiledExecution, key: int) -> None:
        """Serve the same kinds of arrays, with the same counter, as another execution."""
        first = self._names.KEY
        self.state[first:] = other.state[first:]
        self._counter, self._log, self._dtypes = other._counter, other._log, list(other._dtypes)
        self._host_calls = other._host_calls
        self._scratch = None if self._operands is None else self._operands.scratch
        self.state[first] = key

    def reuse_for_plan(self, key: int, counter: Words, tag: int) -> None:
        """See `Reusable.reuse_for_plan`."""
        names, self._counter, self._completed = self._names, counter, _NOTHING_NOTED
        self.state[names.KEY], self.state[names.COUNTER] = key, address(counter)
        self.state[names.TAG] = tag

    def set_arrays(self, source: Array | None, target: Array | None) -> None:
        """Set the arrays of the next run, which Python starts."""
        names = self._names
        self.state[names.INPUT_AT] = 0 if source is None else address(source)
        self.state[names.OUTPUT_AT] = 0 if target is None else address(target)

    def set_tag(self, run_number: int) -> None:
        """Set the tag of the next run, which Python starts, from its number."""
        names = self._names
        first, num_tags = self.state[names.FIRST_TAG], self.state[names.NUM_TAGS]
        if num_tags:  # otherwise all runs have one tag
            self.state[names.TAG] = first + run_number % num_tags

    @property
    def tag(self) -> int:
        """The tag of the current run."""
        return int(self.state[self._names.TAG])

    def started(self, answer: int, source: Array | None, target: Array | None) -> bool:
        """See `Reusable.started`."""
        names = self._names
        self._pending_answer = None if answer in (names.MISFIT, names.WAITING) else answer
        return bool(answer != names.MISFIT)

    @property
    def is_running(self) -> bool:
        """Whether a run that compiled code has started is not complete."""
        return bool(self.state[self._names.NUMBER])

    @property
    def run_number(self) -> int:
        """The number of the run that compiled code has started."""
        return int(self.state[self._names.NUMBER])

    @property
    def log_entry(self) -> int:
        """The index of that run's entry in the log."""
        return int(self.state[self._names.ENTRY])

    @property
    def row(self) -> int:
        """The row that runs next."""
        return int(self.state[self._names.ROW])

    def restart(self, number: int, *, is_async: bool = False) -> None:
        """Go back to the first row."""
        if self._host_calls is not None:
            self._host_calls[number % NUM_HOST_CALLS] = number
        self.state[self._names.ROW] = self.state[self._names.NUMBER] = 0
        self._completed = _NOTHING_NOTED

    def advance(self, seconds: float) -> bool:
        """See `Execution.advance`."""
        answer, self._pending_answer = self._pending_answer, None
        if answer is None:
            answer = self.loop.advance(self.state_address, int(seconds * 1e9))
        return not answer or self._run_python_rows(answer, seconds)

    def _run_python_rows(self, answer: int, seconds: float) -> bool:
        """Run rows that need Python, and continue; return whether the program is complete."""
        names = self._names
        while answer == names.PYTHON:
            self._combine()
            self.state[names.ROW] += 1
            answer = self.loop.advance(self.state_address, int(seconds * 1e9))
        if answer not in (names.DONE, names.WAITING):
            self._raise(answer)
        return bool(answer == names.DONE)

    def interrupt(self, is_wanted: bool) -> None:
        """End a wait in another thread at once; with False, allow waits again."""
        self.state[self._names.INTERRUPT] = is_wanted

    def _combine(self) -> None:
        """Run a row for which there is no kernel."""
        assert self._operands is not None
        Memory(self._operands, self.program.itemsize).work(self.program.listed[self.row])

    def _raise(self, answer: int) -> None:
        names, me = self._names, self._port.comm.rank
        where, error, got = (int(self.state[n]) for n in (names.WHERE, names.ERROR, names.GOT))
        if answer == names.WRONG_LENGTH:
            peer, expected = self._ends()[where][0], int(self._expected[where])
            raise CollectiveMismatch(wrong_length(me, peer, got, expected))
        raise translate_message_error(MPI.Exception(error), me, self._failed())

    def _failed(self) -> list[Failed]:
        """Return the messages of the failed row, with MPI's error codes."""
        row, ends = self.program.listed[self.row], self._ends()
        if row.kind != Kind.WAIT:
            return [Failed(row.peer, row.kind == Kind.RECEIVE, int(self.state[self._names.ERROR]))]
        size = MPI._sizeof(MPI.Status)
        failed = []
        for number in range(row.size):
            status = MPI.Status()
            ctypes.memmove(MPI._addressof(status), self._statuses_at + number * size, size)
            failed.append(Failed(*ends[row.slot + number], status.Get_error()))
        return failed

    def _ends(self, stop: int | None = None) -> dict[int, tuple[int, bool]]:
        """Return the peer of the last message in each slot, and whether that message is a receive.

        `stop` is the row before which the messages are; None for the row that runs next.
        """
        rows = self.program.listed[: self.row if stop is None else stop]
        posted = (row for row in rows if row.kind <= Kind.SEND)
        return {row.slot: (row.peer, row.kind == Kind.RECEIVE) for row in posted}

    def _occupied(self) -> list[int]:
        """Return the slots of messages that were posted and have not been waited for."""
        slots: list[int] = np.flatnonzero((self._requests != self._port.no_request).any(1)).tolist()
        return slots

    def _posted(self) -> list[tuple[int, MPI.Request]]:
        """Return the requests of these messages, with their slots."""
        return [(slot, request_of(self._requests[slot])) for slot in self._occupied()]

    def when_complete(self, then: Callable[[float], object]) -> None:
        """See `Execution.when_complete`."""
        then(time.perf_counter())

    def link(self, rank: int) -> str:
        """See `Execution.link`."""
        return "host"

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""
        slots = frozenset(slot for slot, request in self._posted() if is_complete(request))
        self._completed = (self.run_number, self.row), slots

    def position(self) -> tuple[int, list[Waiting]]:
        """See `Execution.position`."""
        row, (place, completed) = self.row, self._completed
        if place != (self.run_number, row):
            completed = frozenset()
        ends = self._ends(row)
        slots = [slot for slot in self._occupied() if slot in ends and slot not in completed]
        return self.program.round_of(row), [Waiting(*ends[slot]) for slot in slots]

    def abandon(self) -> bool:
        """See `Execution.abandon`."""
        self.state[self._names.NUMBER] = 0
        ends, posted = self._ends(), self._posted()
        receives = [request for slot, request in posted if slot in ends and ends[slot][1]]
        are_done = cancel_all([request for _, request in posted], receives)
        if are_done:
            self._requests[:] = self._port.no_request
        return are_done


def _is_equal_but_other(array: Array | None, dtype: np.dtype[Any] | None) -> bool:
    """Return whether the dtype of an array is equal to `dtype` but another object."""
    return array is not None and array.dtype is not dtype and bool(array.dtype == dtype)


def kernel_of(function: Any, dtype: np.dtype[Any]) -> int:
    """Return the address of the kernel that combines arrays of this dtype; 0 if there is none."""
    return (kernels.combine(function, dtype) or 0) if isinstance(function, str) else 0


def _shift(source: Array | None, target: Array | None, apart: int) -> int:
    """Return the offset in bytes of the output from the input.

    It is `apart` if they do not overlap.
    """
    if source is None or target is None:
        return apart
    shift = address(target) - address(source)
    return apart if shift >= source.nbytes or -shift >= target.nbytes else shift


def address(array: Array) -> int:
    """Return the address of an array's first byte.

    `_knows_arrays` checks this fast way to read it.
    """
    return _pointer_at(id(array) + _DATA_FIELD).value or 0
