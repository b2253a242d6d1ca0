"""Attention to rows whose positions are divided by the ranks along an axis of a mesh.

Every rank has all parameters and a part of the positions of every row (`context_positions`).  Only
attention mixes positions, so only attention sends.  If C ranks divide b rows of s positions evenly,
with vectors of h elements of w bytes (w' is at least 4), then in every layer:

| sent by a rank     | forward               | backward                       | messages          |
|--------------------|-----------------------|--------------------------------|-------------------|
| `RingAttention`    | (C-1) 2 b (s/C) h w   | (C-1) 2 b (s/C) h (w + w')     | (C-1), 2 (C-1)    |
| `UlyssesAttention` | (C-1)/C 4 b (s/C) h w | (C-1)/C 4 b (s/C) h w          | 2 (C-1), 2 (C-1)  |

What a rank of `RingAttention` sends does not shrink with C, but it is sent while the rank computes,
and the number of heads does not limit C.  What a rank of `UlyssesAttention` sends shrinks with C,
but a rank without a head is idle during attention.  ``traffic`` of the layers also counts uneven
numbers.
"""

from parallel.nn.context.positions import ContextGroup, Tile, context_positions, tiles
from parallel.nn.context.ring import RingAttention
from parallel.nn.context.ulysses import UlyssesAttention

__all__ = [
    "ContextGroup",
    "RingAttention",
    "Tile",
    "UlyssesAttention",
    "context_positions",
    "tiles",
]
