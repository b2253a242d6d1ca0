"""What an engine offers to those who run programs: messages, executions, and how to wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Array, Backend, BinaryFunction, Bytes
from collectives.diagnostics import CallLog, FlightRecorder, Waiting
from collectives.programs import Program

Action = Callable[[], object]

_YIELDS = 10_000  # offers of the processor to other ranks; who has waited so long may sleep


class Operands(NamedTuple):
    """What a program works on: flat arrays, the backend that serves them, and how to combine.

    `function`: the name of a NumPy function or one that is called in the same way, if the program
    combines.  `divisor`: what an average is divided by.
    """

    backend: Backend
    input: Array
    output: Array
    scratch: Array
    function: str | BinaryFunction | None = None
    divisor: int = 1


class Execution(Protocol):
    """A program that is being run: it stands at a row and goes on from there."""

    @property
    def row(self) -> int:
        """Where it stands."""

    def advance(self, seconds: float) -> bool:
        """Go on, waiting at most so long for messages; whether the program is complete.

        Raises CollectiveMismatch on a message of a wrong length, and what an operator raises.
        """

    def restart(self) -> None:
        """Begin again, after the program was complete."""

    def attach(self, operands: Operands, tag: int) -> None:
        """Let the next run be on these arrays and have this tag."""

    def let_go(self) -> Operands | None:
        """The arrays, which are the caller's again; the next run has others."""

    def interrupt(self, is_wanted: bool) -> None:
        """Let a wait that is under way in another thread end at once, or no more."""

    def position(self) -> tuple[int, list[Waiting]]:
        """The round in which it stands, and the messages that were posted and are not complete."""

    def abandon(self) -> bool:
        """After a failure: call off what is still to come.  Whether nothing is on its way now."""


class Loop(Protocol):
    """The compiled functions that begin executions; arrays go in as addresses of their objects."""

    @property
    def run(self) -> Callable[[int, int, int, int], int]:
        """Begin a run of a state, on these arrays, for so many nanoseconds; 0 if it is complete."""

    @property
    def fits(self) -> Callable[[int, int, int], bool]:
        """Whether a run of a state could begin on these arrays."""


class Reusable(Execution, Protocol):
    """An execution that compiled code can begin, on other arrays each time.

    `at`: the address of its state.
    """

    at: int

    @property
    def loop(self) -> Loop:
        """The functions that begin it."""

    @property
    def reads(self) -> bool:
        """Whether runs need an input."""

    @property
    def num_bytes(self) -> int:
        """The memory that keeping it takes."""

    @property
    def is_begun(self) -> bool:
        """Whether a run that compiled code has begun is not complete."""

    @property
    def number(self) -> int:
        """That of the run that compiled code has begun."""

    @property
    def entry(self) -> int:
        """Where the log has it."""

    def take_tag(self, number: int) -> None:
        """Let the next run, which Python begins, have the tag that goes with its number."""

    @property
    def tag(self) -> int:
        """That of the run under way."""

    def accept(
        self,
        log: CallLog,
        key: int,
        counter: NDArray[np.int64],
        source: Array | None,
        target: Array | None,
        tags: range = range(0),
    ) -> None:
        """Let `loop.run` begin runs on arrays such as these, and number them by a counter.

        It enters them into a log, in which `key` stands for the program.  `tags`: those that runs
        have in turns, by their numbers, if they do not all have one.
        """

    def accept_like(self, other: Any, key: int) -> None:
        """The same arrays and numbers as another execution of the same program."""

    def accept_plan(self, key: int, counter: NDArray[np.int64], tag: int) -> None:
        """Let `loop.run` begin the runs of another plan, on arrays that look the same.

        `key` and `counter`: see `accept`.  All runs of a plan have one tag.
        """

    def accepts_now(self, source: Array | None, target: Array | None) -> bool:
        """Whether arrays may not have fitted because a dtype, an equal one, is another object."""

    def place(self, source: Array | None, target: Array | None) -> None:
        """Let the next run, which Python begins, be on these arrays."""

    def began(self, answer: int) -> bool:
        """Go on after what `loop.run` has answered; False if it has not begun."""


