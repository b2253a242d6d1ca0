"""The layer: a router, experts on the ranks along an axis, and a dispatch between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from moe import dispatch
from moe.dispatch import Part
from moe.exchange import Exchange, Sent
from moe.experts import Experts, Half, both_halves, first_half
from moe.gates import Gate
from moe.log import RoutingLog
from moe.payload import PAYLOADS, form_of
from moe.router import Routed, Router
from moe.routing import Integers, Routing
from parallel import Mesh, PredictedCall
from parallel.nn import (
    Activations,
    Array,
    ArraySpec,
    Layer,
    LayerTraffic,
    Model,
    ParameterSpec,
    Sequential,
    Step,
    cast,
    namespace_of,
)
from parallel.nn.functional import upcast
from parallel.nn.layer import by_layer

AXIS = "expert"
PADDINGS = ("none", "capacity", "needed")
MOST_ALGORITHM = "recursive_doubling"  # of the all-reduce of one number


class Saved(NamedTuple):
    """What `MixtureOfExperts.forward` keeps."""

    tokens: Array  # (tokens, dim)
    routed: Routed
    sent: Sent
    shape: tuple[int, ...]
    step: Step


class Rest(NamedTuple):
    """What `MixtureOfExperts.backward_weight` needs."""

    tokens: Array
    dlogits: Array
    experts: list[list[Any]]


class MixtureOfExperts(Layer):
    """A layer of which each token uses a few of many experts.  Shazeer et al. 2017.

    Vectors (batch, tokens, `dim`) become vectors of the same shape: for each token, the sum of what
    its experts make of it, each times the weight that the gate gives it.  A token that no expert
    takes becomes zero, so the layer belongs inside a `Residual`.  The auxiliary losses of the gate
    are added to the loss.

    Ranks along the axis ``expert`` of the mesh have different tokens and divide the experts.  Ranks
    along ``data`` have copies of the experts, and ranks along ``tensor`` parts of each.

    Parameters
    ----------
    dim : int
    gate : Gate
    expert : function
        Makes one expert: a layer that turns rows (n, `dim`) into rows (n, `dim`).
    mesh : Mesh, optional
        By default there is one rank.
    name : str
        Which random numbers the layer draws, and how a log calls it.
    rows_per_group : int
        The consecutive rows of the batch that are routed together.  Each micro-batch of each rank
        must have whole groups, so that the routing does not depend on the ranks.
    padding : str
        ``"none"``: exactly the rows that are routed are sent; ``"capacity"``: as many for each
        expert and group as its capacity; ``"needed"``: as many as the expert needs that needs most
        in this micro-batch on all ranks that share the experts (Hwang et al. 2023, Tutel).
    num_parts : int
        In how many parts rows are sent, so that experts compute one while others are sent.
    payload : str
        In which form rows are sent: ``"same"``, ``"bfloat16"`` or ``"int8"`` (`moe.payload`).
    log : RoutingLog, optional
        To which the routing of each step is added.

    Attributes
    ----------
    expected : RoutingLog, optional
        The routing that predictions assume: that of the same run on one rank.
    bias : array
        What is added to the scores of each expert, float64 (experts,), if the gate has a
        `bias_rate`: the same on all ranks, in checkpoints, and changed after each update.

    Raises
    ------
    ValueError
        If a number is less than 1, for an unknown padding or payload, and for the padding
        ``"capacity"`` without a capacity rule of the gate.
    """

    needs_rows = True

    def __init__(
        self,
        dim: int,
        gate: Gate,
        expert: Callable[[], Layer],
        *,
        mesh: Mesh | None = None,
        name: str = "moe",
        rows_per_group: int = 1,
        padding: str = "none",
        num_parts: int = 1,
        payload: str = "same",
        log: RoutingLog | None = None,
    ) -> None:
        super().__init__()
        for what, number in (("rows_per_group", rows_per_group), ("num_parts", num_parts)):
            if number < 1:
                raise ValueError(f"{what} is {number}: it must be at least 1")
        if payload not in PAYLOADS:
            raise ValueError(f"payload is {payload!r}: it must be one of {', '.join(PAYLOADS)}")
        if padding not in PADDINGS:
            raise ValueError(f"padding is {padding!r}: it must be one of {', '.join(PADDINGS)}")
        if padding == "capacity" and gate.rule is None:
            raise ValueError("padding to the capacity needs a gate with a capacity rule")
        self.dim, self.gate, self.mesh, self.name = dim, gate, mesh or Mesh(None), name
        self.rows_per_group, self.padding, self.num_parts = rows_per_group, padding, num_parts
        self.payload, self.log, self.expected = payload, log, log
        self.num_ranks = self.mesh.axes.get(AXIS, 1)
        self.router = Router(gate, self.mesh, name)
        owned = dispatch.experts_of(gate.num_experts, self.num_ranks, self._place(self.mesh.rank))
        self.experts = Experts(expert, gate.num_experts, owned, AXIS)
        self.bias = np.zeros(gate.num_experts)
        self.step_counts = np.zeros(gate.num_experts, np.int64) if gate.bias_rate else None

    @property
    def comm(self) -> Communicator | None:
        """The communicator of the ranks that divide the experts; None if one rank has all."""
        return self.mesh[AXIS] if self.num_ranks > 1 else None

    @property
    def exchange(self) -> Exchange:
        """What sends rows to experts and back."""
        return Exchange(self.comm, self.payload)

    def _place(self, rank: int) -> int:
        """Return the place of a rank of the mesh among those that divide the experts."""
        return self.mesh.index(AXIS, rank) if self.num_ranks > 1 else 0

    # Parameters

    def specs(self) -> dict[str, ParameterSpec]:
        """Return those of the router, and those of all experts with a first dimension for them."""
        specs = {}
        if self.gate.has_router:
            std = math.sqrt(self.gate.init_scale / self.dim)
            specs["router"] = ParameterSpec((self.dim, self.gate.num_experts), std)
        of_experts = self.experts.specs().items()
        return specs | {f"experts.{name}": spec for name, spec in of_experts}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        both = (by_layer(each).get("experts", {}) for each in (values, gradients))
        self.experts.bind(*both)

    def config(self) -> list[Any]:
        options = [self.dim, self.name, self.rows_per_group, self.padding, self.num_parts]
        inner = [*self.gate.config(), *self.experts.pattern.config()]
        return [*super().config(), *options, self.payload, *inner]

    # Forward

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        tokens, routed = x.reshape(-1, self.dim), self._route(x, step)
        parts = self._parts(routed.routing, step)

        def compute(rows: Array, part: Part) -> tuple[Array, Any]:
            return self.experts.forward(rows, part, step)

        y, sent = self.exchange.forward(tokens, routed.weights, parts, step, compute)
        return cast(y, x.dtype).reshape(x.shape), Saved(tokens, routed, sent, x.shape, step)

    def _route(self, x: Array, step: Step) -> Routed:
        """Route this rank's tokens, and add its part of the losses to those of the step."""
        weight = self.value["router"] if self.gate.has_router else None
        batch = step.batch
        bias = None if self.step_counts is None else self.bias
        routed = self.router.route(x, weight, step, self._num_groups(x.shape[0]), bias)
        if self.step_counts is not None and not step.is_again:
            self.step_counts += routed.routing.choices
        step.losses.append(self.router.loss(routed) / step.total)
        if self.log is not None and batch is not None:
            first = batch.of_rank[self.mesh.rank].start
            self.log.add(batch.step, self.name, first, routed.gated.routing)
        return routed

    # The biases of experts

    def end_step(self, counts: Integers) -> None:
        """Change the biases against the loads, the `counts` of all tokens of the step."""
        self.bias = self.gate.next_bias(self.bias, counts)

    def state(self) -> list[float]:
        """Return the biases of the experts."""
        biases: list[float] = self.bias.tolist()
        return biases

    def load_state(self, state: Sequence[float]) -> None:
        self.bias = np.array(state, np.float64)

    # The dispatch

    def _num_groups(self, num_rows: int) -> int:
        if num_rows % self.rows_per_group:
            raise ValueError(
                f"{num_rows} rows of a rank are not whole groups of {self.rows_per_group}, which"
                f" the layer {self.name} routes together"
            )
        return num_rows // self.rows_per_group

    def _parts(self, routing: Routing, step: Step) -> list[Part]:
        """Return the parts of the dispatch; ranks exchange what these depend on."""
        if self.padding == "none":
            with collectives.phase("counts"):
                loads = dispatch.exchange(routing.load, self.comm)
            return dispatch.dropless(routing, loads, self.num_parts)
        rows = step.batch
        if rows is None:  # of one rank
            groups = [routing.num_groups]
        else:
            groups = [self._num_groups(len(rows.of_rank[rank])) for rank in self._group()]
        slots = self._slots(routing, step.context or step.length)
        return dispatch.padded(routing, slots, groups, self._place(self.mesh.rank), self.num_parts)

    def _slots(self, routing: Routing, context: int) -> int:
        """Return how many rows are sent for each expert and group."""
        if self.padding == "capacity":
            return self._capacity(context)
        most = np.array([routing.most_slots])
        if self.comm is not None:
            with collectives.phase("slots"):
                self.comm.all_reduce(most, "max", out=most, algorithm=MOST_ALGORITHM)
        return int(most[0])

    def _group(self, rank: int | None = None) -> Sequence[int]:
        """Return the ranks of the mesh that divide the experts with a `rank`, by default this."""
        mine = self.mesh.rank if rank is None else rank
        if self.num_ranks == 1:
            return (mine,)
        return next(group for group in self.mesh.ranks(AXIS) if mine in group)

    def _capacity(self, context: int) -> int:
        """Return the capacity of an expert for each group of rows of `context` tokens."""
        capacity = self.gate.capacity(self.rows_per_group * context)
        assert capacity is not None, "the gate has a rule"
        return capacity

    # Backward

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, dlogits, rests = self._backward(dy, saved, first_half)
        return dx, Rest(saved.tokens, dlogits, rests)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves, expert by expert, so that experts keep nothing between them."""
        dx, dlogits, _ = self._backward(dy, saved, both_halves)
        self._router_backward(saved.tokens, dlogits)
        return dx

    def _backward(
        self, dy: Array, saved: Saved, half: Half
    ) -> tuple[Array, Array, list[list[Any]]]:
        """Return the derivatives by the input and by the logits, and what experts keep."""
        slopes, routed, step = dy.reshape(saved.tokens.shape), saved.routed, saved.step

        def compute(rows: Array, part: Part, kept: Any) -> tuple[Array, Any]:
            return self.experts.backward(rows, part, kept, half)

        dx, dweights, rests = self.exchange.backward(
            slopes, routed.weights, saved.sent, step, compute
        )
        loss_weight = step.loss_scale / step.total
        dlogits = namespace_of(dy).asarray(self.router.backward(routed, dweights, loss_weight))
        if self.gate.has_router:
            dx += dlogits @ upcast(self.value["router"]).T
        return cast(dx, dy.dtype).reshape(saved.shape), dlogits, rests

    def backward_weight(self, rest: Any) -> None:
        self._router_backward(rest.tokens, rest.dlogits)
        self.experts.backward_weight(rest.experts)

    def _router_backward(self, tokens: Array, dlogits: Array) -> None:
        if self.gate.has_router:
            self.router.add_gradient(self.gradient["router"], tokens, dlogits)

    # What it keeps and sends

    def activation_bytes(self, x: ArraySpec) -> Activations:
        saved = x.nbytes + self.router.saved_bytes(x, self.rows_per_group)
        rest, extra = x.nbytes + self.router.dlogits_bytes(x), 0
        for loads in self._loads(x):
            saved += x.width * self.dim * int(loads[self._place(x.rank)].sum())
            for inner in self._inputs(x, loads):
                kept = self.experts.pattern.activation_bytes(inner)
                saved, rest, extra = saved + kept.saved, rest + kept.rest, max(extra, kept.extra)
        return Activations(saved, x, rest, extra)

    def out(self, x: ArraySpec) -> ArraySpec:
        return x  # whatever is routed

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        by_part = self._loads(x)
        inner = [
            self.experts.pattern.traffic(each)
            for loads in by_part
            for each in self._inputs(x, loads)
        ]
        forward = [call for each in inner for call in each.forward]
        backward = [call for each in inner for call in each.backward]
        if self.num_ranks > 1 and self._place(x.rank) == 0:
            exchanges = self._exchanges(x, by_part)
            forward += self._counts() + exchanges["dispatch", False] + exchanges["combine", True]
            backward += exchanges["combine", False] + exchanges["dispatch", True]
        return LayerTraffic((*self.router.traffic(x), *forward), tuple(backward))

    def _counts(self) -> list[PredictedCall]:
        owned = collectives.even_counts(self.gate.num_experts, self.num_ranks)
        call = self._call("counts", [owned] * self.num_ranks, np.dtype(np.int64).itemsize)
        most = PredictedCall(
            "slots", "all_reduce", MOST_ALGORITHM, 1, call.itemsize, axis=AXIS, in_place=True
        )
        return {"none": [call], "needed": [most], "capacity": []}[self.padding]

    def _exchanges(
        self, x: ArraySpec, by_part: list[list[Integers]]
    ) -> dict[tuple[str, bool], list[PredictedCall]]:
        """Return the calls that send rows, by label and whether they go back; see `_loads`."""
        form = form_of(self.payload, self.dim, x.width)
        tables = [np.array(dispatch.tables(loads, self.num_ranks)) for loads in by_part]
        return {
            (label, is_back): [
                self._call(
                    label, (form.width * (rows.T if is_back else rows)).tolist(), form.itemsize
                )
                for rows in tables
            ]
            for label in ("dispatch", "combine") for is_back in (False, True)
        }  # fmt: skip

    def _call(self, label: str, table: Any, itemsize: int) -> PredictedCall:
        counts = tuple(map(tuple, table))
        return PredictedCall(label, "all_to_all", dispatch.ALGORITHM, counts, itemsize, axis=AXIS)

    def _loads(self, x: ArraySpec) -> list[list[Integers]]:
        """Return the rows that each rank sends to each expert, by part of the dispatch."""
        if x.batch is None:
            raise ValueError(f"what {self.name} sends depends on its rows: give ArraySpec.batch")
        of_rank = [x.batch.of_rank[rank] for rank in self._group(x.rank)]
        if self.padding == "capacity":
            return self._padded_loads(of_rank, self._capacity(x.context))
        expected = [self._expected(x, x.batch.step, rows) for rows in of_rank]
        if self.padding == "needed":
            return self._padded_loads(of_rank, max(each.most_slots for each in expected))
        return [
            [dispatch.share(each.load, self.num_parts, i)[0] for each in expected]
            for i in range(self.num_parts)
        ]

    def _padded_loads(self, of_rank: list[range], slots: int) -> list[list[Integers]]:
        """Return what `_loads` does if so many slots of each expert and group are sent."""
        queues = np.full(self.gate.num_experts, 1, np.int64)
        groups = [self._num_groups(len(rows)) for rows in of_rank]
        sizes = collectives.even_counts(slots, self.num_parts)
        return [[queues * n * size for n in groups] for size in sizes]

    def _expected(self, x: ArraySpec, step: int, rows: range) -> Routing:
        """Return the expected routing of the tokens that the rank of `x` would have of `rows`."""
        if self.expected is None:
            raise ValueError(
                f"what {self.name} sends depends on the routing: set `expected` to the log of a run"
                " on one rank"
            )
        whole = self.expected.whole(step, self.name)
        size = self.rows_per_group
        of_rows = whole.of_groups(rows.start // size, rows.stop // size)
        return of_rows.of_tokens(self.router.own_tokens(len(rows), x.context, x.rank))

    def _inputs(self, x: ArraySpec, loads: list[Integers]) -> list[ArraySpec]:
        """Return what enters each expert of a rank."""
        mine = dispatch.experts_of(self.gate.num_experts, self.num_ranks, self._place(x.rank))
        sizes = sum(load[mine] for load in loads)
        return [x.of_shape(n, self.dim) for n in np.asarray(sizes).tolist()]


def mixtures(model: Model) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of a `model`, in its order.

    To predict what it will send, set `expected` of each to the log of a run on one rank.
    """
    parts = Sequential(model.layers).parts()
    return [layer for _, layer in parts if isinstance(layer, MixtureOfExperts)]
