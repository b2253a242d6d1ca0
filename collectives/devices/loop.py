"""The state of the compiled loop that runs a device program."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple
from weakref import finalize

import numpy as np

from collectives.arrays import jit
from collectives.devices.driver import MEMORY_OPERATION_WORDS, Driver, DriverError
from collectives.devices.interpreter_source import NUM_THREADS
from collectives.devices.order import Enqueued, Order, Turns
from collectives.devices.row_format import ROW_WORDS, Words
from collectives.devices.streams import STREAMS
from collectives.diagnostics import CallLog
from collectives.engines import Operands

_SPINS = 10  # polls before a waiting rank yields its processor


class Functions(NamedTuple):
    """The compiled functions; see `enqueue`."""

    run: Callable[[int, int], int]
    note_start: Callable[[int], int]
    come: Callable[[int, int, int], None]
    look: Callable[[int], int]
    advance: Callable[[int, int], int]
    log_end: Callable[[int, int], None]


@cache
def compiled() -> Functions:
    """Return the compiled functions, which are compiled or loaded at first use."""
    from collectives.devices import enqueue  # noqa: PLC0415 - it imports numba
    from collectives.engines.executor import log_end  # noqa: PLC0415

    return Functions(
        jit.function(enqueue.run.py_func, "int64(int64, int64)"),
        jit.function(enqueue.note_start.py_func, "int64(int64)"),
        jit.function(enqueue.come.py_func, "void(int64, int64, int64)"),
        jit.function(enqueue.look.py_func, "int64(int64)"),
        jit.function(enqueue.advance.py_func, "int64(int64, int64)"),
        jit.function(log_end.py_func, "void(int64, int64)"),
    )


@cache
def _port() -> Words:
    """Return the words of `executor.py` that a device program needs of a port."""
    from collectives.engines import executor  # noqa: PLC0415 - it imports numba

    library, port = ctypes.CDLL(None), np.zeros(executor.NUM_PORT_WORDS, np.int64)
    for name, function in (
        (executor.CLOCK, library.clock_gettime),
        (executor.YIELD, library.sched_yield),
    ):
        port[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
    port[executor.SPINS] = _SPINS
    return port


class Loop:
    """The words of the compiled loop; see `enqueue`.

    Attributes
    ----------
    interpreter : int
        The kernel that runs whole programs, loaded if they may be kernels; else 0.
    num_blocks_at_once : int
        How many blocks of this kernel the device can run at the same time.
    seconds : float
        How long `advance` may wait.
    limit : float or None
        The seconds that a run may take on the device; None for the limit of the communicator.
    enqueued : Enqueued or None
        What an asynchronous run puts on its stream; None if the run is on the caller's stream.
    """

    seconds = 0.0
    limit: float | None = None
    enqueued: Enqueued | None = None

    def __init__(
        self,
        driver: Driver,
        order: Order,
        turns: Turns,
        operands: Operands,
        itemsize: int,
        *,
        may_be_kernel: bool,
    ) -> None:
        from collectives.devices import enqueue  # noqa: PLC0415 - it imports numba

        self.names, self._functions = enqueue, compiled()
        self.rows = np.zeros((0, ROW_WORDS), np.int64)
        self._values = np.zeros(12, np.int64)
        self._parameters = self._values.ctypes.data + 8 * np.arange(12)
        self._batch = np.zeros((enqueue.MOST_IN_BATCH, MEMORY_OPERATION_WORDS), np.int64)
        self.words = np.zeros(enqueue.NUM_STATE_WORDS, np.int64)
        self.address = self.words.ctypes.data
        dtype, kernels = operands.output.dtype, driver.kernels
        function = operands.function if isinstance(operands.function, str) else ""
        is_average = operands.divisor > 1
        self._driver, addresses = driver, driver.addresses
        self.divisor = operands.divisor
        interpreter = kernels.interpret(function or None, dtype) if may_be_kernel else None
        self.interpreter, self.num_blocks_at_once = interpreter or 0, 0
        if interpreter is not None:  # this also loads it
            self.num_blocks_at_once = driver.num_blocks_at_once(interpreter, NUM_THREADS)
        self.order, self._turns = order, turns
        started = STREAMS.borrow_event(driver)
        finalize(self, STREAMS.give_back_event, driver, started)
        for name, value in {
            enqueue.PORT: _port().ctypes.data,
            enqueue.STARTED: started,
            enqueue.ORDER: order.words.ctypes.data,
            enqueue.FIRST_CALL: turns.words.ctypes.data,
            enqueue.BATCH: self._batch.ctypes.data,
            enqueue.VALUES: self._values.ctypes.data,
            enqueue.PARAMETERS: self._parameters.ctypes.data,
            enqueue.COMBINE: (kernels.combine(function, dtype) or 0) if function else 0,
            enqueue.DIVIDE: (kernels.divide(dtype) or 0) if is_average else 0,
            enqueue.DIVISOR: operands.divisor,
            enqueue.ITEMSIZE: itemsize,
            enqueue.BATCH_OPERATION: addresses["cuStreamBatchMemOp_v2"],
            enqueue.COPY_BYTES: addresses["cuMemcpyDtoDAsync_v2"],
            enqueue.LAUNCH: addresses["cuLaunchKernel"],
            enqueue.LAUNCH_TOGETHER: addresses["cuLaunchCooperativeKernel"],
            enqueue.RECORD_EVENT: addresses["cuEventRecord"],
            enqueue.WAIT_EVENT: addresses["cuStreamWaitEvent"],
            enqueue.QUERY_EVENT: addresses["cuEventQuery"],
            enqueue.IS_CAPTURING: addresses["cuStreamIsCapturing"],
        }.items():
            self.words[name] = value

    def log_runs(self, log: CallLog, key: int, counter: Words) -> None:
        """Let `run` number and log the runs that it starts; see `Reusable.make_reusable`."""
        words = key, log.words.ctypes.data, counter.ctypes.data
        self.words[self.names.KEY : self.names.COUNTER_AT + 1] = words
        self._logged = log, counter

    def log_runs_like(self, other: Loop, key: int) -> None:
        """Let `run` number and log runs as another loop does."""
        log, counter = other._logged
        self.log_runs(log, key, counter)

    @property
    def can_be_kernel(self) -> bool:
        """Whether there is a kernel that runs whole programs, and room for it on the device."""
        return self.num_blocks_at_once > 0

    # Runs after a meeting

    def begin(self, rows: Words) -> None:
        """Set the rows of the next run, which begins after the start that was noted."""
        self.rows, names = rows, self.names
        for name, value in {
            names.TABLE: rows.ctypes.data,
            names.NUM_ROWS: len(rows),
            names.MOST_OUTSTANDING: self._driver.most_outstanding,
            names.STAGE: names.FOLLOWING,
        }.items():
            self.words[name] = value

    # Runs without one

    def keep(self, mine: Words, peers: Sequence[Words], most_turns: int) -> None:
        """Let the same rows run again.

        Parameters
        ----------
        mine : array
            The word by which the peers see that this rank has come.
        peers : sequence of arrays
            The words of the peers.
        most_turns : int
            How often the rows can run again at most.
        """
        names = self.names
        self._mine = mine, peers
        self._peers = np.array([word.ctypes.data for word in peers], np.int64)
        self.words[names.PEERS], self.words[names.NUM_PEERS] = self._peers.ctypes.data, len(peers)
        self.words[names.TURN] = 0
        self.words[names.LAST_TURN] = min(most_turns, names.MOST_TURNS)
        self.words[names.MINE] = mine.ctypes.data

    def forget(self) -> None:
        """Let the peers see that this rank does not run the same rows again."""
        names, words = self.names, self.words
        if words[names.MINE]:
            turn = self.turn + (not self.is_coming)
            self._mine[0][0] = names.word_of.py_func(0, turn, names.MUST_MEET)
            words[names.MINE] = 0
        words[names.STAGE] = names.IDLE

    @property
    def can_run_again(self) -> bool:
        """Whether the rows of the last run can run once more."""
        words, names = self.words, self.names
        return bool(words[names.MINE]) and bool(words[names.TURN] < words[names.LAST_TURN])

    def run(self, of_caller: int, nanoseconds: int) -> int:
        """Start a run and advance it, after what is on the caller's stream.

        Raises DriverError.
        """
        self.words[self.names.OF_CALLER] = of_caller
        return self._checked(self._functions.run(self.address, nanoseconds))

    def come(self, number: int, *, has_changed: bool) -> None:
        """Start a run of this number; say whether this rank has other arrays than in the last."""
        self._functions.come(self.address, number, self.names.HAS_CHANGED if has_changed else 0)

    def go_on(self) -> None:
        """Go on with a run to which all have come, some of them with other arrays."""
        self.words[self.names.STAGE] = self.names.FOLLOWING

    # Any run

    def note_start(self, of_caller: int) -> None:
        """Let the next run begin after what is on the caller's stream now, and nothing later."""
        self.words[self.names.OF_CALLER] = of_caller
        self._functions.note_start(self.address)

    def note_no_start(self) -> None:
        """Note that the driver has failed."""
        self.words[self.names.START] = self.names.FAILED

    @property
    def start(self) -> int:
        """NOTED; or CAPTURED or FAILED, if the caller's stream is."""
        return int(self.words[self.names.START])

    @property
    def is_start_noted(self) -> bool:
        """Whether the next run begins after what was on the caller's stream."""
        return self.start == self.names.NOTED

    def advance(self) -> int:
        """Advance a run; return the answer of the loop.  Raises DriverError."""
        return self._checked(self._functions.advance(self.address, int(self.seconds * 1e9)))

    def _checked(self, answer: int) -> int:
        """Return the answer of the loop.  Raises DriverError if the driver has failed."""
        if answer == self.names.DRIVER_ERROR:
            raise DriverError("running a program", int(self.words[self.names.ERROR]))
        return answer

    def interrupt(self, is_wanted: bool) -> None:
        """End a wait in another thread at once; with False, allow waits again."""
        self.words[self.names.INTERRUPT] = is_wanted

    # Where a run is enqueued

    def use_callers_stream(self) -> None:
        """Enqueue the next run on the stream that is current at the call."""
        self.enqueued = None
        self.words[self.names.OWN_STREAM] = self.words[self.names.ENDED] = 0

    def use_own_stream(self, enqueued: Enqueued) -> None:
        """Enqueue the next run, or the rest of this one, on a stream of its own.

        The event of `enqueued` is recorded at its end.  Raises DriverError.
        """
        self.enqueued, (stream, event) = enqueued, self.order.stream
        self.words[self.names.OWN_STREAM], self.words[self.names.ENDED] = stream, enqueued.event
        if self.is_open:
            self._driver.call("cuEventRecord", event, self.stream)
            self._driver.call("cuStreamWaitEvent", stream, event, 0)
            self.words[self.names.STREAM] = stream

    def has_room(self, num_operations: int) -> bool:
        """Return whether the stream has room for operations that Python enqueues."""
        outstanding = int(self.order.words[self.names.NUM_OUTSTANDING])
        return outstanding + num_operations <= self._driver.most_outstanding

    @property
    def stream(self) -> int:
        """The stream on which the last run was enqueued."""
        return int(self.words[self.names.STREAM])

    def log_end(self, state: int) -> None:
        """Log the state of a run that `run` has started, unless that is done."""
        if self.run_number:
            self._functions.log_end(self.address, state)

    def can_advance(self) -> bool:
        """Return whether `advance` would do more than wait."""
        if self.is_coming:
            return self._functions.look(self.address) != self.names.WAITING
        return self.order.has_ended

    def late(self) -> list[int]:
        """Return the indices of the peers that are not known to have come to the run."""
        (mine, peers), is_late = self._mine, self.names.is_late.py_func
        return [at for at, word in enumerate(peers) if is_late(int(word[0]), int(mine[0]))]

    @property
    def turn(self) -> int:
        """How many runs there were after the one that has begun with a meeting."""
        return int(self.words[self.names.TURN])

    @property
    def is_coming(self) -> bool:
        """Whether the run waits for its peers to come."""
        return bool(self.words[self.names.STAGE] == self.names.COMING)

    @property
    def is_certain(self) -> bool:
        """Whether all ranks enqueue the run, and nothing can end that."""
        return self.is_open or int(self.words[self.names.STAGE]) == self.names.FOLLOWING

    @property
    def is_open(self) -> bool:
        """Whether a part of the run is enqueued, and not all of it."""
        return int(self.words[self.names.STAGE]) in (self.names.ENQUEUEING, self.names.DRAINING)

    @property
    def run_number(self) -> int:
        """The number of the run that `run` has started; 0 if it is complete."""
        return int(self.words[self.names.NUMBER])

    @property
    def log_entry(self) -> int:
        """The index of that run's entry in the log."""
        return int(self.words[self.names.ENTRY])

    @property
    def row(self) -> int:
        """The row that is enqueued next."""
        return int(self.words[self.names.ROW])

    @row.setter
    def row(self, row: int) -> None:
        self.words[self.names.ROW] = row
