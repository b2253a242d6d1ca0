"""The walk that every prediction of time makes: one action of a rank after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol

from parallel.layout import RankView
from parallel.step import Action, Clock


class WaitingClock(Clock, Protocol):
    """A clock that also waits for what was started."""

    def is_known(self, name: Hashable) -> bool:
        """Return whether it is known when `name` arrives; False until another rank has sent it."""

    def wait(self, name: Hashable) -> None:
        """Wait for `name`, if it was started and nobody has waited for it yet."""


def walk(view: RankView, actions: Iterable[Action], clock: WaitingClock) -> Iterator[None]:
    """Do actions in the time of a clock; pause where a message is needed that nobody has sent."""
    for action in actions:
        for name in action.needs(view):
            while not clock.is_known(name):
                yield
            clock.wait(name)
        action.pass_time(clock, view)
