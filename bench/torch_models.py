"""A small transformer in PyTorch whose layers tensor parallelism can divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

HIDDEN, HEADS, BLOCKS, VOCABULARY = 32, 4, 2, 64
ROWS, CONTEXT = 4, 16  # of a rank


class Attention(nn.Module):  # type: ignore[misc]
    """Causal attention of the heads that this rank has."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Any) -> Any:
        heads = (self._heads(each(x)) for each in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def _heads(x: Any) -> Any:
        return x.unflatten(2, (-1, HIDDEN // HEADS)).transpose(1, 2)


class Mlp(nn.Module):  # type: ignore[misc]
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Any) -> Any:
        return self.down(gelu(self.up(x)))


class Block(nn.Module):  # type: ignore[misc]
    """Attention and an MLP, each behind a layer norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):  # type: ignore[misc]
    """Embedding, blocks and a head, in the order in which they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def transformer() -> Transformer:
    """The same model on every rank and in every call."""
    torch.manual_seed(0)
    return Transformer()


def step(model: Any, optimizer: Any) -> None:
    """Train it by one step, on the same tokens on every rank."""
    random = torch.Generator().manual_seed(0)
    inputs, targets = torch.randint(VOCABULARY, (2, ROWS, CONTEXT), generator=random)
    cross_entropy(model(inputs), targets.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
