"""A pipeline schedule: which stage and micro-batch each rank computes, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from parallel.pipeline.actions import Action, Computation, Update

Lists: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each rank."""


def computations(actions: Iterable[Action]) -> Iterator[Computation]:
    """Yield the forward and backward computations; two that overlap one after the other."""
    for action in actions:
        for part in action.parts:
            if isinstance(part, Computation):
                yield part


@dataclass(frozen=True)
class Schedule:
    """What each rank along the axis ``pipe`` computes in a step.

    Attributes
    ----------
    name : str
        A name of `SCHEDULES`, or the name of the file from which the schedule was read.
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
        parts = [part for row in actions for part in computations(row)]
        num_stages = 1 + max((part.stage for part in parts), default=-1)
        num_micro_batches = 1 + max((part.micro_batch for part in parts), default=-1)
        return cls(name, len(actions), num_stages, num_micro_batches, tuple(map(tuple, actions)))

    @cached_property
    def _rank_of(self) -> dict[tuple[int, int], int]:
        return {
            (part.stage, part.micro_batch): rank
            for rank, row in enumerate(self.actions)
            for part in computations(row)
        }

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """Return the rank that computes a `stage` for a `micro_batch`.

        Raises KeyError if there is none.
        """
        return self._rank_of[stage, micro_batch]

    @cached_property
    def _stages_of(self) -> list[tuple[int, ...]]:
        return [tuple(sorted({part.stage for part in computations(row)})) for row in self.actions]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank computes, in ascending order."""
        return self._stages_of[rank]

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that compute a stage: one, or two with different micro-batches."""
        return tuple(rank for rank in range(self.num_ranks) if stage in self.stages_of(rank))

    @cached_property
    def is_asynchronous(self) -> bool:
        """Whether stages are updated while micro-batches are in progress."""
        return any(isinstance(action, Update) for row in self.actions for action in row)
