"""The parts of a transformer: blocks, their MLPs and dropout, and the head with the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping

from parallel.mesh import Mesh
from parallel.nn.layer import Layer, Residual, Sequential
from parallel.nn.plain import CrossEntropy, Gelu, LayerNorm, Linear, Unembedding
from parallel.nn.tensor import Columns, Divided, Dropout, Rows, VocabularyCrossEntropy, Whole

SEQUENCE_PARALLEL = (None, "keep", "gather")


def region_of(mesh: Mesh | None, sequence_parallel: str | None = None) -> Whole | None:
    """Return the ranks that divide layers along ``tensor`` of a `mesh`; None without other ranks.

    Raises ValueError unless `sequence_parallel` is one of `SEQUENCE_PARALLEL`.
    """
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


def feed_forward(hidden: int, inner: int, num_layers: int, region: Whole | None) -> Sequential:
    """Return the MLP of one of `num_layers` blocks.

    Vectors of `hidden` elements become vectors of `inner` elements, which ranks of a `region`
    divide, and then vectors of `hidden` elements again.
    """
    return Sequential(
        {
            "up": columns(Linear(hidden, inner), region),
            "gelu": Gelu(),
            "down": rows(Linear(inner, hidden, gain_of(num_layers)), region),
        }
    )


def dropped(
    rate: float, name: str, mesh: Mesh | None, region: Whole | None, width: int | None = None
) -> dict[str, Layer]:
    """Return a `Dropout` as the part ``drop``, or no part if `rate` is 0.

    The arguments are as in `Dropout`.
    """
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

    Parameters
    ----------
    hidden, num_heads : int
        The width of the vectors, and the number of attention heads that divide it.
    num_layers : int
        The number of blocks of the model, on which the initial weights depend.
    region : Whole, optional
        The ranks that divide the layers.
    heads : Layer
        The attention, which makes vectors of queries, keys and values.
    mlp, drop : mapping of str to Layer
        The layers of the MLP, and the layers that follow the attention, such as dropout.
    """
    width = hidden // num_heads
    attention = Residual(
        {
            "norm": norm(hidden, region),
            "qkv": columns(Linear(hidden, (3, num_heads, width)), region, dim=1),
            "heads": heads,
            "out": rows(Linear(hidden, hidden, gain_of(num_layers)), region, width),
            **drop,
        }
    )
    return Sequential(
        {"attention": attention, "mlp": Residual({"norm": norm(hidden, region), **mlp})}
    )


def head(
    hidden: int, vocab_size: int, region: Whole | None, pool: Mapping[str, Layer]
) -> dict[str, Layer]:
    """Return the layers that make logits of vectors, and the loss of the logits.

    Parameters
    ----------
    hidden, vocab_size : int
        The width of the vectors, and the number of logits.
    region : Whole, optional
        The ranks that divide the logits.
    pool : mapping of str to Layer
        Layers before the logits, such as a mean of vectors.
    """
    out = columns(Unembedding(hidden, vocab_size), region)
    loss = CrossEntropy() if region is None else VocabularyCrossEntropy(vocab_size, region)
    return {"head": Sequential({"norm": norm(hidden, region), **pool, "out": out}), "loss": loss}


def norm(hidden: int, region: Whole | None) -> Layer:
    """Return a layer norm outside of the regions in which ranks divide layers."""
    return LayerNorm(hidden, () if region is None else region.partial)


def columns(linear: Linear, region: Whole | None, dim: int = 0) -> Layer:
    """Return a `linear` layer of which ranks divide dimension `dim` of the output."""
    return linear if region is None else Columns(linear, region, dim)


def rows(linear: Linear, region: Whole | None, block: int = 1) -> Layer:
    """Return a `linear` layer of which ranks divide the input, in whole blocks of elements."""
    return linear if region is None else Rows(linear, region, block)
