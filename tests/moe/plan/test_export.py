"""A training step of a mixture of experts, as tasks: it has exactly the predicted messages."""

from __future__ import annotations

import numpy as np
import pytest

import collectives
from collectives import Communicator
from collectives.export import Machine, goal
from moe import moe_gpt
from parallel import Mesh, Recipe, Sharding, Trainer, step_tasks
from parallel.predict import RunSize
from tests.export.goal_reader import read, run
from tests.moe.plan.test_plan import CONTEXT, PARTS, ROWS, mixtures, routed, step_of


@pytest.mark.parametrize("axes", [{"pipe": 2, "data": 1, "expert": 2}, {"data": 2, "expert": 2}])
def test_a_step_has_exactly_the_predicted_messages(axes: dict[str, int]) -> None:
    step = step_of(routed("switch"), "switch")

    def fn(comm: Communicator) -> Trainer:
        mesh = Mesh(comm, **axes)
        model = moe_gpt(**step.model, mesh=mesh)
        for layer in mixtures(model):
            layer.expected = step.log
        sharding = Sharding.ddp(axes=("data", "expert"))
        return Trainer(mesh, model, Recipe(num_micro_batches=PARTS), sharding=sharding)

    trainer = collectives.run(fn, size=4, timeout=60)[0]
    ranks = step_tasks(trainer.layout, Machine({}), batch=(ROWS, CONTEXT))
    found = np.zeros((2, 4, 4), np.int64)
    for ends, sizes in run(read(goal.lines(ranks))).items():
        found[:, *ends] = len(sizes), sum(sizes)
    for rank, tasks in enumerate(ranks):
        for task in tasks:
            found[1, rank, task.peer] -= task.kind == "send" and task.size == 0
    calls = trainer.step_traffic(RunSize(1, 1, (ROWS, CONTEXT)))
    np.testing.assert_array_equal(found, sum(call.matrices(4) for call in calls))
