"""What an action of a training step is: the base class of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from parallel.accounts import PredictedCall
from parallel.layout import BatchSize, RankView
from parallel.nn import Model
from parallel.step.kept import Kept
from parallel.step.layer_calls import led_by

SCALAR_ALGORITHM = "recursive_doubling"  # for all-reduces of a few numbers
STARTED_CALLS, STARTED_SENDS = "calls", "sends"  # names of all that was started


class Clock(Protocol):
    """The time of one rank, or of ranks that do the same, which actions pass."""

    def compute(self, action: Action) -> None:
        """Compute what an action computes."""

    def call(self, action: Action) -> None:
        """Make the calls of an action, and wait for them."""

    def start(self, action: Action, name: Hashable) -> None:
        """Start the calls of an action; actions that need `name` wait for them."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """One action of one rank; the base class of all kinds.

    Attributes
    ----------
    code : str
        The kind, as it is printed.
    phase : str
        The label of the ledger for what is sent meanwhile.
    axes : tuple of str
        The axes of the mesh along which the rank communicates.
    slot : int, optional
        The number of the overlapping forward and backward to which the action belongs, if the two
        take turns.
    """

    code: ClassVar[str]
    phase: str = ""
    axes: tuple[str, ...] = ()
    slot: int | None = None

    @property
    def kind(self) -> str:
        """The kind, with the direction if it is a message."""
        return self.code

    @property
    def where(self) -> tuple[int, int | None]:
        """The stage and the micro-batch; 0 and None if the action has neither."""
        return 0, None

    @property
    def name(self) -> str:
        """The layer, unit or bucket of the action; "" if it has none."""
        return ""

    def sends(self, view: RankView, batch: BatchSize | None = None) -> Iterable[PredictedCall]:
        """Return the calls of all groups that have a rank with this part of the model.

        Parameters
        ----------
        view : RankView
            The rank that does the action.
        batch : BatchSize, optional
            The batch of all ranks; needed if layers send messages.
        """
        return ()

    def led(self, view: RankView, batch: BatchSize | None = None) -> Iterator[PredictedCall]:
        """Yield the calls of `sends` by the groups whose first rank has this part of the model.

        The `view` and the `batch` are as in `sends`.  A group has one first rank: the calls
        led by all parts are the calls of the step, each once.
        """
        return led_by(view, self.sends(view, batch))

    def depends_on_rows(self, model: Model) -> bool:
        """Return whether what is sent depends on which rows of the batch a `model` computes."""
        return False

    def like(self, model: Model) -> Action:
        """Return an action that sends the same in a `model`, equal for all actions that do."""
        return self

    def keep(self, kept: Kept) -> None:
        """Change what a rank has `kept`, as the action does."""

    def needs(self, view: RankView) -> list[Hashable]:
        """Return the names of what must arrive before the rank of a `view` does the action."""
        return []

    def seconds(self, model: Model, forward_seconds: Callable[[str], float]) -> float:
        """Return how long the action computes in a `model`, by the `forward_seconds` of layers."""
        return 0.0

    def pass_time(self, clock: Clock, view: RankView) -> None:
        """Pass the time of the action on the `clock` of the rank of a `view`."""
        clock.call(self)

    def __str__(self) -> str:
        """Return ``0F1[block0]`` for a layer, or ``0REDUCE[bucket0]@data``."""
        stage, number = self.where
        name = f"[{self.name}]" if self.name else ""
        axes = f"@{','.join(self.axes)}" if self.axes else ""
        return f"{stage}{self.kind}{'' if number is None else number}{name}{axes}"
