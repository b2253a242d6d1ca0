"""The layer against PyTorch: a mixture of experts in plain functions, which autograd derives.

The plain form lets every expert compute every token, and multiplies by a matrix of weights that has
zeros where an expert does not take a token.  It takes the numbers that are drawn, and nothing else,
from the library.  Run where torch is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest

from moe.gates import Gate, named
from moe.gates.losses import Balance
from moe.layer import MixtureOfExperts
from parallel.nn import BatchRows, Model, Step
from tests.moe.experts import DIM, mlp
from tests.parallel.models import Values
from tests.parallel.split_layers import bound_by_name

torch: Any = pytest.importorskip("torch")

Tensor: TypeAlias = Any
ROWS, CONTEXT, EXPERTS = 5, 12, 4
CLOSE = 1e-10
BIAS = np.array([0.3, -0.4, 0.0, 0.2])
WEIGHT = 0.7  # of auxiliary losses, so that they matter


class Plan(NamedTuple):
    """What one group of S tokens does: (S, E) weights, 0 where an expert does not take a token."""

    weights: Tensor
    loss: Tensor
    num_dropped: int


class Group(NamedTuple):
    """What decides it: logits (S, E), a number from 0 to 1 for each token, and biases (E,)."""

    logits: Tensor
    uniform: Tensor
    bias: Tensor


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
) -> Plan:
    """The weights of choices (S, E), of which some are kept."""
    weights = scores * sum(kept)
    if is_normalized:
        weights = weights / (scores * sum(choices)).sum(dim=-1, keepdim=True)
    return Plan(weights, loss, int(sum(choices).sum() - sum(kept).sum()))


def top_k(group: Group, k: int, capacity: int | None, *, is_normalized: bool) -> Plan:
    """The best `k` by softmax, with the loss of Switch."""
    scores = torch.softmax(group.logits, dim=-1)
    choices = [one_hot(index) for index in torch.topk(scores, k).indices.T]
    loss = balance(scores, choices[0], WEIGHT * EXPERTS)
    kept = queued(choices, capacity)
    return plan(scores, choices, kept, is_normalized=is_normalized, loss=loss)


def gshard(group: Group, capacity: int) -> Plan:
    """The second of two is used with a probability of twice its share."""
    scores = torch.softmax(group.logits, dim=-1)
    best = torch.topk(scores, 2)
    first, second = (one_hot(index) for index in best.indices.T)
    share = best.values[:, 1] / best.values.sum(dim=-1)
    sampled = second * (2 * share > group.uniform)[:, None]
    loss = balance(scores, first, WEIGHT / EXPERTS)
    kept = queued([first, sampled], capacity)
    return plan(scores, [first, second], kept, is_normalized=True, loss=loss)


def expert_choice(group: Group, capacity: int) -> Plan:
    """Each expert takes the tokens with its largest scores."""
    scores = torch.softmax(group.logits, dim=-1)
    tokens = torch.topk(scores, capacity, dim=0).indices
    taken = torch.zeros_like(scores).scatter(0, tokens, 1.0)
    return plan(scores, [taken], [taken], is_normalized=False, loss=torch.zeros(()))


def biased(group: Group, k: int, scale: float) -> Plan:
    """The best `k` by sigmoid plus a bias; the loss of all choices."""
    scores = torch.sigmoid(group.logits)
    choices = [one_hot(index) for index in torch.topk(scores + group.bias, k).indices.T]
    loss = balance(scores, sum(choices), WEIGHT * EXPERTS / k)
    found = plan(scores, choices, choices, is_normalized=True, loss=loss)
    return found._replace(weights=found.weights * scale)


class Case(NamedTuple):
    """A gate, and what it does to a group in plain functions."""

    gate: Gate
    plain: Callable[[Group], Plan]
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
    "top-2, capacity": Case(
        replace(named.stable(EXPERTS, capacity_factor=0.75), losses=SWITCH_LOSS),
        lambda g: top_k(g, 2, 5, is_normalized=True), drops=True,
    ),
    "switch": Case(
        named.switch(EXPERTS, capacity_factor=0.75, weight=WEIGHT),
        lambda g: top_k(g, 1, 3, is_normalized=False), drops=True,
    ),
    "gshard": Case(
        named.gshard(EXPERTS, capacity_factor=0.75, weight=WEIGHT), lambda g: gshard(g, 5),
        drops=True,
    ),
    "expert-choice": Case(named.choice(EXPERTS), lambda g: expert_choice(g, 6)),
    "sigmoid": Case(
        named.sigmoid(EXPERTS, k=2, scale=2.5, weight=WEIGHT), lambda g: biased(g, 2, 2.5)
    ),
}  # fmt: skip


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
    step = Step(targets, total=ROWS * CONTEXT, context=CONTEXT, batch=rows)
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
    for row, random in zip(x, each_row, strict=True):
        uniform = torch.from_numpy(random.random(CONTEXT))
        found = case.plain(Group(row @ given["router"], uniform, torch.from_numpy(BIAS)))
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


NOT_THE_SAME: list[tuple[str, Callable[[Group], Plan], set[str]]] = [
    (  # without the auxiliary loss
        "switch", lambda g: top_k(g, 1, 3, is_normalized=False)._replace(loss=torch.zeros(())),
        {"loss", "router", "x"},
    ),
    (  # without the capacity
        "switch", lambda g: top_k(g, 1, None, is_normalized=False),
        {"y", "router", "experts.up.weight", "x"},
    ),
    (  # other numbers are drawn
        "gshard", lambda g: gshard(g._replace(uniform=1 - g.uniform), 5), {"y", "router", "x"}
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "plain", "where"), NOT_THE_SAME)
def test_what_is_not_the_same_is_noticed(
    name: str, plain: Callable[[Group], Plan], where: set[str]
) -> None:
    """The negative control: by more than 1e-6, and where it should be."""
    found, values = of_layer(CASES[name])
    wanted, _ = of_torch(CASES[name]._replace(plain=plain), values)
    assert where <= {key for key, each in distances(found, wanted).items() if each > 1e-6}
