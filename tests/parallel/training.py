"""A small model trained by any strategy on threads as ranks, and what each rank brings home."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import collectives
from collectives import Communicator
from parallel import Mesh, Recipe, Sharding, TrafficTable, Trainer, choose_group_size, text
from parallel.nn import Model, gpt
from parallel.run.memory import peak_memory

ROWS, CONTEXT = 11, 4  # 11 rows on 2, 3, 4, 5 and 8 ranks: every division is uneven
DATA = text.load(__file__)

Make = Callable[..., Trainer]
Values = dict[str, np.ndarray]


class End(NamedTuple):
    """Of one rank; `table` on rank 0 only."""

    losses: list[float]
    held: dict[str, tuple[slice, np.ndarray]]  # parameters, and which elements of the unit
    strategy: Any
    memory: dict[str, tuple[int, int]]  # by formula, and counted
    table: TrafficTable | None


def model(*, is_tied: bool = False, layers: int = 2, recompute: Sequence[str] = ()) -> Model:
    """Units whose sizes 3, 4, 5 and 8 ranks divide unevenly."""
    return gpt(
        num_layers=layers,
        hidden=6,
        num_heads=2,
        context=CONTEXT,
        is_tied=is_tied,
        recompute=recompute,
    )


def batch(step: int, rank: int, ranks: int) -> Any:
    where = {"batch_size": ROWS, "context": CONTEXT, "rank": rank, "num_ranks": ranks}
    return text.batch(DATA, seed=0, step=step, **where)


def nothing(*_: object) -> None:
    """Does nothing."""


def train(
    make: Make,
    ranks: int,
    recipe: Recipe | None = None,
    *,
    steps: int = 4,
    of: Callable[[], Model] = model,
    after: Callable[[Any], object] = nothing,
) -> list[End]:
    """Every rank's end of so many steps; `after` may do more, while all is recorded."""

    def fn(comm: Communicator) -> End:
        strategy = make(comm, of(), recipe or Recipe())
        with comm.record() as ledger:
            strategy.start()
            losses = strategy.train(steps, batch, ROWS * CONTEXT, nothing)
            after(strategy)
        whole = ledger.gather()
        table = None
        if whole is not None:
            calls = strategy.traffic(
                steps, batch=(ROWS, CONTEXT), num_skipped=strategy.updates.num_skipped
            )
            table = TrafficTable(calls, whole, None, size=comm.size)
        return End(losses, held_by(strategy), strategy, kept_by(strategy), table)

    ends: list[End] = collectives.run(fn, size=ranks)
    return ends


def of_kind(kind: type[Trainer], sharding: Callable[[], Sharding] = Sharding.ddp) -> Make:
    """Makes a run of a class of its own."""

    def make(comm: Communicator | None, *given: Any, **options: Any) -> Trainer:
        return kind(Mesh(comm), *given, sharding=sharding() if comm else None, **options)

    return make


OF_TRAINER = ("algorithm", "phase")  # options


def factory(sharding: Callable[..., Sharding]) -> Make:
    """Makes a run of a sharding, of which it takes the options, on a mesh with its axes."""

    def make(
        comm: Communicator,
        of: Model,
        recipe: Recipe | None = None,
        group_size: int | None = None,
        **options: Any,
    ) -> Trainer:
        given = {name: options.pop(name) for name in OF_TRAINER if name in options}
        divided, axes = sharding(**options), {}
        if "shard" in divided.axes:
            size = choose_group_size(comm.size, group_size)
            axes = {"replicate": comm.size // size, "shard": size}
        return Trainer(Mesh(comm, **axes), of, recipe, sharding=divided, **given)

    return make


ddp = factory(Sharding.ddp)
zero1, zero2, zero3 = (factory(partial(Sharding.zero, stage)) for stage in (1, 2, 3))
hsdp = factory(Sharding.hsdp)
zeropp = factory(Sharding.zeropp)
local_updates = factory(Sharding.local_updates)


def held_by(strategy: Trainer) -> dict[str, tuple[slice, np.ndarray]]:
    return {
        unit: (strategy.view.stored_slice(unit), x.copy())
        for unit, x in strategy.parameters.items()
    }


def kept_by(strategy: Trainer) -> dict[str, tuple[int, int]]:
    """Memory by formula, and the most that was counted."""
    rows = len(batch(0, *strategy.batch_part)[0])
    formula, counted = peak_memory(strategy, rows, CONTEXT), strategy.memory.peak
    return {name: (formula[name], counted[name]) for name in formula | counted}


@cache
def serial(recipe: Recipe | None = None, steps: int = 4, **options: Any) -> End:
    """One rank."""
    (end,) = train(alone, 1, recipe, steps=steps, **options)
    return end


def alone(_: Any, *given: Any) -> Trainer:
    """One rank without a communicator."""
    return Trainer(None, *given)


def whole(ends: list[End]) -> Values:
    """The parameters that all ranks hold together; AssertionError if two hold different bits."""
    found = {unit: np.zeros(n) for unit, n in ends[0].strategy.model.unit_sizes.items()}
    known = {unit: np.zeros(x.size, bool) for unit, x in found.items()}
    for end in ends:
        for unit, (part, x) in end.held.items():
            before = found[unit][part][known[unit][part]]
            np.testing.assert_array_equal(x[known[unit][part]].astype(float), before)
            found[unit][part], known[unit][part] = x, True
    assert all(each.all() for each in known.values())
    return found


def verdict(ends: list[End]) -> str:
    """Of the comparison of predicted and recorded traffic."""
    assert ends[0].table is not None
    return ends[0].table.check()