class Messages(Protocol):
    """The messages of one execution, each in a slot of its own, and all with one tag."""

    tag: int

    def receive(self, slot: int, peer: int, data: Bytes) -> None:
        """Post a receive.  The buffer belongs to the engine until the message is complete."""

    def send(self, slot: int, peer: int, data: Bytes) -> None:
        """Post a send.  The buffer belongs to the engine until the message is complete."""

    def test(self, slots: range, num_receives: int) -> bool:
        """Whether these are complete, of which the first `num_receives` are receives."""

    def waiting_for(self) -> list[Waiting]:
        """The messages that were posted and are not complete."""

    def abandon(self) -> bool:
        """See `Execution.abandon`."""


class CallUnderWay(Protocol):
    """A call that has begun and goes on when somebody makes it.

    `is_awaited`: whether somebody waits for it, who then makes it go on.
    """

    is_over: bool
    is_awaited: bool

    def progress(self, seconds: float = 0.0) -> bool:
        """Go on unless somebody else does, waiting so long at most; whether anything moved.

        Raises nothing but KeyboardInterrupt.
        """


class Transport(Protocol):
    """One rank's end of a communicator.

    `in_flight`: the calls of this rank, in all its communicators, that go on only when somebody
    waits: whoever does must keep all of them going, or two ranks that wait in different orders
    would wait for ever.  `failed`: what is kept for ever, because MPI may yet write into its
    buffers.  `flight`: one for all communicators of this rank.  `identity`: the ranks of the job,
    and which one of their communicators this is.  `patience`: for how many seconds an execution
    should wait by itself where nothing else has to be kept going.
    """

    rank: int
    size: int
    num_tags: int
    in_flight: list[CallUnderWay]
    failed: list[Any]
    flight: FlightRecorder
    log: CallLog
    identity: tuple[tuple[int, ...], int]

    @property
    def patience(self) -> float:
        """See above."""

    @property
    def why_interpreted(self) -> str | None:
        """See above."""

    def execution(self, program: Program, operands: Operands, tag: int) -> Execution:
        """A run of a program on these arrays, which must live until it is over."""

    def messages(self, tag: int) -> Messages:
        """The messages of an execution that is interpreted."""

    def subgroup(self, ranks: Sequence[int], deadline: float | None) -> Transport:
        """A transport among these ranks, in this order; called by exactly these.

        Raises CollectiveTimeout if they have not all called it by `deadline`.
        """

    def split(self, ranks: Sequence[int] | None, deadline: float | None) -> Transport | None:
        """The same, called by every rank with the group it goes into, or None for none."""

    def pause(self, deadline: float | None, num_tries: int) -> None:
        """Nothing under way can go on just now: let time pass, at most until `deadline`."""

    @property
    def can_shrink(self) -> bool:
        """Whether `shrink` works."""

    def translate_error(self, error: BaseException) -> BaseException:
        """What a failure of the engine below means: PeerFailed, or the error itself."""

    def shrink(self, deadline: float | None) -> tuple[Transport, list[int]]:
        """A transport among the ranks that are alive, all of which call it, and these ranks."""

    def free(self) -> None:
        """Give back the communicator below, if it is ours."""


def do(actions: Sequence[Action]) -> None:
    """All of them, one after the other, each once."""
    for action in actions:
        action()


def until(is_over: Callable[[], Any], deadline: float | None = None) -> bool:
    """Ask until the answer is true; False if the deadline came first.

    An engine's own wait would let in neither Ctrl-C nor any other signal.
    """
    num_tries = 0
    while not is_over():
        if deadline is not None and time.monotonic() > deadline:
            return False
        if num_tries < _YIELDS:
            os.sched_yield()
        else:
            back_off(num_tries - _YIELDS)
        num_tries += 1
    return True


def deadline_in(seconds: float | None) -> float | None:
    """The deadline (of `time.monotonic`) that a time limit sets from now on."""
    return None if seconds is None else time.monotonic() + seconds


def back_off(num_tries: int) -> None:
    """Let others run: the processor at first, then for ever longer, up to a millisecond."""
    time.sleep(0 if num_tries < 100 else min(1e-3, 1e-6 * num_tries))


def wrong_length(rank: int, peer: int, got: int, expected: int) -> str:
    """The sentence of a CollectiveMismatch."""
    return (
        f"rank {rank} expected {expected} bytes from rank {peer} and got {got}: "
        "the two did not make the same call with the same sizes"
    )
