"""When each computation of a schedule begins and ends, and what that implies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from parallel.pipeline.actions import (
    Action,
    Backward,
    BackwardWeight,
    Computation,
    Forward,
    Result,
    Update,
)
from parallel.pipeline.schedule import Schedule, computations
from parallel.pipeline.times import Time, Times


class Span(NamedTuple):
    """An action and when it begins and ends."""

    action: Action
    begin: Time
    end: Time


@dataclass(frozen=True)
class Simulation:
    """A schedule in time: each rank begins an action as soon as what precedes it is done.

    Attributes
    ----------
    schedule : Schedule
    times : Times
    spans : list of (list of Span)
        The actions of each rank.
    """

    schedule: Schedule
    times: Times
    spans: list[list[Span]] = field(repr=False)

    @property
    def makespan(self) -> Time:
        """The time from the first action of any rank to the end of the last."""
        return max((span.end for row in self.spans for span in row), default=0)

    def busy(self, rank: int) -> Time:
        """Return the time for which a rank computes."""
        return sum((span.end - span.begin for span in self.spans[rank]), 0)

    def idle(self, rank: int) -> Time:
        """Return the time for which a rank waits between its first and its last action."""
        row = self.spans[rank]
        return row[-1].end - row[0].begin - self.busy(rank)

    @cached_property
    def bubble(self) -> Time:
        """The bubble: the longest time from a rank's first action to its last, less its work."""
        return max(map(self.idle, range(self.schedule.num_ranks)))

    def idle_in_step(self, rank: int) -> Time:
        """Return the time for which a rank does not compute while any rank is in the step."""
        return self.makespan - self.busy(rank)

    @property
    def fractions(self) -> tuple[Fraction, Fraction]:
        """The bubble as a fraction of all time, and of the time for which a rank computes."""
        bubble = Fraction(self.bubble)
        busy = Fraction(max(map(self.busy, range(self.schedule.num_ranks))))
        return bubble / (bubble + busy), bubble / busy

    def live(self, rank: int, *, until: type[Computation] = BackwardWeight) -> int:
        """Return the most activations of one stage and micro-batch that a rank keeps at a time.

        Activations are kept from F until W, as papers count, or until the first half of backward
        with ``until=BackwardInput``.
        """
        return most(kept_by(part, until) for part in computations(self.schedule.actions[rank]))

    def held(
        self, rank: int, *, until: type[Computation] = BackwardWeight
    ) -> list[tuple[Time, int]]:
        """Return how many activations a rank keeps from each time on at which the number changes.

        `until` is as in `live`.  Activations are kept from the beginning of F to the end of B or W.
        """
        changes: Counter[Time] = Counter()
        for action, begin, end in self.spans[rank]:
            for part in computations((action,)):
                change = kept_by(part, until)
                changes[begin if change > 0 else end] += change
        times = sorted(time for time, change in changes.items() if change)
        return list(zip(times, accumulate(changes[time] for time in times), strict=True))

    @property
    def num_messages(self) -> list[int]:
        """How many messages each rank sends: activations forward, derivatives backward."""
        sent: Counter[int] = Counter()
        schedule = self.schedule
        for rank, row in enumerate(schedule.actions):
            for part in computations(row):
                if (to := part.target(schedule.num_stages)) is not None:
                    sent[rank] += schedule.rank_of(to, part.micro_batch) != rank
        return [sent[rank] for rank in range(schedule.num_ranks)]

    def versions(self, rank: int) -> tuple[dict[int, int], int]:
        """Return the updates before F of each micro-batch on a rank, and the most versions alive.

        A version is alive if it is the current one, or if B of a micro-batch needs it.
        """
        versions_read: dict[int, int] = {}
        version, alive, begun = 0, 1, dict[int, int]()
        for action in self.schedule.actions[rank]:
            number = action.micro_batch
            if isinstance(action, Forward):
                versions_read[number] = begun[number] = version
            elif isinstance(action, Update):
                del begun[number]
                version += 1
                alive = max(alive, len({*begun.values(), version}))
        return versions_read, alive


def most(changes: Iterable[int]) -> int:
    """Return the largest running sum of `changes`, at least 0."""
    total = largest = 0
    for change in changes:
        total += change
        largest = max(largest, total)
    return largest


def kept_by(part: Computation, until: type[Computation]) -> int:
    """Return how a computation changes the number of activations that are kept; see `live`."""
    return isinstance(part, Forward) - isinstance(part, (Backward, until))


def simulate(schedule: Schedule, times: Times | None = None) -> Simulation:
    """Return when each action of a schedule begins and ends; by default, F = I = W = 1.

    A message takes time on its way, but no time of a rank.  Raises ValueError if actions wait for
    each other forever; `validate` says which.

    Examples
    --------
    >>> from parallel.pipeline import Times, make, simulate
    >>> simulate(make("1f1b", 4, 8), Times(1, 1, 1)).bubble
    9
    """
    times, n = times or Times(), schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in range(n)]
    ends: dict[Result, tuple[Time, int]] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(n):
            for action in schedule.actions[rank][len(spans[rank]) :]:
                if (begin := _begin(action, rank, schedule, times, ends)) is None:
                    break
                free = spans[rank][-1].end if spans[rank] else begin
                span = Span(action, max(begin, free), max(begin, free) + action.time(times))
                spans[rank].append(span)
                for part in computations((action,)):
                    ends[part.result] = span.end, rank
                has_moved = True
    if any(len(spans[rank]) < len(schedule.actions[rank]) for rank in range(n)):
        raise ValueError("actions wait for each other forever: see `validate`")
    return Simulation(schedule, times, spans)


def _begin(
    action: Action,
    rank: int,
    schedule: Schedule,
    times: Times,
    ends: dict[Result, tuple[Time, int]],
) -> Time | None:
    """Return when all that an action needs is there; None if something is not done yet."""
    begin: Time = 0
    for result in action.needs(schedule.num_stages):
        if result not in ends:
            return None
        end, where = ends[result]
        begin = max(begin, end + (times.message if where != rank else 0))
    return begin
