"""The actions of which a training step consists."""

from __future__ import annotations

from typing import NamedTuple

# What each kind does.  The first three are those of a schedule; `lower` adds the others.
KINDS = {
    "F": "forward of a layer, or of all layers of a stage",
    "B": "backward, which adds to the gradients",
    "UPDATE": "change the parameters; what follows is left out if gradients overflowed",
    "UNSHARD": "start to gather the parameters of a unit",
    "AVERAGE": "start to make the parameters of a unit equal again, after several steps",
    "RESHARD": "free the gathered parameters of a unit",
    "REDUCE": "start to sum the gradients of a unit or bucket over ranks",
    "WAIT": "complete what was started, and free the gradients that it has summed",
    "UNUSED": "find the layers that no rank has used",
    "LOSS": "sum the loss over ranks",
    "NORM": "sum the squares of the gradients over ranks",
}


class Action(NamedTuple):
    """One action of one rank.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    stage : int
        The part of the model that it is of.
    micro_batch : int, optional
        The number of the micro-batch that it computes.
    part : str
        The layer, unit or bucket; "" for all of a stage.
    axis : str
        The axes of the mesh along which it communicates, joined by commas.
    phase : str
        The label of the ledger for what is sent meanwhile.
    """

    kind: str
    stage: int = 0
    micro_batch: int | None = None
    part: str = ""
    axis: str = ""
    phase: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which it communicates."""
        return tuple(self.axis.split(",")) if self.axis else ()

    def __str__(self) -> str:
        """Return ``0F1`` for a stage, as PyTorch writes it, or ``0F1[block0]`` for a layer."""
        number = "" if self.micro_batch is None else str(self.micro_batch)
        part = f"[{self.part}]" if self.part else ""
        axis = f"@{self.axis}" if self.axis else ""
        return f"{self.stage}{self.kind}{number}{part}{axis}"


def one_forward_one_backward(num_micro_batches: int) -> list[Action]:
    """Return the schedule of a rank that has the whole model: 0F0 0B0 0F1 0B1 ... 0UPDATE."""
    both = (Action(kind, 0, k) for k in range(num_micro_batches) for kind in "FB")
    return [*both, Action("UPDATE")]
