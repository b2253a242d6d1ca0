"""The GPT and the optimizers against PyTorch's: the same model out of its functions, in float64.

Collected where torch is installed (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it

from parallel import Recipe, Trainer
from parallel.nn import Model, Step, gpt
from parallel.optim import SGD, Adam, AdamW
from tests.parallel.nn.bound_models import Bound, Values, bound, cross_entropy

Tensors: TypeAlias = dict[str, torch.Tensor]

CLOSE = 1e-12  # relatively to the largest number
SIZES = [
    {"num_layers": 2, "hidden": 12, "num_heads": 3, "context": 7},
    {"num_layers": 1, "hidden": 8, "num_heads": 1, "context": 4},
]
each_tie = pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])


def tokens(rows: int, context: int, step: int = 0) -> tuple[Values, Values]:
    """Inputs and targets; few different tokens, so that each comes more than once."""
    inputs, targets = np.random.default_rng([9, step]).integers(60, 80, (2, rows, context))
    return inputs, targets


# The model in PyTorch


def as_tensors(named: dict[str, Values]) -> Tensors:
    """Copies, of which derivatives are wanted."""
    return {name: torch.tensor(x, requires_grad=True) for name, x in named.items()}


def torch_loss(p: Tensors, inputs: Values, targets: Values, heads: int) -> torch.Tensor:
    """The mean loss of the GPT with these parameters."""
    x = F.embedding(torch.tensor(inputs), p["embedding.token"])
    x = x + p["embedding.position"][: inputs.shape[1]]
    layers = sum(name.endswith("attention.qkv.weight") for name in p)
    for block in (f"block{i}" for i in range(layers)):
        x = x + torch_attention(p, f"{block}.attention", x, heads)
        h = torch_norm(p, f"{block}.mlp.norm", x)
        h = F.gelu(torch_linear(p, f"{block}.mlp.up", h), approximate="tanh")
        x = x + torch_linear(p, f"{block}.mlp.down", h)
    table = p.get("head.out.table", p["embedding.token"])
    logits = torch_norm(p, "head.norm", x) @ table.T
    return F.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten())


def torch_attention(p: Tensors, name: str, x: torch.Tensor, heads: int) -> torch.Tensor:
    qkv = torch_linear(p, f"{name}.qkv", torch_norm(p, f"{name}.norm", x))
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch_linear(p, f"{name}.out", y.transpose(1, 2).flatten(2))


def torch_linear(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = p[f"{name}.weight"].flatten(1), p[f"{name}.bias"].flatten()
    return F.linear(x, weight.T, bias)


def torch_norm(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.gain"], p[f"{name}.bias"], eps=1e-5)


# Loss and gradients


def add_gradients(made: Bound, inputs: Values, targets: Values) -> float:
    logits, saved = made.whole.forward(inputs, Step())
    loss, slope = cross_entropy(logits, targets, targets.size)
    made.whole.backward(slope, saved)
    return loss


def check(made: Bound, inputs: Values, targets: Values, heads: int) -> None:
    """Loss and every gradient."""
    loss = add_gradients(made, inputs, targets)
    tensors = as_tensors(made.named_values())
    wanted = torch_loss(tensors, inputs, targets, heads)
    wanted.backward()
    assert loss == pytest.approx(wanted.item(), rel=CLOSE)
    for name, slope in made.named_gradients().items():
        theirs = tensors[name].grad
        assert theirs is not None
        atol = CLOSE * float(theirs.abs().max())
        np.testing.assert_allclose(slope, theirs.numpy(), rtol=CLOSE, atol=atol, err_msg=name)


@each_tie
@pytest.mark.parametrize("sizes", SIZES, ids=["large", "small"])
@pytest.mark.parametrize("shorter", [0, 2])
def test_loss_and_all_gradients_are_pytorchs(
    sizes: dict[str, int], is_tied: bool, shorter: int
) -> None:
    made = bound(gpt(**sizes, is_tied=is_tied))
    check(made, *tokens(5, sizes["context"] - shorter), sizes["num_heads"])


@pytest.mark.parametrize("change", [{"epsilon": 2e-5}, {"cubic": 0.0447}, {"num_heads": 1}])
def test_a_slightly_other_model_is_noticed(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    monkeypatch.setattr("parallel.nn.LayerNorm.EPSILON", change.get("epsilon", 1e-5))
    monkeypatch.setattr("parallel.nn.Gelu.CUBIC", change.get("cubic", 0.044715))
    made = bound(gpt(**SIZES[0]))
    with pytest.raises(AssertionError):
        check(made, *tokens(5, 7), change.get("num_heads", 3))


# Training

OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (lambda x, **o: SGD(x, lr=0.1, momentum=0.0, **o), lambda x: torch.optim.SGD(x, lr=0.1)),
    "momentum": (
        lambda x, **o: SGD(x, lr=0.1, momentum=0.9, **o),
        lambda x: torch.optim.SGD(x, lr=0.1, momentum=0.9),
    ),
    "adam": (
        lambda x, **o: Adam(x, lr=0.01, betas=(0.8, 0.99), eps=1e-7, **o),
        lambda x: torch.optim.Adam(x, lr=0.01, betas=(0.8, 0.99), eps=1e-7),
    ),
    "adamw": (  # the decay is both sides' own
        lambda x, **o: AdamW(x, lr=0.01, **o),
        lambda x: torch.optim.AdamW(x, lr=0.01),
    ),
    "adamw with decay": (
        lambda x, **o: AdamW(x, lr=0.01, weight_decay=0.3, **o),
        lambda x: torch.optim.AdamW(x, lr=0.01, weight_decay=0.3),
    ),
}
each_optimizer = pytest.mark.parametrize(
    ("ours", "theirs"), OPTIMIZERS.values(), ids=list(OPTIMIZERS)
)


@each_optimizer
def test_many_steps_of_an_optimizer_are_pytorchs(ours: Any, theirs: Any) -> None:
    """On random gradients, large and small and zero."""
    rng = np.random.default_rng(0)
    x, sizes = rng.standard_normal(200), 10 ** rng.uniform(-6, 3, 200)
    sizes[::10] = 0
    tensor = torch.tensor(x, requires_grad=True)
    mine, other = ours({"x": x}), theirs([tensor])
    for _ in range(50):
        slope = sizes * rng.standard_normal(200)
        mine.step({"x": slope})
        tensor.grad = torch.tensor(slope)
        other.step()
    np.testing.assert_allclose(x, tensor.detach().numpy(), rtol=1e-13, atol=1e-13)


@each_tie
@each_optimizer
def test_ten_steps_of_training_are_pytorchs(ours: Any, theirs: Any, is_tied: bool) -> None:
    """Ten steps of the whole model, from the values it begins with."""
    sizes = SIZES[0]
    model = gpt(**sizes, is_tied=is_tied)
    strategy = Trainer(None, model, Recipe(optimizer=ours, num_micro_batches=2))
    tensors = as_tensors(model.named(strategy.parameters))
    other = theirs(list(tensors.values()))
    for step in range(10):
        inputs, targets = tokens(5, sizes["context"], step)
        loss = strategy.step(inputs, targets, targets.size)
        other.zero_grad()
        wanted = torch_loss(tensors, inputs, targets, sizes["num_heads"])
        wanted.backward()
        other.step()
        assert loss == pytest.approx(wanted.item(), rel=CLOSE), step
    assert_same(model, strategy, tensors)


def assert_same(model: Model, strategy: Trainer, tensors: Tensors) -> None:
    """But for the bias of the keys: its gradient is rounding alone, which Adam makes large."""
    for name, value in model.named(strategy.parameters).items():
        theirs = tensors[name].detach().numpy()
        if name.endswith("qkv.bias"):
            value, theirs = value.reshape(3, -1), theirs.reshape(3, -1)
            np.testing.assert_allclose(value[1], theirs[1], rtol=0, atol=1e-9, err_msg=name)
            value, theirs = value[[0, 2]], theirs[[0, 2]]
        np.testing.assert_allclose(value, theirs, rtol=0, atol=CLOSE, err_msg=name)
