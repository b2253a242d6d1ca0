"""Two computations of a rank take turns: where one waits for a message, the other goes on.

DeepSeek-AI 2024 (DualPipe): while one micro-batch goes forward, another goes backward, and each
hides what the other sends.  Each of the two runs in a greenlet, so that no layer has to be written
for this.  One of the two runs at a time, and hands over only where the program says so.  So all
ranks with the same layers make their calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import TypeAlias

from greenlet import greenlet

from parallel.accounts import PhaseFunction
from parallel.step import Action

Record: TypeAlias = Callable[[Action, float, float], object]
"""Called with an action, and when this rank began and ended to do it, or a part of it."""


class Side:
    """The actions of one computation, each with its number among the actions of both."""

    def __init__(self, actions: Sequence[tuple[int, Action]], run: Callable[[Side], object]):
        self.actions = actions
        self.number, self.action = actions[0]
        self.began = 0.0  # when it began this action, or went on with it
        self.is_blocked = False  # until all actions before this one are done
        self._greenlet = greenlet(partial(run, self))

    @property
    def is_done(self) -> bool:
        """Whether all actions are done, or one has failed."""
        return bool(self._greenlet.dead)

    def can_go_on(self, num_done: int) -> bool:
        """Return whether it has something to do once `num_done` actions of both are done."""
        return not self.is_done and (not self.is_blocked or self.number <= num_done)

    def resume(self) -> None:
        """Go on until all is done, or until `suspend`.  Raises what an action raises."""
        if not self._greenlet:  # it begins, in the context of the caller
            self._greenlet.gr_context = copy_context()
        self._greenlet.switch()

    def suspend(self) -> None:
        """Let the caller of `resume` go on; an action of this side calls this."""
        assert self._greenlet.parent is not None
        self._greenlet.parent.switch()

    def close(self) -> None:
        """End the side where it is suspended, if it is."""
        self._greenlet.throw()


class Alternation:
    """The two sides of a slot in which a forward and a backward overlap.

    Outside of a slot, `pass_on` and `in_order` do nothing.
    """

    def __init__(self) -> None:
        self._sides: list[Side] = []
        self._running: Side | None = None
        self._num_done = 0
        self._record: Record = lambda action, began, ended: None

    @property
    def is_in_slot(self) -> bool:
        """Whether a side is running."""
        return self._running is not None

    def run(
        self,
        actions: Sequence[Action],
        do: Callable[[Action], object],
        phase: PhaseFunction,
        record: Record,
    ) -> None:
        """Call `do` with all `actions`: the actions of each phase in order, two phases by turns.

        Each turn is in the phase of its actions, which `phase` marks; `record` is told of it.  If
        an action fails, the other side ends where it waits, and the error is raised.
        """
        self._record = record
        by_phase: dict[str, list[tuple[int, Action]]] = {}
        for number, action in enumerate(actions):
            by_phase.setdefault(action.phase, []).append((number, action))
        self._num_done = 0
        self._sides = [Side(actions, partial(self._do_all, do)) for actions in by_phase.values()]
        try:
            while not all(side.is_done for side in self._sides):
                for side in self._sides:
                    if side.can_go_on(self._num_done):
                        self._running = side
                        with phase(side.action.phase):
                            side.resume()
        finally:
            for side in self._sides:
                side.close()
            self._sides, self._running = [], None

    def _do_all(self, do: Callable[[Action], object], side: Side) -> None:
        for number, action in side.actions:
            side.number, side.action = number, action
            side.began = time.perf_counter()
            do(action)
            self.in_order()
            self._record(action, side.began, time.perf_counter())
            self._num_done += 1

    def pass_on(self) -> None:
        """Let the other side go on if it can, until it waits itself."""
        side = self._running
        if side is not None and any(
            other is not side and other.can_go_on(self._num_done) for other in self._sides
        ):
            self._suspend(side)

    def in_order(self) -> None:
        """Let the other side go on until all actions before this one are done.

        Then what a rank keeps changes in the order of the actions, although these overlap.
        """
        if (side := self._running) is not None:
            side.is_blocked = True
            while self._num_done < side.number:
                self._suspend(side)
            side.is_blocked = False

    def _suspend(self, side: Side) -> None:
        self._record(side.action, side.began, time.perf_counter())
        side.suspend()
        side.began = time.perf_counter()
