"""How much of the sums of input gradients is hidden behind the products for weight gradients."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import Communicator
from parallel import Mesh, Trainer
from parallel.nn import gpt
from parallel.run.computing.overlap import PERIOD
from parallel.step import LayerBackward


@pytest.mark.parametrize("form", [None, "keep", "gather"])
def test_a_trainer_measures_the_overlap_and_changes_no_bit(form: str | None) -> None:
    """A reference step has the same losses; both kinds wait, and the summary says how long."""
    rows = np.random.default_rng(0).integers(0, 256, (2, 3, 4))

    def fn(comm: Communicator) -> None:
        mesh, losses = Mesh(comm, tensor=2), []
        for is_measured in (True, False):
            sizes = {"num_layers": 1, "hidden": 6, "num_heads": 2, "context": 4}
            model = gpt(mesh=mesh, sequence_parallel=form, **sizes)  # type: ignore[arg-type]
            trainer = Trainer(mesh, model)
            trainer.start()
            if not is_measured:
                trainer.overlap.num_steps = PERIOD + 2  # far from a reference step
            losses.append([trainer.step(*rows, 12) for _ in range(3)])
            seconds = trainer.overlap.seconds()
            assert (seconds is not None) == is_measured
            if seconds is not None:
                assert min(seconds) > 0
                assert "hidden by computation" in trainer.summary_lines()[0]
        assert losses[0] == losses[1]

    collectives.run(fn, size=2)


def test_each_column_parallel_layer_says_how_long_it_waited() -> None:
    """Once for each micro-batch, in backward: two layers of a block, and the head."""
    tokens = np.zeros((2, 2, 4), np.int64)

    def fn(comm: Communicator) -> None:
        mesh, waits = Mesh(comm, tensor=2), list[float]()
        model = gpt(num_layers=1, hidden=6, num_heads=2, context=4, mesh=mesh)
        trainer = Trainer(mesh, model)
        trainer.start()
        trainer.overlap.add = waits.append  # type: ignore[method-assign]
        trainer.begin(*tokens, 8)
        found = {}
        for action in trainer.actions:
            before = len(waits)
            trainer.run([action])
            if isinstance(action, LayerBackward):
                found[action.layer] = len(waits) - before
        assert found == {"loss": 0, "head": 1, "block0": 2, "embedding": 0}
        assert min(waits) > 0

    collectives.run(fn, size=2)
