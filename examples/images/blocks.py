"""The blocks of the transformers for images, and what their sizes must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from moe import Gate, MixtureOfExperts
from parallel import Mesh
from parallel.nn import Layer, Sequential, block, feed_forward, region_of
from parallel.nn.tensor import Whole


@dataclass(frozen=True)
class Blocks:
    """Makes the blocks of a transformer, some of which have experts in place of an MLP.

    Attributes
    ----------
    num_layers : int
        How many blocks there are.
    gates : dict of int to Gate
        The gates of those with experts, by number.  Raises ValueError for one without a router.
    mesh : Mesh, optional
        Ranks along ``expert`` divide experts; ranks along ``tensor`` heads, and the middle of each
        MLP and of each expert.  Raises ValueError if there are several along ``context``.
    options : mapping
        Of each `MixtureOfExperts`.
    """

    num_layers: int
    gates: dict[int, Gate]
    mesh: Mesh | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.axes.get("context", 1) > 1:
            raise ValueError(
                "ranks along 'context' divide the positions of a text: a model of images takes none"
            )
        if any(not gate.has_router for gate in self.gates.values()):
            raise ValueError("a gate without a router routes tokens of a text, and not patches")

    @property
    def region(self) -> Whole | None:
        """The ranks that divide layers; None if there is one alone."""
        return region_of(self.mesh)

    def make(self, i: int, hidden: int, num_heads: int, attention: Layer) -> Sequential:
        """Return block `i`, of vectors of `hidden` elements, with heads that are `attention`."""
        mlp = self._mlp(i, hidden)
        return block(hidden, num_heads, self.num_layers, self.region, attention, mlp, drop={})

    def _mlp(self, i: int, hidden: int) -> Mapping[str, Layer]:
        """Return the layers of a block behind its attention: experts or an MLP."""
        dense = partial(feed_forward, hidden, 4 * hidden, self.num_layers, self.region)
        if i not in self.gates:
            return dense().layers
        return {
            "moe": MixtureOfExperts(
                hidden, self.gates[i], dense, mesh=self.mesh, name=f"block{i}", **self.options
            )
        }


def check_sizes(**sizes: int) -> None:
    """Raise ValueError unless all numbers are at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}: it must be at least 1")


def width_of(hidden: int, num_heads: int) -> int:
    """Return the elements of a head.  Raises ValueError if heads do not divide the vectors."""
    if hidden % num_heads:
        raise ValueError(f"{num_heads} heads do not divide a width of {hidden}")
    return hidden // num_heads
