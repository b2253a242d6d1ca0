"""The layer against PyTorch: a mixture of experts in plain functions, which autograd derives.

The plain form lets every expert compute every token, and multiplies by a matrix of weights that has
zeros where an expert does not take a token.  It takes the numbers that are drawn, and nothing else,
from the library.  Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch

from moe.gates import Gate, named
from moe.gates.losses import Balance
from moe.layers.mixture import MixtureOfExperts
from parallel.nn import BatchRows, Model, Step
from tests.moe.experts import DIM, mlp
from tests.parallel.nn.bound_models import Values
from tests.parallel.nn.tensor.split_layers import bound_by_name

Tensor: TypeAlias = torch.Tensor
ROWS, CONTEXT, EXPERTS = 5, 12, 4
CLOSE = 1e-10
BIAS = np.array([0.3, -0.4, 0.0, 0.2])
TOKENS = np.random.default_rng(4).integers(0, 256, (ROWS, CONTEXT))
WEIGHT = 0.7  # of auxiliary losses, so that they matter
Z_WEIGHT = 0.3


class Prediction(NamedTuple):
    """What one group of S tokens does: (S, E) weights, 0 where an expert does not take a token."""

    weights: Tensor
    loss: Tensor
    num_dropped: int


class Group(NamedTuple):
    """What decides it: logits (S, E), noise on them, a number from 0 to 1 for each token, biases
    (E,), and the tokens of the text (S,).
    """

    logits: Tensor
    noise: Tensor
    uniform: Tensor
    bias: Tensor
    tokens: Tensor


def queued(wanted: list[Tensor], capacity: int | None) -> list[Tensor]:
    """Of one-hot choices (S, E) for each rank of choice, those for which the experts have room.

    First choices of all tokens go before second choices (Lepikhin et al. 2020, algorithm 1).
    """
    if capacity is None:
        return wanted
    places = torch.cumsum(torch.cat(wanted), dim=0)  # from 1 on
    kept = torch.cat(wanted) * (places <= capacity)
    return list(torch.split(kept, len(wanted[0])))


def balance(scores: Tensor, firsts: Tensor, factor: float) -> Tensor:
    """`factor` times the sum of f_e P_e."""
    fraction = firsts.mean(dim=0)
    share = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    return factor * (fraction * share).sum()


def one_hot(index: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(index, EXPERTS).to(torch.float64)


def plan(
    scores: Tensor, choices: list[Tensor], kept: list[Tensor], *, is_normalized: bool, loss: Any
) -> Prediction:
    """The weights of choices (S, E), of which some are kept."""
    weights = scores * sum(kept)
    if is_normalized:
        weights = weights / (scores * sum(choices)).sum(dim=-1, keepdim=True)
    return Prediction(weights, loss, int(sum(choices).sum() - sum(kept).sum()))


def top_k(group: Group, k: int, capacity: int | None, *, is_normalized: bool) -> Prediction:
    """The best `k` by softmax, with the loss of Switch."""
    scores = torch.softmax(group.logits, dim=-1)
    choices = [one_hot(index) for index in torch.topk(scores, k).indices.T]
    loss = balance(scores, choices[0], WEIGHT * EXPERTS)
    kept = queued(choices, capacity)
    return plan(scores, choices, kept, is_normalized=is_normalized, loss=loss)


def stable(group: Group, capacity: int) -> Prediction:
    """The best two, with the loss of Switch and the squared log-sum-exp of the logits."""
    found = top_k(group, 2, capacity, is_normalized=True)
    logs = torch.logsumexp(group.logits, dim=-1)
    return found._replace(loss=found.loss + Z_WEIGHT * (logs**2).mean())


def v_moe(group: Group, capacity: int) -> Prediction:
    """The best two by noisy logits; tokens with a larger best score go first."""
    noisy = group.logits + group.noise
    scores = torch.softmax(noisy, dim=-1)
    choices = [one_hot(index) for index in torch.topk(scores, 2).indices.T]
    order = torch.argsort(scores.max(dim=-1).values, descending=True, stable=True)
    kept = queued([each[order] for each in choices], capacity)
    kept = [each[torch.argsort(order)] for each in kept]
    importance = torch.softmax(group.logits, dim=-1).sum(dim=0)
    least = torch.topk(noisy, 2).values[:, 1:]
    normal = torch.distributions.Normal(0.0, 1 / EXPERTS)
    load = (1 - normal.cdf(least - group.logits)).sum(dim=0)
    loss = WEIGHT * (squared_variation(importance) + squared_variation(load)) / 2
    return plan(scores, choices, kept, is_normalized=False, loss=loss)


def squared_variation(x: Tensor) -> Tensor:
    return x.var(unbiased=False) / x.mean() ** 2


def hashed(group: Group, k: int) -> Prediction:
    """The expert of a hash of each token, and the next ones, with equal weights."""
    first = torch.tensor([splitmix64(int(token)) % EXPERTS for token in group.tokens])
    chosen = torch.stack([one_hot((first + i) % EXPERTS) for i in range(k)]).sum(dim=0)
    return Prediction(chosen / k, torch.zeros(()), 0)


def splitmix64(number: int) -> int:
    """Steele et al. 2014."""
    z = (number + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def gshard(group: Group, capacity: int, factor: float) -> Prediction:
    """The second of two is used with a probability of twice its share."""
    scores = torch.softmax(group.logits, dim=-1)
    best = torch.topk(scores, 2)
    first, second = (one_hot(index) for index in best.indices.T)
    share = best.values[:, 1] / best.values.sum(dim=-1)
    sampled = second * (2 * share > group.uniform)[:, None]
    loss = balance(scores, first, factor)
    kept = queued([first, sampled], capacity)
    return plan(scores, [first, second], kept, is_normalized=True, loss=loss)


def expert_choice(group: Group, capacity: int) -> Prediction:
    """Each expert takes the tokens with its largest scores."""
    scores = torch.softmax(group.logits, dim=-1)
    tokens = torch.topk(scores, capacity, dim=0).indices
    taken = torch.zeros_like(scores).scatter(0, tokens, 1.0)
    return plan(scores, [taken], [taken], is_normalized=False, loss=torch.zeros(()))


def biased(group: Group, k: int, scale: float) -> Prediction:
    """The best `k` by sigmoid plus a bias; the loss of all choices."""
    scores = torch.sigmoid(group.logits)
    choices = [one_hot(index) for index in torch.topk(scores + group.bias, k).indices.T]
    loss = balance(scores, sum(choices), WEIGHT * EXPERTS / k)
    found = plan(scores, choices, choices, is_normalized=True, loss=loss)
    return found._replace(weights=found.weights * scale)


class Case(NamedTuple):
    """A gate, and what it does to a group in plain functions."""

    gate: Gate
    plain: Callable[[Group], Prediction]
    drops: bool = False


SWITCH_LOSS = (Balance(WEIGHT * EXPERTS),)
CASES = {
    "top-1, dropless": Case(
        Gate(EXPERTS, 1, losses=SWITCH_LOSS), lambda g: top_k(g, 1, None, is_normalized=False)
    ),
    "top-2, dropless": Case(
        Gate(EXPERTS, 2, losses=SWITCH_LOSS, is_normalized=True),
        lambda g: top_k(g, 2, None, is_normalized=True),
    ),
    "stable": Case(
        named.stable(EXPERTS, capacity_factor=0.75, weight=WEIGHT, z_weight=Z_WEIGHT),
        lambda g: stable(g, 5),
        drops=True,
    ),
    "v-moe": Case(
        named.v_moe(EXPERTS, capacity_factor=0.75, weight=WEIGHT), lambda g: v_moe(g, 4), drops=True
    ),
    "hash": Case(named.hash_layer(EXPERTS, k=2), lambda g: hashed(g, 2)),
    "switch": Case(
        named.switch(EXPERTS, capacity_factor=0.75, weight=WEIGHT),
        lambda g: top_k(g, 1, 3, is_normalized=False),
        drops=True,
    ),
    "gshard": Case(
        named.gshard(EXPERTS, capacity_factor=0.75, weight=WEIGHT),
        lambda g: gshard(g, 5, WEIGHT * EXPERTS),
        drops=True,
    ),
    "gshard, the paper's loss": Case(
        named.gshard(EXPERTS, capacity_factor=0.75, weight=WEIGHT / EXPERTS**2),
        lambda g: gshard(g, 5, WEIGHT / EXPERTS),
        drops=True,
    ),
    "expert-choice": Case(named.choice(EXPERTS), lambda g: expert_choice(g, 6)),
    "sigmoid": Case(
        named.sigmoid(EXPERTS, k=2, scale=2.5, weight=WEIGHT), lambda g: biased(g, 2, 2.5)
    ),
}


class Ends(NamedTuple):
    """The output, the auxiliary loss, and all derivatives by name."""

    y: Values
    loss: float
    gradients: dict[str, Values]


def inputs() -> tuple[Values, Values]:
    """The input, and the derivative by the output."""
    rng = np.random.default_rng(5)
    x, dy = rng.standard_normal((2, ROWS, CONTEXT, DIM))
    return x, dy


def of_layer(case: Case) -> tuple[Ends, dict[str, Values]]:
    """What the layer computes, and its parameters."""
    layer = MixtureOfExperts(DIM, case.gate, mlp)
    layer.bias[...] = BIAS * (case.gate.bias_rate > 0)
    made = bound_by_name(Model({"only": layer}))
    x, dy = inputs()
    rows, targets = BatchRows(0, (range(ROWS),), seed=3), np.zeros((ROWS, CONTEXT), np.int64)
    step = Step(targets, total=ROWS * CONTEXT, context=CONTEXT, tokens=TOKENS, batch=rows)
    y, saved = layer.forward(x, step)
    dx = layer.backward(dy, saved)
    names = {name: name.removeprefix("only.") for name in made.named_gradients()}
    gradients = {names[name]: each.copy() for name, each in made.named_gradients().items()}
    values = {names[name]: each.copy() for name, each in made.named_values().items()}
    return Ends(y, sum(step.losses), gradients | {"x": dx}), values


def of_torch(case: Case, values: dict[str, Values]) -> tuple[Ends, int]:
    """The same by autograd, and how many choices were dropped."""
    x, dy = (torch.from_numpy(each) for each in inputs())
    given = {name: torch.from_numpy(each).requires_grad_() for name, each in values.items()}
    given["x"] = x.requires_grad_()
    each_row = BatchRows(0, (range(ROWS),), seed=3).random(0, "moe")
    rows, total, dropped = [], torch.zeros((), dtype=torch.float64), 0
    for row, ids, random in zip(x, TOKENS, each_row, strict=True):
        noise = np.zeros((CONTEXT, EXPERTS))
        if case.gate.noise:
            noise = case.gate.noise * random.standard_normal(noise.shape)
        numbers = noise, random.random(CONTEXT), BIAS, ids
        logits = row @ given["router"] if "router" in given else torch.zeros(CONTEXT, EXPERTS)
        found = case.plain(Group(logits, *map(torch.from_numpy, numbers)))
        rows.append(torch.einsum("se,esm->sm", found.weights, experts(row, given)))
        total, dropped = total + found.loss / ROWS, dropped + found.num_dropped
    y = torch.stack(rows)
    ((y * dy).sum() + total).backward()
    gradients = {name: each.grad.numpy() for name, each in given.items()}
    return Ends(y.detach().numpy(), total.item(), gradients), dropped


def experts(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """What all experts make of tokens (S, dim): (E, S, dim)."""
    part = {name.removeprefix("experts."): each for name, each in given.items()}
    inner = torch.einsum("sm,emh->esh", x, part["up.weight"]) + part["up.bias"][:, None]
    inner = torch.nn.functional.gelu(inner, approximate="tanh")
    return torch.einsum("esh,ehm->esm", inner, part["down.weight"]) + part["down.bias"][:, None]


def distances(found: Ends, wanted: Ends) -> dict[str, float]:
    """How far numbers are apart, relatively to the largest one."""
    pairs = {"y": (found.y, wanted.y), "loss": (found.loss, wanted.loss)}
    pairs |= {name: (x, wanted.gradients[name]) for name, x in found.gradients.items()}
    return {
        name: float(np.abs(a - b).max() / max(1.0, np.abs(b).max()))
        for name, (a, b) in pairs.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_the_layer_is_what_autograd_says(name: str) -> None:
    """Outputs, loss, and gradients of router, experts and input, in float64."""
    found, values = of_layer(CASES[name])
    wanted, dropped = of_torch(CASES[name], values)
    assert found.gradients.keys() == wanted.gradients.keys()
    assert all(each.any() for each in wanted.gradients.values())
    assert max(distances(found, wanted).values()) < CLOSE
    assert (dropped > 0) == CASES[name].drops


def test_both_fates_of_a_second_expert_occur() -> None:
    """Some are sampled and some are not, so that the test above shows both."""
    random = BatchRows(0, (range(ROWS),), seed=3).random(0, "moe")
    _, values = of_layer(CASES["gshard"])
    kept = []
    for row, each in zip(inputs()[0], random, strict=True):
        scores = torch.softmax(torch.from_numpy(row @ values["router"]), dim=-1)
        best = torch.topk(scores, 2).values
        share = best[:, 1] / best.sum(dim=-1)
        kept += (2 * share > torch.from_numpy(each.random(CONTEXT))).tolist()
    assert 0 < sum(kept) < len(kept)


NOT_THE_SAME: list[tuple[str, Callable[[Group], Prediction], set[str]]] = [
    (  # without the auxiliary loss
        "switch",
        lambda g: top_k(g, 1, 3, is_normalized=False)._replace(loss=torch.zeros(())),
        {"loss", "router", "x"},
    ),
    (  # without the capacity
        "switch",
        lambda g: top_k(g, 1, None, is_normalized=False),
        {"y", "router", "experts.up.weight", "x"},
    ),
    (  # other numbers are drawn
        "gshard",
        lambda g: gshard(g._replace(uniform=1 - g.uniform), 5, WEIGHT * EXPERTS),
        {"y", "router", "x"},
    ),
    (  # another factor of the loss
        "gshard",
        lambda g: gshard(g, 5, WEIGHT / EXPERTS),
        {"loss", "router", "x"},
    ),
    (  # without the loss of large logits
        "stable",
        lambda g: top_k(g, 2, 5, is_normalized=True),
        {"loss", "router", "x"},
    ),
    (  # without noise
        "v-moe",
        lambda g: v_moe(g._replace(noise=0 * g.noise), 4),
        {"y", "loss", "router", "x"},
    ),
    (  # other tokens
        "hash",
        lambda g: hashed(g._replace(tokens=g.tokens + 1), 2),
        {"y", "experts.up.weight"},
    ),
]


@pytest.mark.parametrize(("name", "plain", "where"), NOT_THE_SAME)
def test_what_is_not_the_same_is_noticed(
    name: str, plain: Callable[[Group], Prediction], where: set[str]
) -> None:
    """The negative control: by more than 1e-6, and where it should be."""
    found, values = of_layer(CASES[name])
    wanted, _ = of_torch(CASES[name]._replace(plain=plain), values)
    assert where <= {key for key, each in distances(found, wanted).items() if each > 1e-6}
