"""The memory, the traffic and the time of a candidate, for the rank with the most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from collectives import even_counts
from parallel.accounts import PredictedCall
from parallel.layout import divide
from parallel.mesh import Mesh
from parallel.nn import Activations, ArraySpec, LayerTraffic, Model, gpt
from parallel.optim import state_bytes
from parallel.pipeline import SCHEDULES, Times, actions, computations, make
from parallel.pipeline.schedules import round_size
from parallel.plan.candidates import RECOMPUTE, Candidate, Job, Machine
from parallel.sharding import Sharding

BFLOAT16 = np.dtype(np.float16)  # any two-byte dtype: updates are made in float32


class Cost(NamedTuple):
    """The cost of a candidate.  Bytes and seconds are of one rank and step.

    Attributes
    ----------
    kept : dict of str to int
        The bytes of parameters, gradients, masters (``"master"``) and states of the optimizer.
    activations : float
        The bytes of activations.
    sent : dict of str to float
        The bytes that the rank sends along each axis.
    bubble : float
        The bubble as a fraction of the time for which ranks compute.
    seconds : float
        The time of a step.  Messages of tensor and data ranks are not hidden behind computation.
    """

    kept: dict[str, int]
    activations: float
    sent: dict[str, float]
    bubble: float
    seconds: float

    @property
    def states(self) -> int:
        """The bytes of all that is kept from step to step."""
        return sum(self.kept.values())

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

    All stages are in it; a stage of a pipeline has a part of its layers.
    """
    mesh = Mesh(None, tensor=tensor)
    model = gpt(
        num_layers=job.num_layers,
        hidden=job.hidden,
        num_heads=job.num_heads,
        context=job.context,
        vocab_size=job.vocab_size,
        recompute=RECOMPUTE[recompute],
        mesh=mesh if tensor > 1 else None,
        sequence_parallel="gather" if tensor > 1 else None,
    )
    tokens = ArraySpec.tokens(micro_batch, job.context, width=job.width)
    message = model.inputs(tokens)["block0"].nbytes
    return Divided(model, model.activation_bytes(tokens), model.traffic(tokens), message)


def cost_of(job: Job, candidate: Candidate, machine: Machine) -> Cost:
    """Return the most that a rank keeps, sends and takes in a step.

    Examples
    --------
    >>> from parallel.plan import Job, Candidate, Machine, cost_of
    >>> job, machine = Job(24, 2048, 16, batch=64), Machine(1, 8)
    >>> cost = cost_of(job, Candidate(pipe=1, data=1, tensor=8, zero=1, micro_batch=4), machine)
    >>> f"{cost.states / 1e9:.2f} GB"
    '2.91 GB'
    """
    info, m = SCHEDULES[candidate.schedule], candidate.num_micro_batches(job)
    chunks = info.num_chunks
    whole = divided(job, candidate.tensor, candidate.micro_batch, candidate.recompute)
    stages = divide(list(whole.model.layers), candidate.pipe * chunks)
    ranks = [  # the layers of each rank along the pipeline, by stage
        [stages[rank + chunk * candidate.pipe] for chunk in range(chunks)]
        for rank in range(candidate.pipe)
    ]
    all_layers = [[name for stage in rank for name in stage] for rank in ranks]
    seconds, exposed = zip(
        *(times(job, candidate, machine, whole, layers) for layers in all_layers), strict=True
    )
    slowest = max(seconds)
    third = slowest / 3 / chunks  # F, I and W of a stage
    bubble = float(info.bubble.of(candidate.pipe, m, chunks, Times(third, third, third)))
    sent = sent_by_axis(candidate, m, chunks, whole, all_layers)
    of_data = sent["data"] / bandwidth(candidate, machine, "data")
    return Cost(
        max(
            (kept_by(candidate, whole.model, layers) for layers in all_layers),
            key=lambda kept: sum(kept.values()),
        ),
        activations(candidate, m, whole, stages),
        sent,
        bubble / (m * slowest),
        m * slowest + bubble + max(exposed) * m + of_data,
    )


def kept_by(candidate: Candidate, model: Model, layers: list[str]) -> dict[str, int]:
    """Return the bytes that a rank with some layers keeps from step to step, by category."""
    size = num_elements(model, layers)
    part = max(even_counts(size, candidate.data))
    return state_bytes(size, part, BFLOAT16, sharded=Sharding.zero(candidate.zero).divided)


def num_elements(model: Model, layers: list[str], summed: str | None = None) -> int:
    """Return the number of elements of the units that some layers use.

    If `summed` is an axis, only units with gradients that are summed along it count.
    """
    units = {unit for name in layers for unit in model.units_of(name)}
    if summed is not None:
        partial = {u for u in units for x in model.units[u].values() if summed in x.partial}
        units &= partial
    return sum(model.unit_sizes[unit] for unit in units)


