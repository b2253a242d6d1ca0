"""A GPT over bytes: what all strategies train.

Token and position embedding, pre-layer-norm blocks of causal multi-head attention and a GeLU MLP,
and a head: Radford et al. 2019.
"""

from __future__ import annotations

import math

from parallel.nn import (
    CausalAttention,
    Embedding,
    Gelu,
    Layer,
    LayerNorm,
    Linear,
    Model,
    Residual,
    Sequential,
    Unembedding,
)

BYTES = 256  # the tokens


def gpt(
    *, layers: int = 4, hidden: int = 256, heads: int = 4, context: int = 64, is_tied: bool = False
) -> Model:
    """Tokens (batch, up to `context`) in 0..255 -> logits of the next ones (batch, context, 256).

    Units: "embedding", "block0", ..., "head".  `is_tied`: the head's table is the embedding's.
    ValueError for less than no layers, or less than one of `hidden`, `heads` and `context`, and if
    `heads` does not divide `hidden`.
    """
    check_at_least(0, layers=layers)
    check_at_least(1, hidden=hidden, heads=heads, context=context)
    if hidden % heads:
        raise ValueError(f"{heads} heads do not divide a width of {hidden}")
    named: dict[str, Layer] = {"embedding": Embedding(BYTES, context, hidden)}
    named |= {f"block{i}": block(hidden, heads, layers) for i in range(layers)}
    named["head"] = Sequential({"norm": LayerNorm(hidden), "out": Unembedding(hidden, BYTES)})
    return Model(named, {"head.out.table": "embedding.token"} if is_tied else None)


def check_at_least(least: int, **sizes: int) -> None:
    """ValueError for one of these sizes that is less."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"{name} is {size}: it must be at least {least}")


def block(hidden: int, heads: int, layers: int) -> Sequential:
    """One of `layers` blocks; (batch, context, hidden) -> the same."""
    gain = 1 / math.sqrt(2 * layers)  # of what adds to the residual stream, in sum as large as it
    attention = Residual({
        "norm": LayerNorm(hidden), "qkv": Linear(hidden, 3 * hidden),
        "heads": CausalAttention(heads), "out": Linear(hidden, hidden, gain),
    })  # fmt: skip
    mlp = Residual({
        "norm": LayerNorm(hidden), "up": Linear(hidden, 4 * hidden),
        "gelu": Gelu(), "down": Linear(4 * hidden, hidden, gain),
    })  # fmt: skip
    return Sequential({"attention": attention, "mlp": mlp})
