"""A small GPT over bytes, the model of the training program: Radford et al. 2019."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from parallel.mesh import Mesh
from parallel.nn import layers as nn
from parallel.nn.context import RingAttention, UlyssesAttention
from parallel.nn.dropout import Dropout
from parallel.nn.layer import Layer, Residual, Sequential
from parallel.nn.model import Model
from parallel.nn.tensor import (
    Columns,
    Divided,
    Rows,
    VocabularyCrossEntropy,
    VocabularyEmbedding,
    Whole,
)

VOCAB_SIZE = 256  # a token is a byte
SEQUENCE_PARALLEL = (None, "keep", "gather")
ATTENTION = {"ring": RingAttention, "ulysses": UlyssesAttention}


def gpt(
    *,
    num_layers: int = 4,
    hidden: int = 256,
    num_heads: int = 4,
    context: int = 64,
    vocab_size: int = VOCAB_SIZE,
    is_tied: bool = False,
    is_shared: bool = False,
    recompute: Sequence[str] = (),
    mesh: Mesh | None = None,
    sequence_parallel: str | None = None,
    attention: str = "ring",
    dropout: float = 0.0,
    mlp: Callable[[int, Callable[[], Sequential]], Mapping[str, Layer] | None] | None = None,
) -> Model:
    """Return a GPT that predicts the next token: a byte by default.

    Tokens, integers of shape (batch, up to `context`), become logits (batch, context,
    `vocab_size`), and these the loss.  Its layers are ``embedding``, ``block0``, ``block1``, ...,
    ``head``, ``loss``.  A block normalizes before causal multi-head ``attention`` (parts ``norm``,
    ``qkv``, ``heads``, ``out``) and before its ``mlp`` (``norm``, ``up``, ``gelu``, ``down``).
    Raises ValueError if a number is too small.

    Parameters
    ----------
    num_layers, context, vocab_size : int
        The number of blocks, at least 0, and of positions and of tokens, at least 1.
    hidden, num_heads : int
        The width of the vectors between layers, and how many attention heads divide it, at least 1.
    is_tied : bool
        Whether the table of the output layer is that of the token embedding (Press & Wolf 2017).
    is_shared : bool
        Whether all blocks have the parameters of the first (Lan et al. 2020, ALBERT).
    recompute : sequence of str
        As in `Model`.
    mesh : Mesh, optional
        Its ranks along ``tensor`` divide heads, the middle of each MLP, and the vocabulary.
    sequence_parallel : str, optional
        Whether they also divide the tokens of each row between these: ``"keep"`` what is gathered
        for backward, or ``"gather"`` it again (`parallel.nn.tensor.Divided`).
    attention : str
        How the ranks along ``context`` of the mesh, which divide the positions of each row, attend
        to those of others: ``"ring"`` (`RingAttention`) or ``"ulysses"`` (`UlyssesAttention`).
    dropout : float
        The rate of `Dropout` behind the attention and the MLP of each block (part ``drop``).
    mlp : function, optional
        Called with the number of each block and a function that makes its MLP (parts ``up``,
        ``gelu``, ``down``); returns the parts that the block has in its place, or None.

    Examples
    --------
    >>> from parallel import gpt
    >>> gpt(num_layers=2, hidden=64).num_parameters
    136960
    """
    sizes = {
        "num_layers": num_layers, "hidden": hidden, "num_heads": num_heads, "context": context,
        "vocab_size": vocab_size,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < (least := 0 if name == "num_layers" else 1):
            raise ValueError(f"{name} is {size}: it must be at least {least}")
    if hidden % num_heads:
        raise ValueError(f"{num_heads} heads do not divide a width of {hidden}")
    parts = {"hidden": hidden, "num_heads": num_heads, "num_layers": num_layers}
    region = region_of(mesh, sequence_parallel)
    heads = heads_of(num_heads, hidden // num_heads, mesh, attention)
    named: dict[str, Layer] = {"embedding": embedding(vocab_size, context, hidden, region)}
    for i in range(num_layers):
        dense = partial(feed_forward, hidden, 4 * hidden, num_layers, region)
        other = None if mlp is None else mlp(i, dense)
        behind_attention, behind_mlp = (
            dropped(dropout, f"block{i}.{part}", mesh, region) for part in ("attention", "mlp")
        )
        inner = {**(dense().layers if other is None else other), **behind_mlp}
        named[f"block{i}"] = block(
            **parts, region=region, heads=heads(), mlp=inner, drop=behind_attention
        )
    named |= head(hidden, vocab_size, region)
    ties = {"head.out.table": "embedding.token"} if is_tied else {}
    ties |= {f"block{i}": "block0" for i in range(1, num_layers)} if is_shared else {}
    return Model(named, ties, recompute=recompute, mesh=mesh)


def region_of(mesh: Mesh | None, sequence_parallel: str | None = None) -> Whole | None:
    """Return the ranks that divide the layers; None if there is one alone."""
    if sequence_parallel not in SEQUENCE_PARALLEL:
        raise ValueError(
            f"sequence_parallel is {sequence_parallel!r}: it must be one of"
            f" {', '.join(map(repr, SEQUENCE_PARALLEL))}"
        )
    if mesh is None or mesh.axes.get("tensor", 1) == 1:
        return None
    if sequence_parallel is None:
        return Whole(mesh)
    return Divided(mesh, gathers_again=sequence_parallel == "gather")


def heads_of(num_heads: int, width: int, mesh: Mesh | None, attention: str) -> Callable[[], Layer]:
    """Return a function that makes the attention of a block."""
    if attention not in ATTENTION:
        raise ValueError(f"attention is {attention!r}: it must be one of {', '.join(ATTENTION)}")
    if mesh is None or mesh.axes.get("context", 1) == 1:
        return partial(nn.CausalAttention, num_heads, width)
    return partial(ATTENTION[attention], num_heads, mesh, width=width)


def embedding(vocab_size: int, context: int, hidden: int, region: Whole | None) -> Layer:
    """Return the layer that makes vectors (batch, context, hidden) of tokens."""
    if region is None:
        return nn.Embedding(vocab_size, context, hidden)
    return VocabularyEmbedding(vocab_size, context, hidden, region)


def feed_forward(hidden: int, inner: int, num_layers: int, region: Whole | None) -> Sequential:
    """Return the MLP of one of `num_layers` blocks: `hidden` elements, `inner`, and `hidden`."""
    return Sequential({
        "up": columns(nn.Linear(hidden, inner), region),
        "gelu": nn.Gelu(),
        "down": rows(nn.Linear(inner, hidden, gain_of(num_layers)), region),
    })  # fmt: skip


def dropped(
    rate: float, name: str, mesh: Mesh | None, region: Whole | None, width: int | None = None
) -> dict[str, Layer]:
    """Return a `Dropout` as the part ``drop``; nothing if `rate` is 0."""
    layer = Dropout(rate, name, mesh=mesh, region=region, width=width)
    return {"drop": layer} if rate else {}


def gain_of(num_layers: int) -> float:
    """Return the gain of what blocks add, so that the sum keeps its magnitude."""
    return 1 / math.sqrt(2 * num_layers)


def block(
    hidden: int,
    num_heads: int,
    num_layers: int,
    region: Whole | None,
    heads: Layer,
    mlp: Mapping[str, Layer],
    drop: Mapping[str, Layer],
) -> Sequential:
    """Return one of `num_layers` transformer blocks: (batch, context, hidden) to the same shape.

    `drop` is what follows the attention.
    """
    width = hidden // num_heads
    attention = Residual({
        "norm": norm(hidden, region),
        "qkv": columns(nn.Linear(hidden, (3, num_heads, width)), region, dim=1),
        "heads": heads,
        "out": rows(nn.Linear(hidden, hidden, gain_of(num_layers)), region, width), **drop,
    })  # fmt: skip
    return Sequential({
        "attention": attention, "mlp": Residual({"norm": norm(hidden, region), **mlp}),
    })  # fmt: skip


def head(hidden: int, vocab_size: int, region: Whole | None) -> dict[str, Layer]:
    """Return the layers that make logits of vectors, and the loss of them."""
    out = columns(nn.Unembedding(hidden, vocab_size), region)
    loss = nn.CrossEntropy() if region is None else VocabularyCrossEntropy(vocab_size, region)
    return {"head": Sequential({"norm": norm(hidden, region), "out": out}), "loss": loss}


def norm(hidden: int, region: Whole | None) -> Layer:
    """Return a layer norm outside of the regions that ranks divide."""
    return nn.LayerNorm(hidden, () if region is None else region.partial)


def columns(linear: nn.Linear, region: Whole | None, dim: int = 0) -> Layer:
    """Return a linear layer of which ranks divide a `dim` of the output."""
    return linear if region is None else Columns(linear, region, dim)


def rows(linear: nn.Linear, region: Whole | None, block: int = 1) -> Layer:
    """Return a linear layer of which ranks divide the input, in whole blocks of elements."""
    return linear if region is None else Rows(linear, region, block)
