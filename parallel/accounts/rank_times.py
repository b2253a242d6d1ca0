"""How long the ranks of a pipeline computed and waited in a step, from events with times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

COMPUTING = ("F", "B", "I", "W")


class Event(NamedTuple):
    """An action of a rank, or its wait for a message, in seconds of a clock that ranks share.

    A wait has the kind of the send that it waits for, and the stage that sends.
    """

    kind: str
    stage: int
    number: int  # of the micro-batch
    begin: float
    end: float
    is_wait: bool = False


class RankTimes(NamedTuple):
    """The seconds of a rank in a step, from its first computation to the end of its last.

    Attributes
    ----------
    computing : float
    waiting : float
        Waiting for messages that the other rank had not begun to send.
    transfer : float
        Waiting for messages on their way.
    span : float
        All of the time; what remains is spent on sending and on bookkeeping.
    """

    computing: float
    waiting: float
    transfer: float
    span: float

    @property
    def fractions(self) -> tuple[float, float]:
        """The time without computation, as a fraction of all time and of the computing time."""
        bubble = self.span - self.computing
        return bubble / self.span, bubble / self.computing


def rank_times(
    events: Sequence[Iterable[Event]], groups: Iterable[tuple[int, ...]]
) -> list[RankTimes]:
    """Return the times of each rank from `events`, by rank; `groups` are the groups along ``pipe``.

    Examples
    --------
    >>> sender = [Event("F", 0, 0, 0.0, 2.0), Event("SEND_F", 0, 0, 2.0, 2.1)]
    >>> receiver = [Event("SEND_F", 0, 0, 1.0, 2.5, is_wait=True), Event("F", 1, 0, 1.0, 4.5)]
    >>> rank_times([sender, receiver], [(0, 1)])[1]
    RankTimes(computing=2.0, waiting=1.0, transfer=0.5, span=3.5)
    """
    all_events = [list(of_rank) for of_rank in events]
    times = dict[int, RankTimes]()
    for group in groups:
        sent = {
            (event.kind, event.stage, event.number): event.begin
            for rank in group
            for event in all_events[rank]
            if event.kind.startswith("SEND") and not event.is_wait
        }
        for rank in group:
            times[rank] = _times(all_events[rank], sent)
    return [times[rank] for rank in range(len(all_events))]


def _times(events: list[Event], sent: dict[tuple[str, int, int], float]) -> RankTimes:
    waits = [event for event in events if event.is_wait]
    busy = [event for event in events if event.kind in COMPUTING]
    waited = sum(event.end - event.begin for event in waits)
    waiting = sum(
        min(max(sent[event[:3]] - event.begin, 0.0), event.end - event.begin) for event in waits
    )
    computing = sum(event.end - event.begin for event in busy) - waited
    span = max(event.end for event in busy) - min(event.begin for event in busy)
    return RankTimes(computing, waiting, waited - waiting, span)
