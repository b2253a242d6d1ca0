"""Add up a few numbers over ranks: the loss, the norm of the gradient, and what layers count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parallel.mesh import pieces_of, split
from parallel.nn import Array
from parallel.optim import pieces
from parallel.run.agreement import format_ranks
from parallel.run.arrays import RankArrays
from parallel.run.computing import MicroBatches
from parallel.step import SCALAR_ALGORITHM, FindUnused, SendNorm, SumCounts, SumLoss, SumNorm


class MissingGradient(ValueError):  # noqa: N818 - named like the errors of `collectives`
    """Layers took no part in a step on some ranks.  The message names the layers and ranks."""


class Scalars:
    """The numbers of a step that ranks add up.

    Parameters
    ----------
    arrays : RankArrays
    micro_batches : MicroBatches
        The micro-batches of the step.

    Attributes
    ----------
    loss : float
        The loss of the step, once it is added up.
    squares : float
        The sum of the squares of the scaled gradient, if the update needs it.
    share : float
        The factor of this rank's loss in the loss of the whole batch.
    unused_units : set of str
        The units that no rank used in this step; they are not updated.
    """

    def __init__(self, arrays: RankArrays, micro_batches: MicroBatches) -> None:
        self.arrays, self.micro_batches = arrays, micro_batches
        self.unused_units: set[str] = set()
        self.begin()

    def begin(self, share: float = 1.0) -> None:
        """Begin a step."""
        self.loss, self.squares, self.share = 0.0, 0.0, share
        for counts in self.arrays.view.model.step_counts.values():
            counts[...] = 0

    # Actions

    def find_unused(self, action: FindUnused) -> None:
        """Find the units that no rank used."""
        view = self.arrays.view
        names, used_here = view.model.layers_with_parameters, self.micro_batches.used_layers
        used = np.array([name in used_here for name in names], np.uint8)
        self._all_reduce(action.axes, used, "max")
        units = [set(view.model.units_of(names[i])) for i in np.flatnonzero(used)]
        self.unused_units = set(view.unit_sizes).difference(*units)

    def sum_loss(self, action: SumLoss) -> None:
        """Add up the loss.  Raise MissingGradient as `Trainer.step` does.

        Here the host waits for the device.
        """
        own = [float(self.micro_batches.loss) * self.share, sum(self.absent_layers())]
        numbers = np.array(own, np.float64)
        self._all_reduce(action.axes, numbers)
        self.loss, num_absent = numbers.tolist()
        if num_absent:
            self._raise_missing_gradient()

    def sum_norm(self, action: SumNorm) -> None:
        """Add up `squares`.  Here the host waits for the device."""
        squares = np.array([float(self.own_squares())])
        self._all_reduce(action.axes, squares)
        self.squares = float(squares[0])

    def send_norm(self, action: SendNorm) -> None:
        """Set `squares` to the server's sum, which is of all gradients, if other ranks need it."""
        squares = np.array([float(self.own_squares())])
        if action.axes:
            comm, server = self.arrays.comm_of(action.axes), self.arrays.view.sharding.server
            comm.broadcast(squares, root=server or 0, out=squares, algorithm="linear")
        self.squares = float(squares[0])

    def sum_counts(self, action: SumCounts) -> None:
        """Let layers use what the layers of all ranks have counted."""
        model = self.arrays.view.model
        own = model.step_counts
        counts = np.concatenate(list(own.values()))
        self._all_reduce(action.axes, counts)
        for name, total in zip(own, split(counts, map(len, own.values())), strict=True):
            model.counting_layers[name].end_step(total)

    def _all_reduce(self, axes: Sequence[str], numbers: Array, op: str = "sum") -> None:
        """Reduce `numbers` over the ranks along `axes`, if there are any, in place."""
        if axes:
            options = {"op": op, "out": numbers, "algorithm": SCALAR_ALGORITHM}
            self.arrays.start_call(axes, "all_reduce", numbers, **options)()

    # The parts of this rank

    def own_squares(self) -> Array:
        """Return the sum of squares of the scaled gradients that this rank updates by, a number.

        If several ranks update the same part of a parameter, although the model is divided along
        their axis, the first of these ranks counts it.
        """
        shards, view = self.arrays.gradient_shards, self.arrays.view
        if not view.layout.is_divided:
            return sum(map(sum_of_squares, shards.values()))
        total: Array = 0.0
        axes = view.model.split_axes
        for unit, x in shards.items():
            for piece in pieces_of(view.model.boxes(unit), view.shard_slice(unit)):
                if view.is_first_copy(unit, piece.name, axes):
                    total += sum_of_squares(x[piece.flat])
        return total

    def absent_layers(self) -> list[bool]:
        """Return for each layer whether it should have taken part in this step and did not."""
        view = self.arrays.view
        missing = set(view.stages.layers_of[view.pipe_index]) - self.micro_batches.used_layers
        may_miss = view.sharding.find_unused_parameters
        return [name in missing and not may_miss for name in view.model.layers_with_parameters]

    def _raise_missing_gradient(self) -> None:
        """Raise MissingGradient with the names of layers and ranks.  All ranks call this."""
        view = self.arrays.view
        layers, comm = view.model.layers_with_parameters, view.mesh.comm
        mine = np.array(self.absent_layers(), np.uint8)
        table = mine[None] if comm is None else comm.all_gather(mine[None])
        missing = [
            f"{layers[i]} (on {format_ranks(table[:, i])})" for i in np.flatnonzero(table.any(0))
        ]
        raise MissingGradient(f"no gradient in this step for {', '.join(missing)}")


def sum_of_squares(x: Array) -> Array:
    """Return the sum of the squares of a flat array's elements, in float64, on its device."""
    wide = (piece.astype(np.float64) for (piece,) in pieces(x))
    return sum((piece @ piece for piece in wide), 0.0)
