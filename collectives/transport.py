"""What the plan asks of an engine: exchange these messages.  Engines know nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from collectives.arrays import Bytes
from collectives.flight_recorder import FlightRecorder, Waiting

if TYPE_CHECKING:
    from collectives.plan import Plan

Parcels = Sequence[tuple[int, Bytes]]
Action = Callable[[], object]  # what returns False is not done, and is asked again

_YIELDS = 10_000  # offers of the processor to other ranks; who has waited so long may sleep


class Exchange(Protocol):
    """The messages of one round, which may be started again and again.

    `starts` and `waits` are what to call, one after the other, to post all messages and to wait for
    them without a limit; what of `waits` returns False is called again until it does not.  Whoever
    does everything by these two does not use `start`, `test`, `wait` in the same run.
    """

    starts: list[Action]
    waits: list[Action]

    def start(self) -> None:
        """Post all messages.  The buffers belong to the exchange until it is complete."""

    def test(self) -> bool:
        """Whether all messages have completed.  Raises CollectiveMismatch on a wrong length."""

    def wait(self, deadline: float | None) -> bool:
        """Wait until all have completed; False if `deadline` (of `time.monotonic`) came first."""

    def retag(self, tag: int) -> None:
        """Let the next start have this tag.  Not for an exchange that was prepared to be kept."""

    def waiting_for(self) -> list[Waiting]:
        """The messages that were started and have not completed."""

    def abandon(self) -> bool:
        """After a failure: call off what is still to come.  Whether nothing is on its way now."""

    def free(self) -> None:
        """Give back what the engine holds for a completed exchange."""


class Transport(Protocol):
    """One rank's end of a communicator, seen by plans."""

    rank: int
    size: int
    num_tags: int
    # Every started plan that has not completed, in all communicators of this rank: whoever waits
    # must keep all of them going, or two ranks that wait in different orders would wait for ever.
    in_flight: list[Plan]
    failed: list[Plan]  # kept for ever: MPI may yet write into their buffers
    flight: FlightRecorder  # one for all communicators of this rank
    identity: tuple[tuple[int, ...], int]  # the ranks of the job, and which one of their groups

    def exchange(self, sends: Parcels, receives: Parcels, tag: int, is_kept: bool) -> Exchange:
        """Prepare messages (peer, bytes); `is_kept`: they will be started many times."""

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

    def meaning(self, error: BaseException) -> BaseException:
        """What a failure of the engine below means: PeerFailed, or the error itself."""

    def shrink(self, deadline: float | None) -> tuple[Transport, list[int]]:
        """A transport among the ranks that are alive, all of which call it, and these ranks."""

    def free(self) -> None:
        """Give back the communicator below, if it is ours."""


def do(actions: Sequence[Action]) -> None:
    """All of them, one after the other, each once."""
    for action in actions:
        action()


def until(is_over: Action, deadline: float | None = None) -> bool:
    """Ask until the answer is not False; False if the deadline came first.

    An engine's own wait would let in neither Ctrl-C nor any other signal.
    """
    num_tries = 0
    while is_over() is False:
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
