"""The router of a layer: logits of tokens, and the routing that a gate makes of whole rows.

Ranks along the axis ``context`` have parts of each row.  They gather the logits of their rows, and
each routes all of them, so that the routing does not depend on the ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import collectives
from moe.gates import Gate, Gated, score_bytes
from moe.routing import Integers, Routing, Values
from moe.sums import scattered
from parallel import Mesh, PredictedCall
from parallel.nn import (
    Array,
    ArraySpec,
    Step,
    cast,
    context_positions,
    namespace_of,
    on_host,
    upcast,
)

CONTEXT, ALGORITHM = "context", "ring"


class Routed(NamedTuple):
    """The routing of this rank's tokens, as a part of the routing of their whole rows.

    `gated` is what the gate returned for the whole rows.  `own` are this rank's tokens in the rows,
    and `routing` is their part; `entries` are its entries in the routing of the whole rows.
    """

    gated: Gated
    routing: Routing
    entries: Integers
    own: Integers

    @property
    def weights(self) -> Values:
        """The weights of the entries of `routing`."""
        return self.gated.weights[self.entries]


class Router:
    """What makes logits and routes by them, on ranks of a mesh that have parts of the same rows.

    Parameters
    ----------
    gate : Gate
    mesh : Mesh
    name : str
        The name of the layer, for its random numbers.
    """

    def __init__(self, gate: Gate, mesh: Mesh, name: str) -> None:
        self.gate, self.mesh, self.name = gate, mesh, name
        self.num_parts = mesh.axes.get(CONTEXT, 1)

    def route(
        self,
        x: Array,
        weight: Array | None,
        step: Step,
        num_groups: int,
        bias: Values | None = None,
    ) -> Routed:
        """Route this rank's tokens `x` (rows, tokens, dim).

        `weight` (dim, experts) are the parameters, None without any.  The whole rows are routed in
        `num_groups` groups, with the `bias` of each expert, if any.
        """
        num_rows, length, dim = x.shape
        tokens = x.reshape(num_rows * length, dim)
        seen = self._seen(tokens, weight, step).reshape(num_rows, length, self._width)
        whole = self._whole_rows(seen, step)
        context = whole.shape[1]
        whole = whole.reshape(num_rows * context, self._width)
        batch = step.batch
        random = None if batch is None else batch.random(self.mesh.rank, self.name)
        if weight is None:
            logits = np.zeros((len(whole), self.gate.num_experts), upcast(tokens[:0]).dtype)
            ids = whole.ravel()
            gated = self.gate.forward(logits, random, num_groups=num_groups, token_ids=ids)
        else:
            gated = self.gate.forward(whole, random, num_groups=num_groups, bias=bias)
        own = self.own_tokens(num_rows, context)
        entries = gated.routing.entries_of(own)
        return Routed(gated, gated.routing.of_tokens(own), entries, own)

    @property
    def _width(self) -> int:
        """The numbers of a token that decide its routing."""
        return self.gate.num_experts if self.gate.has_router else 1

    def _seen(self, tokens: Array, weight: Array | None, step: Step) -> Any:
        """Return what decides the routing of this rank's tokens, in host memory."""
        if weight is not None:
            return on_host(upcast(tokens) @ upcast(weight))
        if step.tokens is None:
            raise ValueError(
                f"{self.name} routes by tokens of the text: they must be in Step.tokens"
            )
        return step.on_host(step.tokens)

    def _whole_rows(self, seen: Any, step: Step) -> Any:
        """Return what decides the routing of whole rows, (rows, context, numbers)."""
        if self.num_parts == 1:
            return seen
        comm = self.mesh[CONTEXT]
        assert comm is not None
        positions = [self._positions(step.context, i) for i in range(self.num_parts)]
        by_position, counts = np.ascontiguousarray(seen.swapaxes(0, 1)), tuple(map(len, positions))
        with collectives.phase("logits"):
            whole = comm.all_gather(by_position, counts=counts, algorithm=ALGORITHM)
        return whole[np.argsort(np.concatenate(positions))].swapaxes(0, 1)

    def _positions(self, context: int, index: int) -> Integers:
        """Return the positions in whole rows of the tokens of the rank with this `index`."""
        return context_positions(context, self.num_parts, index)

    def own_tokens(self, num_rows: int, context: int, rank: int | None = None) -> Integers:
        """Return which tokens of `num_rows` whole rows of `context` a rank has, in order."""
        tokens = np.arange(num_rows * context).reshape(num_rows, context)
        if self.num_parts == 1:
            return tokens.ravel()
        return tokens[:, self._positions(context, self.mesh.index(CONTEXT, rank))].ravel()

    def loss(self, routed: Routed) -> float:
        """Return this rank's share of the auxiliary losses of its rows."""
        num_tokens = max(1, routed.gated.routing.num_tokens)
        return routed.gated.loss * len(routed.own) / num_tokens

    def backward(self, routed: Routed, dweights: Array, loss_weight: float) -> Array:
        """Return the derivative by this rank's logits, (tokens, experts); see `Gate.backward`.

        `dweights` are the derivatives by the weights of the entries of ``routed.routing``; the
        result is on their device.
        """
        weights, xp = routed.gated.weights, namespace_of(dweights)
        whole = scattered(dweights, routed.entries, len(weights), weights.dtype)
        dlogits = self.gate.backward(routed.gated, whole, loss_weight)
        return dlogits if self.num_parts == 1 else dlogits[xp.asarray(routed.own)]

    def add_gradient(self, gradient: Array, tokens: Array, dlogits: Array) -> None:
        """Add the derivative by the parameters to `gradient`."""
        gradient += cast(upcast(tokens).T @ dlogits, gradient.dtype)

    # What it keeps and sends

    def saved_bytes(self, x: ArraySpec, rows_per_group: int) -> int:
        """Return the bytes of what `route` keeps for an input `x` of the layer."""
        num_rows, per_group = x.shape[0], rows_per_group * x.context
        entries = num_rows // rows_per_group * self.gate.num_entries(per_group)
        scores = num_rows * x.context * self.gate.num_experts
        return score_bytes(x.width) * (3 * scores + entries)

    def dlogits_bytes(self, x: ArraySpec) -> int:
        """Return the bytes of what `backward` returns."""
        return score_bytes(x.width) * x.shape[0] * x.shape[1] * self.gate.num_experts

    def traffic(self, x: ArraySpec) -> list[PredictedCall]:
        """Return what `route` sends for an input `x` of the layer."""
        if self.num_parts == 1:
            return []
        per_token = x.shape[0] * self._width
        lengths = [len(self._positions(x.context, i)) for i in range(self.num_parts)]
        counts = tuple(per_token * length for length in lengths)
        itemsize = score_bytes(x.width) if self.gate.has_router else np.dtype(np.int64).itemsize
        return [PredictedCall("logits", "all_gather", ALGORITHM, counts, itemsize, axis=CONTEXT)]
