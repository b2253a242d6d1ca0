"""A gate: from the logits of a router to choices of experts and their weights, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from moe.gates.capacity import RULES
from moe.gates.losses import Loss, LossInput
from moe.gates.scores import SOFTMAX, TINY, Scores
from moe.gates.selections import (
    Chosen,
    Selection,
    SelectionInput,
    expert_choice,
    random_second,
    top_k,
)
from moe.routing import Integers, Routing, Values, joined, slots_of
from moe.sums import scattered, sums_of
from parallel.nn import Array, namespace_of


class Gated(NamedTuple):
    """What `Gate.forward` returns.

    Attributes
    ----------
    routing : Routing
    weights : array
        The factor of what each entry's expert computes, (entries,); 0 for dropped entries.
    loss : float
        The auxiliary losses of all groups, each weighted by its number of tokens.
    saved : tuple of array
        What `Gate.backward` needs.
    """

    routing: Routing
    weights: Values
    loss: float
    saved: tuple[Values, Values]


@dataclass(frozen=True)
class Gate:
    """How tokens choose experts, or experts tokens; `moe.gates.named` has gates of the literature.

    A gate works in host memory, because the choices are needed there to send tokens; `backward`
    works on the device of the derivatives.

    Attributes
    ----------
    num_experts : int
    k : int
        Experts for each token (in expert choice, on average), from 1 to `num_experts`.
    scores : Scores
        The function that makes scores of logits.
    selection : function
        Chooses within a group: one of `moe.gates.selections`.
    losses : tuple of function
        The auxiliary losses: some of `moe.gates.losses`.
    rule : str, optional
        The capacity rule: a name in `moe.gates.capacity.RULES`; None: experts take all tokens.
        The rule ``"expert-choice"`` goes with the selection `expert_choice`, and others do not.
    capacity_factor : float
        More than 0.
    is_normalized : bool
        Whether the weights of a token's choices, dropped ones included, add up to `scale`.
    scale : float
        A factor of all weights, more than 0.
    noise : float
        The standard deviation of Gaussian noise on the logits, during training.
    bias_rate : float
        If more than 0, a bias of each expert is added to the scores by which experts are chosen,
        but not to the weights.  After each step it changes by so much against the expert's load
        (`next_bias`).  Wang et al. 2024.
    has_router : bool
        Whether logits are computed; if not, all weights are 1 / k.
    init_scale : float
        The initial weights of the router have the standard deviation sqrt(init_scale / inputs).
        The weights of experts and of other layers do not depend on it.

    Raises
    ------
    ValueError
        If a number is out of range or not finite, if there is no such rule, and if `selection` does
        not go with `rule` or `k`.
    """

    num_experts: int
    k: int = 1
    scores: Scores = SOFTMAX
    selection: Selection = top_k
    losses: tuple[Loss, ...] = ()
    rule: str | None = None
    capacity_factor: float = 1.0
    is_normalized: bool = False
    scale: float = 1.0
    noise: float = 0.0
    bias_rate: float = 0.0
    has_router: bool = True
    init_scale: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.num_experts < 1:
            raise ValueError(f"num_experts is {self.num_experts}: it must be at least 1")
        if not 1 <= self.k <= self.num_experts:
            raise ValueError(f"k is {self.k}: it must be from 1 to {self.num_experts} experts")
        if self.rule is not None and self.rule not in RULES:
            raise ValueError(f"there is no capacity rule {self.rule!r}; choose {', '.join(RULES)}")
        self._check_numbers()
        self._check_selection()

    def _check_numbers(self) -> None:
        """Raise ValueError if a number is negative or not finite, or 0 where it may not be."""
        positive = ("capacity_factor", "scale")
        for name in (*positive, "noise", "bias_rate", "init_scale"):
            value, least = getattr(self, name), "more than 0" if name in positive else "at least 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and name in positive):
                raise ValueError(f"{name} is {value}: it must be {least}, and finite")

    def _check_selection(self) -> None:
        """Raise ValueError if the selection cannot work with this k or this rule."""
        if self.selection is random_second and self.k != 2:
            raise ValueError(f"k is {self.k}: the selection random_second chooses two experts")
        if (self.selection is expert_choice) != (self.rule == "expert-choice"):
            name = getattr(self.selection, "__name__", repr(self.selection))
            raise ValueError(
                f"the selection {name} does not go with the capacity rule {self.rule}: the rule"
                " expert-choice is for the selection expert_choice, which takes no other"
            )

    def capacity(self, num_tokens: int) -> int | None:
        """Return how many of `num_tokens` tokens of a group an expert takes; None: all.

        Raises ValueError if it would take none.
        """
        if self.rule is None or not num_tokens:
            return None
        capacity = RULES[self.rule](num_tokens, self.num_experts, self.k, self.capacity_factor)
        if capacity < 1:
            raise ValueError(
                f"experts would take no token: the rule {self.rule} gives a capacity of {capacity}"
                f" for {num_tokens} tokens, {self.num_experts} experts, k = {self.k} and a factor"
                f" of {self.capacity_factor}"
            )
        return capacity

    def num_entries(self, num_tokens: int) -> int:
        """Return the number of choices of a group of `num_tokens` tokens, dropped ones included."""
        if self.rule == "expert-choice":
            return self.num_experts * (self.capacity(num_tokens) or 0)
        return self.k * num_tokens

    def forward(
        self,
        logits: Values,
        random: Sequence[np.random.Generator] | None = None,
        *,
        num_groups: int = 1,
        bias: Values | None = None,
        token_ids: Integers | None = None,
    ) -> Gated:
        """Return the routing of tokens to experts, with its weights and the auxiliary loss.

        Parameters
        ----------
        logits : array
            The logits of the router, float32 or float64 (tokens, experts).
        random : sequence of Generator, optional
            One for each row of the text; rows have equally many tokens.  The numbers that a token
            draws do not depend on which rows are computed together.  Without it nothing is drawn:
            there is no noise, and a random choice is made if its probability is 1 / 2.
        num_groups : int
            The number of groups of consecutive tokens that are routed independently; 0 without
            tokens.
        bias : array, optional
            The bias of each expert, (experts,).
        token_ids : array, optional
            The tokens of the text, int64 (tokens,), for hash routing.

        Raises
        ------
        ValueError
            If logits are not finite, if the groups do not divide the tokens, or for a capacity
            of 0.
        """
        num_tokens = self._check(logits, num_groups)
        noisy, uniform = self._noisy(logits, random), self._uniform(random, num_tokens)
        scores = self.scores.forward(noisy)
        by = scores if bias is None else scores + bias.astype(scores.dtype)
        size = num_tokens // max(1, num_groups)
        capacity, slopes = self.capacity(size), np.zeros((2, *logits.shape), logits.dtype)
        routings, loss = [Routing.empty(self.num_experts)], 0.0
        for group in range(num_groups):
            part = slice(group * size, (group + 1) * size)
            ids = None if token_ids is None else token_ids[part]
            chosen = self.selection(SelectionInput(by[part], self.k, capacity, uniform[part], ids))
            routings.append(self._of_group(chosen, size, capacity))
            loss += self._losses(logits[part], noisy[part], scores[part], chosen, slopes[:, part])
        routing = joined(routings)
        return Gated(routing, self._weights(routing, scores), loss, (scores, slopes))

    def _of_group(self, chosen: Chosen, size: int, capacity: int | None) -> Routing:
        """Return the routing of what a group of `size` tokens has chosen."""
        slot = slots_of(chosen.expert, chosen.is_queued, self.num_experts)
        group = np.zeros_like(slot)
        return Routing(
            chosen.token, chosen.expert, group, slot, size, self.num_experts, 1, capacity
        )

    def _check(self, logits: Values, num_groups: int) -> int:
        """Return the number of tokens."""
        num_tokens = len(logits)
        if num_tokens % num_groups if num_groups > 0 else num_tokens:
            raise ValueError(f"{num_groups} groups do not divide {num_tokens} tokens")
        if not np.isfinite(logits).all():
            raise ValueError("a logit of the router is not finite")
        return num_tokens

    def _noisy(self, logits: Values, random: Sequence[np.random.Generator] | None) -> Values:
        """Return the logits with noise."""
        if not self.noise or random is None:
            return logits
        shape = (len(logits) // max(1, len(random)), self.num_experts)
        parts = [generator.standard_normal(shape) for generator in random]
        drawn = np.concatenate([np.empty((0, self.num_experts)), *parts])
        noisy: Values = logits + (self.noise * drawn).astype(logits.dtype)
        return noisy

    def _uniform(self, random: Sequence[np.random.Generator] | None, num_tokens: int) -> Values:
        """Return a number from 0 to 1 for each token."""
        if random is None:
            return np.full(num_tokens, 0.5)
        parts = [generator.random(num_tokens // max(1, len(random))) for generator in random]
        return np.concatenate([np.empty(0), *parts])

    def _losses(
        self, logits: Values, noisy: Values, scores: Values, chosen: Chosen, slopes: Values
    ) -> float:
        """Return the losses of a group, times its tokens, and set their derivatives in `slopes`."""
        firsts, choices = (
            np.bincount(expert, minlength=self.num_experts).astype(np.int64)
            for expert in (chosen.expert[chosen.is_first], chosen.expert)
        )
        group, total = LossInput(logits, noisy, scores, firsts, choices, self.k), 0.0
        for loss in self.losses:
            slope = loss(group)
            total += len(logits) * slope.value
            slopes[0] += len(logits) * slope.dlogits
            slopes[1] += len(logits) * slope.dscores
        return total

    def _weights(self, routing: Routing, scores: Values) -> Values:
        """Return the weight of each entry."""
        if not self.has_router:
            weights = np.full(len(routing.token), self.scale / self.k, scores.dtype)
        else:
            weights = scores[routing.token, routing.expert] * self.scale
            if self.is_normalized:
                weights = weights / self._totals(routing, scores)[routing.token]
        result: Values = np.where(routing.is_dropped, 0, weights).astype(scores.dtype)
        return result

    def _totals(self, routing: Routing, scores: Values) -> Values:
        """Return the sum of the scores of each token's choices, to divide by."""
        chosen = scores[routing.token, routing.expert]
        sums: Values = np.bincount(routing.token, chosen, routing.num_tokens).astype(scores.dtype)
        return sums + TINY

    def backward(self, gated: Gated, dweights: Array, loss_weight: float = 0.0) -> Array:
        """Return the derivative of the whole loss by the logits, (tokens, experts).

        `dweights` (entries,) is the derivative by the weights; `gated` is what `forward` returned.
        The whole loss has `loss_weight` times the `loss` of `gated`.
        """
        xp = namespace_of(dweights)
        scores, slopes = map(xp.asarray, gated.saved)
        dscores = loss_weight * slopes[1]
        if self.has_router:
            dscores = dscores + self._weights_backward(gated.routing, gated.saved[0], dweights)
        return self.scores.backward(scores, dscores) + loss_weight * slopes[0]

    def _weights_backward(self, routing: Routing, scores: Values, dweights: Array) -> Array:
        """Return the derivative by the `scores`, which are on the host."""
        xp, token = namespace_of(dweights), routing.token
        zero = xp.zeros((), dtype=dweights.dtype)
        slopes = xp.where(xp.asarray(routing.is_dropped), zero, dweights) * self.scale
        if self.is_normalized:
            of_token = self._totals(routing, scores)
            totals, of_entry = xp.asarray(of_token), xp.asarray(of_token[token])
            chosen = xp.asarray(scores[token, routing.expert])
            along = sums_of(slopes * chosen, token, routing.num_tokens)
            slopes = (slopes - (along / totals)[xp.asarray(token)]) / of_entry
        places = token * self.num_experts + routing.expert  # each occurs once
        return scattered(slopes, places, scores.size, scores.dtype).reshape(scores.shape)

    def next_bias(self, bias: Values, choices: Integers) -> Values:
        """Return the biases after a step in which tokens made these `choices` of each expert.

        The `bias` of an expert chosen more often than the mean becomes less by `bias_rate`.
        """
        change = self.bias_rate * np.sign(choices.mean() - choices)
        result: Values = bias + change.astype(bias.dtype)
        return result

    def config(self) -> list[str]:
        """Return what must be equal on all ranks: the result consists of strings."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return [f"{name}={getattr(x, '__name__', repr(x))}" for name, x in values.items()]
