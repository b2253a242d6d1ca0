"""V-MoE: a vision transformer, some of whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe.gates import Gate
from moe.gpt import gates_of_blocks
from moe.images.blocks import Blocks, check_sizes, classifier, width_of
from parallel import Mesh
from parallel.nn import Attention, Grid, Layer, Model, PatchEmbedding


def v_moe(
    *,
    num_classes: int,
    image_size: int = 16,
    channels: int = 1,
    patch: int = 4,
    hidden: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    gate: str | Callable[[int], Gate] = "v-moe",
    gate_options: Mapping[str, Any] | None = None,
    num_experts: int | Sequence[int] = 8,
    every: int = 2,
    recompute: Sequence[str] = (),
    mesh: Mesh | None = None,
    **options: Any,
) -> Model:
    """Return a vision transformer with experts.  Riquelme et al. 2021 (V-MoE).

    Images, int64 (batch, `image_size`, `image_size`, `channels`) from 0 to 255, become logits
    (batch, 1, `num_classes`), and these the loss; targets are int64 (batch, 1).  Its layers are
    ``embedding``, ``block0``, ``block1``, ..., ``head``, ``loss``.  A patch of an image is a token;
    it attends to all patches, and the class is that of the mean of all tokens.

    Parameters
    ----------
    num_classes, image_size, channels : int
    patch : int
        The rows, and columns, of pixels of a patch.
    hidden, num_layers, num_heads : int
        As in `parallel.gpt`; at least one layer.
    gate, gate_options, num_experts, every
        As in `moe_gpt`.
    recompute : sequence of str
        As in `parallel.nn.Model`.
    mesh : Mesh, optional
        Ranks along ``expert`` divide experts, those along ``tensor`` heads, MLPs, each expert and
        the classes.
    options
        As in `MixtureOfExperts`: `log`, `rows_per_group`, `padding`, `num_parts`, `payload`,
        `dispatch` and `ranks_per_host`.  A row is an image.

    Raises
    ------
    ValueError
        For what `moe_gpt` refuses; if patches do not divide images or heads the vectors; for a gate
        without a router; and for a mesh with several ranks along ``context``.

    Examples
    --------
    >>> from moe import v_moe
    >>> model = v_moe(num_classes=6, hidden=16, num_layers=2, num_experts=4)
    >>> model.specs["block1.mlp.moe.experts.up.weight"].shape
    (4, 16, 64)
    """
    check_sizes(
        num_classes=num_classes, image_size=image_size, channels=channels, hidden=hidden,
        num_layers=num_layers, num_heads=num_heads,
    )  # fmt: skip
    gates = gates_of_blocks(gate, gate_options or {}, num_experts, every, num_layers)
    blocks = Blocks(num_layers, gates, mesh, options)
    width, image = width_of(hidden, num_heads), Grid(image_size, image_size)
    named: dict[str, Layer] = {"embedding": PatchEmbedding(image, channels, patch, hidden)}
    for i in range(num_layers):
        named[f"block{i}"] = blocks.make(i, hidden, num_heads, Attention(num_heads, width))
    named |= classifier(hidden, num_classes, blocks.region)
    return Model(named, recompute=recompute, mesh=mesh)
