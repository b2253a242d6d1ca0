"""A checkpoint of any layout continues on any other, to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh, Recipe, Sharding, Trainer, checkpoint
from tests.parallel.layouts import ROWS, Setup, batch
from tests.parallel.training import CONTEXT, nothing

RECIPE = Recipe(num_micro_batches=4)
WITH_CONTEXT = partial(Sharding.zero, 1, axes=("data", "context"))


class Saved(NamedTuple):
    axes: tuple[tuple[str, int], ...]
    schedule: str = "1f1b"
    sharding: Any = partial(Sharding.zero, 1)
    model: tuple[tuple[str, Any], ...] = ()

    def trainer(self, comm: Communicator) -> Trainer:
        mesh = Mesh(comm, **dict(self.axes))
        setup = Setup(self.axes, model=(("is_tied", True), *self.model), blocks=4)
        model = setup.make_model(mesh)
        return Trainer(mesh, model, RECIPE, sharding=self.sharding(), schedule=self.schedule)

    @property
    def size(self) -> int:
        return int(np.prod([n for _, n in self.axes]))


def of(pipe: int, data: int, tensor: int, **options: Any) -> Saved:
    return Saved((("pipe", pipe), ("data", data), ("tensor", tensor)), **options)


LAYOUTS = [
    of(2, 2, 1),
    of(1, 2, 2, model=(("sequence_parallel", "keep"),)),
    of(2, 1, 2, schedule="dualpipe"),
    Saved((("pipe", 2), ("data", 1), ("context", 2)), sharding=WITH_CONTEXT),
    of(4, 1, 1, schedule="zb-h2", sharding=Sharding.ddp),
    of(2, 2, 1, sharding=partial(Sharding.zero, 3), schedule="interleaved"),
    of(1, 1, 1, sharding=Sharding.ddp),
]


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
@pytest.mark.slow
def test_a_checkpoint_of_one_layout_is_loaded_with_the_next(number: int, tmp_path: Path) -> None:
    """And saved again: one rank reads the same bytes in both."""
    saved, loaded = LAYOUTS[number], LAYOUTS[(number + 1) % len(LAYOUTS)]

    def save(comm: Communicator) -> None:
        trainer = saved.trainer(comm)
        trainer.start()
        trainer.train(2, batch, ROWS * CONTEXT, nothing)
        checkpoint.save(trainer, tmp_path / "first", 2)

    def load_and_save(comm: Communicator) -> None:
        trainer = loaded.trainer(comm)
        trainer.resume()
        assert checkpoint.load(trainer, tmp_path / "first" / "step-00000002") == 2
        checkpoint.save(trainer, tmp_path / "second", 2)

    def alone(root: str) -> bytes:
        one = of(1, 1, 1, sharding=Sharding)
        trainer = one._replace(axes=()).trainer(collectives.run(lambda comm: comm, size=1)[0])
        checkpoint.load(trainer, tmp_path / root / "step-00000002")
        path = checkpoint.save(trainer, tmp_path / f"{root}-alone", 2)
        return next(path.glob("*.safetensors")).read_bytes()

    collectives.run(save, size=saved.size)
    collectives.run(load_and_save, size=loaded.size)
    assert alone("first") == alone("second")


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2]], ids=["1f1b", "dualpipe"])
def test_a_run_continues_as_if_it_had_not_stopped(layout: Saved, tmp_path: Path) -> None:
    def whole(comm: Communicator) -> list[float]:
        trainer = layout.trainer(comm)
        trainer.start()
        losses = trainer.train(2, batch, ROWS * CONTEXT, nothing)
        checkpoint.save(trainer, tmp_path, 2)
        return losses + trainer.train(4, batch, ROWS * CONTEXT, nothing, 2)

    def rest(comm: Communicator) -> list[float]:
        trainer = layout.trainer(comm)
        trainer.resume()
        checkpoint.load(trainer, tmp_path / "step-00000002")
        return trainer.train(4, batch, ROWS * CONTEXT, nothing, 2)

    first = collectives.run(whole, size=layout.size)[0]
    assert collectives.run(rest, size=layout.size)[0] == first[2:]
