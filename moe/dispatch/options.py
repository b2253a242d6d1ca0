"""How a layer routes and sends tokens, apart from which ranks do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe.exchange import PAYLOADS
from moe.gates import Gate

PADDINGS = ("none", "capacity", "needed")


@dataclass(frozen=True)
class Options:
    """How a mixture of experts routes and sends tokens.

    Attributes
    ----------
    dim : int
        The length of the vectors.
    gate : Gate
    name : str
        Which random numbers the layer draws, and how a log calls it.
    rows_per_group : int
        The consecutive rows of the batch that are routed together.  Each micro-batch of each rank
        must have whole groups, so that the routing does not depend on the ranks.
    padding : str
        How many rows are sent for each expert and group.  ``"none"``: exactly the rows that are
        routed.  ``"capacity"``: as many as the capacity.  ``"needed"``: as many as the fullest
        expert of this micro-batch has, on all ranks that share the experts (Hwang et al. 2023,
        Tutel).
    num_parts : int
        In how many parts rows are sent, so that experts compute one while others are sent.
    payload : str
        In which form rows are sent: ``"same"``, ``"bfloat16"`` or ``"int8"``.

    Raises
    ------
    ValueError
        If a number is less than 1, for an unknown padding or payload, and for the padding
        ``"capacity"`` without a capacity rule of the gate.
    """

    dim: int
    gate: Gate
    name: str = "moe"
    rows_per_group: int = 1
    padding: str = "none"
    num_parts: int = 1
    payload: str = "same"

    def __post_init__(self) -> None:
        for name in ("rows_per_group", "num_parts"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {number}: it must be at least 1")
        check_choice("payload", self.payload, PAYLOADS)
        check_choice("padding", self.padding, PADDINGS)
        if self.padding == "capacity" and self.gate.rule is None:
            raise ValueError("padding to the capacity needs a gate with a capacity rule")

    def config(self) -> list[str]:
        """Return what must be equal on all ranks, without the gate."""
        sent = (self.rows_per_group, self.padding, self.num_parts, self.payload)
        return [repr(value) for value in (self.dim, self.name, *sent)]

    def num_groups(self, num_rows: int) -> int:
        """Return the number of groups of consecutive rows that are routed together.

        Raises ValueError unless they are whole.
        """
        if num_rows % self.rows_per_group:
            raise ValueError(
                f"{num_rows} rows of a rank are not whole groups of {self.rows_per_group}, which"
                f" the layer {self.name} routes together"
            )
        return num_rows // self.rows_per_group

    def capacity(self, context: int) -> int | None:
        """Return the capacity of an expert for each group of rows of `context` tokens; None: all.

        Raises ValueError if an expert would take none.
        """
        return self.gate.capacity(self.rows_per_group * context)


def check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError unless the `value` of an option is one of some `choices`."""
    if value not in choices:
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(choices)}")
