"""The mixture of experts as GShard writes it: two masks and three products.

Lepikhin et al. 2020, algorithm 1 and section 3.2.  It computes what a mixture does, readably,
with (tokens x experts x capacity) numbers; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moe.routing import Routing, Values


class Masks(NamedTuple):
    """`dispatch` has ones and `combine` weights; (groups, tokens, experts, capacity)."""

    dispatch: Values
    combine: Values


def masks(routing: Routing, weights: Values, capacity: int) -> Masks:
    """Return the masks of a routing, with the weights of its entries, (entries,)."""
    per_group = routing.num_tokens // routing.num_groups
    shape = (routing.num_groups, per_group, routing.num_experts, capacity)
    kept = ~routing.is_dropped
    at = (
        routing.group[kept],
        routing.token[kept] % per_group,
        routing.expert[kept],
        routing.slot[kept],
    )
    dispatch, combine = np.zeros(shape, weights.dtype), np.zeros(shape, weights.dtype)
    dispatch[at] = 1
    combine[at] = weights[kept]
    return Masks(dispatch, combine)


def mixture(x: Values, found: Masks, expert: Callable[[int, Values], Values]) -> Values:
    """Return the weighted sum of what experts compute of tokens `x` (tokens, dim).

    `expert` is called with the number of an expert and its input, (rows, dim).
    """
    groups, per_group, num_experts, capacity = found.dispatch.shape
    grouped = x.reshape(groups, per_group, x.shape[-1])
    inputs = np.einsum("gsec,gsm->egcm", found.dispatch, grouped)
    rows = inputs.reshape(num_experts, groups * capacity, x.shape[-1])
    outputs = np.stack([expert(i, each) for i, each in enumerate(rows)])
    outputs = outputs.reshape(num_experts, groups, capacity, -1)
    y = np.einsum("gsec,egcm->gsm", found.combine, outputs)
    result: Values = y.reshape(len(x), -1)
    return result
