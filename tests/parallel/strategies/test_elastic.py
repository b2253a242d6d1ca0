"""Training that outlives its ranks, on threads: a death can be put anywhere.

`tests/launch/test_elastic.py` kills ranks for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import collectives
from collectives import Communicator, PeerFailed
from parallel import Mesh, RankView, Recipe, TrafficTable, text
from parallel.nn import Model, gpt
from parallel.run.agreement import DIGEST_BYTES
from parallel.strategies import Elastic, ReplicaMismatch
from parallel.strategies.elastic import digest
from tests.parallel.training import ddp

DATA = text.load(__file__)
RANKS, STEPS, BATCH, CONTEXT = 4, 3, 11, 4
LAYERS = 4  # one broadcast each at the start, then in each step one sum each, and one of the loss
START = 2 + LAYERS  # two calls tell whether the ranks have the same model
MAKING = 2  # calls that compare axes, while there is no strategy yet


class Fate(NamedTuple):
    """Of one communicator: `victim` dies after its call of this number, which fails on `losers`."""

    call: int
    victim: int
    losers: Sequence[int]


class Died(Exception):  # noqa: N818
    """The end of a thread that plays a rank."""


class Mortal:
    """A communicator of threads of which ranks die, and which tells as MPI does.

    The call in which one dies may complete on some ranks and fail on others; the next fails on all.
    """

    def __init__(self, comm: Communicator, fates: Sequence[Fate | None]) -> None:
        self.comm, self.fate, self.to_come = comm, next(iter(fates), None), fates[1:]
        self.rank, self.size = comm.rank, comm.size
        self.num_calls = 0

    name, check, can_shrink = "data", False, True

    def split(self, color: int, name: str) -> Mortal:
        return self

    def free(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        def call(x: Any, **options: Any) -> Any:
            if self.dead:
                raise PeerFailed("somebody died", self.dead)
            is_async = options.pop("async_op", False)
            try:
                result = getattr(self.comm, name)(x, **options)
            except PeerFailed as failure:  # of all threads: one has raised, and nobody can recover
                raise Died from failure
            self.num_calls += 1
            if self.dead == (self.rank,):
                raise Died
            if self.fate is not None and self.dead and self.rank in self.fate.losers:
                if (name, self.rank) != ("broadcast", 0):  # the root's is its own
                    result[...] = 99  # for what it has received
                raise PeerFailed("somebody died", self.dead)
            return SimpleNamespace(wait=lambda: result, scratch_bytes=0) if is_async else result

        return call

    @property
    def dead(self) -> tuple[int, ...]:
        return (self.fate.victim,) if self.fate and self.num_calls > self.fate.call else ()

    def shrink(self, *, interrupt: bool = True) -> Mortal:
        if not self.dead:
            return self
        alive = [rank for rank in range(self.size) if rank not in self.dead]
        return Mortal(self.comm.subgroup(alive), self.to_come)


class End(NamedTuple):
    """What a rank holds at the end."""

    losses: list[float]
    digest: bytes


def batch(step: int, rank: int, ranks: int) -> Any:
    return text.batch(
        DATA, seed=0, step=step, batch_size=BATCH, context=CONTEXT, rank=rank, num_ranks=ranks
    )


def model() -> Model:
    return gpt(num_layers=2, hidden=8, num_heads=2, context=CONTEXT)


def elastic(*fates: Fate | None, kind: type[Elastic] = Elastic) -> list[End]:
    """The survivors of a run in which ranks die so."""

    def fn(comm: Communicator) -> End | None:
        mortal: Any = Mortal(comm, fates)
        mortal.num_calls = -MAKING
        try:
            strategy = kind(mortal, model(), Recipe(seed=comm.rank), bucket_bytes=1)
            strategy.start()
            losses = strategy.train(STEPS, batch, BATCH * CONTEXT, lambda step, loss: None)
        except Died:
            return None
        return End(losses, digest(strategy.optimizer))

    return [end for end in collectives.run(fn, size=RANKS) if end is not None]


@cache
def leaving(*leaves: tuple[int, int]) -> End:
    """The reference: before a step (first) a rank (second) leaves, as is agreed beforehand."""

    def fn(comm: Communicator) -> End | None:
        strategy, losses = ddp(comm, model(), bucket_bytes=1), []
        strategy.start()
        for step in range(STEPS + 1):
            for _, leaver in filter(lambda leave: leave[0] == step, leaves):
                if strategy.comm.rank == leaver:
                    return None
                rest = [rank for rank in range(strategy.comm.size) if rank != leaver]
                mesh = Mesh(strategy.comm.subgroup(rest, name="data"))
                strategy.set_view(RankView(strategy.layout.on(mesh), mesh.rank))
            if step < STEPS:
                losses.append(strategy.step(*batch(step, *strategy.batch_part), BATCH * CONTEXT))
        return End(losses, digest(strategy.optimizer))

    return next(end for end in collectives.run(fn, size=RANKS) if end is not None)


def first_repeated(call: int, losers: Sequence[int]) -> int:
    """The step from which on the others go on after a death in the call of this number."""
    step, place = divmod(call - START, LAYERS + 1)
    is_complete = place == LAYERS and not losers
    return min(max(step + is_complete, 0), STEPS)


LAST = START + STEPS * (LAYERS + 1)  # the number of the call that is the check at the end
LOSERS = [[], [0], [0, 1, 3]]


@pytest.mark.parametrize("losers", LOSERS, ids=str)
@pytest.mark.parametrize("call", range(LAST + 1))
@pytest.mark.slow
def test_wherever_a_rank_dies_the_others_end_as_those_would_whom_it_left_there(
    call: int, losers: list[int]
) -> None:
    ends = elastic(Fate(call, 2, losers))
    assert ends == 3 * [leaving((first_repeated(call, losers), 2))]


@pytest.mark.parametrize("losers", [[], [1], [1, 2]], ids=str)
@pytest.mark.parametrize("call", range(8))
@pytest.mark.slow
def test_another_rank_may_die_while_the_others_recover_or_after(
    call: int, losers: list[int]
) -> None:
    """Call 0 agrees on the step, call 1 compares the digests, then the step is repeated."""
    ends = elastic(Fate(START + LAYERS + 2, 2, [1]), Fate(call, 0, losers))
    second = 1 + (call == LAYERS + 2 and not losers) + (call > LAYERS + 2)
    assert ends == 2 * [leaving((1, 2), (second, 0))]


def test_the_last_rank_ends_alone() -> None:
    ends = elastic(Fate(START + 2, 0, []), Fate(0, 0, []), Fate(1, 1, []))
    assert ends == [leaving((0, 0), (0, 0), (0, 1))]


def test_without_a_death_it_is_plain_data_parallelism() -> None:
    assert elastic(None) == 4 * [leaving()]


class Forgetful(Elastic):
    """The negative control: it does not take the last update back."""

    def _go_back(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.optimizer.steps = num_steps


def test_an_update_that_is_not_taken_back_would_be_noticed() -> None:
    """Rank 0 has not heard the sum of the losses after which the others have updated."""
    in_the_loss = START + LAYERS
    with pytest.raises(ReplicaMismatch, match="after 0 updates"):
        elastic(Fate(in_the_loss, 2, [0]), kind=Forgetful)


class Altered(Elastic):
    """The negative control: after a recovery one rank differs from the others in one bit."""

    def recover(self, *, is_over: bool = False) -> bool:
        was_over = super().recover(is_over=is_over)
        if self.comm.rank == 1:
            first = self.parameters["head"]
            first[0] = np.nextafter(first[0], np.inf)
        return was_over


def test_a_rank_that_differs_in_one_bit_is_noticed() -> None:
    with pytest.raises(ReplicaMismatch, match=r"after 3 updates .* of rank 1 \(of 3\) are not"):
        elastic(Fate(START, 2, []), kind=Altered)


def test_the_traffic_of_a_run_without_a_death_is_predicted() -> None:
    def fn(comm: Communicator) -> TrafficTable | None:
        mortal: Any = Mortal(comm.split(0, name="data"), [])
        strategy = Elastic(mortal, model(), bucket_bytes=1)
        with comm.record() as ledger:
            strategy.start()
            strategy.train(STEPS, batch, BATCH * CONTEXT, lambda step, loss: None)
        whole = ledger.gather()
        return whole and TrafficTable(strategy.traffic(STEPS), whole, None, size=comm.size)

    table = collectives.run(fn, size=RANKS)[0]
    assert table is not None
    assert "two columns compared" in table.check()
    (check,) = (row for row in table.rows if row.phase == "check")
    assert check.recorded.bytes == (RANKS - 1) * RANKS * DIGEST_BYTES
