"""The interface of an engine: messages, executions of programs, and how to wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Arrays, Backend, BinaryFunction, Bytes, Operator
from collectives.diagnostics import CallLog, FlightRecorder, Waiting
from collectives.engines.board import Board
from collectives.programs import Program

Action = Callable[[], object]

_YIELDS = 10_000  # offers of the processor to other ranks before a rank backs off


class Operands(NamedTuple):
    """The flat arrays of a run, the backend that serves them, and the function that combines.

    Attributes
    ----------
    function : str or function or None
        The name of a NumPy function, or a function called in the same way; None if the program does
        not combine.
    divisor : int
        The divisor of an average.
    """

    backend: Backend
    input: Array
    output: Array
    scratch: Array
    function: str | BinaryFunction | None = None
    divisor: int = 1

    @classmethod
    def of(
        cls, arrays: Arrays, num_scratch: int = 0, op: Operator | None = None, divisor: int = 1
    ) -> Operands:
        """Flatten the arrays of a call, and allocate so many bytes of scratch."""
        (backend, source, target), dtype = arrays, arrays.dtype
        nothing = backend.empty((0,), dtype)
        return cls(
            backend,
            nothing if source is None else source.reshape(-1),
            nothing if target is None else target.reshape(-1),
            backend.empty((num_scratch // dtype.itemsize,), dtype) if num_scratch else nothing,
            None if op is None else op.function,
            divisor,
        )


class MessageMemory(Protocol):
    """A kind of memory in which MPI takes and leaves the messages of arrays on a device.

    Attributes
    ----------
    link : str
        The link of such messages; see `Row.link` of ledgers.
    """

    link: str

    def new(self, num_bytes: int) -> Bytes:
        """Return memory that nothing uses.  Only MPI and the device may look into it.

        To allocate it may wait for all streams of the process.
        """

    @property
    def copy_to(self) -> Callable[[Sequence[tuple[Array, Bytes]]], object]:
        """The function that lets the current stream copy flat arrays to messages of their sizes.

        Neither may be changed or given up before the stream has done it.
        """

    @property
    def copy_from(self) -> Callable[[Sequence[tuple[Array, Bytes]]], object]:
        """The function that does the same for copies of messages to the arrays."""


class Enqueued(Protocol):
    """What an asynchronous run has put on a stream of a device."""

    def join(self) -> None:
        """Let the stream that is current in this thread wait for it."""

    @property
    def is_complete(self) -> bool:
        """Whether the device has done it."""


class Execution(Protocol):
    """A program that is being run, from the row that it has reached.

    Only the thread that advances it may call its methods, except for `row`, `position` and
    `interrupt`, which any thread may use at any time: they read or write plain memory.

    Attributes
    ----------
    limit : float or None
        The seconds that a run may take on a device; None for the limit of the communicator.
    """

    limit: float | None

    @property
    def row(self) -> int:
        """The row that runs next."""

    def when_complete(self, then: Callable[[float], object]) -> None:
        """Call a function with the time at which the last run was complete.

        It is called at once, or when the device has done the run.  The time is in seconds of
        `time.perf_counter`.
        """

    def link(self, rank: int) -> str:
        """Return how the messages of a complete run to a rank went: see `Row.link` of ledgers."""

    @property
    def device_row(self) -> str:
        """The row at which its device waits, as text; "" if there is none."""

    @property
    def final_state(self) -> int:
        """The state of a run that `advance` has completed, for the flight recorder."""

    @property
    def enqueued(self) -> Enqueued | None:
        """What a complete run has left to a device; None if the caller's stream waits for it."""

    def advance(self, seconds: float) -> bool:
        """Continue, waiting at most `seconds`; return whether the program is complete.

        Raises CollectiveMismatch for a message of the wrong length, and what an operator raises.
        """

    def restart(self, number: int, *, is_async: bool = False) -> None:
        """Go back to the first row, for the run of this number.

        `is_async` says whether the caller goes on meanwhile.
        """

    def leave_callers_stream(self) -> None:
        """Go on with a run while its caller goes on too."""

    def attach(self, operands: Operands, tag: int) -> None:
        """Set the arrays and the tag of the next run."""

    def detach(self) -> None:
        """Release the arrays; the next run has others."""

    def interrupt(self, is_wanted: bool) -> None:
        """End a wait in another thread at once; with False, allow waits again."""

    def note_completed(self) -> None:
        """Note which of the messages that were posted are complete, for `position`."""

    def position(self) -> tuple[int, list[Waiting]]:
        """Return the current round, and the messages that are not known to be complete.

        They were posted.  What is returned is read while another thread may change it, so it may be
        a moment old.
        """

    def abandon(self) -> bool:
        """Cancel the messages of a failed run; return whether none is in flight any more."""


