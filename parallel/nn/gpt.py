"""A small GPT over bytes, the model of the training program: Radford et al. 2019."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallel.mesh import Mesh
from parallel.nn import layers as nn
from parallel.nn.layer import Layer, Residual, Sequential
from parallel.nn.model import Model

VOCAB_SIZE = 256  # a token is a byte


def gpt(
    *,
    num_layers: int = 4,
    hidden: int = 256,
    num_heads: int = 4,
    context: int = 64,
    is_tied: bool = False,
    is_shared: bool = False,
    recompute: Sequence[str] = (),
    mesh: Mesh | None = None,
) -> Model:
    """Return a GPT that predicts the next byte.

    Tokens, integers in 0..255 of shape (batch, up to `context`), become logits (batch, context,
    256), and these the loss.  Its layers are ``embedding``, ``block0``, ``block1``, ..., ``head``,
    ``loss``.  A block normalizes before causal multi-head ``attention`` (parts ``norm``, ``qkv``,
    ``heads``, ``out``) and before its ``mlp`` (``norm``, ``up``, ``gelu``, ``down``).  Raises
    ValueError if a number is too small.

    Parameters
    ----------
    num_layers, context : int
        The number of blocks, at least 0, and of positions, at least 1.
    hidden, num_heads : int
        The width of the vectors between layers, and how many attention heads divide it, at least 1.
    is_tied : bool
        Whether the table of the output layer is that of the token embedding (Press & Wolf 2017).
    is_shared : bool
        Whether all blocks have the parameters of the first (Lan et al. 2020, ALBERT).
    recompute, mesh
        As in `Model`.

    Examples
    --------
    >>> from parallel import gpt
    >>> gpt(num_layers=2, hidden=64).num_parameters
    136960
    """
    sizes = {"num_layers": num_layers, "hidden": hidden, "num_heads": num_heads, "context": context}
    for name, size in sizes.items():
        if size < (least := 0 if name == "num_layers" else 1):
            raise ValueError(f"{name} is {size}: it must be at least {least}")
    if hidden % num_heads:
        raise ValueError(f"{num_heads} heads do not divide a width of {hidden}")
    named: dict[str, Layer] = {"embedding": nn.Embedding(VOCAB_SIZE, context, hidden)}
    named |= {f"block{i}": block(hidden, num_heads, num_layers) for i in range(num_layers)}
    named["head"] = Sequential(
        {"norm": nn.LayerNorm(hidden), "out": nn.Unembedding(hidden, VOCAB_SIZE)}
    )
    named["loss"] = nn.CrossEntropy()
    ties = {"head.out.table": "embedding.token"} if is_tied else {}
    ties |= {f"block{i}": "block0" for i in range(1, num_layers)} if is_shared else {}
    return Model(named, ties, recompute=recompute, mesh=mesh)


def block(hidden: int, num_heads: int, num_layers: int) -> Sequential:
    """Return one of `num_layers` transformer blocks: (batch, context, hidden) to the same shape."""
    gain = 1 / math.sqrt(2 * num_layers)  # of what is added: the sum keeps its magnitude
    attention = Residual({
        "norm": nn.LayerNorm(hidden), "qkv": nn.Linear(hidden, (3, num_heads, hidden // num_heads)),
        "heads": nn.CausalAttention(num_heads), "out": nn.Linear(hidden, hidden, gain),
    })  # fmt: skip
    mlp = Residual({
        "norm": nn.LayerNorm(hidden), "up": nn.Linear(hidden, 4 * hidden),
        "gelu": nn.Gelu(), "down": nn.Linear(4 * hidden, hidden, gain),
    })  # fmt: skip
    return Sequential({"attention": attention, "mlp": mlp})
