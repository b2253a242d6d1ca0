"""How many bytes a rank keeps, by formula.  `Memory` counts the same from the arrays themselves.

Of n elements, with w bytes each in the model's dtype and W in that of updates (float32 for two-byte
dtypes, else the same), and S optimizer states:

| category    | bytes                                                   |
|-------------|---------------------------------------------------------|
| parameters  | n w                                                     |
| gradients   | n w                                                     |
| optimizer   | n W S                                                   |
| master      | n W where updates have another dtype or place, else 0   |
| buffers     | what the strategy says of itself (`buffer_bytes`)       |
| activations | what the layers say (`Model.kept`), see `activations`   |

n is all that the model has; or, where the strategy divides the category, what this rank updates.
In float16 with Adam that is 16 Psi, and 16 Psi/N where all is divided.  Rajbhandari et al. 2020.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from parallel.precision import master_dtype
from parallel.shards import length, span

if TYPE_CHECKING:
    from parallel.strategy import Strategy


def share(sizes: Iterable[int], ranks: int, rank: int) -> int:
    """The elements that a rank owns of units of these sizes, each divided among the ranks."""
    return sum(length(span(size, ranks, rank)) for size in sizes)


def states(
    whole: int,
    own: int,
    dtype: np.dtype[Any],
    *,
    divided: Container[str] = (),
    num_states: int = 2,
    is_offloaded: bool = False,
) -> dict[str, int]:
    """What a rank keeps on its device from step to step.

    `whole`: the model's elements.  `own`: those that this rank updates; of the categories in
    `divided` it keeps no others.  `is_offloaded`: what updates are made of is elsewhere.
    """

    def of(category: str) -> int:
        return own if category in divided else whole

    there = offloaded(of("optimizer"), dtype, num_states=num_states)
    is_copied = master_dtype(dtype) != dtype
    return {
        "parameters": dtype.itemsize * of("parameters"),
        "gradients": dtype.itemsize * of("gradients"),
        "optimizer": 0 if is_offloaded else there["optimizer"],
        "master": there["master"] if is_copied and not is_offloaded else 0,
    }


def offloaded(own: int, dtype: np.dtype[Any], *, num_states: int = 2) -> dict[str, int]:
    """What is elsewhere, if updates are made there: always with copies of the values."""
    nbytes = master_dtype(dtype).itemsize * own
    return {"optimizer": num_states * nbytes, "master": nbytes}


def activations(strategy: Strategy, rows: int, context: int) -> int:
    """The most that is kept between forward and backward, for this rank's batches of this shape.

    In tokens.  At the end of a forward pass each layer holds what its backward needs, or its input
    if it is to be recomputed; then, from the last layer to the first, what a layer needs is there
    while its backward runs, and all that the layers before it hold.  The first micro-batch is a
    largest one.
    """
    recipe, width = strategy.recipe, strategy.dtype.itemsize
    largest = length(span(rows, recipe.micro_batches, 0))
    before, most = 0, 0
    for layer, (needed, entering) in strategy.model.kept((largest, context), width).items():
        most = max(most, before + needed)
        before += entering if layer in recipe.recompute else needed
    return max(most, before)


def predicted(strategy: Strategy, rows: int, context: int) -> dict[str, int]:
    """`strategy.memory.peak` after steps on batches of this shape, in tokens, on this rank."""
    kept = states(
        strategy.model.num_parameters,
        num_own(strategy),
        strategy.dtype,
        divided=strategy.divided,
        num_states=len(strategy.optimizer.STATES),
        is_offloaded=is_offloaded(strategy),
    )
    return kept | {
        "activations": activations(strategy, rows, context),
        "buffers": strategy.buffer_bytes(),
    }


def predicted_there(strategy: Strategy) -> dict[str, int]:
    """`strategy.place.memory.peak`, where updates are made elsewhere; nothing where they are not.

    From and to a device all goes through a buffer that the largest unit's part fits in.
    """
    if not is_offloaded(strategy):
        return {}
    largest = max(length(strategy.own(unit)) for unit in strategy.model.units)
    kept = offloaded(num_own(strategy), strategy.dtype, num_states=len(strategy.optimizer.STATES))
    return kept | {"buffers": strategy.dtype.itemsize * largest * strategy.place.is_crossing}


def is_offloaded(strategy: Strategy) -> bool:
    """Whether masters and optimizer states are elsewhere than the parameters."""
    return strategy.place.memory is not strategy.memory


def num_own(strategy: Strategy) -> int:
    """The elements that this rank updates."""
    return sum(length(strategy.own(unit)) for unit in strategy.model.units)