class Loop(Protocol):
    """The compiled functions that start executions; arrays are passed as object addresses."""

    @property
    def run(self) -> Callable[[int, int, int, int], int]:
        """The function that starts a run of a state on two arrays, for some nanoseconds.

        It returns 0 if the run is complete.
        """

    @property
    def start(self) -> Callable[[int, int, int, int], int]:
        """The function that does the same for a run whose caller goes on meanwhile."""

    @property
    def fits(self) -> Callable[[int, int, int], bool]:
        """The function that says whether a run of a state can start on two arrays."""


class Reusable(Execution, Protocol):
    """An execution that compiled code can start, each time on other arrays.

    Attributes
    ----------
    state_address : int
        The address of its state.
    """

    state_address: int

    @property
    def loop(self) -> Loop:
        """The functions that start it."""

    @property
    def reads_input(self) -> bool:
        """Whether runs need an input."""

    @property
    def is_running(self) -> bool:
        """Whether a run that compiled code has started is not complete."""

    @property
    def run_number(self) -> int:
        """The number of the run that compiled code has started."""

    @property
    def log_entry(self) -> int:
        """The index of that run's entry in the log."""

    def set_tag(self, run_number: int) -> None:
        """Set the tag of the next run, which Python starts, from its number."""

    @property
    def tag(self) -> int:
        """The tag of the current run."""

    def make_reusable(
        self,
        log: CallLog,
        key: int,
        counter: NDArray[np.int64],
        source: Array | None,
        target: Array | None,
        tags: range = range(0),
    ) -> None:
        """Let `loop.run` start runs on arrays of this shape and dtype, numbered by a counter.

        Each run gets an entry in `log`, where `key` identifies the program.  Runs use `tags` in
        rotation, by their numbers; `tags` is empty if all runs have the same tag.
        """

    def make_reusable_like(self, other: Any, key: int) -> None:
        """Serve the same kinds of arrays, with the same counter, as another execution."""

    def reuse_for_plan(self, key: int, counter: NDArray[np.int64], tag: int) -> None:
        """Let `loop.run` start the runs of another plan, on arrays of the same kind.

        `key` and `counter` are as in `make_reusable`.  All runs of a plan have the same tag.
        """

    def update_dtypes(self, source: Array | None, target: Array | None) -> bool:
        """Take over dtype objects that are equal to the known ones; return whether any changed.

        Compiled code compares the addresses of dtype objects, so an equal dtype may not fit.
        """

    def set_arrays(self, source: Array | None, target: Array | None) -> None:
        """Set the arrays of the next run, which Python starts."""

    def started(self, answer: int, source: Array | None, target: Array | None) -> bool:
        """Continue after the answer of `loop.run`; return False if the run has not started.

        `source` and `target` are the arrays on which `loop.run` has started it.
        """


class Messages(Protocol):
    """The messages of one execution: each has its own slot, and all have the same tag.

    Attributes
    ----------
    lengths : dict of int to int
        By slot, the bytes of the messages that were received and might be shorter.
    """

    tag: int
    lengths: dict[int, int]

    def receive(self, slot: int, peer: int, data: Bytes, *, may_be_shorter: bool = False) -> None:
        """Post a receive.  The buffer belongs to the engine until the message is complete.

        `may_be_shorter` says whether a message of fewer bytes than the buffer's is right, too.
        """

    def send(self, slot: int, peer: int, data: Bytes) -> None:
        """Post a send.  The buffer belongs to the engine until the message is complete."""

    def test(self, slots: range, num_receives: int) -> bool:
        """Return whether the messages in `slots` are complete.

        The first `num_receives` of them are receives.
        """

    def note_completed(self) -> None:
        """See `Execution.note_completed`."""

    def waiting_for(self) -> list[Waiting]:
        """Return the messages that were posted and are not known to be complete.

        Any thread may ask.
        """

    def abandon(self) -> bool:
        """See `Execution.abandon`."""


class PendingCall(Protocol):
    """A call that has started and continues only when `progress` is called.

    Attributes
    ----------
    is_done : bool
        Whether it is complete or has failed.
    is_awaited : bool
        Whether a thread waits for it and therefore advances it.
    """

    is_done: bool
    is_awaited: bool

    def progress(self, seconds: float = 0.0) -> bool:
        """Advance it for at most `seconds` unless another thread does; return whether it moved.

        Raises only KeyboardInterrupt.
        """

    @property
    def is_on_device(self) -> bool:
        """Whether it is a call on a device that is not enqueued yet."""


