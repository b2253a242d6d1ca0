"""Where a forward and a backward overlap, each hides the exchanges of tokens of the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe import mixtures
from parallel import Disk, Mesh, Recipe, Trainer, gpt
from parallel.accounts.rank_times import COMPUTING, rank_times
from parallel.commands.rank_report import differences
from parallel.nn import Activations, Array, ArraySpec, Layer, Model, Step
from parallel.run.computing import Alternation
from tests.moe.models.test_training import Mixture, check, setup_of
from tests.parallel.layouts import Setup, check_equal
from tests.parallel.training import CONTEXT

SCHEDULES = ["dualpipe", "dualpipe-v"]
BOTH: dict[str, int] = {"data": 2, "expert": 2}
STEPS = 3  # the second is a reference step, in which ranks take no turns


def overlapped(
    schedule: str = "dualpipe-v", mixture: Mixture | None = None, zero: int = 1, **axes: int
) -> Setup:
    setup = setup_of(mixture or Mixture(blocks=4), zero, 4, pipe=2, **axes or BOTH)
    return setup._replace(schedule=schedule, steps=STEPS)


def num_slots(trainer: Trainer) -> int:
    return len({action.slot for action in trainer.actions} - {None})


# What is computed, sent and kept


@pytest.mark.parametrize(
    ("schedule", "axes"),
    [
        ("dualpipe", {"expert": 2}),
        ("dualpipe", BOTH),
        ("dualpipe", {"expert": 2, "tensor": 2}),
        ("dualpipe-v", {"expert": 2}),
        ("dualpipe-v", {"context": 2, "expert": 2}),
        ("dualpipe-v", {"expert": 4}),
    ],
)
@pytest.mark.slow
def test_training_equals_one_rank(schedule: str, axes: dict[str, int]) -> None:
    """Losses, parameters, traffic and memory; by turns in some slots of each rank."""
    ends = check(overlapped(schedule, **axes))
    assert all(end.trainer.takes_turns and num_slots(end.trainer) for end in ends)


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.slow
def test_other_ways_to_shard_equal_one_rank(zero: int) -> None:
    """Units that exist while a layer runs leave no turns: layers follow each other."""
    ends = check(overlapped(zero=zero))
    assert all(bool(num_slots(end.trainer)) == (zero == 0) for end in ends)


@pytest.mark.parametrize(
    "mixture",
    [
        Mixture("stable", blocks=4, dispatch="hierarchical", ranks_per_host=2),
        Mixture("stable", blocks=4, dispatch="weights"),
        Mixture("stable", blocks=4, dispatch="cheaper"),
        Mixture("gshard", blocks=4, dropout=0.2, num_shared=1),
        Mixture("bias", blocks=4, padding="needed"),
        Mixture("expert-choice", blocks=4, padding="capacity"),
    ],
)
@pytest.mark.slow
def test_other_mixtures_equal_one_rank(mixture: Mixture) -> None:
    check(overlapped(mixture=mixture, expert=4 if mixture.ranks_per_host else 2))


@pytest.mark.parametrize("dispatch", ["weights", "cheaper"])
@pytest.mark.slow
def test_ranks_wait_equally_often(dispatch: str) -> None:
    """In each of several parts, although ranks along context may dispatch in different ways."""
    mixture = Mixture("stable", blocks=4, dispatch=dispatch, num_parts=3)
    check(overlapped(mixture=mixture, context=2, expert=2))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.slow
def test_layers_that_run_again_equal_one_rank(schedule: str) -> None:
    """Blocks keep their inputs; what a backward computes again is counted in order too."""
    ends = check(overlapped(schedule, Again(blocks=4), expert=2))
    assert all(end.trainer.micro_batches.num_recomputed for end in ends)


class Again(Mixture):
    """Whose blocks run again in backward, on several ranks."""

    def __call__(self, mesh: Mesh | None) -> Model:
        model = super().__call__(mesh)
        several = mesh is not None and mesh.size > 1
        return Model(model.layers, recompute=["block*"] if several else [], mesh=mesh)


def test_activations_on_disk_come_back_in_the_order_of_the_actions(tmp_path: Path) -> None:
    """They come back in the order of the actions."""
    setup = overlapped(expert=2)
    alone = setup.alone()  # first: of which the routing is predicted
    recipe = replace(setup.recipe, offload_activations=partial(Disk, tmp_path))
    ends = setup._replace(recipe=recipe).run()
    check_equal(ends, alone)
    assert differences([end.report for end in ends]) == []


def test_memory_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a side that runs ahead keeps more than is predicted."""
    setup = overlapped(expert=2)
    setup.alone()
    monkeypatch.setattr(Alternation, "in_order", lambda _: None)
    assert differences([end.report for end in setup.run()])


def test_times_of_overlapping_actions_do_not_overlap() -> None:
    setup = overlapped(expert=2)
    setup.alone()
    ends = setup.run()
    for end in ends:
        events = [each for each in end.trainer.micro_batches.events if each.kind in COMPUTING]
        assert all(first.end <= second.begin for first, second in pairwise(events))
    events = [end.trainer.micro_batches.events for end in ends]
    for times in rank_times(events, ends[0].trainer.mesh.ranks("pipe")):
        assert 0 < times.computing <= times.span


