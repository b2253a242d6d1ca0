"""A small GPT over bytes, the model of the training program.  Radford et al. 2019."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from parallel.mesh import Mesh
from parallel.nn.context import RingAttention, UlyssesAttention
from parallel.nn.layer import Layer, Sequential
from parallel.nn.models.blocks import block, dropped, feed_forward, head, region_of
from parallel.nn.models.model import Model
from parallel.nn.plain import CausalAttention, Embedding
from parallel.nn.tensor import VocabularyEmbedding, Whole

VOCAB_SIZE = 256  # a token is a byte
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
    """Return a GPT that predicts the next token, by default a byte.

    Tokens, integers of shape (batch, up to `context`), become logits (batch, context,
    `vocab_size`), and the logits become the loss.  The layers are ``embedding``, ``block0``,
    ``block1``, ..., ``head``, ``loss``.  A block normalizes before causal multi-head ``attention``
    (parts ``norm``, ``qkv``, ``heads``, ``out``) and before its ``mlp`` (``norm``, ``up``,
    ``gelu``, ``down``).

    Parameters
    ----------
    num_layers, context, vocab_size : int
        The number of blocks, at least 0, and the numbers of positions and of tokens, at least 1.
    hidden, num_heads : int
        The width of the vectors between layers, and the number of attention heads that divide it,
        at least 1.
    is_tied : bool
        Whether the output layer has the table of the token embedding (Press & Wolf 2017).
    is_shared : bool
        Whether all blocks have the parameters of the first (Lan et al. 2020, ALBERT).
    recompute : sequence of str
        As in `Model`.
    mesh : Mesh, optional
        The ranks.  Ranks along ``tensor`` divide heads, the middle of every MLP, and the
        vocabulary.
    sequence_parallel : str, optional
        Whether the ranks along ``tensor`` also divide the tokens of every row outside of these
        layers: ``"keep"`` the gathered tokens for backward, or ``"gather"`` the tokens again
        (`parallel.nn.tensor.Divided`).
    attention : str
        How the ranks along ``context`` of the mesh, which divide the positions of every row, attend
        to the positions of other ranks: ``"ring"`` (`RingAttention`) or ``"ulysses"``
        (`UlyssesAttention`).
    dropout : float
        The rate of `Dropout` behind the attention and the MLP of every block (part ``drop``).
    mlp : function, optional
        Called for every block, with its number and a function that makes an MLP (parts ``up``,
        ``gelu``, ``down``).  It returns the parts that the block has in place of the MLP, or None.

    Raises
    ------
    ValueError
        If a number is too small, the heads do not divide the width, or a word is unknown.

    Examples
    --------
    >>> from parallel import gpt
    >>> gpt(num_layers=2, hidden=64).num_parameters
    136960
    """
    check_sizes(
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        context=context,
        vocab_size=vocab_size,
    )
    region = region_of(mesh, sequence_parallel)
    heads = heads_of(num_heads, hidden // num_heads, mesh, attention)
    dense = partial(feed_forward, hidden, 4 * hidden, num_layers, region)
    drop = partial(dropped, dropout, mesh=mesh, region=region)
    layers: dict[str, Layer] = {"embedding": embedding(vocab_size, context, hidden, region)}
    for i in range(num_layers):
        other = None if mlp is None else mlp(i, dense)
        inner = dense().layers if other is None else other
        layers[f"block{i}"] = block(
            hidden,
            num_heads,
            num_layers,
            region,
            heads(),
            mlp={**inner, **drop(f"block{i}.mlp")},
            drop=drop(f"block{i}.attention"),
        )
    layers |= head(hidden, vocab_size, region, {})
    ties = {"head.out.table": "embedding.token"} if is_tied else {}
    ties |= {f"block{i}": "block0" for i in range(1, num_layers)} if is_shared else {}
    return Model(layers, ties, recompute=recompute, mesh=mesh)


def check_sizes(**sizes: int) -> None:
    """Raise ValueError if a size of a model is too small, or its heads do not divide its width."""
    for name, size in sizes.items():
        if size < (least := 0 if name == "num_layers" else 1):
            raise ValueError(f"{name} is {size}: it must be at least {least}")
    if sizes["hidden"] % sizes["num_heads"]:
        raise ValueError(f"{sizes['num_heads']} heads do not divide a width of {sizes['hidden']}")


def heads_of(num_heads: int, width: int, mesh: Mesh | None, attention: str) -> Callable[[], Layer]:
    """Return a function that makes the attention of a block, of heads of this `width`.

    Raises ValueError unless `attention` is one of `ATTENTION`.
    """
    if attention not in ATTENTION:
        raise ValueError(f"attention is {attention!r}: it must be one of {', '.join(ATTENTION)}")
    if mesh is None or mesh.axes.get("context", 1) == 1:
        return partial(CausalAttention, num_heads, width)
    return partial(ATTENTION[attention], num_heads, mesh, width=width)


def embedding(vocab_size: int, context: int, hidden: int, region: Whole | None) -> Layer:
    """Return the layer that turns tokens into vectors (batch, context, hidden)."""
    if region is None:
        return Embedding(vocab_size, context, hidden)
    return VocabularyEmbedding(vocab_size, context, hidden, region)
