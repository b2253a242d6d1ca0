"""What one layer with experts sends in a training step: by kind of message, and in each way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from collectives import Topology
from moe.plan.amounts import Sent, matrices_of, sent
from moe.plan.job import Job, predicted
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
WAYS: dict[str, dict[str, str]] = {
    "flat": {"dispatch": "flat", "padding": "none"},
    "flat, padded to the capacity": {"dispatch": "flat", "padding": "capacity"},
    "flat, padded to what is needed": {"dispatch": "flat", "padding": "needed"},
    "hierarchical": {"dispatch": "hierarchical", "padding": "none"},
    "weights": {"dispatch": "weights", "padding": "none"},
    "cheaper": {"dispatch": "cheaper", "padding": "none"},
}


class Kind(NamedTuple):
    """A kind of message of a layer: in which phase it is sent, what it is, and how much."""

    phase: str
    about: str
    sent: Sent


class OfLayer(NamedTuple):
    """What a layer sends in a step.

    Attributes
    ----------
    kinds : list of Kind
        What it sends to compute.
    total : Sent
        All kinds together.
    sums : Sent
        What is sent to sum the gradients of its router and its experts.
    """

    kinds: list[Kind]
    total: Sent
    sums: Sent


def of_layer(
    job: Job, layer: str, axes: Mapping[str, int], ranks_per_host: int, **changes: str
) -> OfLayer:
    """Return what a `layer` of a job sends in a training step.

    Parameters
    ----------
    job : Job
    layer : str
        The name of the layer, such as ``"block1"``.
    axes : mapping
        The number of ranks along each axis of the mesh, slowest first.
    ranks_per_host : int
        How many consecutive ranks are on a host.
    changes
        Options of `moe.moe_gpt` in place of those of the job, such as ``dispatch``.

    Raises
    ------
    ValueError
        If the job cannot be trained on such a mesh.
    """
    size = math.prod(axes.values())
    hosts = Topology.consecutive(size, ranks_per_host)
    own: dict[str, list[PredictedCall]] = {}
    sums: list[PredictedCall] = []
    for call in predicted(job, axes, layer=layer, ranks_per_host=ranks_per_host, **changes):
        outer, _, rest = call.phase.partition("/")
        part, _, inner = rest.partition("/")
        if part == layer:
            phase = "/".join(filter(None, (outer, inner)))
            own.setdefault(phase, []).append(call)
        elif outer == "backward":
            sums.append(call)
    order = [*KINDS, *(phase for phase in own if phase not in KINDS)]
    each = {phase: matrices_of(own[phase], size) for phase in order if phase in own}
    kinds = [
        Kind(phase, KINDS.get(phase, "within experts"), sent(matrices, hosts))
        for phase, matrices in each.items()
    ]
    total = sum(each.values(), np.zeros((2, size, size), np.int64))
    of_sums = matrices_of(sums, size)
    return OfLayer(kinds, sent(total, hosts), sent(of_sums, hosts))


def of_ways(
    job: Job, layer: str, axes: Mapping[str, int], ranks_per_host: int
) -> dict[str, Sent | str]:
    """Return what a `layer` sends in each way to dispatch and to pad, or why it cannot be.

    The arguments are those of `of_layer`; the keys are those of `WAYS`.
    """
    found: dict[str, Sent | str] = {}
    for name, options in WAYS.items():
        try:
            found[name] = of_layer(job, layer, axes, ranks_per_host, **options).total
        except ValueError as error:
            found[name] = str(error)
    return found
