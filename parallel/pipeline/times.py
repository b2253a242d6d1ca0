"""How long the computations of a stage take: in any unit, exact if integers or fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple, TypeAlias

Time: TypeAlias = int | float | Fraction


class Times(NamedTuple):
    """How long a stage takes for a micro-batch, and a message between ranks.

    Attributes
    ----------
    forward, backward_input, backward_weight : number
        The times of F, I and W.
    message : number
        The time of a message between ranks.
    overlapped : number, optional
        The time of an F and a B that overlap; by default their sum.
    """

    forward: Time = 1
    backward_input: Time = 1
    backward_weight: Time = 1
    message: Time = 0
    overlapped: Time | None = None

    @property
    def backward(self) -> Time:
        """The time of both halves of backward."""
        return self.backward_input + self.backward_weight

    @property
    def all_of_one(self) -> Time:
        """The time of all that one stage computes for one micro-batch."""
        return self.forward + self.backward

    @property
    def pair(self) -> Time:
        """The time of an F and a B that overlap."""
        return self.all_of_one if self.overlapped is None else self.overlapped