# In which order


def first_row(step: Step) -> int:
    """The first row of the batch in a micro-batch, on rank 0."""
    assert step.batch is not None
    return step.batch.of_rank[0].start


class Noted(NamedTuple):
    """What a layer does, in which direction, and in the micro-batch with which first row."""

    what: str
    direction: str
    first_row: int


Log = list[Noted]


class Noting(Layer):
    """A layer that changes nothing, and notes when it runs in the `log` of this rank."""

    saves_input = False
    needs_rows = True  # by which it tells micro-batches apart

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: Array, step: Step) -> tuple[Array, Any]:
        return self.done(x, "F", step), step

    def backward_input(self, dy: Array, saved: Any) -> tuple[Array, Any]:
        return self.done(dy, "B", saved), None

    def activation_bytes(self, x: ArraySpec) -> Activations:
        return Activations(0, x)

    def done(self, x: Array, direction: str, step: Step) -> Array:
        self.log.append(Noted("compute", direction, first_row(step)))
        return x


class Exchanged(Noting):
    """Sends its input to the other ranks along ``expert``, and adds up nothing of it."""

    comm_axes = ("expert",)

    def __init__(self, log: Log, mesh: Mesh) -> None:
        super().__init__(log)
        self.mesh = mesh

    def done(self, x: Array, direction: str, step: Step) -> Array:
        comm: Any = self.mesh["expert"]
        self.log.append(Noted("start", direction, first_row(step)))
        work = comm.all_to_all(x.reshape(-1), algorithm="linear", async_op=True)

        def finish() -> Array:
            self.log.append(Noted("wait", direction, first_row(step)))
            return work.wait().reshape(x.shape)

        return step.wait(finish)


def noted(change: Callable[[Trainer], object] = lambda _: None) -> list[Log]:
    """What the four ranks of pipe=2, expert=2 did in three steps, in order."""
    logs: dict[int, Log] = {}

    def of(mesh: Mesh | None) -> Model:
        assert mesh is not None
        log = logs[mesh.rank] = []

        def mlp(i: int, dense: Any) -> dict[str, Layer]:
            return {"before": Noting(log), "exchange": Exchanged(log, mesh), "after": Noting(log)}

        return gpt(num_layers=4, hidden=6, num_heads=2, context=CONTEXT, mesh=mesh, mlp=mlp)

    recipe = Recipe(num_micro_batches=8)
    setup = overlapped(expert=2)._replace(of=of, recipe=recipe, rows=16, change=change)
    setup.run()
    return [logs[rank] for rank in range(setup.size)]


def hidden(log: Log, direction: str) -> int:
    """How many exchanges are waited for after a computation in the other direction."""
    found = 0
    for i, each in enumerate(log):
        if each.what == "start" and each.direction == direction:
            end = log.index(each._replace(what="wait"), i)
            found += any(x.what == "compute" and x.direction != direction for x in log[i:end])
    return found


def test_an_exchange_is_waited_for_after_the_other_micro_batch_has_computed() -> None:
    """In both directions, and in the same order on both ranks that exchange."""
    logs = noted()
    for log in logs:
        assert hidden(log, "F") > 8 and hidden(log, "B") > 8
    assert logs[0] == logs[1] and logs[2] == logs[3]


def test_without_turns_nothing_is_hidden() -> None:
    """The negative control; and in reference steps, the second of each ten."""

    def sequential(trainer: Trainer) -> None:
        trainer.takes_turns = False

    for log in noted(sequential):
        assert hidden(log, "F") == hidden(log, "B") == 0
    for log in noted():
        second = log[len(log) // 3 : 2 * len(log) // 3]
        assert hidden(second, "F") == hidden(second, "B") == 0


def test_layers_that_wait_for_nothing_take_no_turns() -> None:
    """They could hide nothing, and would only change threads."""

    def dense(mesh: Mesh | None) -> Model:
        return gpt(num_layers=4, hidden=6, num_heads=2, context=CONTEXT, mesh=mesh)

    trainers = [end.trainer for end in overlapped()._replace(of=dense).run()]
    assert not any(num_slots(trainer) for trainer in trainers)


@pytest.mark.parametrize("direction", ["F", "B"])
def test_an_error_on_one_side_ends_both(direction: str) -> None:
    """On all ranks, and no thread remains."""

    def fail(trainer: Trainer) -> None:
        layer = mixtures(trainer.model)[-1]

        def wrong(*_: Any) -> Any:
            if trainer.alternation.is_in_slot:
                raise ArithmeticError("of this layer")
            return right(*_)

        name = "forward" if direction == "F" else "backward"
        right = getattr(layer, name)
        setattr(layer, name, wrong)

    setup = overlapped(expert=2)
    setup.alone()  # of which the routing is predicted
    with pytest.raises(ArithmeticError, match="of this layer"):
        setup._replace(change=fail).run()
    deadline = time.monotonic() + 10
    while any(each.name == "turn" for each in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread is left"
        time.sleep(0.01)