class Waiter(Protocol):
    """An execution that waits for other ranks without a message of theirs.

    Any thread may ask, also while another one advances the execution.
    """

    @property
    def can_move(self) -> bool:
        """Whether it can go on, and no other thread advances it."""

    @property
    def is_stuck(self) -> bool:
        """Whether it can only go on after another rank."""

    @property
    def missing(self) -> list[int]:
        """The ranks that it waits for."""


class Transport(Protocol):
    """One rank's end of a communicator.

    Attributes
    ----------
    in_flight : list of PendingCall
        The calls of this rank, in all its communicators, that continue only while some call waits.
        A waiting call must advance all of them; otherwise two ranks that wait in different orders
        would deadlock.
    failed : list
        Objects that are kept until the process ends, because MPI may still write into their
        buffers.
    flight : FlightRecorder
        The flight recorder of all communicators of this rank.
    identity : (ranks, ordinal)
        The ranks of the job, and the ordinal of this communicator among theirs.
    board : Board
        What the ranks of this host show each other.
    message_memory : function
        Returns, for a backend, where MPI takes and leaves the messages of arrays on a device.
    """

    rank: int
    size: int
    num_tags: int
    in_flight: list[PendingCall]
    failed: list[Any]
    flight: FlightRecorder
    log: CallLog
    identity: tuple[tuple[int, ...], int]
    board: Board
    message_memory: Callable[[Backend], MessageMemory]

    @property
    def max_wait(self) -> float:
        """The seconds that an execution may wait at a time if no other call is in flight."""

    @property
    def can_use_threads(self) -> bool:
        """Whether several threads may make calls of the engine at the same time."""

    @property
    def why_interpreted(self) -> str | None:
        """Why Python runs the programs instead of compiled code; None if compiled code does."""

    def execution(
        self,
        program: Program,
        operands: Operands,
        tag: int,
        host_calls: NDArray[np.int64] | None = None,
    ) -> Execution:
        """Return an execution of a program on arrays that live until it is complete.

        It writes the number of each run to the array `host_calls`, at the number's remainder.
        """

    def messages(self, tag: int) -> Messages:
        """Return the messages of an interpreted execution."""

    def probe(self, tag: int) -> int | None:
        """Return a rank whose message of this tag has arrived and is not received.

        None if there is none.
        """

    def subgroup(self, ranks: Sequence[int], deadline: float | None) -> Transport:
        """Return a transport among `ranks`, in this order; exactly these ranks call it.

        Raises CollectiveTimeout if they have not all called it by `deadline`.
        """

    def split(self, ranks: Sequence[int] | None, deadline: float | None) -> Transport | None:
        """Return a transport among `ranks`; every rank calls it, with its own group or None."""

    def watch(self, waiter: Waiter) -> None:
        """Let `pause` return as soon as an execution can move that waits for no message."""

    def unwatch(self, waiter: Waiter) -> None:
        """Forget an execution that is watched."""

    def pause(self, deadline: float | None, num_tries: int) -> None:
        """Let time pass, at most until `deadline`, because no call can continue now."""

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink` works."""

    def translate_error(self, error: BaseException) -> BaseException:
        """Return the error to raise for an engine's failure: PeerFailed, or the error itself."""

    def shrink(self, deadline: float | None, interrupt: bool) -> tuple[Transport, list[int]]:
        """Return a transport among the ranks that are alive, and these ranks; all of them call it.

        `interrupt` says whether pending calls of this transport fail.
        """

    def free(self) -> None:
        """Free the engine's communicator, if the library made it."""


def call_all(actions: Sequence[Action]) -> None:
    """Call each action once, in order."""
    for action in actions:
        action()


def poll_until(is_done: Callable[[], Any], deadline: float | None = None) -> bool:
    """Poll until `is_done` returns a true value; return False if the deadline comes first.

    An engine's own wait would block Ctrl-C and every other signal.
    """
    num_tries = 0
    while not is_done():
        if deadline is not None and time.monotonic() > deadline:
            return False
        back_off(num_tries - _YIELDS)
        num_tries += 1
    return True


def deadline_in(seconds: float | None) -> float | None:
    """Return the deadline, in `time.monotonic`, of a time limit that starts now."""
    return None if seconds is None else time.monotonic() + seconds


def back_off(num_tries: int) -> None:
    """Yield the processor at first, then sleep for increasing times of up to a millisecond.

    To yield takes about a microsecond; even the shortest sleep takes more than 50.
    """
    if num_tries < 100:
        os.sched_yield()
    else:
        time.sleep(min(1e-3, 1e-6 * num_tries))


def wrong_length(rank: int, peer: int, got: int, expected: int) -> str:
    """Return the message of a CollectiveMismatch for a message of the wrong length."""
    return (
        f"rank {rank} expected {expected} bytes from rank {peer} and got {got}: "
        "the two ranks did not make the same call with the same sizes"
    )
