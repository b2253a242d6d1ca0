"""The layer: a router, experts on the ranks along an axis, and a dispatch between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moe.dispatch import ExpectedInput, Options, Prediction, make_dispatcher
from moe.exchange import Experts, Half, Team, both_halves, first_half
from moe.gates import Gate
from moe.layers.router import Routed, Router
from moe.routing import Integers, Routing, RoutingLog
from parallel import Mesh
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
    by_layer,
    cast,
    token_numbers,
    upcast,
)

AXIS = "expert"


class Saved(NamedTuple):
    """What `MixtureOfExperts.forward` keeps."""

    tokens: Array  # (tokens, dim)
    routed: Routed
    dispatched: Any
    shape: tuple[int, ...]
    step: Step


class Rest(NamedTuple):
    """What `MixtureOfExperts.backward_weight` needs."""

    tokens: Array
    dlogits: Array
    dispatched: Any


class MixtureOfExperts(Layer):
    """A layer in which each token uses a few of many experts.  Shazeer et al. 2017.

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
    log : RoutingLog, optional
        The log to which the routing of each step is added.
    dispatch : str
        ``"flat"``: each token is sent to the ranks of its experts; ``"hierarchical"``: once to each
        host, and there to them; ``"weights"``: tokens stay, and the experts' weights are gathered;
        ``"cheaper"``: in each micro-batch, the first or the last, whichever sends fewer bytes.
    ranks_per_host : int, optional
        How many consecutive ranks of the mesh are on a host, for ``"hierarchical"``; by default,
        hosts are as the mesh's communicator knows them.
    options
        `rows_per_group`, `padding`, `num_parts`, `payload` and `name`: see `moe.Options`.

    Attributes
    ----------
    expected : RoutingLog, optional
        The routing that predictions assume, of the same run on one rank.
    bias : array
        What is added to the scores of each expert, float64 (experts,), if the gate has a
        `bias_rate`: the same on all ranks, in checkpoints, and changed after each update.

    Raises
    ------
    ValueError
        For an unknown `dispatch`, for one that does not work with these options, and for options
        that `moe.Options` refuses.
    """

    needs_rows = True

    def __init__(
        self,
        dim: int,
        gate: Gate,
        expert: Callable[[], Layer],
        *,
        mesh: Mesh | None = None,
        log: RoutingLog | None = None,
        dispatch: str = "flat",
        ranks_per_host: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.options = Options(dim, gate, **options)
        self.dim, self.gate, self.name = dim, gate, self.options.name
        self.mesh, self.log, self.expected = mesh or Mesh(None), log, log
        self.router = Router(gate, self.mesh, self.name)
        team = Team.along(self.mesh, AXIS, gate.num_experts)
        self.experts = Experts(expert, gate.num_experts, team.owned, AXIS)
        self.dispatch = dispatch
        self.dispatcher = make_dispatcher(
            dispatch, self.options, team, self.experts, ranks_per_host
        )
        self.comm_axes = self.dispatcher.axes
        self.bias = np.zeros(gate.num_experts)
        self.step_counts = np.zeros(gate.num_experts, np.int64) if gate.bias_rate else None

    # Parameters

    def specs(self) -> dict[str, ParameterSpec]:
        """Return the parameters of the router, and the stacked parameters of all experts."""
        specs = {}
        if self.gate.has_router:
            std = math.sqrt(self.gate.init_scale / self.dim)
            specs["router"] = ParameterSpec((self.dim, self.gate.num_experts), std)
        of_experts = self.experts.specs().items()
        return specs | {f"experts.{name}": spec for name, spec in of_experts}

    def bind(self, values: dict[str, Array], gradients: dict[str, Array]) -> None:
        super().bind(values, gradients)
        self.experts.bind(*(by_layer(arrays).get("experts", {}) for arrays in (values, gradients)))

    def config(self) -> list[Any]:
        inner = [*self.gate.config(), *self.experts.pattern.config()]
        return [*super().config(), self.dispatch, *self.options.config(), *inner]

    # Forward

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        tokens, routed = x.reshape(-1, self.dim), self._route(x, step)
        with step.numbered(self._numbers(step)):
            y, dispatched = self.dispatcher.forward(tokens, routed.routing, routed.weights, step)
        return cast(y, x.dtype).reshape(x.shape), Saved(tokens, routed, dispatched, x.shape, step)

    def _numbers(self, step: Step) -> Integers | None:
        """Return the numbers of this rank's tokens in the batch, if experts need to know them."""
        if step.batch is None or not self.experts.needs_rows:
            return None
        return token_numbers(step, self.mesh.rank).ravel()

    def _route(self, x: Array, step: Step) -> Routed:
        """Route this rank's tokens, and add its part of the losses to the losses of the step."""
        weight = self.value["router"] if self.gate.has_router else None
        batch = step.batch
        bias = None if self.step_counts is None else self.bias
        for rows in batch.of_rank if batch is not None else ():  # so that all ranks raise, or none
            self.options.num_groups(len(rows))
        routed = self.router.route(x, weight, step, self.options.num_groups(x.shape[0]), bias)
        if self.step_counts is not None and not step.is_again:
            self.step_counts += routed.routing.choices
        step.losses.append(self.router.loss(routed) / num_tokens(step, x.shape[1]))
        if self.log is not None and batch is not None:
            first = batch.of_rank[self.mesh.rank].start
            self.log.add(batch.step, self.name, first, routed.gated.routing)
        return routed._replace(routing=self._with_capacity(routed.routing, x.shape[1], step))

    def _with_capacity(self, routing: Routing, length: int, step: Step) -> Routing:
        """Return a `routing` that has the capacity even if this rank has no rows.

        This rank has `length` tokens of each row.
        """
        context = step.context if self.router.num_parts > 1 else length
        return replace(routing, capacity=self.options.capacity(context))

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

    # Backward

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        dx, dlogits, rests = self._backward(dy, saved, first_half)
        return dx, Rest(saved.tokens, dlogits, rests)

    def backward(self, dy: Array, saved: Any) -> Array:
        """Do both halves, expert by expert, so that experts keep nothing between them."""
        dx, dlogits, _ = self._backward(dy, saved, both_halves)
        self._router_backward(saved.tokens, dlogits)
        return dx

    def _backward(self, dy: Array, saved: Saved, half: Half) -> tuple[Array, Array, Any]:
        """Return the derivatives by input and logits, and what the dispatcher still needs."""
        slopes, routed, step = dy.reshape(saved.tokens.shape), saved.routed, saved.step
        dx, dweights, rest = self.dispatcher.backward(
            slopes, routed.weights, saved.dispatched, step, half
        )
        loss_weight = step.loss_scale / num_tokens(step, saved.shape[1])
        dlogits = self.router.backward(routed, dweights, loss_weight)
        if self.gate.has_router:
            dx += dlogits @ upcast(self.value["router"]).T
        return cast(dx, dy.dtype).reshape(saved.shape), dlogits, rest

    def backward_weight(self, rest: Any) -> None:
        self._router_backward(rest.tokens, rest.dlogits)
        self.dispatcher.backward_weight(rest.dispatched)

    def _router_backward(self, tokens: Array, dlogits: Array) -> None:
        if self.gate.has_router:
            self.router.add_gradient(self.gradient["router"], tokens, dlogits)

    # What it keeps and sends

    def activation_bytes(self, x: ArraySpec) -> Activations:
        prediction, extra = self._predicted(x), 0
        saved = x.nbytes + prediction.kept
        saved += self.router.saved_bytes(x, self.options.rows_per_group)
        rest = x.nbytes + self.router.dlogits_bytes(x) + (prediction.rest or 0)
        for rows in self._inputs(x, prediction):
            kept = self.experts.pattern.activation_bytes(rows)
            saved, extra = saved + kept.saved, max(extra, kept.extra)
            rest += kept.rest if prediction.rest is None else 0
        return Activations(saved, x, rest, extra, is_input_in_rest=True)

    def out(self, x: ArraySpec) -> ArraySpec:
        return x  # whatever is routed

    def check_input(self, x: ArraySpec) -> None:
        """Raise ValueError unless rows are whole groups, and each expert takes a token of them."""
        self.options.num_groups(x.shape[0])
        self.options.capacity(x.context)
        self.experts.pattern.check_input(x.of_shape(0, self.dim))

    def traffic(self, x: ArraySpec) -> LayerTraffic:
        prediction = self._predicted(x)
        inner = [self.experts.pattern.traffic(rows) for rows in self._inputs(x, prediction)]
        forward = [call for traffic in inner for call in traffic.forward]
        backward = [call for traffic in inner for call in traffic.backward]
        return LayerTraffic(
            (*self.router.traffic(x), *forward, *prediction.forward),
            (*backward, *prediction.backward),
        )

    def _predicted(self, x: ArraySpec) -> Prediction:
        """Return what the dispatcher will do for an input `x`."""
        batch = x.batch
        if batch is None:
            raise ValueError(f"what {self.name} sends depends on its rows: give ArraySpec.batch")

        def routing(rank: int) -> Routing:
            return self._expected(x, batch.step, rank, batch.of_rank[rank])

        return self.dispatcher.predict(ExpectedInput(x, batch.of_rank, routing))

    def _expected(self, x: ArraySpec, step: int, rank: int, rows: range) -> Routing:
        """Return the expected routing of the tokens that a `rank` will have of its `rows`."""
        if self.expected is None:
            raise ValueError(
                f"what {self.name} sends depends on the routing: set `expected` to the log of a run"
                " on one rank"
            )
        whole, size = self.expected.whole(step, self.name), self.options.rows_per_group
        check_routing(whole, self.gate.num_experts, rows.stop // size, size * x.context)
        of_rows = whole.of_groups(rows.start // size, rows.stop // size)
        return of_rows.of_tokens(self.router.own_tokens(len(rows), x.context, rank))

    def _inputs(self, x: ArraySpec, prediction: Prediction) -> list[ArraySpec]:
        """Return what enters each expert of a rank, for each part."""
        return [x.of_shape(n, self.dim) for rows in prediction.rows for n in rows]


def check_routing(whole: Routing, num_experts: int, num_groups: int, group_size: int) -> None:
    """Raise ValueError unless a routing has these experts, and so many groups of this size."""
    actual_size = whole.num_tokens // max(1, whole.num_groups)
    if whole.num_experts != num_experts:
        raise ValueError(f"the log is of {whole.num_experts} experts, not of {num_experts}")
    if whole.num_groups < num_groups or (num_groups and actual_size != group_size):
        raise ValueError(
            f"the log has {whole.num_groups} groups of {actual_size} tokens; {num_groups} of"
            f" {group_size} are needed"
        )


def num_tokens(step: Step, length: int) -> int:
    """Return how many tokens the batch of all ranks has, if this rank has `length` of each row.

    A row has as many targets as tokens; an image, whose patches are tokens, has one target.
    """
    return step.total * length // step.length


def mixtures(model: Model) -> list[MixtureOfExperts]:
    """Return the mixtures of experts of a `model`, in its order.

    To predict what it will send, set `expected` of each to the log of a run on one rank.
    """
    parts = Sequential(model.layers).parts()
    return [layer for _, layer in parts if isinstance(layer, MixtureOfExperts)]
