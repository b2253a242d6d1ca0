"""What a layout keeps, sends and takes, of the rank with the most."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from collectives import Communicator, even_counts
from parallel.accounts import PredictedCall
from parallel.mesh import Mesh
from parallel.nn import Activations, ArraySpec, LayerTraffic, Model, gpt
from parallel.optim.formulas import state_bytes
from parallel.pipeline import SCHEDULES, Times
from parallel.plan.layouts import RECOMPUTE, Job, Layout, Machine
from parallel.sharding import Sharding
from parallel.stages import divide

BFLOAT16 = np.dtype(np.float16)  # any two-byte dtype: updates are made in float32


class Planned(NamedTuple):
    """What a mesh asks of a communicator, of ranks that do not exist."""

    size: int
    rank: int = 0
    name: str = ""


class Cost(NamedTuple):
    """The cost of a layout.  Bytes and seconds are of one rank and step.

    Attributes
    ----------
    states, activations : float
        The bytes of parameters, gradients, masters and optimizer states, and of activations.
    sent : dict of str to float
        The bytes that the rank sends along each axis.
    bubble : float
        The bubble as a fraction of the time for which ranks compute.
    seconds : float
        Of a step: what tensor and data ranks send is not hidden behind computation.
    """

    states: float
    activations: float
    sent: dict[str, float]
    bubble: float
    seconds: float

    @property
    def memory(self) -> float:
        """All bytes that are kept."""
        return self.states + self.activations


class Divided(NamedTuple):
    """A model on the first rank along ``tensor``, and what its layers keep and send."""

    model: Model
    activations: dict[str, Activations]
    traffic: dict[str, LayerTraffic]
    message: int  # bytes between two stages


@cache
def divided(job: Job, tensor: int, micro_batch: int, recompute: str) -> Divided:
    """Return the model of a job for `tensor` ranks, with sequence parallelism if these are several.

    All stages are in it: those of a pipeline have a part of its layers.
    """
    mesh = Mesh(cast(Communicator, Planned(tensor)), tensor=tensor)
    model = gpt(
        num_layers=job.num_layers, hidden=job.hidden, num_heads=job.num_heads,
        context=job.context, vocab_size=job.vocab_size, recompute=RECOMPUTE[recompute],
        mesh=mesh if tensor > 1 else None, sequence_parallel="gather" if tensor > 1 else None,
    )  # fmt: skip
    tokens = ArraySpec.tokens(micro_batch, job.context, width=job.width)
    message = model.inputs(tokens)["block0"].nbytes
    return Divided(model, model.activation_bytes(tokens), model.traffic(tokens), message)


def cost_of(job: Job, layout: Layout, machine: Machine) -> Cost:
    """Return what the rank with the most of it keeps, sends and takes in a step.

    Examples
    --------
    >>> from parallel.plan import Job, Layout, Machine, cost_of
    >>> job, machine = Job(24, 2048, 16, batch=64), Machine(1, 8)
    >>> cost = cost_of(job, Layout(pipe=1, data=1, tensor=8, zero=1, micro_batch=4), machine)
    >>> f"{cost.states / 1e9:.2f} GB"
    '2.91 GB'
    """
    info, m = SCHEDULES[layout.schedule], layout.num_micro_batches(job)
    chunks = info.num_chunks
    whole = divided(job, layout.tensor, layout.micro_batch, layout.recompute)
    stages = divide(list(whole.model.layers), layout.pipe * chunks)
    places = [  # the layers of each rank along the pipeline
        [name for chunk in range(chunks) for name in stages[place + chunk * layout.pipe]]
        for place in range(layout.pipe)
    ]
    live = int(info.kept.of(layout.pipe, m, chunks, 0))
    seconds, exposed = zip(
        *(times(job, layout, machine, whole, layers) for layers in places), strict=True
    )
    slowest = max(seconds)
    third = slowest / 3 / chunks  # F, I and W of a stage
    bubble = float(info.bubble.of(layout.pipe, m, chunks, Times(third, third, third)))
    sent = sent_by_axis(layout, m, chunks, whole, places)
    of_data = sent["data"] / bandwidth(layout, machine, "data")
    return Cost(
        max(states(layout, whole.model, layers) for layers in places),
        max(
            activations(whole, stages, place, layout, live if place == 0 else 1, chunks)
            for place in {0, layout.pipe - 1}
        ),
        sent,
        bubble / (m * slowest),
        m * slowest + bubble + max(exposed) * m + of_data,
    )


def states(layout: Layout, model: Model, layers: list[str]) -> float:
    """Return the bytes of parameters, gradients, masters and states of some layers."""
    size = num_elements(model, layers)
    part = max(even_counts(size, layout.data))
    sharded = Sharding.zero(layout.zero).divided
    return float(sum(state_bytes(size, part, BFLOAT16, sharded=sharded).values()))


def num_elements(model: Model, layers: list[str]) -> int:
    """Return the number of elements of the units that some layers use."""
    units = {unit for name in layers for unit in model.units_of(name)}
    return sum(model.unit_sizes[unit] for unit in units)


def activations(
    whole: Divided, stages: Any, place: int, layout: Layout, live: int, chunks: int
) -> float:
    """Return the bytes of activations of a place that keeps `live` of its stages."""
    of_stage = [
        sum(whole.activations[name].saved for name in stages[place + chunk * layout.pipe])
        for chunk in range(chunks)
    ]
    extra = max(each.extra for each in whole.activations.values())
    return float(max(of_stage) * live + extra)


def sent_by_axis(
    layout: Layout, m: int, chunks: int, whole: Divided, places: list[list[str]]
) -> dict[str, float]:
    """Return the most bytes that a rank sends along each axis in a step."""
    size = max(num_elements(whole.model, layers) for layers in places)
    num_calls = {1: 2, 2: m + 1, 3: 3 * m}[layout.zero]
    return {
        "tensor": m * max(sent_within(whole, layers, layout.tensor) for layers in places),
        "data": num_calls * size * BFLOAT16.itemsize * (layout.data - 1) / layout.data,
        "pipe": 2.0 * m * chunks * whole.message * (layout.pipe > 1),
    }


def sent_within(whole: Divided, layers: list[str], num_ranks: int) -> float:
    """Return the bytes that a rank sends in some layers for a micro-batch."""
    calls = [call for name in layers for each in whole.traffic[name] for call in each]
    return sum((bytes_of(call, num_ranks) for call in calls), 0.0)


def bytes_of(call: PredictedCall, num_ranks: int) -> float:
    """Return the bytes that a rank sends in a call by ring."""
    total = sum(call.counts) if isinstance(call.counts, tuple) else call.counts
    times = 2 if call.collective == "all_reduce" else 1
    return times * total * call.itemsize * (num_ranks - 1) / num_ranks


def times(
    job: Job, layout: Layout, machine: Machine, whole: Divided, layers: list[str]
) -> tuple[float, float]:
    """Return the seconds of a micro-batch in some layers: of computation, and of their messages."""
    num_recomputed = {"none": 0.0, "attention": 0.0, "all": 1.0}[layout.recompute]
    flops = sum(forward_flops(job, layout, whole.model, name) for name in layers)
    sent = sent_within(whole, layers, layout.tensor)
    exposed = sent / bandwidth(layout, machine, "tensor") if layout.tensor > 1 else 0.0
    return (3 + num_recomputed) * flops / machine.flops, exposed


def forward_flops(job: Job, layout: Layout, model: Model, layer: str) -> float:
    """Return the operations of a layer forward on a micro-batch, of one rank along ``tensor``.

    Two for each element of a matrix and each token, and for each score of attention.
    """
    tokens = layout.micro_batch * job.context
    units = model.units_of(layer) if layer != "embedding" else ()
    specs = {name: x for unit in units for name, x in model.shapes[unit].items()}
    matrices = sum(math.prod(shape) for shape in specs.values() if len(shape) > 1)
    biases = sum(math.prod(s) for n, s in specs.items() if n.endswith("bias") and len(s) > 1)
    scores = 2 * job.context * job.hidden / layout.tensor if layer.startswith("block") else 0
    return 2.0 * tokens * (matrices - biases + scores)


def bandwidth(layout: Layout, machine: Machine, axis: str) -> float:
    """Return the bytes a second along an axis; ``tensor`` is the fastest axis, then ``data``."""
    ends = {"tensor": layout.tensor, "data": layout.tensor * layout.data}
    return machine.within if ends[axis] <= machine.ranks_per_host else machine.between
