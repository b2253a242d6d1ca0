"""V-MoE and Swin-MoE: transformers for images, some of whose MLPs are mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from examples.images.blocks import Blocks, check_sizes, width_of
from examples.images.patches import Grid, MeanPool, MergePatches, PatchEmbedding
from examples.images.windows import WindowAttention
from moe import Gate, gates_of_blocks
from parallel import Mesh
from parallel.nn import Attention, Layer, LayerNorm, Linear, Model, Sequential, head


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
    >>> from examples.images import v_moe
    >>> model = v_moe(num_classes=6, hidden=16, num_layers=2, num_experts=4)
    >>> model.specs["block1.mlp.moe.experts.up.weight"].shape
    (4, 16, 64)
    """
    check_sizes(
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
    )
    gates = gates_of_blocks(gate, gate_options or {}, num_experts, every, num_layers)
    blocks = Blocks(num_layers, gates, mesh, options)
    width, image = width_of(hidden, num_heads), Grid(image_size, image_size)
    named: dict[str, Layer] = {"embedding": PatchEmbedding(image, channels, patch, hidden)}
    for i in range(num_layers):
        named[f"block{i}"] = blocks.make(i, hidden, num_heads, Attention(num_heads, width))
    named |= head(hidden, num_classes, blocks.region, {"mean": MeanPool()})
    return Model(named, recompute=recompute, mesh=mesh)


def swin_moe(
    *,
    num_classes: int,
    image_size: int = 16,
    channels: int = 1,
    patch: int = 2,
    hidden: int = 32,
    num_layers: Sequence[int] = (2, 2),
    num_heads: Sequence[int] = (2, 4),
    window: int = 4,
    gate: str | Callable[[int], Gate] = "switch",
    gate_options: Mapping[str, Any] | None = None,
    num_experts: int | Sequence[int] = 8,
    every: int = 2,
    recompute: Sequence[str] = (),
    mesh: Mesh | None = None,
    **options: Any,
) -> Model:
    """Return a Swin transformer with experts.  Liu et al. 2021; Hwang et al. 2023 (Swin-MoE).

    Images and targets are as in `v_moe`.  Tokens attend to the tokens of their window; in every
    second block of a stage windows are moved by half a window.  Between stages 2 x 2 neighbours
    become one token with twice the elements.  Layers are ``embedding``, ``block0``, ``block1``,
    ..., ``merge1`` before the blocks of the second stage, ..., ``head``, ``loss``.

    Parameters
    ----------
    num_classes, image_size, channels, patch : int
        As in `v_moe`.
    hidden : int
        The width of the vectors in the first stage.
    num_layers, num_heads : sequence of int
        How many blocks each stage has, and how many heads these.
    window : int
        The rows, and columns, of tokens of a window; less where the grid is smaller.
    gate, gate_options, num_experts, every
        As in `moe_gpt`, for the blocks of all stages one after the other.
    recompute, mesh, options
        As in `v_moe`.

    Raises
    ------
    ValueError
        As `v_moe`; if the stages have not one number of heads each, if windows do not divide a
        grid, or if neighbours of an odd grid would be merged.

    Examples
    --------
    >>> from examples.images import swin_moe
    >>> model = swin_moe(num_classes=6, hidden=8, num_experts=4)
    >>> list(model.layers)
    ['embedding', 'block0', 'block1', 'merge1', 'block2', 'block3', 'head', 'loss']
    >>> model.specs["block3.mlp.moe.experts.up.weight"].shape
    (4, 16, 64)
    """
    check_sizes(
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        hidden=hidden,
        window=window,
        stages=len(num_layers),
        num_layers=min(num_layers, default=1),
        num_heads=min(num_heads, default=1),
    )
    if len(num_layers) != len(num_heads):
        raise ValueError(f"{len(num_layers)} stages have {len(num_heads)} numbers of heads")
    gates = gates_of_blocks(gate, gate_options or {}, num_experts, every, sum(num_layers))
    blocks = Blocks(sum(num_layers), gates, mesh, options)
    patches = PatchEmbedding(
        Grid(image_size, image_size), channels, patch, hidden, has_positions=False
    )
    grid = patches.grid
    named: dict[str, Layer] = {
        "embedding": Sequential({"patches": patches, "norm": LayerNorm(hidden)})
    }
    numbers = count()  # of blocks
    for stage, (depth, heads) in enumerate(zip(num_layers, num_heads, strict=True)):
        if stage:
            merge = MergePatches(grid)
            named[f"merge{stage}"] = merging(merge, hidden)
            grid, hidden = merge.merged, 2 * hidden
        for i in range(depth):
            number = next(numbers)
            attention = windows(grid, window, i % 2 == 1, heads, width_of(hidden, heads), blocks)
            named[f"block{number}"] = blocks.make(number, hidden, heads, attention)
    named |= head(hidden, num_classes, blocks.region, {"mean": MeanPool()})
    return Model(named, recompute=recompute, mesh=mesh)


def merging(merge: MergePatches, hidden: int) -> Sequential:
    """Return what makes tokens of 2 `hidden` elements of four neighbours."""
    return Sequential(
        {"merge": merge, "norm": LayerNorm(4 * hidden), "out": Linear(4 * hidden, 2 * hidden)}
    )


def windows(
    grid: Grid, window: int, is_shifted: bool, num_heads: int, width: int, blocks: Blocks
) -> WindowAttention:
    """Return attention in windows; they are not shifted if one is the whole grid."""
    size = min(window, *grid)
    shift = size // 2 if is_shifted and size < max(grid) else 0
    return WindowAttention(num_heads, width, grid, size, shift, region=blocks.region)
