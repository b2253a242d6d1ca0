"""Change the parameters by the gradients, with the loss scale, clipping, and offload."""

from __future__ import annotations

import math

from parallel.optim import Offload, Optimizer
from parallel.run.arrays import RankArrays
from parallel.run.computing import WeightStash
from parallel.run.scalars import Scalars
from parallel.step import Update


class Updates:
    """The optimizer of a rank, and how often it has changed the parameters.

    Parameters
    ----------
    arrays : RankArrays
    offload : Offload
        Where updates are made.
    scalars : Scalars
        Has the norm of the gradient, and the units that no rank used.
    stash : WeightStash, optional
        The versions of parameters, if they are updated while micro-batches are in progress.

    Attributes
    ----------
    optimizer : Optimizer
    num_updates, num_skipped : int
        The updates made, and the updates that an overflow prevented.
    """

    def __init__(
        self,
        arrays: RankArrays,
        offload: Offload,
        scalars: Scalars,
        stash: WeightStash | None = None,
    ) -> None:
        self.arrays, self.offload, self.scalars, self.stash = arrays, offload, scalars, stash
        self.recipe = arrays.view.recipe
        self.optimizer: Optimizer = self.recipe.optimizer(offload.masters, make_state=offload.zeros)
        self.num_updates = self.num_skipped = 0

    def zero_gradients(self) -> None:
        """Set all gradients to 0."""
        for flat in self.arrays.gradients.values():
            flat[...] = 0

    def update(self, action: Update) -> bool:
        """Change the parameters; return whether no gradient overflowed.

        An update by one micro-batch sets the gradients to 0 for the next.
        """
        if self.stash is not None:
            assert action.micro_batch is not None
            self.stash.update(action.micro_batch, self.arrays.parameters)
        scale, squares = self.arrays.loss_scale.value, self.scalars.squares
        if not self.update_loss_scale(squares):
            self.num_skipped += 1
            return False
        self.num_updates += 1
        factor = 1 / scale
        if (clip := self.recipe.clip) is not None:
            factor *= clip / max(math.sqrt(squares) * factor, clip)
        unused, shards = self.scalars.unused_units, self.arrays.gradient_shards
        used = {unit: x for unit, x in shards.items() if unit not in unused}
        self.offload.update(self.optimizer, used, factor)
        if self.stash is not None:
            self.zero_gradients()
        return True

    def update_loss_scale(self, squares: float) -> bool:
        """Set the scale of the next step; return whether this step's gradients are finite.

        `squares` is the sum of their squares over all ranks.
        """
        return self.arrays.loss_scale.update(is_finite=math.isfinite(squares))
