"""A pipeline schedule: which stage and micro-batch each rank computes, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from parallel.actions import Action

Lists: TypeAlias = Sequence[Sequence[Action]]  # of each rank

COMPUTING = ("F", "B", "I", "W")


def computations(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield the forward and backward computations, those that overlap one after the other."""
    for action in actions:
        for part in action.parts or (action,):
            if part.kind in COMPUTING:
                yield part


@dataclass(frozen=True)
class Schedule:
    """What each rank along the axis ``pipe`` computes in a step.

    Attributes
    ----------
    name : str
        That of `SCHEDULES`, or of the file that it was read from.
    num_ranks, num_stages, num_micro_batches : int
    actions : tuple of (tuple of Action)
        What each rank computes, without messages: F, B, or I and W, or F and B that overlap; and
        UPDATE if the schedule updates a stage while others compute.

    Examples
    --------
    >>> from parallel.pipeline import make
    >>> print(*make("1f1b", 2, 3).actions[0])
    0F0 0F1 0B0 0F2 0B1 0B2
    """

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, name: str, actions: Lists) -> Schedule:
        """Return the schedule `name` of lists of `actions`: all stages and micro-batches."""
        each = [part for row in actions for part in computations(row)]
        num_stages = 1 + max((x.stage for x in each), default=-1)
        number = 1 + max((x.micro_batch or 0 for x in each), default=-1)
        return cls(name, len(actions), num_stages, number, tuple(map(tuple, actions)))

    @cached_property
    def _rank_of(self) -> dict[tuple[int, int | None], int]:
        return {
            (part.stage, part.micro_batch): rank
            for rank, row in enumerate(self.actions)
            for part in computations(row)
        }

    def rank_of(self, stage: int, micro_batch: int | None) -> int:
        """Return the rank that computes a `stage` for a `micro_batch`.

        Raises KeyError if there is none.
        """
        return self._rank_of[stage, micro_batch]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank computes, in ascending order."""
        return tuple(sorted({part.stage for part in computations(self.actions[rank])}))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that compute a stage: one, or two with different micro-batches."""
        return tuple(rank for rank in range(self.num_ranks) if stage in self.stages_of(rank))

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether stages are updated while micro-batches are in progress."""
        return any(action.kind == "UPDATE" for row in self.actions for action in row)


def dependencies(action: Action, num_stages: int) -> list[tuple[str, int]]:
    """Return the kinds and stages that must precede a computation, of the same micro-batch.

    "B" stands for I as well.
    """
    stage = action.stage
    if action.kind == "F":
        return [("F", stage - 1)] if stage else []
    if action.kind == "W":
        return [("B", stage)]
    return [("F", stage), *([("B", stage + 1)] if stage + 1 < num_stages else [])]


def done_by(action: Action) -> str:
    """Return the kind by which `dependencies` names what a computation does."""
    return "B" if action.kind == "I" else action.kind
