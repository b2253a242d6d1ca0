"""When each computation of a schedule begins and ends, and what that implies.

Times are in any unit, and exact if they are integers or fractions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from parallel.actions import Action
from parallel.pipeline.schedule import Schedule, computations, dependencies, done_by

Time: TypeAlias = int | float | Fraction


class Times(NamedTuple):
    """How long a stage takes for a micro-batch, and a message between ranks.

    Attributes
    ----------
    forward, backward_input, backward_weight : number
        The times of F, I and W.
    message : number
        That of a message between ranks.
    overlapped : number, optional
        That of an F and a B that overlap; by default their sum.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    message: Time = 0
    overlapped: Time | None = None

    @property
    def backward(self) -> Time:
        """The time of both halves of backward."""
        return self.backward_input + self.backward_weight

    @property
    def all_of_one(self) -> Time:
        """The time of all that one stage computes for one micro-batch."""
        return self.forward + self.backward

    @property
    def pair(self) -> Time:
        """The time of an F and a B that overlap."""
        return self.all_of_one if self.overlapped is None else self.overlapped

    def of(self, action: Action) -> Time:
        """Return the time of an action; an update takes none."""
        if action.parts:
            return self.pair
        kinds = {"F": self.forward, "I": self.backward_input, "W": self.backward_weight}
        return {**kinds, "B": self.backward}.get(action.kind, 0)


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
        By rank.
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

    def live(self, rank: int, *, until: str = "W") -> int:
        """Return the most activations of one stage and micro-batch that a rank keeps at a time.

        From F until W, as papers count, or with ``until="I"`` until the first half of backward.
        """
        ends = {"B", until}
        return most(
            1 if part.kind == "F" else -1
            for part in computations(self.schedule.actions[rank])
            if part.kind == "F" or part.kind in ends
        )

    def held(self, rank: int, *, until: str = "W") -> list[tuple[Time, int]]:
        """Return how many activations a rank keeps from each time on at which the number changes.

        `until` is that of `live`.  Activations are kept from the begin of F to the end of B or W.
        """
        changes: Counter[Time] = Counter()
        for action, begin, end in self.spans[rank]:
            for part in computations((action,)):
                if part.kind == "F":
                    changes[begin] += 1
                elif part.kind in ("B", until):
                    changes[end] -= 1
        times = sorted(time for time, change in changes.items() if change)
        return list(zip(times, accumulate(changes[time] for time in times), strict=True))

    @property
    def num_messages(self) -> list[int]:
        """How many messages each rank sends: activations forward, derivatives backward."""
        sent: Counter[int] = Counter()
        schedule = self.schedule
        for rank, row in enumerate(schedule.actions):
            for part in computations(row):
                if (to := target(part, schedule.num_stages)) is not None:
                    sent[rank] += schedule.rank_of(to, part.micro_batch) != rank
        return [sent[rank] for rank in range(schedule.num_ranks)]

    def versions(self, rank: int) -> tuple[dict[int, int], int]:
        """Return the updates before F of each micro-batch on a rank, and the most versions alive.

        A version is alive if it is the current one, or if B of a micro-batch needs it.
        """
        found: dict[int, int] = {}
        version, alive, begun = 0, 1, dict[int, int]()
        for action in self.schedule.actions[rank]:
            number = action.micro_batch or 0
            if action.kind == "F":
                found[number] = begun[number] = version
            elif action.kind == "UPDATE":
                del begun[number]
                version += 1
                alive = max(alive, len({*begun.values(), version}))
        return found, alive


def most(changes: Iterable[int]) -> int:
    """Return the largest sum of the first changes."""
    total = largest = 0
    for change in changes:
        total += change
        largest = max(largest, total)
    return largest


def target(action: Action, num_stages: int) -> int | None:
    """Return the stage that needs the result of a computation; None if there is none."""
    step = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
    stage = action.stage + step
    return stage if step and 0 <= stage < num_stages else None


def simulate(schedule: Schedule, times: Times | None = None) -> Simulation:
    """Return when each action of a schedule begins and ends; by default, F = I = W = 1.

    Messages take no time of a rank, only of their own.  Raises ValueError if actions wait for each
    other forever; `validate` says which.

    Examples
    --------
    >>> from parallel.pipeline import Times, make, simulate
    >>> simulate(make("1f1b", 4, 8), Times(1, 1, 1)).bubble
    9
    """
    times, n = times or Times(), schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in range(n)]
    ends: dict[tuple[str, int, int | None], tuple[Time, int]] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for rank in range(n):
            for action in schedule.actions[rank][len(spans[rank]) :]:
                if (begin := _begin(action, rank, schedule, times, ends)) is None:
                    break
                free = spans[rank][-1].end if spans[rank] else begin
                span = Span(action, max(begin, free), max(begin, free) + times.of(action))
                spans[rank].append(span)
                for part in action.parts or (action,):
                    ends[done_by(part), part.stage, part.micro_batch] = span.end, rank
                has_moved = True
    if any(len(spans[rank]) < len(schedule.actions[rank]) for rank in range(n)):
        raise ValueError("actions wait for each other forever: see `validate`")
    return Simulation(schedule, times, spans)


def _begin(
    action: Action,
    rank: int,
    schedule: Schedule,
    times: Times,
    ends: dict[tuple[str, int, int | None], tuple[Time, int]],
) -> Time | None:
    """Return when all that an action needs is there; None if something is not done yet."""
    begin: Time = 0
    for part in computations((action,)):
        for kind, stage in dependencies(part, schedule.num_stages):
            if (found := ends.get((kind, stage, part.micro_batch))) is None:
                return None
            end, where = found
            begin = max(begin, end + (times.message if where != rank else 0))
    return begin