def activations(
    candidate: Candidate, m: int, whole: Divided, stages: Sequence[Sequence[str]]
) -> float:
    """Return the most bytes of activations that a rank keeps at a time, by its list of actions."""
    changes = {
        (i, kind): [change for name in order for change in whole.activations[name].changes(kind)]
        for i, layers in enumerate(stages)
        for kind in "FBIW"
        for order in [layers if kind == "F" else layers[::-1]]
    }
    of_ranks = (
        chain.from_iterable(
            changes[action.stage, action.letter] for action in computations(actions)
        )
        for actions in lists(candidate.schedule, candidate.pipe, m)
    )
    return float(max(max(accumulate(of_rank)) for of_rank in of_ranks))


@cache
def lists(schedule: str, num_ranks: int, m: int) -> tuple[tuple[actions.Action, ...], ...]:
    """Return the actions of each rank on as many of `m` micro-batches as it takes to keep the most.

    These are the micro-batches of the first three rounds: the lists of `SCHEDULES_TRIED` repeat.
    """
    of_round = round_size(num_ranks, m)
    return make(schedule, num_ranks, min(m, 3 * of_round)).actions


def sent_by_axis(
    candidate: Candidate, m: int, chunks: int, whole: Divided, all_layers: list[list[str]]
) -> dict[str, float]:
    """Return the most bytes that a rank sends along each axis in a step, but for loss and norm."""
    model, size = whole.model, max(num_elements(whole.model, layers) for layers in all_layers)
    num_calls = {1: 2, 2: m + 1, 3: 3 * m}[candidate.zero]
    return {
        "tensor": max(
            m * sent_within(whole, layers, candidate.tensor)
            + sent_for_sums(num_elements(model, layers, "tensor"), candidate)
            for layers in all_layers
        ),
        "data": num_calls * size * BFLOAT16.itemsize * (candidate.data - 1) / candidate.data,
        "pipe": float(m * whole.message * num_neighbours(candidate.pipe, chunks)),
    }


def num_neighbours(num_ranks: int, chunks: int) -> int:
    """Return the most stages to which a rank sends: the neighbors of its stages on other ranks."""
    last = num_ranks * chunks - 1
    stages = [range(rank, last + 1, num_ranks) for rank in range(num_ranks * (num_ranks > 1))]
    return max((sum((s > 0) + (s < last) for s in mine) for mine in stages), default=0)


def sent_for_sums(size: int, candidate: Candidate) -> float:
    """Return the bytes that a rank sends to sum gradients of `size` elements along ``tensor``.

    Ranks along ``data`` divide them first.
    """
    part = max(even_counts(size, candidate.data))
    call = PredictedCall("", "all_reduce", "ring", part, BFLOAT16.itemsize)
    return bytes_of(call, candidate.tensor)


def sent_within(whole: Divided, layers: list[str], num_ranks: int) -> float:
    """Return the bytes that a rank sends in some layers for a micro-batch."""
    calls = (call for name in layers for direction in whole.traffic[name] for call in direction)
    return sum((bytes_of(call, num_ranks) for call in calls), 0.0)


def bytes_of(call: PredictedCall, num_ranks: int) -> float:
    """Return the bytes that a rank sends in a call by ring."""
    total = sum(call.counts) if isinstance(call.counts, tuple) else call.counts
    times = 2 if call.collective == "all_reduce" else 1
    return times * total * call.itemsize * (num_ranks - 1) / num_ranks


def times(
    job: Job, candidate: Candidate, machine: Machine, whole: Divided, layers: list[str]
) -> tuple[float, float]:
    """Return the seconds of a micro-batch in some layers: of computation, and of their messages."""
    flops = 0.0
    for name in layers:
        of_matrices, of_scores = forward_flops(job, candidate, whole.model, name)
        is_block = name.startswith("block")
        again = {"none": 0.0, "attention": of_scores, "all": (of_matrices + of_scores) * is_block}
        flops += 3 * (of_matrices + of_scores) + again[candidate.recompute]
    sent = sent_within(whole, layers, candidate.tensor)
    exposed = sent / bandwidth(candidate, machine, "tensor") if candidate.tensor > 1 else 0.0
    return flops / machine.flops, exposed


def forward_flops(job: Job, candidate: Candidate, model: Model, layer: str) -> tuple[float, float]:
    """Return the operations of matrices and of attention in a layer, forward on a micro-batch.

    They are the operations of one rank along ``tensor``, for the `model` of a `job` that is divided
    as a `candidate` says: two for each element of a matrix and each token, and four for each score
    of attention and each element of a head.
    """
    tokens = candidate.micro_batch * job.context
    units = model.units_of(layer) if layer != "embedding" else ()
    specs = {name: x for unit in units for name, x in model.shapes[unit].items()}
    matrices = sum(math.prod(shape) for shape in specs.values() if len(shape) > 1)
    biases = sum(math.prod(s) for n, s in specs.items() if n.endswith("bias") and len(s) > 1)
    of_scores = 4.0 * tokens * job.context * job.hidden / candidate.tensor
    return 2.0 * tokens * (matrices - biases), of_scores * layer.startswith("block")


def bandwidth(candidate: Candidate, machine: Machine, axis: str) -> float:
    """Return the bytes a second along an axis; ``tensor`` is the fastest axis, then ``data``."""
    ends = {"tensor": candidate.tensor, "data": candidate.tensor * candidate.data}
    return machine.within if ends[axis] <= machine.ranks_per_host else machine.between
