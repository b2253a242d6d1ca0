"""Text from models with experts: their gates without capacity, and which weights tokens read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from moe.gates import Gate
from moe.layers import MixtureOfExperts, mixtures
from moe.routing import RoutingLog
from parallel.inference import Inference
from parallel.nn import Activations, Array, ArraySpec, Layer, Step

COUNTED = ("flat", "hierarchical")  # with these, a rank computes with its own experts only


def without_capacity(make: Callable[[int], Gate]) -> Callable[[int], Gate]:
    """Return a function that makes the gates of `make` for the generation of text.

    Their experts take all tokens that choose them: what a token gets depends neither on the other
    tokens that are read with it, nor on later ones.

    Raises
    ------
    ValueError
        By the function, for a gate in which experts choose tokens.
    """

    def made(num_experts: int) -> Gate:
        gate = make(num_experts)
        if gate.rule == "expert-choice":
            raise ValueError(
                "experts that choose tokens look at later tokens: a model with expert choice"
                " generates no text"
            )
        return replace(gate, rule=None)

    return made


class Counted(Layer):
    """An expert, which tells `count` how many bytes of weights it reads if it gets any tokens."""

    def __init__(self, expert: Layer, count: Callable[[int], object]) -> None:
        super().__init__()
        self.expert, self.count, self.nbytes = expert, count, 0

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        self.expert.bind(values, gradients)
        self.nbytes = sum(int(x.nbytes) for x in values.values())

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        self.count(self.nbytes if len(x) else 0)
        return self.expert.forward(x, step)

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.expert.backward_input(dy, saved)

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return self.expert.activation_bytes(x)


def count_reads(inference: Inference) -> None:
    """Let the experts of a model add what they read to ``inference.bytes_read``.

    Raises ValueError for a dispatch that gathers the weights of other ranks' experts: reads of
    gathered weights are not counted.
    """
    for layer in mixtures(inference.model):
        if layer.dispatch not in COUNTED:
            raise ValueError(
                f"the layer {layer.name} has the dispatch {layer.dispatch}, which gathers weights:"
                f" the weights that tokens read are counted only for {' and '.join(COUNTED)}"
            )

    def count(nbytes: int) -> None:
        inference.bytes_read += nbytes

    for layer in mixtures(inference.model):
        experts = layer.experts
        experts.layers = [Counted(expert, count) for expert in experts.layers]


def bytes_read(inference: Inference, log: RoutingLog, rank: int) -> list[int]:
    """Return the bytes of weights that a `rank` reads in each pass made so far.

    These are the weights of layers without experts, if the rank has texts; and the weights of each
    of its experts that any token of its team chose, once.  `log` has the routing of all ranks.
    """
    dense = [*inference.model.layers][:-1] if inference.of_rank[rank] else []
    return [
        sum(inference.dense_bytes(name, one_pass.num_tokens, rank) for name in dense)
        + sum(
            num_used(inference, layer, log, number, rank)
            * inference.itemsize
            * sum(layer.experts.sizes(inference.mesh, rank))
            for layer in mixtures(inference.model)
        )
        for number, one_pass in enumerate(inference.passes)
    ]


def num_used(
    inference: Inference, layer: MixtureOfExperts, log: RoutingLog, number: int, rank: int
) -> int:
    """Return how many of a rank's experts any token of its team chose in a pass."""
    whole, team = log.whole(number, layer.name), layer.dispatcher.team
    rows = [inference.of_rank[member] for member in team.group(rank)]
    mine = team.owned_by(team.index_of(rank))
    loads = [whole.of_groups(part.start, part.stop).load[mine] for part in rows]
    return int(np.any(loads, axis=0).sum())
