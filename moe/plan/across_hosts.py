"""The bytes between hosts if experts, a pipeline, or copies of the model are across the hosts."""

from __future__ import annotations

import math
from typing import NamedTuple

from collectives import Topology
from moe.plan.amounts import amounts_of, matrices_of
from moe.plan.training_step import TrainingStep, predict_calls
from parallel import PredictedCall

PARTS = ("experts", "pipeline", "gradients")


class HostTraffic(NamedTuple):
    """What is sent between hosts in a training step, in bytes and messages, by `PARTS`."""

    axes: dict[str, int]
    bytes: dict[str, int]
    messages: dict[str, int]


def layouts(num_hosts: int, ranks_per_host: int) -> dict[str, dict[str, int]]:
    """Return the axes of the meshes that are compared, by what is across hosts."""
    inside = {"expert": ranks_per_host}
    return {
        "experts": {"data": 1, "expert": num_hosts * ranks_per_host},
        "pipeline": {"pipe": num_hosts, "data": 1, **inside},
        "copies": {"data": num_hosts, **inside},
    }


def compare_layouts(
    step: TrainingStep, num_hosts: int, ranks_per_host: int
) -> dict[str, HostTraffic | str]:
    """Return what a training step sends between hosts, or why it cannot be, in three layouts.

    Ranks divide the experts, on all hosts; or a pipeline has a stage on each host, whose ranks
    divide the experts of that stage; or each host has a copy of the model, whose experts its ranks
    divide.  The model, the batch and the routing are the same.

    Parameters
    ----------
    step : TrainingStep
    num_hosts, ranks_per_host : int
    """
    compared: dict[str, HostTraffic | str] = {}
    for name, axes in layouts(num_hosts, ranks_per_host).items():
        try:
            compared[name] = host_traffic(step, axes, ranks_per_host)
        except ValueError as error:
            compared[name] = str(error)
    return compared


def host_traffic(step: TrainingStep, axes: dict[str, int], ranks_per_host: int) -> HostTraffic:
    """Return what a training step sends between hosts of consecutive ranks of a mesh."""
    by_part: dict[str, list[PredictedCall]] = {part: [] for part in PARTS}
    names = {layer.name for layer in step.layers}
    for call in predict_calls(step, axes, ranks_per_host=ranks_per_host):
        by_part[part_of(call, names)].append(call)
    size = math.prod(axes.values())
    hosts = Topology.consecutive(size, ranks_per_host)
    amounts = {part: amounts_of(matrices_of(calls, size), hosts) for part, calls in by_part.items()}
    return HostTraffic(
        axes,
        {part: sent.off_host for part, sent in amounts.items()},
        {part: sent.messages_off_host for part, sent in amounts.items()},
    )


def part_of(call: PredictedCall, layers: set[str]) -> str:
    """Return which of `PARTS` a call belongs to; calls of `layers` are of experts.

    The sums of the loss and the like are among the gradients.
    """
    if call.collective == "send":
        return "pipeline"
    outer, _, inner = call.phase.partition("/")
    is_layer = outer in ("forward", "backward") and inner.partition("/")[0] in layers
    return "experts" if is_layer else "gradients"
