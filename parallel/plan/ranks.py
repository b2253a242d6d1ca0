"""Ranks that do not exist: their mesh, and training runs that only predict."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

from collectives import Communicator
from parallel.mesh import Mesh
from parallel.runtime import Trainer


class Planned(NamedTuple):
    """What a mesh asks of a communicator, of ranks that do not exist."""

    size: int
    rank: int = 0
    name: str = ""


class PlannedMesh(Mesh):
    """The mesh of the first of some ranks that do not exist, with these `axes`.

    Raises ValueError for axes that `parallel.Mesh` refuses.
    """

    def __init__(self, **axes: int) -> None:
        size = max(1, math.prod(axes.values()))
        super().__init__(cast(Communicator, Planned(size)), **axes)

    def _make(self, whole: Communicator, names: tuple[str, ...]) -> Communicator:
        return cast(Communicator, Planned(self.size_of(names), name=",".join(names)))


class PlannedTrainer(Trainer):
    """A training run on ranks that do not exist: it has no arrays, and only predicts."""

    def _allocate_parameters(self) -> None:
        self.parameters, self.full_parameters, self.parameter_shards = {}, {}, {}

    def _allocate_gradients(self) -> None:
        self.gradients, self.full_gradients, self.gradient_shards = {}, {}, {}

    def _make_communicators(self) -> None:
        pass
