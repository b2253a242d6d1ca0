"""Prove that lists of actions compute every stage once and wait for nothing forever."""

from __future__ import annotations

from collections import Counter

from parallel.actions import Action
from parallel.pipeline.picture import grid
from parallel.pipeline.schedule import (
    COMPUTING,
    Lists,
    Schedule,
    computations,
    dependencies,
    done_by,
)

OTHERS = {"SEND_F": "RECV_F", "SEND_B": "RECV_B", "RECV_F": "SEND_F", "RECV_B": "SEND_B"}
KINDS = {*COMPUTING, *OTHERS, "OVERLAP_F_B", "UPDATE"}


class InvalidSchedule(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """A schedule cannot run.  The message says why, and shows the grid with the faulty cell."""

    def __init__(self, why: str, lists: Lists, faulty: tuple[int, int] | None = None) -> None:
        super().__init__(f"{why}\n{grid(lists, faulty)}")


def validate(schedule: Schedule, lists: Lists | None = None) -> None:
    """Raise InvalidSchedule unless the lists of a schedule can run and compute all of it.

    By default the lists are those of the schedule, which have no messages.  In lists with messages
    (`with_messages`), a rank waits in each send until the other rank receives, as large messages of
    MPI may: what runs so, runs however messages are buffered.

    Examples
    --------
    >>> from parallel.pipeline import Schedule, validate
    >>> from parallel.pipeline.text import parse
    >>> validate(Schedule.of("wrong", [[parse("0B0"), parse("0F0")]]))
    Traceback (most recent call last):
    ...
    parallel.pipeline.validation.InvalidSchedule: rank 0 waits forever in 0B0 for 0F0
    rank 0: >0B0< 0F0
    """
    lists = schedule.actions if lists is None else lists
    _check_kinds(lists)
    _check_each_once(schedule, lists)
    _Run(schedule, lists).check()


def _check_kinds(lists: Lists) -> None:
    if not lists or not all(lists):
        rank = next((rank for rank, row in enumerate(lists) if not row), 0)
        raise InvalidSchedule(f"rank {rank} has no stage: its list is empty", lists or [[]])
    for rank, row in enumerate(lists):
        for i, action in enumerate(row):
            if action.kind not in KINDS:
                raise InvalidSchedule(
                    f"rank {rank} has {action}, which no schedule has", lists, (rank, i)
                )


def _check_each_once(schedule: Schedule, lists: Lists) -> None:
    """Check that each stage has one F and one B, or I and W, of each micro-batch."""
    done = Counter(
        (part.kind, part.stage, part.micro_batch) for row in lists for part in computations(row)
    )
    for rank, row in enumerate(lists):
        for i, action in enumerate(row):
            for part in computations((action,)):
                if done[part.kind, part.stage, part.micro_batch] > 1:
                    raise InvalidSchedule(f"{part} is there twice", lists, (rank, i))
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_micro_batches):
            kinds = "".join(kind for kind in COMPUTING if done[kind, stage, k])
            if kinds not in ("FB", "FIW"):
                raise InvalidSchedule(
                    f"stage {stage} computes {kinds or 'nothing'} of micro-batch {k}: it must be F"
                    " and B, or F, I and W",
                    lists,
                )


class _Run:
    """All ranks do one action after the other; a send waits for its receive."""

    def __init__(self, schedule: Schedule, lists: Lists) -> None:
        self.schedule, self.lists = schedule, lists
        self.at = [0] * len(lists)
        self.done: set[tuple[str, int, int | None]] = set()
        self.arrived: set[tuple[str, int, int | None]] = set()
        self.has_messages = any(action.kind in OTHERS for row in lists for action in row)

    def check(self) -> None:
        """Raise InvalidSchedule if ranks wait for each other forever."""
        while any(self.advance(rank) for rank in range(len(self.lists))):
            pass
        for rank, row in enumerate(self.lists):
            if self.at[rank] < len(row):
                action = row[self.at[rank]]
                raise InvalidSchedule(
                    f"rank {rank} waits forever in {action} for {self.missing(rank, action)}",
                    self.lists,
                    (rank, self.at[rank]),
                )

    def current(self, rank: int) -> Action | None:
        row = self.lists[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def advance(self, rank: int) -> bool:
        """Let a rank do its next action if it can; return whether it could."""
        action = self.current(rank)
        if action is None or self.missing(rank, action):
            return False
        if action.kind.startswith("RECV"):
            return False  # the sender does it
        self.at[rank] += 1
        if action.kind in OTHERS:
            peer, received = self.partner(action)
            self.at[peer] += 1
            self.arrived.add((action.kind[-1], received.stage, received.micro_batch))
        for part in action.parts or (action,):
            self.done.add((done_by(part), part.stage, part.micro_batch))
        return True

    def missing(self, rank: int, action: Action) -> str:
        """Return what an action waits for; "" if it can be done."""
        if action.kind in OTHERS:
            peer, partner = self.partner(action)
            if action.kind.startswith("SEND"):
                made = (action.kind[-1], action.stage, action.micro_batch)
                if made not in self.done:
                    return f"{action.stage}{action.kind[-1]}{action.micro_batch}"
            return "" if self.current(peer) == partner else f"{partner} on rank {peer}"
        if action.kind == "UPDATE":
            return self.absent([("B", action.stage)], action, rank)
        parts = computations((action,))
        each = (self.absent(dependencies(x, self.schedule.num_stages), x, rank) for x in parts)
        return next(filter(None, each), "")

    def absent(self, needed: list[tuple[str, int]], part: Action, rank: int) -> str:
        """Return the first of what is needed that is not there, and not received."""
        for kind, stage in needed:
            key = (kind, stage, part.micro_batch)
            is_here = stage == part.stage or self.place(stage, part.micro_batch) == rank
            if key not in self.done:
                return f"{stage}{kind}{part.micro_batch}"
            is_message = self.has_messages and not is_here
            if is_message and (kind, part.stage, part.micro_batch) not in self.arrived:
                return f"{part.stage}RECV_{kind}{part.micro_batch}"
        return ""

    def partner(self, action: Action) -> tuple[int, Action]:
        """Return the other end of a message: its rank and action."""
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        other = Action(OTHERS[action.kind], action.stage + step, action.micro_batch)
        return self.place(other.stage, other.micro_batch), other

    def place(self, stage: int, micro_batch: int | None) -> int:
        try:
            return self.schedule.rank_of(stage, micro_batch)
        except KeyError:
            raise InvalidSchedule(
                f"no rank computes stage {stage} for micro-batch {micro_batch}", self.lists
            ) from None
