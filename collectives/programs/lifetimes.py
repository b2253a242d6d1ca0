"""When blocks are needed: which values must be kept until which round, and where in scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from collectives.schedule import Block, Operation, Schedule


class Outline(NamedTuple):
    """The parts of a rank's schedule that do not depend on the counts.

    Attributes
    ----------
    rounds : list
        The sends, the receives and the local operations of each round.
    uses : mapping of block to list of int
        The times at which each block is needed: 2k if it is sent in round k, 2k + 1 if it is used
        after the messages of round k.
    ends : mapping of block to list of int
        The times, counted likewise, after which a block's value is replaced.
    """

    rounds: list[tuple[list[Operation], list[Operation], list[Operation]]]
    uses: Mapping[Block, list[int]]
    ends: Mapping[Block, list[int]]


def outline(schedule: Schedule) -> Outline:
    """Return the outline of one rank's schedule."""
    rounds: list[tuple[list[Operation], list[Operation], list[Operation]]] = []
    uses: dict[Block, list[int]] = {}
    ends: dict[Block, list[int]] = {}
    for number, operations in enumerate(schedule):
        sends: list[Operation] = []
        receives: list[Operation] = []
        local: list[Operation] = []
        for op in operations:
            is_receive = op.kind.startswith("recv")
            (sends if op.kind == "send" else receives if is_receive else local).append(op)
            replaced = op.targets if op.kind in ("recv", "copy") else ()
            needed = () if is_receive else op.blocks
            for block in replaced:
                ends.setdefault(block, []).append(2 * number + (op.kind == "copy"))
            for block in (*needed, *(op.targets if op.side is not None else ())):
                uses.setdefault(block, []).append(2 * number + (op.kind != "send"))
        rounds.append((sends, receives, local))
    return Outline(rounds, uses, ends)


class Arena:
    """Allocates scratch elements first-fit, and frees them after their last round."""

    def __init__(self) -> None:
        self._live: list[tuple[int, int, int]] = []  # start, stop, last round; in order
        self._num_adjacent = 0  # of these, from the first on: there are no gaps between them
        self.num_elements = 0

    def forget(self, before_round: int) -> None:
        """Free what was last needed before `before_round`."""
        self._live = [extent for extent in self._live if extent[2] >= before_round]
        self._num_adjacent = 0

    def take(self, num_elements: int, last_round: int) -> int:
        """Allocate the lowest gap of `num_elements` until after `last_round`; return its start."""
        if not num_elements:
            return 0
        place = self._num_adjacent
        start = self._live[place - 1][1] if place else 0
        while place < len(self._live) and self._live[place][0] - start < num_elements:
            if self._live[place][0] == start and self._num_adjacent == place:
                self._num_adjacent += 1
            start = self._live[place][1]
            place += 1
        self._live.insert(place, (start, start + num_elements, last_round))
        self.num_elements = max(self.num_elements, start + num_elements)
        return start
