"""A small GPT trained on ranks as threads along any axes, and what each rank brings home."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from parallel import Mesh, Recipe, Sharding, TrafficTable, Trainer, gpt, text
from parallel.commands.rank_report import RankReport, differences
from parallel.layout import BatchSize
from parallel.mesh import pieces_of
from parallel.nn import Model
from parallel.pipeline import Schedule
from tests.parallel.training import CONTEXT, DATA, Values, nothing

ROWS, STEPS = 17, 4
FEW_STEPS = 2  # of which the second depends on all that the first one left
CLIP = 0.1  # less than the norm of any gradient here

# All ways to write 1 to 8 ranks as pipe x data x tensor.
LAYOUTS = [
    (pipe, data, n // (pipe * data))
    for n in range(1, 9)
    for pipe in range(1, n + 1)
    for data in range(1, n + 1)
    if n % (pipe * data) == 0
]


def batch(step: int, rank: int, ranks: int, rows: int = ROWS) -> Any:
    where = {"batch_size": rows, "context": CONTEXT, "rank": rank, "num_ranks": ranks}
    return text.batch(DATA, seed=0, step=step, **where)


def num_blocks(pipe: int) -> int:
    """Enough for as many stages: the embedding and the head may be stages of their own."""
    return max(1, pipe if pipe < 5 else pipe - 2)


class End(NamedTuple):
    """Of one rank; `table` on rank 0 only."""

    losses: list[float]
    parameters: list[tuple[str, tuple[slice, ...], Values]]  # names, and where in the whole one
    trainer: Any
    report: RankReport
    table: TrafficTable | None
    norms: list[float]  # of the gradient in each step


class Setup(NamedTuple):
    """What is trained and how; `change` may spoil a trainer, and `of` make another model."""

    axes: tuple[tuple[str, int], ...]
    schedule: str | Schedule = "1f1b"
    recipe: Recipe = Recipe(num_micro_batches=2, clip=CLIP)
    sharding: Callable[[], Sharding] = lambda: Sharding.zero(1)
    model: tuple[tuple[str, Any], ...] = ()
    blocks: int | None = None
    change: Callable[[Trainer], object] = nothing
    rows: int = ROWS
    of: Callable[[Mesh | None], Model] | None = None
    batch: Callable[..., Any] = batch  # of so many `rows`, with `context` targets in each
    context: int = CONTEXT
    steps: int = STEPS

    @property
    def size(self) -> int:
        return math.prod(n for _, n in self.axes)

    def make_model(self, mesh: Mesh | None) -> Model:
        if self.of is not None:
            return self.of(mesh)
        pipe = dict(self.axes).get("pipe", 1)
        blocks = self.blocks or num_blocks(pipe)
        options: Mapping[str, Any] = {"num_layers": blocks, "num_heads": 2} | dict(self.model)
        return gpt(hidden=6, context=CONTEXT, mesh=mesh, **options)

    def run(self) -> list[End]:
        """Train on all ranks."""
        ends: list[End] = collectives.run(self.train, size=self.size, timeout=60)
        return ends

    def train(self, comm: Communicator) -> End:
        mesh = Mesh(comm, **dict(self.axes))
        trainer = Trainer(
            mesh,
            self.make_model(mesh),
            self.recipe,
            sharding=self.sharding(),
            schedule=self.schedule,
        )
        self.change(trainer)
        shape, rows_of = (self.rows, self.context), partial(self.batch, rows=self.rows)
        calls = trainer.traffic(self.steps, batch=shape) if comm.rank == 0 else []
        norms: list[float] = []

        def show(step: int, loss: float) -> None:
            norms.append(math.sqrt(trainer.scalars.squares))

        with comm.record() as ledger:
            trainer.start()
            losses = trainer.train(self.steps, rows_of, math.prod(shape), show)
        whole = ledger.gather()
        if whole is not None and trainer.updates.num_skipped:  # in float16, known only now
            calls = trainer.traffic(
                self.steps, batch=shape, num_skipped=trainer.updates.num_skipped
            )
        table = None if whole is None else TrafficTable(calls, whole, None, size=comm.size)
        rows = len(rows_of(0, *trainer.batch_part)[0])
        updates = trainer.num_updates_in(self.steps) - trainer.updates.num_skipped
        batches = [BatchSize(*shape, step) for step in range(self.steps)]
        report = RankReport.of(trainer, updates, rows, self.context, batches)
        return End(losses, boxes_of(trainer), trainer, report, table, norms)

    def alone(self) -> End:
        """Train on one rank."""
        of_ranks = ("sequence_parallel", "attention")
        model = tuple(option for option in self.model if option[0] not in of_ranks)
        blocks = self.blocks or num_blocks(dict(self.axes).get("pipe", 1))
        return trained_alone(
            self.recipe, model, blocks, self.rows, self.of, self.batch, self.context, self.steps
        )


@cache
def trained_alone(
    recipe: Recipe,
    model: tuple[tuple[str, Any], ...],
    blocks: int,
    rows: int,
    of: Callable[[Mesh | None], Model] | None,
    batch: Callable[..., Any],
    context: int,
    steps: int,
) -> End:
    setup = Setup(
        (),
        recipe=recipe,
        sharding=Sharding,
        model=model,
        blocks=blocks,
        rows=rows,
        of=of,
        batch=batch,
        context=context,
        steps=steps,
    )
    return setup.train(next(iter(collectives.run(lambda comm: comm, size=1))))


def boxes_of(trainer: Trainer) -> list[tuple[str, tuple[slice, ...], Values]]:
    """What a rank has of parameters, with where that is in the whole ones."""
    return [
        (name, box.slices, flat[part].reshape(box.shape).copy())
        for unit, flat in trainer.parameters.items()
        for name, box, part in pieces_of(trainer.model.boxes(unit), trainer.view.stored_slice(unit))
    ]


def check_equal(ends: list[End], alone: End, tolerance: float = 1e-12) -> None:
    """Losses and parameters of all ranks are those of one rank."""
    wanted = {name: x for name, _, x in alone.parameters}
    seen: dict[str, Values] = {name: np.zeros(x.shape) for name, x in wanted.items()}
    for end in ends:
        np.testing.assert_allclose(end.losses, alone.losses, rtol=0, atol=tolerance)
        for name, where, x in end.parameters:
            np.testing.assert_allclose(x, wanted[name][where], rtol=0, atol=tolerance, err_msg=name)
            seen[name][where] += 1
    assert all(count.min() > 0 for count in seen.values()), "a parameter is on no rank"


def check_as_one_rank(setup: Setup) -> list[End]:
    """Check that ranks end as one rank does, and send and keep what is predicted."""
    alone = setup.alone()  # first: a routing is predicted by that of one rank
    ends = setup.run()
    check_equal(ends, alone)
    check_accounts(ends)
    return ends


def check_accounts(ends: list[End]) -> None:
    """Memory and traffic are as predicted, and ranks have the same parameters."""
    assert differences([end.report for end in ends]) == []
    assert ends[0].table is not None and ends[0].table.check()


def with_optimizer(setup: Setup, optimizer: Callable[..., Any]) -> Setup:
    return setup._replace(recipe=replace(setup.recipe, optimizer=optimizer))
