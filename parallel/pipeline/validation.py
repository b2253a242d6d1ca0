"""Prove that lists of actions compute every stage once and wait for nothing forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parallel.pipeline.actions import (
    COMPUTATIONS,
    Action,
    Computation,
    Forward,
    Message,
    Receive,
    Result,
    Send,
)
from parallel.pipeline.picture import Cell, grid
from parallel.pipeline.schedule import Lists, Schedule, computations


class Wait(NamedTuple):
    """The action that a rank waits for, and the rank that must do it."""

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

    By default the lists are ``schedule.actions``, without messages.  In lists with messages
    (`with_messages`), a rank waits in each send until the other rank receives, as large messages of
    MPI may: lists that can run in this way can run however messages are buffered.

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
    _check_not_empty(lists)
    cells = _cells_of(lists)
    _check_each_once(schedule, lists, cells)
    _check_places(schedule, lists, cells)
    _Run(schedule, lists).check()


def _check_not_empty(lists: Lists) -> None:
    """Check that each rank has a list of actions with something in it."""
    if not lists or not all(lists):
        rank = next((rank for rank, row in enumerate(lists) if not row), 0)
        why = f"rank {rank} has no stage: its list is empty"
        raise InvalidSchedule(why, lists or [[]], (rank, 0))


def _cells_of(lists: Lists) -> dict[Action, Cell]:
    """Return where each action is.  Refuse an action that is there twice."""
    cells: dict[Action, Cell] = {}
    for rank, row in enumerate(lists):
        for i, action in enumerate(row):
            for part in action.parts:
                cell = cells.setdefault(part, (rank, i))
                if cell != (rank, i):
                    why = f"{part} is there twice: on rank {rank} after rank {cell[0]}"
                    raise InvalidSchedule(why, lists, (rank, i), cell)
    return cells


def _check_each_once(schedule: Schedule, lists: Lists, cells: dict[Action, Cell]) -> None:
    """Check that each stage has one F and one B, or I and W, of each micro-batch."""
    for stage in range(schedule.num_stages):
        if not (ranks := schedule.ranks_of(stage)):
            raise InvalidSchedule(f"no rank has stage {stage}", lists)
        for k in range(schedule.num_micro_batches):
            wanted = (kind(stage, k) for kind in COMPUTATIONS)
            there = {part.letter: cells[part] for part in wanted if part in cells}
            letters = "".join(there)
            if letters not in ("FB", "FIW"):
                rank = min(there.values())[0] if there else ranks[0]
                why = (
                    f"stage {stage} computes {letters or 'nothing'} of micro-batch {k} on rank"
                    f" {rank}: it must be F and B, or F, I and W"
                )
                is_too_much = {"F", "B"} < set(there)
                end = rank, len(lists[rank])
                raise InvalidSchedule(why, lists, there["B"] if is_too_much else end)


def _check_places(schedule: Schedule, lists: Lists, cells: dict[Action, Cell]) -> None:
    """Check that one rank does all actions of a stage and micro-batch, and computes it."""
    for action, cell in cells.items():
        if any(part not in cells for part in action.belongs_to()):
            why = f"{action} of rank {cell[0]} belongs to no computation"
            raise InvalidSchedule(why, lists, cell)
        forward = Forward(action.stage, action.micro_batch)
        if isinstance(action, Computation) and cell[0] != (rank := cells[forward][0]):
            why = f"rank {cell[0]} computes {action}, but rank {rank} computes {forward}"
            raise InvalidSchedule(why, lists, cell, cells[forward])
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
        self.done: set[Result] = set()
        self.arrived: set[Message] = set()  # received
        self.has_messages = any(isinstance(action, Message) for row in lists for action in row)

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
        if isinstance(action, Receive):
            return False  # the sender does it
        self.at[rank] += 1
        if isinstance(action, Send):
            self.at[self.rank_of(action.other_end)] += 1
            self.arrived.add(action.other_end)
        self.done.update(part.result for part in computations((action,)))
        return True

    def missing(self, rank: int, action: Action) -> Wait | None:
        """Return what an action waits for; None if it can be done."""
        if isinstance(action, Send):
            wait = self.absent([Result(action.direction, action.stage, action.micro_batch)], rank)
            if wait is not None:
                return wait
        if isinstance(action, Message):
            peer, other = self.rank_of(action.other_end), action.other_end
            return None if self.current(peer) == other else Wait(str(other), peer)
        return self.absent(action.needs(self.schedule.num_stages), rank)

    def absent(self, needed: list[Result], rank: int) -> Wait | None:
        """Return the first needed result that is neither computed nor received."""
        for result in needed:
            source = self.schedule.rank_of(result.stage, result.micro_batch)
            if result not in self.done:
                return Wait(str(result), source)
            message = Send(result.stage, result.micro_batch, result.kind).other_end
            if self.has_messages and source != rank and message not in self.arrived:
                return Wait(str(message), rank)
        return None

    def rank_of(self, action: Action) -> int:
        """Return the rank that does an action."""
        return self.schedule.rank_of(action.stage, action.micro_batch)
