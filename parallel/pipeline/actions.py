"""The actions of a schedule: what a rank of a pipeline does with a stage for a micro-batch.

Each kind is a small class.  It says what must be there before, what it makes for other actions, how
long it takes, and how it is written: F, B, I and W, as in papers and in PyTorch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from parallel.pipeline.times import Time, Times


class Result(NamedTuple):
    """The result of a computation, of a stage for a micro-batch.

    Attributes
    ----------
    kind : str
        ``"F"``, the output of the stage; ``"B"``, the derivative by its input; or ``"W"``, its
        gradients.
    stage, micro_batch : int
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Action(ABC):
    """One action of a schedule; the base class of all kinds."""

    stage: int
    micro_batch: int

    @property
    @abstractmethod
    def code(self) -> str:
        """The kind of the action, as PyTorch writes it."""

    @property
    def parts(self) -> tuple[Action, ...]:
        """What is done at the same time, forward first: the action itself, or two."""
        return (self,)

    def needs(self, num_stages: int) -> list[Result]:
        """Return the results that must be there before, if there are `num_stages` stages."""
        return []

    def belongs_to(self) -> list[Forward]:
        """Return the computations that a schedule with this action must have."""
        return []

    def time(self, times: Times) -> Time:
        """Return how long a rank takes for the action; messages and updates take no time."""
        return 0

    def __str__(self) -> str:
        """Return ``0F1``: stage, kind, and micro-batch, as PyTorch writes them."""
        return f"{self.stage}{self.code}{self.micro_batch}"


class Computation(Action):
    """An action that computes; the base class of four kinds.

    Attributes
    ----------
    letter : str
        The code.
    makes : str
        The kind of `result`.
    step : int
        How many stages further the result is needed: 1, -1, or 0 if no other stage needs it.
    """

    letter: ClassVar[str]
    makes: ClassVar[str]
    step: ClassVar[int]

    @property
    def code(self) -> str:
        return self.letter

    @property
    def result(self) -> Result:
        """What the computation makes."""
        return Result(self.makes, self.stage, self.micro_batch)

    def target(self, num_stages: int) -> int | None:
        """Return the stage that needs the result; None if no stage does."""
        stage = self.stage + self.step
        return stage if self.step and 0 <= stage < num_stages else None


class Forward(Computation):
    """Compute the output of a stage."""

    letter, makes, step = "F", "F", 1

    def needs(self, num_stages: int) -> list[Result]:
        return [Result("F", self.stage - 1, self.micro_batch)] if self.stage else []

    def time(self, times: Times) -> Time:
        return times.forward


class Backward(Computation):
    """Compute the derivative by the input of a stage, and add to its gradients."""

    letter, makes, step = "B", "B", -1

    def needs(self, num_stages: int) -> list[Result]:
        return _needed_backward(self, num_stages)

    def time(self, times: Times) -> Time:
        return times.backward


class BackwardInput(Computation):
    """Compute the derivative by the input of a stage: the first half of backward."""

    letter, makes, step = "I", "B", -1

    def needs(self, num_stages: int) -> list[Result]:
        return _needed_backward(self, num_stages)

    def time(self, times: Times) -> Time:
        return times.backward_input


class BackwardWeight(Computation):
    """Add to the gradients of a stage: the second half of backward."""

    letter, makes, step = "W", "W", 0

    def needs(self, num_stages: int) -> list[Result]:
        return [Result("B", self.stage, self.micro_batch)]

    def time(self, times: Times) -> Time:
        return times.backward_weight


def _needed_backward(action: Action, num_stages: int) -> list[Result]:
    own = Result("F", action.stage, action.micro_batch)
    is_last = action.stage + 1 == num_stages
    return [own] if is_last else [own, Result("B", action.stage + 1, action.micro_batch)]


COMPUTATIONS = Forward, Backward, BackwardInput, BackwardWeight


@dataclass(frozen=True)
class Overlap(Action):
    """Forward of one micro-batch and backward of another one, at the same time."""

    forward: Forward
    backward: Backward

    @classmethod
    def of(cls, forward: Forward, backward: Backward) -> Overlap:
        """Return the action that does both."""
        return cls(forward.stage, forward.micro_batch, forward, backward)

    @property
    def code(self) -> str:
        return "OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        return self.forward, self.backward

    def needs(self, num_stages: int) -> list[Result]:
        return [result for part in self.parts for result in part.needs(num_stages)]

    def time(self, times: Times) -> Time:
        return times.pair

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){self.code}"


class Update(Action):
    """Change the parameters of a stage by the gradient of one micro-batch."""

    @property
    def code(self) -> str:
        return "UPDATE"

    def needs(self, num_stages: int) -> list[Result]:
        return [Result("B", self.stage, self.micro_batch)]

    def belongs_to(self) -> list[Forward]:
        return [Forward(self.stage, self.micro_batch)]


@dataclass(frozen=True)
class Message(Action):
    """One end of a message between two stages: the base class of `Send` and `Receive`.

    Attributes
    ----------
    direction : str
        ``"F"``: activations, to the next stage.  ``"B"``: derivatives, to the stage before.
    """

    direction: str

    @property
    @abstractmethod
    def other_end(self) -> Message:
        """The same message on the other rank."""

    def belongs_to(self) -> list[Forward]:
        ends = self.stage, self.other_end.stage
        return [Forward(stage, self.micro_batch) for stage in ends]

    def _moved(self, sign: int) -> int:
        return self.stage + (sign if self.direction == "F" else -sign)


class Send(Message):
    """Send what a stage has computed."""

    @property
    def code(self) -> str:
        return f"SEND_{self.direction}"

    @property
    def other_end(self) -> Message:
        return Receive(self._moved(1), self.micro_batch, self.direction)


class Receive(Message):
    """Receive what a stage computes with."""

    @property
    def code(self) -> str:
        return f"RECV_{self.direction}"

    @property
    def other_end(self) -> Message:
        return Send(self._moved(-1), self.micro_batch, self.direction)
