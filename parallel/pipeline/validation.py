"""Prove that lists of actions compute every stage once and wait for nothing forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from parallel.actions import Action
from parallel.pipeline.picture import Cell, grid
from parallel.pipeline.schedule import (
    COMPUTING,
    Lists,
    Schedule,
    computations,
    dependencies,
    done_by,
)

OTHERS = {"SEND_F": "RECV_F", "SEND_B": "RECV_B", "RECV_F": "SEND_F", "RECV_B": "SEND_B"}
STEPS = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}  # stages to the other end
KINDS = {*COMPUTING, *OTHERS, "OVERLAP_F_B", "UPDATE"}

Key: TypeAlias = tuple[str, int, int | None]  # kind, stage, micro-batch


class Wait(NamedTuple):
    """What a rank waits for, and on which rank it must be done."""

    action: str
    rank: int


class InvalidSchedule(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """A schedule cannot run.  The message says why, and shows the grid with the faulty cells.

    Attributes
    ----------
    faulty : tuple of (rank, place)
        Where the lists are wrong; what is missing has the place after the last of its rank.
    """

    def __init__(self, why: str, lists: Lists, *faulty: Cell) -> None:
        super().__init__(f"{why}\n{grid(lists, faulty)}")
        self.faulty = faulty


def validate(schedule: Schedule, lists: Lists | None = None) -> None:
    """Raise InvalidSchedule unless the lists of a schedule can run and compute all of it.

    By default the lists are those of the schedule, which have no messages.  In lists with messages
    (`with_messages`), a rank waits in each send until the other rank receives, as large messages of
    MPI may: what runs so, runs however messages are buffered.

    Each stage has one F of each micro-batch, and one B, or one I and one W, all on the same rank.
    A stage is on one rank, or on several that have the same stages.  Each computation comes after
    what it needs, and an UPDATE, if there is one, after the backward of its micro-batch.

    Parameters
    ----------
    schedule : Schedule
        Says how many stages and micro-batches there are, and where they belong.
    lists : sequence of sequence of Action, optional
        The lists of all ranks with messages.

    Raises
    ------
    InvalidSchedule
        Names the rank, the cell, and what is missing.

    Examples
    --------
    >>> from parallel.pipeline import Schedule, validate
    >>> from parallel.pipeline.text import parse
    >>> validate(Schedule.of("wrong", [[parse("0B0"), parse("0F0")]]))
    Traceback (most recent call last):
    ...
    parallel.pipeline.validation.InvalidSchedule: rank 0 waits forever in 0B0 for 0F0 on rank 0
    rank 0: >0B0< 0F0
    """
    lists = schedule.actions if lists is None else lists
    _check_kinds(lists)
    cells = _cells_of(lists)
    _check_each_once(schedule, lists, cells)
    _check_places(schedule, lists, cells)
    _Run(schedule, lists).check()


def _check_kinds(lists: Lists) -> None:
    if not lists or not all(lists):
        rank = next((rank for rank, row in enumerate(lists) if not row), 0)
        why = f"rank {rank} has no stage: its list is empty"
        raise InvalidSchedule(why, lists or [[]], (rank, 0))
    for rank, row in enumerate(lists):
        for i, action in enumerate(row):
            if action.kind not in KINDS:
                why = f"rank {rank} has {action}, which no schedule has"
                raise InvalidSchedule(why, lists, (rank, i))


def _cells_of(lists: Lists) -> dict[Key, Cell]:
    """Return where each action is.  Refuse an action that is there twice."""
    cells: dict[Key, Cell] = {}
    for rank, row in enumerate(lists):
        for i, action in enumerate(row):
            for part in action.parts or (action,):
                cell = cells.setdefault((part.kind, part.stage, part.micro_batch), (rank, i))
                if cell != (rank, i):
                    why = f"{part} is there twice: on rank {rank} after rank {cell[0]}"
                    raise InvalidSchedule(why, lists, (rank, i), cell)
    return cells


def _check_each_once(schedule: Schedule, lists: Lists, cells: dict[Key, Cell]) -> None:
    """Check that each stage has one F and one B, or I and W, of each micro-batch."""
    for stage in range(schedule.num_stages):
        if not (ranks := schedule.ranks_of(stage)):
            raise InvalidSchedule(f"no rank has stage {stage}", lists)
        for k in range(schedule.num_micro_batches):
            found = {x: cells[x, stage, k] for x in COMPUTING if (x, stage, k) in cells}
            kinds = "".join(found)
            if kinds not in ("FB", "FIW"):
                rank = min(found.values())[0] if found else ranks[0]
                why = (
                    f"stage {stage} computes {kinds or 'nothing'} of micro-batch {k} on rank"
                    f" {rank}: it must be F and B, or F, I and W"
                )
                is_too_much = {"F", "B"} < set(found)
                end = rank, len(lists[rank])
                raise InvalidSchedule(why, lists, found["B"] if is_too_much else end)


def _check_places(schedule: Schedule, lists: Lists, cells: dict[Key, Cell]) -> None:
    """Check that all of a stage and micro-batch is on one rank, and that it exists."""
    for (kind, stage, k), cell in cells.items():
        action = Action(kind, stage, k)
        if kind in OTHERS or kind == "UPDATE":
            other = stage + STEPS.get(kind, 0)
            if ("F", stage, k) not in cells or ("F", other, k) not in cells:
                why = f"{action} of rank {cell[0]} belongs to no computation"
                raise InvalidSchedule(why, lists, cell)
        elif kind in COMPUTING and cell[0] != (rank := cells["F", stage, k][0]):
            why = f"rank {cell[0]} computes {action}, but rank {rank} computes {stage}F{k}"
            raise InvalidSchedule(why, lists, cell, cells["F", stage, k])
    _check_copies(schedule, lists)


def _check_copies(schedule: Schedule, lists: Lists) -> None:
    """Check that two ranks that have one stage have the same stages."""
    for stage in range(schedule.num_stages):
        ranks = schedule.ranks_of(stage)
        for rank in ranks[1:]:
            if schedule.stages_of(rank) != schedule.stages_of(ranks[0]):
                why = f"ranks {ranks[0]} and {rank} share stage {stage}, but have different stages"
                raise InvalidSchedule(why, lists, (rank, 0), (ranks[0], 0))


class _Run:
    """All ranks do one action after the other; a send waits for its receive."""

    def __init__(self, schedule: Schedule, lists: Lists) -> None:
        self.schedule, self.lists = schedule, lists
        self.at = [0] * len(lists)
        self.done: set[Key] = set()
        self.arrived: set[Key] = set()
        self.has_messages = any(action.kind in OTHERS for row in lists for action in row)

    def check(self) -> None:
        """Raise InvalidSchedule if ranks wait for each other forever."""
        while any(self.advance(rank) for rank in range(len(self.lists))):
            pass
        if not (waits := dict(self.path())):
            return
        why = ", and ".join(
            f"rank {rank} waits forever in {self.current(rank)} for {wait.action} on rank"
            f" {wait.rank}"
            for rank, wait in waits.items()
        )
        cells = [(rank, self.at[rank]) for rank in waits]
        raise InvalidSchedule(why, self.lists, *cells)

    def path(self) -> Iterator[tuple[int, Wait]]:
        """Yield a rank that waits and what for, then the rank that should do that, and so on."""
        rank = next((r for r in range(len(self.lists)) if self.current(r) is not None), None)
        seen: set[int] = set()
        while rank is not None and rank not in seen and (action := self.current(rank)):
            wait = self.missing(rank, action)
            assert wait is not None, "it would have advanced"
            yield rank, wait
            seen.add(rank)
            rank = wait.rank

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

    def missing(self, rank: int, action: Action) -> Wait | None:
        """Return what an action waits for; None if it can be done."""
        if action.kind in OTHERS:
            return self.missing_message(rank, action)
        if action.kind == "UPDATE":
            return self.absent([("B", action.stage)], action, rank)
        parts = computations((action,))
        each = (self.absent(dependencies(x, self.schedule.num_stages), x, rank) for x in parts)
        return next(filter(None, each), None)

    def missing_message(self, rank: int, action: Action) -> Wait | None:
        """Return what a send or a receive waits for."""
        peer, partner = self.partner(action)
        if action.kind.startswith("SEND"):
            wait = self.absent([(action.kind[-1], action.stage)], action, rank)
            if wait is not None:
                return wait
        return None if self.current(peer) == partner else Wait(str(partner), peer)

    def absent(self, needed: list[tuple[str, int]], part: Action, rank: int) -> Wait | None:
        """Return the first of what is needed that is not there, and not received."""
        for kind, stage in needed:
            place = self.schedule.rank_of(stage, part.micro_batch)
            if (kind, stage, part.micro_batch) not in self.done:
                return Wait(f"{stage}{kind}{part.micro_batch}", place)
            is_message = self.has_messages and place != rank
            if is_message and (kind, part.stage, part.micro_batch) not in self.arrived:
                return Wait(f"{part.stage}RECV_{kind}{part.micro_batch}", rank)
        return None

    def partner(self, action: Action) -> tuple[int, Action]:
        """Return the other end of a message: its rank and action."""
        stage = action.stage + STEPS[action.kind]
        rank = self.schedule.rank_of(stage, action.micro_batch)
        return rank, Action(OTHERS[action.kind], stage, action.micro_batch)
