"""A small transformer in PyTorch whose linear layers tensor parallelism can divide."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from bench.torch.results import HEADS

BLOCKS = 2


class Sizes(NamedTuple):
    """The sizes of a model, and of the tokens on which a rank trains it in a step."""

    hidden: int
    vocabulary: int = 256
    context: int = 32
    rows: int = 4


class Attention(nn.Module):  # type: ignore[misc]
    """Causal attention of the heads that this rank has."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.head_size = hidden // HEADS
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(hidden, hidden))

    def forward(self, x: Any) -> Any:
        heads = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Any) -> Any:
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class Mlp(nn.Module):  # type: ignore[misc]
    """Two linear layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Any) -> Any:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):  # type: ignore[misc]
    """Attention and an MLP, each behind a layer norm and beside a residual connection."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(hidden), Attention(hidden)
        self.norm2, self.mlp = nn.LayerNorm(hidden), Mlp(hidden)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):  # type: ignore[misc]
    """Embedding, blocks and a head, in the order in which they compute."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes.hidden) for _ in range(BLOCKS))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def transformer(sizes: Sizes) -> Transformer:
    """Return a model, the same on every rank and in every call."""
    torch.manual_seed(0)
    return Transformer(sizes)


RATE = 0.1
CLOSE = 1e-4  # relatively: sums of more than two ranks depend on the order


class TrainingStep:
    """Called, it trains a model by one step, on the same tokens every time.

    The model may be divided among ranks; `seed` is of the tokens of this rank, and `loss` that of
    the last step, on this rank.
    """

    def __init__(self, model: Any, sizes: Sizes, seed: int, device: str = "cpu") -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        random = torch.Generator().manual_seed(seed)
        shape = 2, sizes.rows, sizes.context
        tokens = torch.randint(sizes.vocabulary, shape, generator=random)
        self.inputs, self.targets = tokens.to(device)
        self.loss = math.nan

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        logits = self.model(self.inputs).flatten(0, 1)
        loss = cross_entropy(logits, self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def num_wrong(steps: dict[str, TrainingStep]) -> int:
    """Return how many of them have not the loss of the first, after equally many steps."""
    first, *others = (step.loss for step in steps.values())
    return sum(not math.isclose(first, loss, rel_tol=CLOSE) for loss in others)
