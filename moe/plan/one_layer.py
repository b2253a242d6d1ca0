"""What one layer with experts sends in a training step: by kind of message, and by dispatch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collectives import Topology
from moe.dispatch import DISPATCHERS, PADDINGS
from moe.plan.amounts import Amounts, amounts_of, matrices_of
from moe.plan.training_step import TrainingStep, predict_calls
from parallel import PredictedCall

KINDS = {
    "forward/logits": "logits of whole rows",
    "forward/counts": "how many rows follow",
    "forward/slots": "how many rows the fullest expert needs",
    "forward/choice": "how many rows would be sent",
    "forward/entries": "choices of tokens, to hosts",
    "forward/weights": "weights of choices or of experts",
    "forward/numbers": "numbers of tokens",
    "forward/dispatch": "tokens to experts",
    "forward/combine": "outputs of experts to tokens",
    "backward/combine": "output gradients to experts",
    "backward/dispatch": "input gradients to tokens",
    "backward/weights": "gradients of weights, or weights again",
    "backward/gradients": "gradients of experts to owners",
    "forward": "sums within experts",
    "backward": "sums within experts",
}
COMPARED = [("flat", padding) for padding in PADDINGS] + [
    (dispatch, "none") for dispatch in DISPATCHERS if dispatch != "flat"
]
TITLES = {
    ("flat", "capacity"): "flat, padded to the capacity",
    ("flat", "needed"): "flat, padded to what is needed",
}


class MessageKind(NamedTuple):
    """A kind of message of a layer: in which phase it is sent, what it is, and how much."""

    phase: str
    about: str
    amounts: Amounts


class LayerAmounts(NamedTuple):
    """What a layer sends in a step.

    Attributes
    ----------
    kinds : list of MessageKind
        What it sends to compute.
    total : Amounts
        All kinds together.
    sums : Amounts
        What is sent to sum the gradients of its router and its experts.
    """

    kinds: list[MessageKind]
    total: Amounts
    sums: Amounts


def layer_amounts(
    step: TrainingStep, layer: str, axes: Mapping[str, int], ranks_per_host: int, **changes: str
) -> LayerAmounts:
    """Return what a `layer` of a step sends in a training step.

    Parameters
    ----------
    step : TrainingStep
    layer : str
        The name of the layer, such as ``"block1"``.
    axes : mapping
        The number of ranks along each axis of the mesh, slowest first.
    ranks_per_host : int
        How many consecutive ranks are on a host.
    changes
        Options of `moe.moe_gpt` in place of the options of the step, such as ``dispatch``.

    Raises
    ------
    ValueError
        If the step cannot be trained on such a mesh.
    """
    size = math.prod(axes.values())
    hosts = Topology.consecutive(size, ranks_per_host)
    own: dict[str, list[PredictedCall]] = {}
    sums: list[PredictedCall] = []
    for call in predict_calls(step, axes, layer=layer, ranks_per_host=ranks_per_host, **changes):
        outer, _, rest = call.phase.partition("/")
        part, _, inner = rest.partition("/")
        if part == layer:
            phase = "/".join(filter(None, (outer, inner)))
            own.setdefault(phase, []).append(call)
        elif outer == "backward":
            sums.append(call)
    order = [*KINDS, *(phase for phase in own if phase not in KINDS)]
    by_phase = {phase: matrices_of(own[phase], size) for phase in order if phase in own}
    kinds = [
        MessageKind(phase, KINDS.get(phase, "within experts"), amounts_of(matrices, hosts))
        for phase, matrices in by_phase.items()
    ]
    total = sum(by_phase.values(), np.zeros((2, size, size), np.int64))
    return LayerAmounts(kinds, amounts_of(total, hosts), amounts_of(matrices_of(sums, size), hosts))


def compare_dispatch(
    step: TrainingStep, layer: str, axes: Mapping[str, int], ranks_per_host: int
) -> dict[tuple[str, str], LayerAmounts | str]:
    """Return what a `layer` sends by dispatch and padding, or why it cannot be.

    The arguments are as in `layer_amounts`; the keys are `COMPARED`.
    """
    compared: dict[tuple[str, str], LayerAmounts | str] = {}
    for dispatch, padding in COMPARED:
        options = {"dispatch": dispatch, "padding": padding}
        try:
            amounts = layer_amounts(step, layer, axes, ranks_per_host, **options)
        except ValueError as error:
            compared[dispatch, padding] = str(error)
        else:
            compared[dispatch, padding] = amounts
    return compared
