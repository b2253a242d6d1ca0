"""One action of a training step: something that a rank computes, sends, receives or frees."""

from __future__ import annotations

from typing import NamedTuple

# What each kind does.  The first six are those of a schedule; `with_messages` adds the next four,
# and `lower` the others.
KINDS = {
    "F": "forward of a layer, or of all layers of a stage",
    "B": "backward, which adds to the gradients",
    "I": "the first half of backward: the derivative by the input",
    "W": "the second half of backward, which adds to the gradients",
    "OVERLAP_F_B": "forward of one micro-batch and backward of another at the same time",
    "UPDATE": "change the parameters; what follows is left out if gradients overflowed",
    "SEND_F": "send the output of a stage to the next one",
    "RECV_F": "receive the input of a stage from the one before it",
    "SEND_B": "send the derivative by the input of a stage to the one before it",
    "RECV_B": "receive the derivative by the output of a stage from the next one",
    "UNSHARD": "start to gather the parameters of a unit",
    "AVERAGE": "start to make the parameters of a unit equal again, after several steps",
    "RESHARD": "free the gathered parameters of a unit",
    "REDUCE": "start to sum the gradients of a unit or bucket over ranks",
    "WAIT": "complete what was started, and free the gradients that it has summed",
    "UNUSED": "find the layers that no rank has used",
    "LOSS": "sum the loss over ranks",
    "COUNT": "sum over ranks what layers have counted, and let them use it",
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
    axes : tuple of str
        Those of the mesh along which it communicates.
    phase : str
        The label of the ledger for what is sent meanwhile.
    parts : tuple of Action
        What is done at the same time, forward first; of an OVERLAP_F_B only.
    slot : int, optional
        Of an action of a layer: the OVERLAP_F_B that it is a part of, if forward and backward take
        turns in it.
    """

    kind: str
    stage: int = 0
    micro_batch: int | None = None
    part: str = ""
    axes: tuple[str, ...] = ()
    phase: str = ""
    parts: tuple[Action, ...] = ()
    slot: int | None = None

    def __str__(self) -> str:
        """Return ``0F1`` for a stage, as PyTorch writes it, or ``0F1[block0]`` for a layer."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        number = "" if self.micro_batch is None else str(self.micro_batch)
        part = f"[{self.part}]" if self.part else ""
        axes = f"@{','.join(self.axes)}" if self.axes else ""
        return f"{self.stage}{self.kind}{number}{part}{axes}"
