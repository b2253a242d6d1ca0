"""What `bench moe` times: dispatch and combine of new routings, ours and by mpi4py's Alltoallv."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from bench.workloads.expected import Array
from collectives import Communicator
from moe.dispatch import Dispatcher, Options, make_dispatcher
from moe.exchange import Experts, Part, Received, Rows, Team
from moe.gates import GATES, Gate
from moe.routing import Routing
from parallel import Mesh, nn

FP32 = np.dtype("float32")
AXIS = "expert"
TOLERANCE = 1e-4

Forward = Callable[[Array, "Routed"], Array]
"""Called with the tokens of a rank and their routing; returns the sum of what experts make."""


class Size(NamedTuple):
    """How large everything is, on each rank; `hidden` is of the experts that compute."""

    tokens: int = 4096
    dim: int = 1024
    num_experts: int = 8
    hidden: int = 512


class Routed(NamedTuple):
    """The routing of one step, and the weights of its entries, float32."""

    routing: Routing
    weights: Array


def gate_of(name: str, size: Size) -> Gate:
    """Return a gate of the literature, by its name and, after a colon, its k: "stable:4"."""
    word, _, k = name.partition(":")
    return GATES[word](size.num_experts, **({"k": int(k)} if k else {}))


def routed(gate: Gate, size: Size, rank: int, step: int) -> Routed:
    """Return the routing of a rank's tokens in a step, by random logits."""
    random = np.random.default_rng((step, rank))
    logits = random.standard_normal((size.tokens, gate.num_experts))
    gated = gate.forward(logits, [random], num_groups=1)
    return Routed(gated.routing, gated.weights.astype(FP32))


class Steps:
    """Calls of a `forward` on the same tokens, each with the routing of the next step."""

    def __init__(self, forward: Forward, x: Array, routings: list[Routed]) -> None:
        self.forward, self.x, self.last = forward, x, routings[-1]
        self._next: Iterator[Routed] = iter(routings)
        self.result = x

    def __call__(self) -> None:
        """Make one; raises StopIteration if there is no routing left."""
        self.last = next(self._next)
        self.result = self.forward(self.x, self.last)


def num_wrong(steps: Steps) -> int:
    """Return how many elements of the last result are not the sum of copies of their token."""
    routing, weights = steps.last
    kept = ~routing.is_dropped
    factors = np.bincount(routing.token[kept], weights[kept], minlength=len(steps.x))
    wanted = factors[:, None] * steps.x
    return int(np.count_nonzero(~np.isclose(steps.result, wanted, rtol=0, atol=TOLERANCE)))


class Copies(Experts):
    """Experts that copy their rows to other memory, in place of computing."""

    def forward(self, rows: Received, out: Rows, part: Part, step: nn.Step) -> list[Any]:
        out.away[...] = rows.away
        rows.own(0, out.own)
        return []


def mlp(size: Size) -> nn.Layer:
    """Return an expert that computes: two linear layers."""
    up, down = nn.Linear(size.dim, size.hidden), nn.Linear(size.hidden, size.dim)
    return nn.Sequential({"up": up, "gelu": nn.Gelu(), "down": down})


def dispatcher_of(
    name: str,
    comm: Communicator,
    gate: Gate,
    size: Size,
    kind: type[Experts] = Copies,
    *,
    num_parts: int = 1,
    ranks_per_host: int | None = None,
) -> Dispatcher:
    """Return a dispatcher of tokens to experts of a `kind`, with random parameters."""
    mesh = Mesh(comm, expert=comm.size)
    team = Team.along(mesh, AXIS, gate.num_experts)
    experts = kind(lambda: mlp(size), gate.num_experts, team.owned, AXIS)
    random, num_owned = np.random.default_rng(comm.rank), len(experts.layers)
    values = {
        key: random.standard_normal((num_owned, *spec.shape[1:]), FP32) / spec.shape[-1] ** 0.5
        for key, spec in experts.specs().items()
    }
    experts.bind(values, {key: np.zeros_like(x) for key, x in values.items()})
    options = Options(size.dim, gate, num_parts=num_parts)
    dispatcher = make_dispatcher(name, options, team, experts, ranks_per_host)
    for axis in dispatcher.axes:
        mesh[axis]  # makes the communicators, on all ranks in the same order
    return dispatcher


def forward_of(dispatcher: Dispatcher) -> Forward:
    """Return the forward pass of a dispatcher."""

    def forward(x: Array, routed: Routed) -> Array:
        y: Array = dispatcher.forward(x, routed.routing, routed.weights, nn.Step())[0]
        return y

    return forward


class Alltoallv:
    """The same with mpi4py's Alltoallv and NumPy's indexing, as a program would write it.

    Both make new arrays in every step.  The weighted sum takes one turn for each choice of the
    tokens, whose entries are (k, tokens): a gather, a product and a sum, which is the fastest that
    was found with NumPy.
    """

    def __init__(self, world: MPI.Comm, num_experts: int) -> None:
        self.world, self.num_experts = world, num_experts

    def __call__(self, x: Array, routed: Routed) -> Array:
        routing, size, dim = routed.routing, self.world.size, x.shape[1]
        kept = np.flatnonzero(~routing.is_dropped)
        by_expert = kept[np.argsort(routing.expert[kept], kind="stable")]
        load = np.bincount(routing.expert[kept], minlength=self.num_experts)
        arriving = np.empty((size, self.num_experts // size), load.dtype)
        self.world.Alltoall(load, arriving)
        sent, received = (dim * counts.reshape(size, -1).sum(axis=1) for counts in (load, arriving))

        leaving = np.take(x, routing.token[by_expert], axis=0)
        rows = np.empty((arriving.sum(), dim), x.dtype)
        self.world.Alltoallv([leaving, sent], [rows, received])
        computed = rows.copy()  # by the experts
        returned = np.empty_like(leaving)
        self.world.Alltoallv([computed, received], [returned, sent])
        return weighted_sum(returned, by_expert, routed, len(x))


def weighted_sum(rows: Array, by_expert: Array, routed: Routed, num_tokens: int) -> Array:
    """Return the sum of the `rows` of each token, in the order of the entries `by_expert`."""
    weights = np.zeros_like(routed.weights)  # of entries that are dropped
    weights[by_expert] = routed.weights[by_expert]
    place = np.zeros(len(weights), np.int64)
    place[by_expert] = np.arange(len(by_expert))
    first, *others = zip(
        place.reshape(-1, num_tokens), weights.reshape(-1, num_tokens, 1), strict=True
    )
    y = np.take(rows, first[0], axis=0)
    y *= first[1]
    for places, factors in others:
        added = np.take(rows, places, axis=0)
        added *= factors
        y += added
    return y
